// SPDX-License-Identifier: Apache-2.0
// The contract of methods that work from gradients alone, over all of the registry in several configurations each. The
// others: method_conformance_test.
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "kernels/methods/registry.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

const LayerSpec kLayers[] = {{"small", 1, 1, false},
                             {"bias", 5, 12, true},
                             {"wide", 3, 40, false},
                             {"tall", 33, 1, false},
                             {"row", 1, 9, false},
                             {"square", 8, 8, false},
                             {"conv", 7, 24, false, {7, 4, 3, 2}}};

// Options of each method that has some, beside its defaults.
std::vector<MethodConfig> Configurations() {
  using Options = std::map<std::string, OptionValue>;
  const auto text = [](const char* value) { return OptionValue(std::string(value)); };
  const std::map<std::string, std::vector<Options>> known = {
      {"kron",
       {{{"memory_save_mode", text("ONE_DIAG")}, {"block_size", 7.0}},
        {{"memory_save_mode", text("ONE_DIAG")}},
        {{"merge_small_dims", false}, {"block_size", 4.0}},
        {{"memory_save_mode", text("ALL_DIAG")}, {"momentum", 0.0}},
        {{"block_size", 7.0}, {"max_size_triangular", 20.0}, {"update_flat_steps", 5.0}, {"update_decay", 0.1}}}},
      {"muon",
       {{{"nesterov", false}, {"ns_steps", 4.0}},
        {{"momentum", 0.0}, {"scale", text("ORIGINAL")}, {"epsilon", 0.0}},
        {{"input_factor", true}, {"refresh_interval", 3.0}},
        {{"input_factor", true}, {"nesterov", false}, {"max_factor_dim", 20.0}}}},
      {"soap",
       {{{"refresh_interval", 3.0}, {"max_factor_dim", 10.0}},
        {{"momentum", 0.0}, {"refresh_interval", 1.0}},
        {{"merge_small_dims", false}, {"refresh_interval", 3.0}},
        {{"rule", text("SHAMPOO")}},
        {{"rule", text("SHAMPOO")}, {"merge_small_dims", false}, {"max_factor_dim", 6.0}},
        {{"rule", text("SHAMPOO")}, {"refresh_interval", 4.0}, {"max_factor_dim", 10.0}}}}};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  std::vector<MethodConfig> all;
  for (const absl::string_view name : MethodNames()) {
    const MethodConfig plain{std::string(name), {}};
    const std::unique_ptr<Method> method = MakeMethod(plain).value();
    if (method->needs_statistics() || !method->MakeState(kLayers[0], *backend).value()->ready()) continue;
    all.push_back(plain);
    const auto found = known.find(plain.name);
    if (found == known.end()) continue;
    for (const Options& options : found->second) all.push_back({plain.name, options});
  }
  return all;
}

// A state that has taken `steps` gradients in.
struct Trained {
  Trained(const Method& method, const LayerSpec& layer, Backend& backend, int steps, double scale = 1.0)
      : driver(method, layer, backend), gradients(layer.d_out, layer.d_in, 4, scale) {
    for (int step = 0; step < steps; ++step) {
      const absl::StatusOr<reference::Vector> u = Next();
      EXPECT_TRUE(u.ok()) << u.status();
    }
  }
  absl::StatusOr<reference::Vector> Next() { return driver.Precondition(gradients.Next().data); }

  LayerDriver driver;
  GradientStream gradients;
};

template <typename Check>
void ForAll(Check check) {
  const std::vector<MethodConfig> all = Configurations();
  EXPECT_FALSE(all.empty());
  for (const MethodConfig& config : all) {
    SCOPED_TRACE(Describe(config));
    const absl::StatusOr<std::unique_ptr<Method>> method = MakeMethod(config);
    ASSERT_TRUE(method.ok()) << method.status();
    for (const LayerSpec& layer : kLayers) {
      SCOPED_TRACE(layer.name);
      check(**method, layer);
    }
  }
}

TEST(GradientMethodConformance, CountsTheGradientsItHasTakenIn) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained(method, layer, *backend, 0);
    EXPECT_TRUE(absl::IsFailedPrecondition(trained.driver.Repeat().status()));
    for (uint64_t step = 0; step < 5; ++step) {
      EXPECT_TRUE(trained.driver.state().ready());
      EXPECT_EQ(trained.driver.state().version(), step);
      ASSERT_TRUE(trained.Next().ok());
    }
    EXPECT_FALSE(method.needs_global_scale());
    EXPECT_TRUE(absl::IsInvalidArgument(
        trained.driver.Update({reference::Vector(layer.d_in)}, {reference::Vector(layer.d_out)})));
  });
}

// Once a gradient outweighs the momentum, <D, U> > 0: nothing turns a descent direction around.
TEST(GradientMethodConformance, GivesFiniteDescentDirections) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    for (const double scale : {1e-8, 1.0, 1e8}) {
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      Trained trained(method, layer, *backend, 60, scale);
      reference::Vector d = trained.gradients.Next().data;
      for (double& element : d) element *= 16384;
      const absl::StatusOr<reference::Vector> u = trained.driver.Precondition(d);
      ASSERT_TRUE(u.ok()) << u.status();
      double inner = 0;
      for (size_t i = 0; i < d.size(); ++i) {
        ASSERT_TRUE(std::isfinite((*u)[i]));
        inner += d[i] * (*u)[i];
      }
      EXPECT_GT(inner, 0) << scale;
    }
  });
}

TEST(GradientMethodConformance, SurvivesALayerWithoutGradients) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained(method, layer, *backend, 0);
    const reference::Vector zero(layer.d_out * layer.d_in, 0.0);
    for (int step = 0; step < 40; ++step) ASSERT_EQ(trained.driver.Precondition(zero).value(), zero);
    for (int step = 0; step < 5; ++step) EXPECT_TRUE(std::isfinite(Norm(trained.Next().value())));
  });
}

TEST(GradientMethodConformance, RefusesBadInputAndChangesNothing) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    for (const int steps : {0, 7}) {
      Trained trained(method, layer, *backend, steps);
      const std::string before = trained.driver.state().Save().value();
      for (const double bad : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
        reference::Vector d = trained.gradients.Next().data;
        d.back() = bad;
        EXPECT_TRUE(absl::IsInvalidArgument(trained.driver.Precondition(d).status()));
        EXPECT_EQ(trained.driver.state().Save().value(), before);
      }
      DeviceMatrix d = backend->Allocate(layer.d_out + 1, layer.d_in).value();
      DeviceMatrix u = backend->Allocate(layer.d_out + 1, layer.d_in).value();
      EXPECT_TRUE(absl::IsInvalidArgument(trained.driver.state().Precondition(d.view(), u.view())));
      EXPECT_EQ(trained.driver.state().Save().value(), before);
    }
  });
}

double Cosine(const reference::Vector& x, const reference::Vector& y) {
  double inner = 0;
  for (size_t i = 0; i < x.size(); ++i) inner += x[i] * y[i];
  return inner / (Norm(x) * Norm(y));
}

// A gradient whose squares are beyond f32 would make the state's averages infinite permanently.
TEST(GradientMethodConformance, RefusesAGradientOfHugeNormAndChangesNothing) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    EXPECT_EQ(method.traits().max_gradient_norm(), kMaxLearntGradientNorm);
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    for (const int steps : {0, 1, 7}) {
      Trained trained(method, layer, *backend, steps);
      const std::string before = trained.driver.state().Save().value();
      for (const double huge : {1e19, 1e21, 3e38}) {
        reference::Vector d = trained.gradients.Next().data;
        d.back() = huge;
        const absl::Status status = trained.driver.Precondition(d).status();
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
        EXPECT_THAT(std::string(status.message()), testing::HasSubstr("expected a norm of at most 1.15292e+18, got "));
        EXPECT_TRUE(trained.driver.state().Save().value() == before) << huge;
      }
    }
  });
}

// Gradients at the ends of what is taken: each later gradient has an answer, and after a while that of a state which
// has not had them. It differs a little: refreshes are due at other steps, and kron's probes are others.
TEST(GradientMethodConformance, GoesOnAfterExtremeGradients) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    for (const double norm : {1e-42, 1e-30, 1e18}) {
      SCOPED_TRACE(norm);
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      Trained trained(method, layer, *backend, 7), other(method, layer, *backend, 7);
      for (int step = 0; step < 20; ++step) {
        reference::Vector d = trained.gradients.Next().data;
        const double to = norm / Norm(d);
        for (double& element : d) element = static_cast<float>(element * to);
        ASSERT_TRUE(trained.driver.Precondition(d).ok());
        other.gradients.Next();
      }
      reference::Vector u, v;
      for (int step = 0; step < (norm > 1 ? 2000 : 150); ++step) {
        const reference::Vector d = trained.gradients.Next().data;
        const absl::StatusOr<reference::Vector> answer = trained.driver.Precondition(d);
        ASSERT_TRUE(answer.ok()) << step << ": " << answer.status();
        u = *answer;
        v = other.driver.Precondition(d).value();
      }
      EXPECT_GT(Cosine(u, v), 0.5);
    }
  });
}

TEST(GradientMethodConformance, TheSameGradientsGiveTheSameBytes) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> first = MakeTestBackend(), second = MakeTestBackend();
    Trained one(method, layer, *first, 0), other(method, layer, *second, 0);
    for (int step = 0; step < 25; ++step) ASSERT_EQ(one.Next().value(), other.Next().value()) << step;
    EXPECT_EQ(one.driver.state().Save().value(), other.driver.state().Save().value());
  });
}

// Repeats an answer that only some ranks have received, also from a state that was restored after it.
TEST(GradientMethodConformance, RepeatsAnAnswerAndTakesNothingIn) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained(method, layer, *backend, 0);
    LayerDriver restored(method, layer, *backend);
    for (int step = 0; step < 24; ++step) {
      const reference::Vector u = trained.Next().value();
      const std::string after = trained.driver.state().Save().value();
      ASSERT_TRUE(restored.state().Load(after).ok());
      for (LayerDriver* driver : {&trained.driver, &restored}) {
        EXPECT_EQ(driver->Repeat().value(), u) << step;
        EXPECT_EQ(driver->state().Save().value(), after);
        EXPECT_EQ(driver->state().version(), static_cast<uint64_t>(step) + 1);
      }
    }
  });
}

TEST(GradientMethodConformance, ASavedStateGoesOnBitwise) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    for (const int before : {0, 1, 2, 13, 30}) {
      const std::unique_ptr<Backend> first = MakeTestBackend(), second = MakeTestBackend();
      Trained one(method, layer, *first, before);
      LayerDriver other(method, layer, *second);
      const std::string saved = one.driver.state().Save().value();
      const absl::Status loaded = other.state().Load(saved);
      ASSERT_TRUE(loaded.ok()) << loaded;
      EXPECT_EQ(other.state().version(), one.driver.state().version());
      EXPECT_EQ(other.state().bytes(), one.driver.state().bytes());
      EXPECT_EQ(other.state().Save().value(), saved);
      for (int step = 0; step < 25; ++step) {
        const reference::Vector d = one.gradients.Next().data;
        EXPECT_EQ(other.Precondition(d).value(), one.driver.Precondition(d).value()) << before << " + " << step;
      }
      EXPECT_EQ(other.state().Save().value(), one.driver.state().Save().value());
    }
  });
}

TEST(GradientMethodConformance, DamagedOrForeignBytesAreRefusedAndChangeNothing) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    Trained trained(method, layer, *backend, 9), further(method, layer, *backend, 12);
    LayerState& state = trained.driver.state();
    const std::string before = state.Save().value();
    LayerSpec taller = layer;
    taller.d_out *= 2;
    if (!taller.shape.empty()) taller.shape[0] *= 2;
    EXPECT_TRUE(
        absl::IsFailedPrecondition(state.Load(Trained(method, taller, *backend, 2).driver.state().Save().value())));
    const std::unique_ptr<Method> identity = MakeMethod({"identity", {}}).value();
    EXPECT_TRUE(absl::IsFailedPrecondition(state.Load(identity->MakeState(layer, *backend).value()->Save().value())));
    EXPECT_EQ(state.Save().value(), before);
    ExpectRefusesDamage(state, further.driver.state().Save().value());
  });
}

// Only kron and soap have a factor for each dimension.
TEST(GradientMethodConformance, RefusesTheStateOfAnotherShape) {
  for (const char* name : {"kron", "soap"}) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const std::unique_ptr<Method> method = MakeMethod({name, {{"merge_small_dims", false}}}).value();
    Trained tensor(*method, {"layer", 6, 20, false, {6, 4, 5}}, *backend, 1);
    LayerDriver other(*method, {"layer", 6, 20, false, {6, 5, 4}}, *backend);
    LayerDriver matrix(*method, {"layer", 6, 20}, *backend);
    const std::string bytes = tensor.driver.state().Save().value();
    for (LayerDriver* wrong : {&other, &matrix}) {
      const absl::Status status = wrong->state().Load(bytes);
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("sides 6")) << name;
    }
  }
}

TEST(GradientMethodConformance, AFaultAtAnyOperationLeavesTheState) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    for (const int steps : {0, 1, 10}) {
      Trained trained(method, layer, backend, steps);
      const std::string before = trained.driver.state().Save().value();
      const DeviceMatrix d = ToDevice(*cpu, {static_cast<size_t>(layer.d_out), reference::Vector(layer.d_in, 0.5)});
      DeviceMatrix u = cpu->Allocate(layer.d_out, layer.d_in).value();
      for (int64_t fault = 0;; ++fault) {
        backend.FailAt(fault);
        const absl::Status status = trained.driver.state().Precondition(d.view(), u.view());
        const bool failed = backend.failed();
        backend.NeverFail();
        if (!failed) {
          EXPECT_TRUE(status.ok()) << status;
          break;
        }
        EXPECT_TRUE(absl::IsInternal(status)) << status;
        ASSERT_EQ(trained.driver.state().Save().value(), before) << "operation " << fault;
      }
    }
  });
}

TEST(GradientMethodConformance, AdmissionsNumbersHold) {
  ForAll([](const Method& method, const LayerSpec& layer) {
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    const std::unique_ptr<LayerState> state = method.MakeState(layer, backend).value();
    EXPECT_GT(method.StepFlops(layer, 16), 0);
    const int64_t bytes = method.StateBytes(layer);
    GradientStream gradients(layer.d_out, layer.d_in, 4);
    DeviceMatrix u = cpu->Allocate(layer.d_out, layer.d_in).value();
    for (int step = 0; step < 24; ++step) {
      DeviceMatrix d = cpu->Allocate(layer.d_out, layer.d_in).value();
      const std::vector<float> values = ToFloats(gradients.Next().data);
      ASSERT_TRUE(cpu->Upload(ConstMatrixView(values.data(), layer.d_out, layer.d_in), d.view()).ok());
      backend.ResetPeak();
      ASSERT_TRUE(state->Precondition(d.view(), u.view()).ok());
      ASSERT_TRUE(state->Repeat(u.view()).ok());
      EXPECT_LE(backend.peak_bytes(), bytes + method.ScratchBytes(layer, 16));
      EXPECT_LE(state->bytes(), bytes);
      EXPECT_EQ(backend.allocated_bytes(), state->bytes());
    }
    EXPECT_EQ(state->bytes(), bytes) << "at its fullest";
  });
}

}  // namespace
}  // namespace precondor
