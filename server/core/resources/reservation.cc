// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/reservation.h"

#include <algorithm>
#include <utility>

#include "kernels/base/session_memory.h"

namespace precondor {
namespace {

constexpr int64_t kSaturated = int64_t{1} << 62;

// Returns x * y for numbers that are not negative; saturates, since the largest layer table would need 2^79 bytes.
int64_t Mul(int64_t x, int64_t y) { return y != 0 && x > kSaturated / y ? kSaturated : x * y; }

// Returns the bytes of one layer's statistics of a step from all workers, as they are sent.
int64_t StatisticsBytes(const SessionSpec& spec, uint32_t layer) {
  return Mul(Mul(spec.world_size, StatisticsElements(spec, layer)),
             static_cast<int64_t>(ByteSize(spec.statistics_dtype)));
}

// Returns the bytes of one step's gradients of a layer and of their accumulator.
int64_t GradientBytes(const SessionSpec& spec, const LayerSpec& layer) {
  if (WorkersPrecondition(spec)) return 0;
  const int64_t elements = layer.d_out * layer.d_in;
  // The parts that come, the gradient that becomes the answer, and its parts that go: AnswerParts has the limit.
  if (spec.exchange == ExchangeMode::kSharded) {
    return Mul(4, Mul(elements, static_cast<int64_t>(ByteSize(spec.gradient_dtype))));
  }
  const int64_t contributors = GradientContributors(spec);
  const int64_t gradients = Mul(Mul(contributors, elements), static_cast<int64_t>(ByteSize(spec.gradient_dtype)));
  return contributors > 1 ? AddBytes(gradients, Mul(elements, 8)) : gradients;
}

// Returns the bytes of the answers to workers that have factors.
int64_t PulledAnswerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps) {
  if (!WorkersPrecondition(spec) || !method.needs_statistics()) return 0;
  const int64_t state = method.SavedBytes(spec.layers[layer]);
  const bool replayed = spec.exchange == ExchangeMode::kReplay;
  return AddBytes(Mul(window_steps, replayed ? Mul(StatisticsScratchElements(spec, layer), 4) : state), Mul(2, state));
}

int64_t StagingBytes(const SessionSpec& spec, const Method& method, uint32_t index, int window_steps) {
  const LayerSpec& layer = spec.layers[index];
  const int64_t statistics = method.needs_statistics() ? StatisticsBytes(spec, index) : 0;
  const int64_t slots = Mul(spec.world_size + GradientContributors(spec), kBytesPerContribution);
  const int64_t payloads =
      AddBytes(Mul(window_steps + 1, AddBytes(statistics, slots)), Mul(window_steps, GradientBytes(spec, layer)));
  return AddBytes(AddBytes(payloads, LayerTableBytes(spec, layer, GradientContributors(spec))),
                  PulledAnswerBytes(spec, method, index, window_steps));
}

// Bytes of scratch of one layer's operations.
struct LayerScratch {
  int64_t statistics = 0, gradient = 0, method = 0, deferred = 0;
};

LayerScratch ScratchOf(const SessionSpec& spec, const Method& method, uint32_t index) {
  const LayerSpec& layer = spec.layers[index];
  LayerScratch scratch{.method = method.ScratchBytes(layer, VectorsPerStep(spec, index)),
                       .deferred = method.DeferredScratchBytes(layer)};
  if (method.needs_statistics()) {
    // The scratch on the device; and on the host one worker's decoded statistics, for vectors all workers', and for
    // MEAN the sums in f64 and the means.
    const StatisticsKind kind = StatisticsOf(spec, index);
    const int64_t both = layer.d_in + layer.d_out;
    const int64_t host = kind == StatisticsKind::kMean         ? 3 * both
                         : kind == StatisticsKind::kCovariance ? StatisticsElements(spec, index)
                                                               : Mul(VectorsPerStep(spec, index), both);
    scratch.statistics = Mul(AddBytes(StatisticsScratchElements(spec, index), host), 4);
  }
  if (!WorkersPrecondition(spec)) scratch.gradient = Mul(layer.d_out * layer.d_in, 4);
  return scratch;
}

int64_t Total(const SessionSpec& spec, const LayerScratch& scratch) {
  // D and U on the device, and D on the host if the wire's type is not f32.
  const int64_t copies = spec.gradient_dtype == DType::kF32 ? 2 : 3;
  return AddBytes(AddBytes(scratch.statistics, Mul(copies, scratch.gradient)),
                  AddBytes(scratch.method, scratch.deferred));
}

}  // namespace

int64_t AddBytes(int64_t x, int64_t y) { return x > kSaturated - y ? kSaturated : x + y; }

int64_t Reservation::total() const { return AddBytes(AddBytes(states, scratch), staging); }

int64_t GradientContributors(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kDelegate ? 1 : spec.world_size;
}

int64_t StatisticsScratchElements(const SessionSpec& spec, uint32_t layer) {
  const LayerSpec& shape = spec.layers[layer];
  if (StatisticsOf(spec, layer) != StatisticsKind::kCovariance) {
    return Mul(VectorsPerStep(spec, layer), shape.d_in + shape.d_out);
  }
  // Both merged sides; and for the wider side a contribution as it was sent, unpacked, and the sum.
  const int64_t widest = std::max(shape.d_in, shape.d_out);
  return AddBytes(StatisticsElements(spec, layer), AddBytes(PackedElements(widest), Mul(2, Mul(widest, widest))));
}

int64_t GradientScratchElements(const SessionSpec& spec, uint32_t layer) {
  return 2 * spec.layers[layer].d_out * spec.layers[layer].d_in;
}

int64_t LayerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps) {
  return AddBytes(method.StateBytes(spec.layers[layer]), StagingBytes(spec, method, layer, window_steps));
}

Reservation ComputeReservation(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism, int64_t free) {
  Reservation sum;
  sum.at_once = parallelism;
  LayerScratch widest;
  for (const uint32_t index : layers) {
    const Method& method = methods.of(index);
    const LayerScratch scratch = ScratchOf(spec, method, index);
    sum.states = AddBytes(sum.states, method.StateBytes(spec.layers[index]));
    sum.staging = AddBytes(sum.staging, StagingBytes(spec, method, index, window_steps));
    sum.scratch = AddBytes(sum.scratch, Total(spec, scratch));
    widest = {.statistics = std::max(widest.statistics, scratch.statistics),
              .gradient = std::max(widest.gradient, scratch.gradient),
              .method = std::max(widest.method, scratch.method),
              .deferred = std::max(widest.deferred, scratch.deferred)};
  }
  if (!layers.empty()) sum.staging = AddBytes(sum.staging, SessionTableBytes(spec));
  // A layer is the work of one strand. If not all layers run at once, each that runs may need blocks of the widest
  // layer.
  const int64_t count = static_cast<int64_t>(layers.size());
  const int64_t deferred = Mul(std::min<int64_t>(count, parallelism), std::exchange(widest.deferred, 0));
  const auto limited = [&](int at_once) { return AddBytes(Mul(at_once, Total(spec, widest)), deferred); };
  if (count > parallelism) sum.scratch = limited(parallelism);
  while (sum.total() > free && sum.at_once > kFewestAtOnce) {
    sum.at_once = std::max<int>(kFewestAtOnce, static_cast<int>(std::min<int64_t>(sum.at_once, count) / 2));
    sum.scratch = std::min(sum.scratch, limited(sum.at_once));
  }
  return sum;
}

std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods) {
  std::vector<PlacementLayer> layers;
  layers.reserve(spec.layers.size());
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    layers.push_back({.cost = methods.of(layer).StepFlops(spec.layers[layer], VectorsPerStep(spec, layer)),
                      .bytes = LayerBytes(spec, methods.of(layer), layer, kDefaultWindowSteps)});
  }
  return layers;
}

}  // namespace precondor
