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

int64_t StatisticsBytes(const SessionSpec& spec, const LayerSpec& layer) {
  return Mul(Mul(spec.world_size, StatisticsElements(spec, layer)),
             static_cast<int64_t>(ByteSize(spec.statistics_dtype)));
}

int64_t StagingBytes(const SessionSpec& spec, const LayerSpec& layer, int64_t statistics, int window_steps) {
  const int64_t elements = layer.d_out * layer.d_in;
  const int64_t contributors = GradientContributors(spec);
  int64_t gradients = Mul(Mul(contributors, elements), static_cast<int64_t>(ByteSize(spec.gradient_dtype)));
  if (contributors > 1) gradients = Add(gradients, Mul(elements, 8));
  const int64_t slots = Mul(spec.world_size + contributors, Gather::kBytesPerContributor);
  return Add(Mul(window_steps + 1, Add(statistics, slots)), Mul(window_steps, gradients));
}

int64_t StagingBytes(const SessionSpec& spec, const Method& method, const LayerSpec& layer, int window_steps) {
  return StagingBytes(spec, layer, method.needs_statistics() ? StatisticsBytes(spec, layer) : 0, window_steps);
}

}  // namespace

int64_t Reservation::total() const { return Add(Add(states, scratch), staging); }

int64_t GradientContributors(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kDelegate ? 1 : spec.world_size;
}

int64_t LayerBytes(const SessionSpec& spec, const Method& method, const LayerSpec& layer, int window_steps) {
  return Add(method.StateBytes(layer), StagingBytes(spec, method, layer, window_steps));
}

Reservation ComputeReservation(const SessionSpec& spec, const Method& method, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism) {
  Reservation reservation;
  int64_t statistics = 0;
  int64_t gradient = 0;
  int64_t method_scratch = 0;
  for (uint32_t index : layers) {
    const LayerSpec& layer = spec.layers[index];
    reservation.states = Add(reservation.states, method.StateBytes(layer));
    reservation.staging = Add(reservation.staging, StagingBytes(spec, method, layer, window_steps));
    // The step's vectors on the device; on the host one worker's decoded, or the means' sums in f64 and the means.
    const int64_t host = spec.statistics == StatisticsKind::kMean ? 3 : VectorsPerWorker(spec);
    statistics = std::max(statistics, Mul(Mul(Add(VectorsPerStep(spec), host), layer.d_in + layer.d_out), 4));
    gradient = std::max(gradient, Mul(layer.d_out * layer.d_in, 4));
    method_scratch = std::max(method_scratch, method.ScratchBytes(layer, VectorsPerStep(spec)));
  }
  // D and U on the device, and D on the host where the wire's type is not f32.
  const int64_t copies = spec.gradient_dtype == DType::kF32 ? 2 : 3;
  const int64_t per_task = Add(Add(method.needs_statistics() ? statistics : 0, Mul(copies, gradient)), method_scratch);
  reservation.scratch = Mul(parallelism, per_task);
  return reservation;
}

Reservation ComputeFirstOrderReservation(const SessionSpec& spec, absl::Span<const uint32_t> layers, int window_steps,
                                         int parallelism) {
  Reservation reservation;
  int64_t gradient = 0;
  for (uint32_t index : layers) {
    const LayerSpec& layer = spec.layers[index];
    reservation.staging = Add(reservation.staging, StagingBytes(spec, layer, /*statistics=*/0, window_steps));
    gradient = std::max(gradient, Mul(layer.d_out * layer.d_in, 4));
  }
  // D on the host where the wire's type is not f32.
  if (spec.gradient_dtype != DType::kF32) reservation.scratch = Mul(parallelism, gradient);
  return reservation;
}

}  // namespace precondor
