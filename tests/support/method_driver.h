// SPDX-License-Identifier: Apache-2.0
// Drives factors and layer states with the f64 vectors of tests/reference, and makes reproducible statistics for them.
#pragma once

#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/method.h"
#include "kernels/methods/mkor.h"
#include "tests/reference/mkor.h"
#include "tests/support/test_backend.h"

namespace precondor {

// Kinds of statistics. Elements are rounded to f32, so that oracle and code see the same numbers.
enum class Stream { kCorrelated, kHeavyTailed, kDrifting, kSubspace };

// One factor's vectors, step after step; a function of (kind, d, seed) alone.
class VectorStream {
 public:
  VectorStream(Stream kind, int64_t d, uint64_t seed, double scale = 1.0)
      : kind_(kind), d_(d), scale_(scale), random_(seed), first_(Gaussian()), second_(Gaussian()) {
    for (int i = 0; i < 5; ++i) basis_.push_back(Gaussian());
  }

  reference::Vectors Next(int64_t k) {
    reference::Vectors out;
    for (int64_t i = 0; i < k; ++i) out.push_back(Vector());
    ++step_;
    return out;
  }

  // Gaussian, rounded to f32: gradients and probes.
  reference::Vector Gaussian() { return Gaussian(d_); }
  reference::Vector Gaussian(int64_t n) {
    reference::Vector x(n);
    for (double& element : x) element = static_cast<float>(normal_(random_));
    return x;
  }

 private:
  // A spectrum that falls like a real layer's: an AR(1) process over the coordinates plus a common mean.
  reference::Vector Vector() {
    reference::Vector x = Gaussian();
    if (kind_ == Stream::kSubspace) {
      x.assign(d_, 0.0);
      for (const reference::Vector& direction : basis_) {
        const double weight = normal_(random_);
        for (int64_t i = 0; i < d_; ++i) x[i] += weight * direction[i];
      }
    } else {
      for (int64_t i = 1; i < d_; ++i) x[i] = 0.95 * x[i - 1] + std::sqrt(1 - 0.95 * 0.95) * x[i];
    }
    double length = 1.0;
    if (kind_ == Stream::kHeavyTailed) {  // Student's t with 2 degrees of freedom
      length = 1.0 / std::sqrt((std::pow(normal_(random_), 2) + std::pow(normal_(random_), 2)) / 2.0);
    }
    const double angle = kind_ == Stream::kDrifting ? 0.02 * static_cast<double>(step_) : 0.3;
    const double mean = kind_ == Stream::kSubspace ? 0.0 : 1.0;
    for (int64_t i = 0; i < d_; ++i) {
      x[i] = static_cast<float>(scale_ * length *
                                (x[i] + mean * (std::cos(angle) * first_[i] + std::sin(angle) * second_[i])));
    }
    return x;
  }

  const Stream kind_;
  const int64_t d_;
  const double scale_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  int64_t step_ = 0;
  reference::Vector first_, second_;
  reference::Vectors basis_;
};

inline std::vector<float> ToFloats(const reference::Vector& x) { return std::vector<float>(x.begin(), x.end()); }

inline DeviceMatrix ToDevice(Backend& backend, const reference::Vectors& rows) {
  const int64_t k = rows.size(), d = rows.empty() ? 0 : rows[0].size();
  std::vector<float> elements;
  for (const reference::Vector& row : rows) elements.insert(elements.end(), row.begin(), row.end());
  DeviceMatrix out = backend.Allocate(k, d).value();
  const absl::Status status = backend.Upload(ConstMatrixView(elements.data(), k, d), out.view());
  if (!status.ok()) std::abort();
  return out;
}

inline reference::Vectors ToHost(Backend& backend, ConstMatrixView x) {
  std::vector<float> elements(x.size());
  const absl::Status status = backend.Download(x, MatrixView(elements.data(), x.rows, x.cols));
  if (!status.ok()) std::abort();
  reference::Vectors out;
  for (int64_t i = 0; i < x.rows; ++i) {
    out.emplace_back(elements.begin() + i * x.cols, elements.begin() + (i + 1) * x.cols);
  }
  return out;
}

// One Factor.
class FactorDriver {
 public:
  FactorDriver(const MkorConfig& config, int64_t d, Backend& backend)
      : d_(d), backend_(backend), factor_(MakeFactor(config, d, 0, backend).value()) {}

  absl::Status Update(const reference::Vectors& vectors) {
    const DeviceMatrix device = ToDevice(backend_, vectors);
    absl::Status status = factor_->Prepare(device.view());
    if (status.ok()) status = factor_->Conclude();
    if (status.ok()) factor_->Commit();
    return status;
  }

  // Rows x' J for the rows x of `probes`.
  reference::Vectors Apply(const reference::Vectors& probes) {
    const FactorInverse inverse = factor_->Inverse().value();
    const DeviceMatrix in = ToDevice(backend_, probes);
    DeviceMatrix out = backend_.Allocate(in.rows(), d_).value();
    absl::Status status;
    if (inverse.dense) {
      DeviceMatrix made;
      const ConstMatrixView matrix = Expanded(backend_, inverse.form, made).value();
      status = backend_.Gemm(1.0, in.view(), Transpose::kNo, matrix, Transpose::kNo, 0.0, out.view());
    } else {
      LowRankInverse form = inverse.low_rank;
      form.c = 1.0;
      status = backend_.LowRankPrecondition({}, form, in.view(), out.view());
    }
    if (!status.ok()) std::abort();
    reference::Vectors rows = ToHost(backend_, out.view());
    for (reference::Vector& row : rows) {
      for (double& element : row) element *= inverse.c;
    }
    return rows;
  }

  reference::Dense Inverse() {
    const reference::Dense identity = reference::Identity(d_);
    reference::Vectors rows;
    for (int64_t i = 0; i < d_; ++i) {
      rows.emplace_back(identity.data.begin() + i * d_, identity.data.begin() + (i + 1) * d_);
    }
    rows = Apply(rows);
    reference::Dense out(d_, d_);
    for (int64_t i = 0; i < d_; ++i) {
      for (int64_t j = 0; j < d_; ++j) out.at(i, j) = rows[i][j];
    }
    return out;
  }

  Factor& factor() { return *factor_; }

 private:
  const int64_t d_;
  Backend& backend_;
  std::unique_ptr<Factor> factor_;
};

// One LayerState.
class LayerDriver {
 public:
  LayerDriver(const Method& method, const LayerSpec& layer, Backend& backend)
      : LayerDriver(layer, backend, method.MakeState(layer, backend).value()) {}
  // Drives a state whose statistics and gradients are on `backend`.
  LayerDriver(const LayerSpec& layer, Backend& backend, std::unique_ptr<LayerState> state)
      : layer_(layer), backend_(backend), state_(std::move(state)) {}

  absl::Status Update(const reference::Vectors& a, const reference::Vectors& g) {
    const DeviceMatrix device_a = ToDevice(backend_, a), device_g = ToDevice(backend_, g);
    return state_->Update({device_a.view(), device_g.view()});
  }

  // A covariance's lower triangle, row after row.
  absl::Status UpdateWithCovariances(const reference::Vector& a, const reference::Vector& g) {
    const DeviceMatrix device_a = ToDevice(backend_, {a}), device_g = ToDevice(backend_, {g});
    return state_->Update({.a_covariance = device_a.view(), .g_covariance = device_g.view()});
  }

  // d and the result row-major.
  absl::StatusOr<reference::Vector> Precondition(const reference::Vector& d) {
    const std::vector<float> elements = ToFloats(d);
    DeviceMatrix in = backend_.Allocate(layer_.d_out, layer_.d_in).value();
    DeviceMatrix out = backend_.Allocate(layer_.d_out, layer_.d_in).value();
    absl::Status status = backend_.Upload(ConstMatrixView(elements.data(), layer_.d_out, layer_.d_in), in.view());
    if (status.ok()) status = state_->Precondition(in.view(), out.view());
    if (!status.ok()) return status;
    return Flat(out.view());
  }

  absl::StatusOr<reference::Vector> Repeat() {
    DeviceMatrix out = backend_.Allocate(layer_.d_out, layer_.d_in).value();
    const absl::Status status = state_->Repeat(out.view());
    if (!status.ok()) return status;
    return Flat(out.view());
  }

  LayerState& state() { return *state_; }

 private:
  reference::Vector Flat(ConstMatrixView x) {
    reference::Vector flat;
    for (const reference::Vector& row : ToHost(backend_, x)) flat.insert(flat.end(), row.begin(), row.end());
    return flat;
  }

  const LayerSpec layer_;
  Backend& backend_;
  std::unique_ptr<LayerState> state_;
};

inline double Norm(const reference::Vector& x) {
  double sum = 0;
  for (double element : x) sum += element * element;
  return std::sqrt(sum);
}

// |x - y| / |y|
inline double RelativeDifference(const reference::Vector& x, const reference::Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += std::pow(x[i] - y[i], 2);
  return std::sqrt(sum) / Norm(y);
}

// A configuration for messages.
inline std::string Describe(const MethodConfig& config) {
  std::string text = config.name;
  for (const auto& [name, value] : config.options) {
    text += " " + name + "=";
    if (const auto* word = std::get_if<std::string>(&value)) text += *word;
    if (const auto* number = std::get_if<double>(&value)) text += std::to_string(*number);
    if (const auto* flag = std::get_if<bool>(&value)) text += *flag ? "true" : "false";
  }
  return text;
}

// Expects that a state refuses bytes of another state of its kind that are damaged, and keeps its own until it gets
// whole ones.
inline void ExpectRefusesDamage(LayerState& state, const std::string& other) {
  const std::string before = state.Save().value();
  const size_t stride = other.size() / 40 + 1;
  for (size_t at = 0; at < other.size(); at += stride) {
    std::string flipped = other;
    flipped[at] ^= 0x10;
    const absl::Status status = state.Load(flipped);
    // A byte of the format's number makes it another format.
    EXPECT_TRUE(absl::IsDataLoss(status) || (at >= 8 && at < 12 && absl::IsFailedPrecondition(status))) << status;
    EXPECT_TRUE(absl::IsDataLoss(state.Load(other.substr(0, at)))) << at;
  }
  EXPECT_TRUE(absl::IsDataLoss(state.Load(other + "x")));
  EXPECT_EQ(state.Save().value(), before);
  EXPECT_TRUE(state.Load(other).ok());
  EXPECT_EQ(state.Save().value(), other);
}

}  // namespace precondor
