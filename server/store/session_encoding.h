// SPDX-License-Identifier: Apache-2.0
// Lists the fields of the types that a session consists of, for server/store/struct_encoding.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"
#include "server/store/struct_encoding.h"

namespace precondor::store {

// The shapes of the layers that have one, by index, as a separate field of a record. Precondition for decoding: the
// layers are decoded.
template <typename Layers>
struct LayerShapes {
  Layers& layers;
};

template <typename Layers>
struct internal::Code<LayerShapes<Layers>> {
  static void Put(std::string& out, const LayerShapes<Layers>& value) {
    std::map<uint32_t, std::vector<int64_t>> shapes;
    for (uint32_t place = 0; place < value.layers.size(); ++place) {
      if (!value.layers[place].shape.empty()) shapes.emplace(place, value.layers[place].shape);
    }
    store::Put(out, shapes);
  }
  static void Take(Decoder& decoder, const LayerShapes<Layers>& value) {
    std::map<uint32_t, std::vector<int64_t>> shapes;
    store::Take(decoder, shapes);
    for (auto& [place, shape] : shapes) {
      if (place >= value.layers.size() || shape.empty()) return decoder.Fail();
      value.layers[place].shape = std::move(shape);
    }
  }
};

// A byte of a record that was a choice of two, a session's on_shard_loss or data plane: written as 1, and read without
// effect.
struct RetiredValue {};

template <>
struct internal::Code<RetiredValue> {
  static void Put(std::string& out, const RetiredValue&) { PutFixed(out, 1, 1); }
  static void Take(Decoder& decoder, const RetiredValue&) {
    const uint8_t byte = decoder.U8();
    if (byte < 1 || byte > 2) decoder.Fail();
  }
};

// The number of a record that was a session's staleness in steps: written as 0, and read without effect.
struct RetiredStaleness {};

template <>
struct internal::Code<RetiredStaleness> {
  static void Put(std::string& out, const RetiredStaleness&) { PutFixed(out, 0, 4); }
  static void Take(Decoder& decoder, const RetiredStaleness&) { decoder.Fixed(4); }
};

}  // namespace precondor::store

namespace precondor {

constexpr Mode LastEnumerator(Mode) { return Mode::kFirstOrder; }
constexpr ExchangeMode LastEnumerator(ExchangeMode) { return ExchangeMode::kSharded; }
constexpr StatisticsKind LastEnumerator(StatisticsKind) { return StatisticsKind::kCovariance; }
constexpr Decision LastEnumerator(Decision) { return Decision::kSkip; }
constexpr DType LastEnumerator(DType) { return DType::kBF16; }
constexpr FallbackPolicy LastEnumerator(FallbackPolicy) { return FallbackPolicy::kAtStep; }
constexpr ProbePhase LastEnumerator(ProbePhase) { return ProbePhase::kAfter; }

// The shape of a layer is not encoded here but at the end of the record: see LayerShapes.
auto Fields(store::Is<LayerSpec> auto& value) {
  auto& [name, d_out, d_in, has_bias, shape] = value;
  return std::tie(name, d_out, d_in, has_bias);
}

auto Fields(store::Is<MethodConfig> auto& value) {
  auto& [name, options] = value;
  return std::tie(name, options);
}

auto Fields(store::Is<FallbackConfig> auto& value) {
  auto& [policy, at_step, loss_decay, rate_decay, lr_jump, min_steps, beta, patience_steps, probe_interval_steps,
         probe_settle_steps, probe_steps, probe_margin, probe_wins, reentry, reentry_beta, reentry_min_steps,
         reentry_min_decrease] = value;
  return std::tie(policy, at_step, loss_decay, rate_decay, lr_jump, min_steps, beta, patience_steps,
                  probe_interval_steps, probe_settle_steps, probe_steps, probe_margin, probe_wins, reentry,
                  reentry_beta, reentry_min_steps, reentry_min_decrease);
}

auto Fields(store::Is<LayerMethod> auto& value) {
  auto& [method, statistics, layers] = value;
  return std::tie(method, statistics, layers);
}

// layer_methods, the layers' shapes and delegates are encoded at the end of the record, because earlier versions of it
// do not have them.
auto Fields(store::Is<SessionSpec> auto& value) {
  auto& [name, seed, world_size, exchange, statistics, sketches, inv_freq, warmup_steps, statistics_dtype,
         gradient_dtype, method, fallback, layers, layer_methods, delegates] = value;
  return std::tuple_cat(std::tie(name, seed, world_size, exchange, statistics, sketches, inv_freq, warmup_steps),
                        std::make_tuple(store::RetiredStaleness()),
                        std::tie(statistics_dtype, gradient_dtype, method, fallback, layers));
}

auto Fields(store::Is<ModeInterval> auto& value) {
  auto& [first_step, mode] = value;
  return std::tie(first_step, mode);
}

auto Fields(store::Is<LossTrend> auto& value) {
  auto& [started, loss, rate, learning_rate, phase_step, phase_loss, phase_steps] = value;
  return std::tie(started, loss, rate, learning_rate, phase_step, phase_loss, phase_steps);
}

auto Fields(store::Is<LossWindow> auto& value) {
  auto& [steps, first_loss, loss_sum, indexed_loss_sum, seconds] = value;
  return std::tie(steps, first_loss, loss_sum, indexed_loss_sum, seconds);
}

auto Fields(store::Is<CostProbe> auto& value) {
  auto& [phase, steps, before, probe, after, rounds, wins, second_order_per_second, first_order_per_second] = value;
  return std::tie(phase, steps, before, probe, after, rounds, wins, second_order_per_second, first_order_per_second);
}

auto Fields(store::Is<FallbackState> auto& value) {
  auto& [observed, last_step, uncounted_steps, trend, probe, second_order_seconds, first_order_seconds, streak_steps,
         mode, switch_step, reentries, forced] = value;
  return std::tie(observed, last_step, uncounted_steps, trend, probe, second_order_seconds, first_order_seconds,
                  streak_steps, mode, switch_step, reentries, forced);
}

}  // namespace precondor
