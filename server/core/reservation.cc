// SPDX-License-Identifier: Apache-2.0
#include "server/core/reservation.h"

#include <algorithm>

#include "server/core/gather.h"
#include "server/core/payload.h"

namespace precondor {
namespace {

constexpr int64_t kSaturated = int64_t{1} << 62;

// Operands are not negative. The largest layer table would need 2^79 bytes.
int64_t Add(int64_t x, int64_t y) { return x > kSaturated - y ? kSaturated : x + y; }
int64_t Mul(int64_t x, int64_t y) { return y != 0 && x > kSaturated / y ? kSaturated : x * y; }

// The gradients of one step that are on their way, and what they are added up in.
int64_t GradientBytes(const SessionSpec& spec, const LayerSpec& layer) {
  if (WorkersPrecondition(spec)) return 0;
  const int64_t elements = layer.d_out * layer.d_in;
  const int64_t contributors = GradientContributors(spec);
  const int64_t gradients = Mul(Mul(contributors, elements), static_cast<int64_t>(ByteSize(spec.gradient_dtype)));
  // Instead of sums in f64, a communicator takes zeros of the widest layer.
  if (spec.data_plane == DataPlane::kCollective) return Add(gradients, Mul(elements, 4));
  return contributors > 1 ? Add(gradients, Mul(elements, 8)) : gradients;
}

int64_t StagingBytes(const SessionSpec& spec, const LayerSpec& layer, int64_t statistics, int window_steps) {
  const int64_t slots = Mul(spec.world_size + GradientContributors(spec), Gather::kBytesPerContributor);
  return Add(Mul(window_steps + 1, Add(statistics, slots)), Mul(window_steps, GradientBytes(spec, layer)));
}

// What workers that have factors are sent.
int64_t HandedBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps) {
  if (!WorkersPrecondition(spec) || !method.needs_statistics()) return 0;
  const int64_t state = method.SavedBytes(spec.layers[layer]);
  const bool replayed = spec.exchange == ExchangeMode::kReplay;
  return Add(Mul(window_steps, replayed ? Mul(StatisticsScratchElements(spec, layer), 4) : state), Mul(2, state));
}

int64_t StagingBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps) {
  return Add(StagingBytes(spec, spec.layers[layer], method.needs_statistics() ? StatisticsBytes(spec, layer) : 0,
                          window_steps),
             HandedBytes(spec, method, layer, window_steps));
}

}  // namespace

int64_t StatisticsBytes(const SessionSpec& spec, uint32_t layer) {
  return Mul(Mul(spec.world_size, StatisticsElements(spec, layer)),
             static_cast<int64_t>(ByteSize(spec.statistics_dtype)));
}

int64_t Reservation::total() const { return Add(Add(states, scratch), staging); }

int64_t GradientContributors(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kDelegate ? 1 : spec.world_size;
}

int64_t StatisticsScratchElements(const SessionSpec& spec, uint32_t layer) {
  const LayerSpec& shape = spec.layers[layer];
  if (StatisticsOf(spec, layer) != StatisticsKind::kCovariance) {
    return Mul(VectorsPerStep(spec, layer), shape.d_in + shape.d_out);
  }
  // Both sides merged; for the wider one a vote as it came, unpacked, and the sum.
  const int64_t widest = std::max(shape.d_in, shape.d_out);
  return Add(StatisticsElements(spec, layer), Add(PackedElements(widest), Mul(2, Mul(widest, widest))));
}

int64_t LayerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps) {
  return Add(method.StateBytes(spec.layers[layer]), StagingBytes(spec, method, layer, window_steps));
}

ReservationSum::ReservationSum(const SessionSpec& spec, const MethodSet& methods, int window_steps, int parallelism)
    : spec_(&spec), methods_(&methods), window_steps_(window_steps), parallelism_(parallelism) {}

void ReservationSum::Include(uint32_t index) {
  const LayerSpec& layer = spec_->layers[index];
  const Method& method = methods_->of(index);
  ++layers_;
  states_ = Add(states_, method.StateBytes(layer));
  staging_ = Add(staging_, StagingBytes(*spec_, method, index, window_steps_));
  if (method.needs_statistics()) {
    // What is on the device; on the host one worker's decoded, or the means' sums in f64 and the means.
    const bool mean = StatisticsOf(*spec_, index) == StatisticsKind::kMean;
    const int64_t host = mean ? 3 * (layer.d_in + layer.d_out) : StatisticsElements(*spec_, index);
    statistics_ = std::max(statistics_, Mul(Add(StatisticsScratchElements(*spec_, index), host), 4));
  }
  if (!WorkersPrecondition(*spec_)) gradient_ = std::max(gradient_, Mul(layer.d_out * layer.d_in, 4));
  method_scratch_ = std::max(method_scratch_, method.ScratchBytes(layer, VectorsPerStep(*spec_, index)));
  deferred_scratch_ = std::max(deferred_scratch_, method.DeferredScratchBytes(layer));
}

Reservation ReservationSum::reservation() const {
  // D and U on the device, and D on the host where the wire's type is not f32.
  const int64_t copies = spec_->gradient_dtype == DType::kF32 ? 2 : 3;
  const int64_t method_bytes = Add(method_scratch_, deferred_scratch_);
  // A layer is one thread's work at a time.
  const int64_t at_once = std::min<int64_t>(parallelism_, layers_);
  const int64_t of_one = Add(Add(statistics_, Mul(copies, gradient_)), method_bytes);
  return {.states = states_, .scratch = Mul(at_once, of_one), .staging = staging_};
}

Reservation ComputeReservation(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism) {
  ReservationSum sum(spec, methods, window_steps, parallelism);
  for (const uint32_t layer : layers) sum.Include(layer);
  return sum.reservation();
}

Reservation ComputeFirstOrderReservation(const SessionSpec& spec, absl::Span<const uint32_t> layers, int window_steps,
                                         int parallelism) {
  Reservation reservation;
  int64_t gradient = 0;
  for (uint32_t index : layers) {
    const LayerSpec& layer = spec.layers[index];
    reservation.staging = Add(reservation.staging, StagingBytes(spec, layer, /*statistics=*/0, window_steps));
    if (!WorkersPrecondition(spec)) gradient = std::max(gradient, Mul(layer.d_out * layer.d_in, 4));
  }
  // D on the host where the wire's type is not f32.
  if (spec.gradient_dtype != DType::kF32) {
    reservation.scratch = Mul(std::min<int64_t>(parallelism, static_cast<int64_t>(layers.size())), gradient);
  }
  return reservation;
}

}  // namespace precondor
