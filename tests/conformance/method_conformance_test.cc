// SPDX-License-Identifier: Apache-2.0
// The contract of every method, over all names of the registry in several configurations each. Methods that work
// from gradients alone have a suite of their own: gradient_method_conformance_test.
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "kernels/methods/registry.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

// Every combination of the values of these options, for each method that has them.
std::vector<MethodConfig> Configurations() {
  const std::vector<OptionValue> scalings = {std::string("NORM_RESCALE"), std::string("KL_CLIP"),
                                             std::string("RMS_CLIP"), std::string("NONE")};
  const std::map<std::string, std::vector<std::map<std::string, std::vector<OptionValue>>>> options = {
      {"kfac",
       {{{"form", {std::string("EIGEN"), std::string("INVERSE")}},
         {"pi_split", {false, true}},
         {"inv_update_steps", {std::string("1"), std::string("piecewise(7, 9: 3)")}}},
        {{"scaling", scalings}},
        {{"prediv", {true}}, {"pi_split", {false, true}}, {"inv_update_steps", {std::string("4")}}},
        {{"form", {std::string("EIGEN"), std::string("INVERSE")}},
         {"refresh_lag", {1.0, 4.0}},
         {"inv_update_steps", {std::string("1"), std::string("3")}}},
        {{"prediv", {true}}, {"pi_split", {true}}, {"refresh_lag", {2.0}}, {"accumulation_steps", {3.0}}},
        {{"accumulation_steps", {3.0}},
         {"factor_update_steps", {std::string("1"), std::string("2")}},
         {"damping", {std::string("linear(0.1, 0.001, 20)")}}}}},
      {"eva", {{{"scaling", scalings}, {"mu", {0.03, 1e-6}}}}},
      {"mkor",
       {{{"rule",
          {std::string("EXACT_DAMPED"), std::string("REFERENCE"), std::string("BLEND"), std::string("PUBLISHED")}},
         {"representation", {std::string("AUTO"), std::string("DENSE"), std::string("LOW_RANK")}},
         {"rank", {4.0, 64.0}}},
        {{"scaling", {std::string("KL_CLIP"), std::string("RMS_CLIP"), std::string("NONE")}}, {"rank", {4.0}}},
        {{"max_factor_dim", {7.0}}, {"representation", {std::string("AUTO"), std::string("LOW_RANK")}}}}}};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  std::vector<MethodConfig> all;
  for (absl::string_view name : MethodNames()) {
    MethodConfig plain;
    plain.name = std::string(name);
    const std::unique_ptr<Method> method = MakeMethod(plain).value();
    if (!method->needs_statistics() && method->MakeState({"any", 1, 1, false}, *backend).value()->ready()) continue;
    all.push_back(plain);
    const auto known = options.find(plain.name);
    if (known == options.end()) continue;
    for (const auto& grid : known->second) {
      std::vector<MethodConfig> configs = {plain};
      for (const auto& [option, values] : grid) {
        std::vector<MethodConfig> extended;
        for (const MethodConfig& config : configs) {
          for (const OptionValue& value : values) {
            extended.push_back(config);
            extended.back().options[option] = value;
          }
        }
        configs = extended;
      }
      all.insert(all.end(), configs.begin(), configs.end());
    }
  }
  return all;
}

const LayerSpec kLayers[] = {
    {"small", 1, 1, false}, {"bias", 5, 12, true}, {"wide", 3, 40, false}, {"tall", 33, 2, true}};

struct Trained {
  std::unique_ptr<LayerDriver> driver;
  VectorStream a, g;
};

Trained Train(const Method& method, const LayerSpec& layer, Backend& backend, int steps) {
  Trained out{std::make_unique<LayerDriver>(method, layer, backend), VectorStream(Stream::kCorrelated, layer.d_in, 1),
              VectorStream(Stream::kHeavyTailed, layer.d_out, 2)};
  for (int step = 0; method.needs_statistics() && step < steps; ++step) {
    const absl::Status status = out.driver->Update(out.a.Next(3), out.g.Next(3));
    EXPECT_TRUE(status.ok()) << status;
  }
  return out;
}

template <typename Check>
void ForAll(Check check) {
  for (const MethodConfig& config : Configurations()) {
    SCOPED_TRACE(Describe(config));
    const absl::StatusOr<std::unique_ptr<Method>> method = MakeMethod(config);
    ASSERT_TRUE(method.ok()) << method.status();
    for (const LayerSpec& layer : kLayers) {
      SCOPED_TRACE(layer.name);
      check(**method, config, layer);
    }
  }
}

TEST(MethodConformance, IsTheIdentityBeforeStatistics) {
  ForAll([](const Method& method, const MethodConfig& config, const LayerSpec& layer) {
    EXPECT_EQ(method.name(), config.name);
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained layer_state = Train(method, layer, *backend, 0);
    const reference::Vector d = layer_state.a.Gaussian(layer.d_out * layer.d_in);
    EXPECT_FALSE(layer_state.driver->state().ready());
    EXPECT_EQ(layer_state.driver->state().version(), 0u);
    EXPECT_EQ(layer_state.driver->Precondition(d).value(), d);
  });
}

// <D, U> > 0: a positive definite preconditioner never turns a descent direction around.
TEST(MethodConformance, GivesFiniteDescentDirections) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained = Train(method, layer, *backend, 40);
    EXPECT_EQ(trained.driver->state().ready(), method.needs_statistics());
    EXPECT_EQ(trained.driver->state().version(), method.needs_statistics() ? 40u : 0u);
    for (int i = 0; i < 5; ++i) {
      const reference::Vector d = trained.a.Gaussian(layer.d_out * layer.d_in);
      const absl::StatusOr<reference::Vector> u = trained.driver->Precondition(d);
      ASSERT_TRUE(u.ok()) << u.status();
      double inner = 0;
      for (size_t j = 0; j < d.size(); ++j) {
        ASSERT_TRUE(std::isfinite((*u)[j]));
        inner += d[j] * (*u)[j];
      }
      EXPECT_GT(inner, 0);
    }
    const reference::Vector zero(layer.d_out * layer.d_in, 0.0);
    EXPECT_EQ(trained.driver->Precondition(zero).value(), zero);
  });
}

// U(s D) = s U(D) except where a policy clips; the norm policies hold.
TEST(MethodConformance, KeepsItsScalingPolicy) {
  ForAll([](const Method& method, const MethodConfig& config, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained = Train(method, layer, *backend, 9);
    const auto option = [&](const std::string& name, const std::string& fallback) {
      const auto it = config.options.find(name);
      return it == config.options.end() ? fallback : std::get<std::string>(it->second);
    };
    const std::string scaling =
        option("scaling", config.name == "eva" || config.name == "kfac" ? "KL_CLIP" : "NORM_RESCALE");
    const reference::Vector d = trained.a.Gaussian(layer.d_out * layer.d_in);
    const reference::Vector u = trained.driver->Precondition(d).value();
    reference::Vector large = d;
    for (double& element : large) element *= 1024;
    const reference::Vector large_u = trained.driver->Precondition(large).value();
    const double root = std::sqrt(static_cast<double>(d.size()));
    if (scaling == "RMS_CLIP") {
      EXPECT_LE(Norm(u) / root, 1.1 * (1 + 1e-5));
      EXPECT_LE(Norm(large_u) / root, 1.1 * (1 + 1e-5));
    } else {
      EXPECT_NEAR(Norm(large_u) / Norm(u), 1024, 1e-2);
    }
    EXPECT_EQ(method.needs_global_scale(), scaling == "KL_CLIP");
    const bool package_norm = option("rule", "") == "REFERENCE" && layer.has_bias;
    if (scaling == "NORM_RESCALE" && !package_norm) {
      EXPECT_NEAR(Norm(u), Norm(d), 1e-5 * Norm(d));
    }
  });
}

TEST(MethodConformance, RefusesBadInputAndChangesNothing) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained = Train(method, layer, *backend, 9);
    const reference::Vector d = trained.a.Gaussian(layer.d_out * layer.d_in);
    const reference::Vector before = trained.driver->Precondition(d).value();
    const uint64_t version = trained.driver->state().version();
    for (double bad : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
      for (bool input : {true, false}) {
        reference::Vectors a = trained.a.Next(2), g = trained.g.Next(2);
        (input ? a : g)[1].back() = bad;
        EXPECT_EQ(trained.driver->Update(a, g).code(), absl::StatusCode::kInvalidArgument);
      }
    }
    reference::Vectors long_a = trained.a.Next(1);
    long_a[0].push_back(1.0);
    EXPECT_EQ(trained.driver->Update(long_a, trained.g.Next(1)).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(trained.driver->state().Update({}).code(), absl::StatusCode::kInvalidArgument);
    if (method.traits().statistics == StatisticsForm::kVectors) {
      const int64_t packed = layer.d_in * (layer.d_in + 1) / 2;
      const DeviceMatrix a = ToDevice(*backend, {reference::Vector(packed, 1.0)});
      const DeviceMatrix g = ToDevice(*backend, trained.g.Next(1));
      EXPECT_EQ(trained.driver->state().Update({.g = g.view(), .a_covariance = a.view()}).code(),
                absl::StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(trained.driver->state().version(), version);
    EXPECT_EQ(trained.driver->Precondition(d).value(), before);
  });
}

TEST(MethodConformance, TheSameInputsGiveTheSameBytes) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    const std::unique_ptr<Backend> first = MakeTestBackend(), second = MakeTestBackend();
    Trained one = Train(method, layer, *first, 25), other = Train(method, layer, *second, 25);
    const reference::Vector d = one.a.Gaussian(layer.d_out * layer.d_in);
    EXPECT_EQ(one.driver->Precondition(d).value(), other.driver->Precondition(d).value());
  });
}

// Every answer from here on, and all that decides it, is that of the state that was saved.
void ExpectGoesOnAlike(const Method& method, const LayerSpec& layer, int before, int after) {
  const std::unique_ptr<Backend> first = MakeTestBackend(), second = MakeTestBackend();
  Trained one = Train(method, layer, *first, before);
  LayerDriver other(method, layer, *second);
  const std::string saved = one.driver->state().Save().value();
  const absl::Status loaded = other.state().Load(saved);
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(other.state().version(), one.driver->state().version());
  EXPECT_EQ(other.state().bytes(), one.driver->state().bytes());
  EXPECT_EQ(other.state().Save().value(), saved);
  const reference::Vector d = one.a.Gaussian(layer.d_out * layer.d_in);
  for (int step = 0; step < after; ++step) {
    EXPECT_EQ(other.Precondition(d).value(), one.driver->Precondition(d).value()) << step;
    if (!method.needs_statistics()) return;
    const reference::Vectors a = one.a.Next(3), g = one.g.Next(3);
    ASSERT_TRUE(one.driver->Update(a, g).ok());
    ASSERT_TRUE(other.Update(a, g).ok());
  }
  EXPECT_EQ(other.state().Save().value(), one.driver->state().Save().value());
}

TEST(MethodConformance, ASavedStateGoesOnBitwise) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    for (int before : {0, 1, 7, 30}) ExpectGoesOnAlike(method, layer, before, 20);
  });
}

TEST(MethodConformance, ASavedStateGoesOnBitwiseForLong) {
  // Long enough for recompressions of all kinds, whose phase depends on the name; rank 70 gives columns up early.
  for (const LayerSpec& layer : {LayerSpec{"long", 3, 200, true}, {"longer", 3, 200, true}}) {
    const double rank = 70;
    for (const char* rule : {"EXACT_DAMPED", "BLEND"}) {
      const MethodConfig config{"mkor", {{"rank", rank}, {"rule", std::string(rule)}}};
      SCOPED_TRACE(Describe(config));
      const std::unique_ptr<Method> method = MakeMethod(config).value();
      for (int before : {7, 25, 26, 60}) ExpectGoesOnAlike(*method, layer, before, 200);
    }
  }
}

TEST(MethodConformance, DamagedBytesAreRefusedAndChangeNothing) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained = Train(method, layer, *backend, 9);
    ExpectRefusesDamage(trained.driver->state(), Train(method, layer, *backend, 12).driver->state().Save().value());
  });
}

TEST(MethodConformance, AnotherLayersOrMethodsBytesAreRefusedByName) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const MethodConfig plain{"mkor", {}};
  const LayerSpec layer{"one", 8, 12, false};
  Trained trained = Train(*MakeMethod(plain).value(), layer, *backend, 5);
  const std::string before = trained.driver->state().Save().value();
  const auto refusal = [&](const MethodConfig& config, const LayerSpec& of) {
    const std::unique_ptr<Method> method = MakeMethod(config).value();
    const absl::Status status =
        trained.driver->state().Load(Train(*method, of, *backend, 5).driver->state().Save().value());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(trained.driver->state().Save().value(), before);
    return std::string(status.message());
  };
  EXPECT_NE(refusal({"identity", {}}, layer).find("method: expected \"mkor\", got \"identity\""), std::string::npos);
  EXPECT_NE(refusal({"mkor", {{"gamma", 0.5}}}, layer).find("configuration: expected"), std::string::npos);
  EXPECT_NE(refusal({"mkor", {{"representation", std::string("LOW_RANK")}}}, layer).find("representation: expected"),
            std::string::npos);
  EXPECT_NE(refusal(plain, {"one", 8, 13, false}).find("dimension: expected 12, got 13"), std::string::npos);
  EXPECT_NE(refusal({"mkor", {{"max_factor_dim", 6.0}}}, layer).find("blocks: expected 1, got 2"), std::string::npos);
}

TEST(MethodConformance, AdmissionsNumbersHold) {
  ForAll([](const Method& method, const MethodConfig&, const LayerSpec& layer) {
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    const std::unique_ptr<LayerState> state = method.MakeState(layer, backend).value();
    EXPECT_GT(method.StepFlops(layer, 16), 0);
    const int64_t vectors = 16, bytes = method.StateBytes(layer);
    EXPECT_LE(state->bytes(), bytes);
    VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
    const DeviceMatrix d = ToDevice(*cpu, reference::Vectors(layer.d_out, a.Gaussian()));
    DeviceMatrix u = cpu->Allocate(layer.d_out, layer.d_in).value();
    for (int step = 0; step < 12; ++step) {
      backend.ResetPeak();
      if (method.needs_statistics()) {
        const DeviceMatrix va = ToDevice(*cpu, a.Next(vectors)), vg = ToDevice(*cpu, g.Next(vectors));
        ASSERT_TRUE(state->Update({va.view(), vg.view()}).ok());
      }
      ASSERT_TRUE(state->Precondition(d.view(), u.view()).ok());
      EXPECT_LE(backend.peak_bytes(), bytes + method.ScratchBytes(layer, vectors));
      EXPECT_LE(backend.allocated_bytes(), bytes);
      EXPECT_EQ(backend.allocated_bytes(), state->bytes());
    }
  });
}

}  // namespace
}  // namespace precondor
