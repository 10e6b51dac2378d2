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

// A field of a record that is no longer used: written as `written`, which earlier versions accept, and read without
// effect.
template <typename T>
struct Retired {
  T written{};
};

template <typename T>
struct internal::Code<Retired<T>> {
  static void Put(std::string& out, const Retired<T>& value) { store::Put(out, value.written); }
  static void Take(Decoder& decoder, const Retired<T>&) {
    T unused{};
    store::Take(decoder, unused);
  }
};

// Retired fields that are written as zeros.
template <size_t kBytes>
struct RetiredBytes {};

template <size_t kBytes>
struct internal::Code<RetiredBytes<kBytes>> {
  static void Put(std::string& out, const RetiredBytes<kBytes>&) { out.append(kBytes, '\0'); }
  static void Take(Decoder& decoder, const RetiredBytes<kBytes>&) { decoder.Take(kBytes); }
};

// Number 3 was a policy COST_AWARE. Sessions that had it go on with LOSS_RATE.
template <>
struct internal::Code<FallbackPolicy> {
  static void Put(std::string& out, FallbackPolicy value) { PutFixed(out, static_cast<uint64_t>(value), 1); }
  static void Take(Decoder& decoder, FallbackPolicy& value) {
    const uint8_t byte = decoder.U8();
    if (byte < 1 || byte > 4) decoder.Fail();
    value = byte == 3 ? FallbackPolicy::kLossRate : static_cast<FallbackPolicy>(byte);
  }
};

}  // namespace precondor::store

namespace precondor {

constexpr Mode LastEnumerator(Mode) { return Mode::kFirstOrder; }
constexpr ExchangeMode LastEnumerator(ExchangeMode) { return ExchangeMode::kSharded; }
constexpr StatisticsKind LastEnumerator(StatisticsKind) { return StatisticsKind::kCovariance; }
constexpr Decision LastEnumerator(Decision) { return Decision::kSkip; }
constexpr DType LastEnumerator(DType) { return DType::kBF16; }

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
  using store::Retired;
  auto& [policy, at_step, rate_decay, lr_jump, min_steps, beta, patience_steps] = value;
  // The retired fields are the weight of the past in the smoothed loss, five options of probes, and four of returns to
  // second order.
  return std::tuple_cat(std::tie(policy, at_step), std::make_tuple(Retired<double>{kLossDecay}),
                        std::tie(rate_decay, lr_jump, min_steps, beta, patience_steps),
                        std::make_tuple(Retired<int32_t>{1000}, Retired<int32_t>{20}, Retired<int32_t>{100},
                                        Retired<double>{0.1}, Retired<int32_t>{3}, Retired<bool>{false},
                                        Retired<double>{0.5}, Retired<int32_t>{1000}, Retired<double>{0.05}));
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
  // The retired field is the staleness in steps.
  return std::tuple_cat(std::tie(name, seed, world_size, exchange, statistics, sketches, inv_freq, warmup_steps),
                        std::make_tuple(store::Retired<int32_t>{0}),
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

auto Fields(store::Is<FallbackState> auto& value) {
  auto& [observed, last_step, uncounted_steps, trend, second_order_seconds, first_order_seconds, streak_steps, mode,
         switch_step, forced] = value;
  // The retired fields are the phase and the numbers of a probe, and the count of returns to second order.
  return std::tuple_cat(std::tie(observed, last_step, uncounted_steps, trend),
                        std::make_tuple(store::Retired<uint8_t>{1}, store::RetiredBytes<160>{}),
                        std::tie(second_order_seconds, first_order_seconds, streak_steps, mode, switch_step),
                        std::make_tuple(store::Retired<uint32_t>{0}), std::tie(forced));
}

}  // namespace precondor
