// SPDX-License-Identifier: Apache-2.0
// Properties that several methods share and that need this folder's views of them: tables of methods with their
// options. tests/conformance has those that hold for every method.
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

using testing::AllOf;
using testing::HasSubstr;
using Options = std::map<std::string, OptionValue>;

OptionValue Word(const char* value) { return std::string(value); }

// A refusal names the option, what was expected and what came.
TEST(EveryMethodTest, RefusesOptionsByName) {
  struct Refused {
    const char* option;
    OptionValue value;
    const char* expected = "";
    const char* got = "";
  };
  const std::map<std::string, std::vector<Refused>> methods = {
      {"eva",
       {{"mu", 0.0},
        {"mu", -1.0},
        {"weight", 0.0},
        {"weight", 1.5},
        {"row_scale", 0.0},
        {"scaling", Word("SOME")},
        {"mo", 1.0}}},
      {"kfac",
       {{"damping", true},
        {"damping", 0.0},
        {"damping", Word("0")},
        {"damping", Word("linear(1, 0, 5)")},
        {"damping", Word("cosine(1)")},
        {"factor_decay", Word("1.5")},
        {"factor_update_steps", Word("0")},
        {"inv_update_steps", Word("piecewise(5, 10: 0.5)")},
        {"accumulation_steps", 0.0},
        {"refresh_lag", -1.0},
        {"refresh_lag", 0.5},
        {"row_scale", 0.0},
        {"prediv", Word("yes")},
        {"form", Word("SVD")},
        {"scaling_clip", Word("-1")},
        {"dampening", Word("0.1")}}},
      {"kron",
       {{"momentum", 1.0},
        {"precondition_lr", 0.0},
        {"init_scale", -1.0},
        {"max_update_probability", 0.0},
        {"min_update_probability", 2.0},
        {"update_decay", -1.0},
        {"balance_probability", 1.5},
        {"max_size_triangular", 1.5},
        {"memory_save_mode", true},
        {"block_size", -1.0},
        {"rms_clip", 0.0},
        {"seed", 0.5},
        {"min_ndim_triangular", 10.0},
        {"max_skew", -1.0},
        {"merge_small_dims", 1.0},
        {"target_merged_dim_size", 0.0},
        {"gamma", 0.5}}},
      {"mkor",
       {{"rule", Word("EXACT"), "EXACT_DAMPED, REFERENCE, BLEND, PUBLISHED", "\"EXACT\""},
        {"rule", 1.0, "EXACT_DAMPED", "1"},
        {"representation", true, "AUTO, DENSE, LOW_RANK", "true"},
        {"scaling", Word("norm_rescale"), "NORM_RESCALE", "\"norm_rescale\""},
        {"storage", Word("BF16"), "F32", "BF16"},
        {"products", Word("F16"), "F32, BF16, TF32", "F16"},
        {"products", Word("BF16X3"), "F32, BF16, TF32", "BF16X3"},
        {"storage", Word("F16"), "F32 with the rules EXACT_DAMPED and PUBLISHED", "F16"},
        {"rank", 0.0, "[1, 1024]", "0"},
        {"rank", 1025.0, "[1, 1024]", "1025"},
        {"rank", 2.5, "a whole number", "2.5"},
        {"rank", Word("64"), "a number", "\"64\""},
        {"gamma", 1.0, "(0, 1)", "1"},
        {"gamma", 0.0, "(0, 1)", "0"},
        {"gamma", std::nan(""), "(0, 1)", "nan"},
        {"damping", 0.0, "[0.001, 1e+06]", "0"},
        {"damping", -1.0, "[0.001, 1e+06]", "-1"},
        {"scaling_clip", 0.0, "(0, ", "0"},
        {"clip", -1.0, "(0, ", "-1"},
        {"zeta", 1.5, "(0, 1)", "1.5"},
        {"norm_threshold", 0.0, "(0, ", "0"},
        {"max_factor_dim", 0.0, "[1, 1.04858e+06]", "0"},
        {"stat_decay", 0.9, "rank"}}},
      {"muon",
       {{"momentum", 1.0},
        {"momentum", -0.1},
        {"nesterov", 1.0},
        {"ns_steps", 0.0},
        {"ns_steps", 21.0},
        {"ns_steps", 2.5},
        {"epsilon", -1e-9},
        {"epsilon", 1.5},
        {"input_factor", 1.0},
        {"damping", 1e-4},
        {"covariance_decay", 1.0},
        {"refresh_interval", 0.0},
        {"max_factor_dim", -1.0},
        {"lr", 0.5},
        {"scale", Word("ADAM")},
        {"precision", Word("BF16X3")}}},
      {"soap",
       {{"rule", Word("ADAM")},
        {"momentum", 1.0},
        {"second_moment_decay", -0.1},
        {"covariance_decay", 1.0},
        {"epsilon", 0.0},
        {"refresh_interval", 0.0},
        {"max_factor_dim", 0.5},
        {"lr", 0.5},
        {"precondition_1d", 1.0},
        {"merge_small_dims", 1.0},
        {"precision", Word("BF16")},
        {"target_merged_dim_size", 0.0}}},
      {"identity", {{"rank", 4.0}}}};
  for (const auto& [method, cases] : methods) {
    for (const Refused& c : cases) {
      const absl::Status status = MakeMethod({method, {{c.option, c.value}}}).status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << method << " " << c.option;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("method " + method + ": option " + c.option),
                                                       HasSubstr(c.expected), HasSubstr(c.got)));
    }
  }
}

TEST(EveryMethodTest, ARefusedGradientNamesItsLayer) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const char* name : {"kron", "muon", "soap"}) {
    LayerDriver driver(*MakeMethod({name, {}}).value(), {"fc1", 4, 7}, *backend);
    reference::Vector bad(28, 1.0);
    bad[5] = std::nan("");
    EXPECT_THAT(std::string(driver.Precondition(bad).status().message()), HasSubstr("layer fc1: gradient"));
    DeviceMatrix d = backend->Allocate(7, 4).value(), u = backend->Allocate(7, 4).value();
    EXPECT_THAT(std::string(driver.state().Precondition(d.view(), u.view()).message()),
                HasSubstr("layer fc1: gradient: expected [4, 7], got [7, 4]"));
  }
}

// Both sides change or neither: the output side can fail after the input side is prepared.
TEST(EveryMethodTest, AFailureOfAnyOperationOfAnUpdateLeavesTheState) {
  const MethodConfig configs[] = {
      {"eva", {}},
      {"kfac", {}},
      {"kfac", {{"form", Word("INVERSE")}}},
      {"kfac", {{"prediv", true}, {"pi_split", true}}},
      {"kfac", {{"refresh_lag", 1.0}}},
      {"mkor", {{"representation", Word("DENSE")}}},
      {"mkor", {{"representation", Word("LOW_RANK")}, {"rank", 3.0}}},
      {"mkor", {{"rule", Word("REFERENCE")}, {"representation", Word("LOW_RANK")}, {"rank", 3.0}}},
      {"mkor", {{"rule", Word("BLEND")}, {"representation", Word("LOW_RANK")}, {"rank", 3.0}}},
      {"mkor", {{"rule", Word("PUBLISHED")}, {"representation", Word("LOW_RANK")}, {"rank", 3.0}}}};
  for (const MethodConfig& config : configs) {
    SCOPED_TRACE(Describe(config));
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    const std::unique_ptr<Method> method = MakeMethod(config).value();
    const LayerSpec layer{"layer", 6, 9, false};
    LayerDriver driver(*method, layer, backend);
    VectorStream a(Stream::kCorrelated, 9, 1), g(Stream::kCorrelated, 6, 2);
    for (int step = 0; step < 5; ++step) ASSERT_TRUE(driver.Update(a.Next(2), g.Next(2)).ok());
    const bool defers = config.options.contains("refresh_lag");
    const std::string before = driver.state().Save().value();
    const reference::Vector d = a.Gaussian(54), answer = driver.Precondition(d).value();
    const DeviceMatrix va = ToDevice(*cpu, a.Next(2)), vg = ToDevice(*cpu, g.Next(2));
    for (int64_t fault = 0;; ++fault) {
      // Deferred work may have run before the fault; it must run again.
      if (defers) {
        ASSERT_TRUE(driver.state().Load(before).ok());
      }
      backend.FailAt(fault);
      const absl::Status status = driver.state().Update({.a = va.view(), .g = vg.view()});
      const bool failed = backend.failed();
      backend.NeverFail();
      ASSERT_EQ(status.ok(), !failed);
      EXPECT_EQ(backend.allocated_bytes(), method->StateBytes(layer));
      if (!failed) break;
      ASSERT_EQ(driver.state().Save().value(), before) << "fault " << fault;
      ASSERT_EQ(driver.Precondition(d).value(), answer) << "fault " << fault;
      ASSERT_EQ(driver.state().version(), 5u);
    }
    EXPECT_NE(driver.state().Save().value(), before);
  }
}

// Statistics of any size a side and gradients from 1e-30 to 1e30: the length comes back, and no NaN.
TEST(EveryMethodTest, KeepsTheGradientsLengthInAnyUnits) {
  std::vector<MethodConfig> configs = {{"mkor", {{"representation", Word("DENSE")}}},
                                       {"mkor", {{"representation", Word("LOW_RANK")}}}};
  for (const char* form : {"EIGEN", "INVERSE"}) {
    for (const bool split : {false, true}) {
      configs.push_back({"kfac", {{"form", Word(form)}, {"pi_split", split}, {"scaling", Word("NORM_RESCALE")}}});
    }
  }
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const MethodConfig& config : configs) {
    for (const double size : {1e-15, 1.0, 1e15, 1e18}) {
      if (size == 1e18 && config.name == "kfac") continue;  // a second moment of 1e36 has no square in f32
      SCOPED_TRACE(testing::Message() << Describe(config) << ", " << size);
      LayerDriver driver(*MakeMethod(config).value(), {"layer", 6, 9, false}, *backend);
      VectorStream a(Stream::kCorrelated, 9, 1, size), g(Stream::kCorrelated, 6, 2, 1 / size);
      for (int step = 0; step < 20; ++step) ASSERT_TRUE(driver.Update(a.Next(2), g.Next(2)).ok());
      for (const double scale : {0.0, 1e-30, 1.0, 1e30}) {
        reference::Vector d = a.Gaussian(54);
        for (double& element : d) element *= scale;
        const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
        ASSERT_TRUE(u.ok()) << u.status();
        EXPECT_NEAR(Norm(*u), Norm(d), 1e-5 * Norm(d));
      }
    }
  }
}

// Gradients and answers may have any stride, whatever the tensor. An even number of muon's iterations ends in another
// buffer; muon reads the strided gradient by other products, which round otherwise.
TEST(EveryMethodTest, TakesAndGivesMatricesOfAnyStride) {
  const LayerSpec matrix{"layer", 6, 20}, tensor{"layer", 6, 20, false, {3, 2, 4, 5}};
  const struct {
    MethodConfig config;
    LayerSpec layer;
    double bound = 0;
  } cases[] = {{{"muon", {{"ns_steps", 4.0}}}, matrix, 3e-5},
               {{"muon", {{"input_factor", true}}}, matrix, 3e-4},
               {{"muon", {{"ns_steps", 5.0}}}, matrix, 3e-5},
               {{"soap", {{"rule", Word("SOAP")}, {"merge_small_dims", false}}}, tensor},
               {{"soap", {{"rule", Word("SHAMPOO")}, {"merge_small_dims", false}}}, tensor}};
  for (const auto& [config, layer, bound] : cases) {
    SCOPED_TRACE(Describe(config));
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const std::unique_ptr<Method> method = MakeMethod(config).value();
    LayerDriver driver(*method, layer, *backend), strided(*method, layer, *backend);
    DeviceMatrix wide_d = backend->Allocate(6, 32).value(), wide_u = backend->Allocate(6, 27).value();
    const MatrixView d = wide_d.view().Corner(6, 20), u = wide_u.view().Corner(6, 20);
    GradientStream gradients(6, 20, 1);
    for (int step = 0; step < 12; ++step) {
      const reference::Dense gradient = gradients.Next();
      const std::vector<float> values = ToFloats(gradient.data);
      ASSERT_TRUE(backend->Upload(ConstMatrixView(values.data(), 6, 20), d).ok());
      ASSERT_TRUE(strided.state().Precondition(d, u).ok());
      reference::Vector got;
      for (const reference::Vector& row : ToHost(*backend, u)) got.insert(got.end(), row.begin(), row.end());
      const reference::Vector want = driver.Precondition(gradient.data).value();
      if (bound == 0) {
        EXPECT_EQ(got, want);
      } else {
        EXPECT_LE(RelativeDifference(got, want), bound);
      }
    }
  }
}

// A tensor whose dimensions merge to the matrix, or of a method that has no use for them.
TEST(EveryMethodTest, AShapeThatMergesToTheMatrixChangesNothing) {
  const OptionValue target = 10.0, interval = 3.0;
  const struct {
    MethodConfig config;
    LayerSpec matrix;
    std::vector<std::vector<int64_t>> shapes;
  } cases[] = {
      {{"muon", {}}, {"layer", 7, 24}, {{7, 4, 3, 2}}},
      {{"soap", {{"rule", Word("SOAP")}, {"target_merged_dim_size", target}, {"refresh_interval", interval}}},
       {"layer", 8, 12},
       {{8, 3, 2, 2}, {8, 12}}},
      {{"soap", {{"rule", Word("SHAMPOO")}, {"target_merged_dim_size", target}, {"refresh_interval", interval}}},
       {"layer", 8, 12},
       {{8, 3, 2, 2}, {8, 12}}}};
  for (const auto& [config, matrix, shapes] : cases) {
    for (const std::vector<int64_t>& shape : shapes) {
      SCOPED_TRACE(testing::Message() << Describe(config) << " " << testing::PrintToString(shape));
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      const std::unique_ptr<Method> method = MakeMethod(config).value();
      LayerSpec layer = matrix;
      layer.shape = shape;
      LayerDriver plain(*method, matrix, *backend), tensor(*method, layer, *backend);
      GradientStream gradients(matrix.d_out, matrix.d_in, 1);
      for (int step = 0; step < 10; ++step) {
        const reference::Dense d = gradients.Next();
        EXPECT_EQ(tensor.Precondition(d.data).value(), plain.Precondition(d.data).value());
      }
      EXPECT_EQ(tensor.state().Save().value(), plain.state().Save().value());
    }
  }
}

// The CPU has one way of computing, so that its answers keep their bits; but a state says what was asked for.
TEST(EveryMethodTest, PrecisionChangesNothingOnTheCpu) {
  const struct {
    MethodConfig config;
    const char* precision;
  } cases[] = {{{"muon", {}}, "BF16"},
               {{"soap", {{"rule", Word("SOAP")}}}, "TF32"},
               {{"soap", {{"rule", Word("SHAMPOO")}}}, "TF32"}};
  for (const auto& [config, precision] : cases) {
    SCOPED_TRACE(Describe(config));
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    MethodConfig rounded = config;
    rounded.options["precision"] = std::string(precision);
    LayerDriver one(*MakeMethod(config).value(), {"layer", 7, 20}, *backend);
    LayerDriver other(*MakeMethod(rounded).value(), {"layer", 7, 20}, *backend);
    GradientStream gradients(7, 20, 2);
    for (int step = 0; step < 12; ++step) {
      const reference::Dense d = gradients.Next();
      EXPECT_EQ(other.Precondition(d.data).value(), one.Precondition(d.data).value());
    }
    EXPECT_TRUE(absl::IsFailedPrecondition(one.state().Load(other.state().Save().value())));
  }
}

}  // namespace
}  // namespace precondor
