// SPDX-License-Identifier: Apache-2.0
// What mkor's option `products` and muon's `precision` cost their answers, on the host's imitation of a device: against
// F32's, and against naive f64. The numbers that docs/methods gives are these.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/fixed_batches.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "tests/reference/muon.h"
#include "tests/support/cuda_host/libraries.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"
#include "tests/support/task_group.h"

namespace precondor {
namespace {

// The gradients that answers are compared for.
enum class Direction { kAny, kOfStatistics };

// After 10 updates by two vectors a side; where they stay close to the first ones, columns are nearly parallel.
reference::Vector Answer(Stream kind, double damping, bool parallel, Direction direction, const std::string& products,
                         const std::string& representation) {
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  MethodConfig config{"mkor", {{"rank", 64.0}, {"damping", damping}}};
  config.options["representation"] = representation;
  config.options["products"] = products;
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  // In low rank, products with the gradient are large enough for cuBLAS.
  const bool dense = representation == "DENSE";
  const LayerSpec layer{"any", dense ? 40 : 320, dense ? 70 : 416, false};
  LayerDriver driver(*method, layer, *backend);
  VectorStream a(kind, layer.d_in, 1), g(kind, layer.d_out, 2);
  const auto next = [&](VectorStream& stream, const reference::Vectors& last) {
    reference::Vectors vectors = stream.Next(2);
    for (size_t i = 0; parallel && i < last.size(); ++i) {
      for (size_t j = 0; j < last[i].size(); ++j) vectors[i][j] = last[i][j] + 1e-3 * vectors[i][j];
    }
    return vectors;
  };
  reference::Vectors of_a, of_g;
  for (int step = 0; step < 10; ++step) {
    of_a = next(a, of_a);
    of_g = next(g, of_g);
    EXPECT_TRUE(driver.Update(of_a, of_g).ok());
  }
  reference::Vector d = VectorStream(kind, layer.d_in, 9).Gaussian(layer.d_out * layer.d_in);
  for (int64_t i = 0; direction == Direction::kOfStatistics && i < layer.d_out; ++i) {
    for (int64_t j = 0; j < layer.d_in; ++j) d[i * layer.d_in + j] = of_g[0][i] * of_a[0][j] + of_g[1][i] * of_a[1][j];
  }
  return driver.Precondition(d).value();
}

double Worst(const std::string& products, const std::string& representation = "LOW_RANK", double damping = 1,
             Direction direction = Direction::kAny) {
  double worst = 0;
  for (const Stream kind : {Stream::kCorrelated, Stream::kSubspace}) {
    for (const bool parallel : {false, true}) {
      const auto answer = [&](const std::string& by) {
        return Answer(kind, damping, parallel, direction, by, representation);
      };
      worst = std::max(worst, RelativeDifference(answer(products), answer("F32")));
    }
  }
  return worst;
}

TEST(CudaPrecisionTest, LowRankAnswersAreAsFarOffAsTheDocsSay) {
  const double bf16 = Worst("BF16"), tf32 = Worst("TF32");
  EXPECT_LE(bf16, 2e-2);
  EXPECT_GE(bf16, 1e-3) << "it is another product";
  EXPECT_LE(tf32, 5e-4);
  EXPECT_GE(tf32, 1e-4) << "it is another product";
  EXPECT_LE(Worst("TF32", "LOW_RANK", .01), 5e-4);
  // What the factors damp most is less than TF32's error of the whole gradient. So F32 is the default.
  EXPECT_GE(Worst("TF32", "LOW_RANK", 1, Direction::kOfStatistics), .5);
}

TEST(CudaPrecisionTest, DenseAnswersAreAsFarOffAsTheDocsSay) {
  const double bf16 = Worst("BF16", "DENSE"), tf32 = Worst("TF32", "DENSE");
  EXPECT_LE(bf16, 5e-3);
  EXPECT_GE(bf16, 1e-3) << "it is another product";
  EXPECT_LE(tf32, 5e-4);
  EXPECT_GE(tf32, 1e-4) << "it is another product";
  EXPECT_GE(Worst("TF32", "DENSE", 1, Direction::kOfStatistics), .05);
}

// The smallest and the largest of 10 errors of muon's answers for each of several shapes.
std::pair<double, double> ErrorsOfMuon(const std::string& precision,
                                       const std::vector<std::pair<int64_t, int64_t>>& shapes) {
  std::vector<double> errors;
  for (const auto& [m, n] : shapes) {
    const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
    const std::unique_ptr<Method> method = MakeMethod({"muon", {{"precision", precision}}}).value();
    LayerDriver driver(*method, {"any", m, n}, *backend);
    GradientStream gradients(m, n, 5);
    reference::Muon oracle({}, m, n);
    for (int step = 0; step < 10; ++step) {
      const reference::Dense d = gradients.Next();
      errors.push_back(RelativeDifference(driver.Precondition(d.data).value(), oracle.Step(d).data));
    }
  }
  const auto [least, most] = std::minmax_element(errors.begin(), errors.end());
  std::printf("muon, %s: %.2g to %.2g\n", precision.c_str(), *least, *most);
  return {*least, *most};
}

TEST(CudaPrecisionTest, AnswersOfMuonAreAsFarOffAsTheDocsSay) {
  // Square, wide and tall ones, with rows that begin anywhere.
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{64, 64}, {40, 160}, {160, 40},
                                                           {33, 70}, {71, 35},  {129, 131}};
  EXPECT_LE(ErrorsOfMuon("F32", shapes).second, 3e-6);
  const auto tf32 = ErrorsOfMuon("TF32", shapes), bf16 = ErrorsOfMuon("BF16", shapes);
  EXPECT_LE(tf32.second, 5e-3);
  EXPECT_GE(tf32.first, 1e-3) << "it is another product";
  EXPECT_LE(bf16.second, 3e-2);
  EXPECT_GE(bf16.first, 8e-3) << "it is another product";
  EXPECT_EQ(ErrorsOfMuon("AUTO", shapes), bf16) << "the default";
  // Few numbers, whose errors do not average.
  const std::vector<std::pair<int64_t, int64_t>> tiny = {{5, 3}, {3, 8}, {1, 12}, {12, 1}, {1, 1}};
  EXPECT_LE(ErrorsOfMuon("F32", tiny).second, 3e-6);
  EXPECT_LE(ErrorsOfMuon("TF32", tiny).second, 1e-2);
  EXPECT_LE(ErrorsOfMuon("BF16", tiny).second, 4e-2);
}

// Layers of one shape have the same bits alone, in company and again, although the library may compute other bits in a
// batch of another size. A gradient that is not finite has the error that it has alone, and changes no other answer.
TEST(CudaPrecisionTest, AnswersOfMuonDoNotDependOnTheirCompany) {
  cuda_host::libraries.company_changes_bits = true;
  const std::unique_ptr<Backend> backend = MakeGroupingBackend(MakeCudaBackend({}).value(), {});
  const std::unique_ptr<Method> method = MakeMethod({"muon", {}}).value();
  constexpr int kLayers = 3;
  std::vector<reference::Vector> answers[2];
  for (const bool together : {false, true}) {
    TaskGroup tasks(*backend);
    std::vector<std::unique_ptr<LayerDriver>> drivers;
    for (int i = 0; i < kLayers; ++i)
      drivers.push_back(std::make_unique<LayerDriver>(*method, LayerSpec{"any", 9, 14}, *backend));
    answers[together].resize(kLayers);
    for (int step = 0; step < 3; ++step) {
      const auto run = [&](int i) {
        reference::Vector d = VectorStream(Stream::kCorrelated, 14, 3 * step + i).Gaussian(9 * 14);
        if (step == 1 && i == 1) d[5] = together ? NAN : INFINITY;
        const absl::StatusOr<reference::Vector> u = drivers[i]->Precondition(d);
        EXPECT_EQ(u.ok(), step != 1 || i != 1) << u.status();
        if (u.ok()) {
          answers[together][i] = *u;
        } else {
          EXPECT_EQ(u.status().ToString(),
                    absl::InvalidArgumentError("layer any: gradient: expected finite elements, got NaN or infinity")
                        .ToString());
        }
      };
      if (together) {
        tasks.Run(kLayers, run);
      } else {
        for (int i = 0; i < kLayers; ++i) run(i);
      }
    }
    for (int i = 0; i < kLayers; ++i) EXPECT_EQ(drivers[i]->Repeat().value(), answers[together][i]);
  }
  EXPECT_EQ(answers[0], answers[1]);
  cuda_host::libraries.company_changes_bits = false;
}

// Answers of mkor have the same bits alone, in company and again, although layers of one shape have taken in different
// numbers of vectors, and although the library may compute other bits in a batch of another size.
TEST(CudaPrecisionTest, AnswersOfMkorDoNotDependOnTheirCompany) {
  cuda_host::libraries.company_changes_bits = true;
  constexpr int kLayers = 3;
  for (const auto& [representation, products] : {std::pair<std::string, std::string>("LOW_RANK", "F32"),
                                                 {"LOW_RANK", "TF32"},
                                                 {"LOW_RANK", "BF16"},
                                                 {"DENSE", "TF32"},
                                                 {"DENSE", "BF16"}}) {
    const std::unique_ptr<Backend> backend = MakeGroupingBackend(MakeCudaBackend({}).value(), {});
    const std::unique_ptr<Method> method =
        MakeMethod({"mkor", {{"representation", representation}, {"rank", 64.0}, {"products", products}}}).value();
    std::vector<reference::Vector> answers[2];
    for (const bool together : {false, true}) {
      TaskGroup tasks(*backend);
      std::vector<std::unique_ptr<LayerDriver>> drivers;
      for (int i = 0; i < kLayers; ++i) {
        drivers.push_back(std::make_unique<LayerDriver>(*method, LayerSpec{"any", 9, 14}, *backend));
        VectorStream a(Stream::kCorrelated, 14, i), g(Stream::kCorrelated, 9, kLayers + i);
        EXPECT_TRUE(drivers[i]->Update(a.Next(1 + 2 * i), g.Next(1 + 2 * i)).ok());
      }
      answers[together].resize(kLayers);
      const auto run = [&](int i) {
        const reference::Vector d = VectorStream(Stream::kCorrelated, 14, 7 + i).Gaussian(9 * 14);
        answers[together][i] = drivers[i]->Precondition(d).value();
        EXPECT_EQ(drivers[i]->Precondition(d).value(), answers[together][i]) << "again";
      };
      if (together) {
        tasks.Run(kLayers, run);
      } else {
        for (int i = 0; i < kLayers; ++i) run(i);
      }
    }
    EXPECT_EQ(answers[0], answers[1]) << representation << " " << products;
  }
  cuda_host::libraries.company_changes_bits = false;
}

TEST(CudaPrecisionTest, AFixedBatchOccupiesADevice) {
  const auto size = [](int64_t rows, int64_t cols, int64_t inner) {
    return cuda::FixedBatches::Size({rows, cols, inner, inner, cols, cols});
  };
  EXPECT_EQ(size(1, 1, 1), 256);
  EXPECT_EQ(size(1024, 128, 128), 256);
  EXPECT_EQ(size(1024, 128, 1024), 32);
  EXPECT_EQ(size(1024, 1024, 256), 16);
  EXPECT_EQ(size(4096, 4096, 4096), 1);
}

// Layers of several shapes and numbers of iterations, all at once and in parts, down to one layer a part.
TEST(CudaPrecisionTest, PartsOfNewtonSchulzHaveTheSameBits) {
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  struct Job {
    cuda::DeviceArray<float> d, u;
    std::array<double, 3> squares = {};
  };
  std::vector<float> expected;
  for (const int64_t most_scratch_bytes : {int64_t{1} << 30, int64_t{20000}, int64_t{1}}) {
    std::deque<Job> jobs;
    std::deque<operation::NewtonSchulz> steps;
    std::vector<const operation::NewtonSchulz*> operations;
    for (int i = 0; i < 9; ++i) {
      const int64_t m = 20 + i % 3, n = 30 - 7 * (i % 3);
      Job& job = jobs.emplace_back();
      const std::vector<float> values = ToFloats(VectorStream(Stream::kCorrelated, n, i).Gaussian(m * n));
      job.d = device->Send(absl::MakeConstSpan(values)).value();
      job.u = device->Array<float>(m * n).value();
      operation::NewtonSchulz& step = steps.emplace_back();
      step.d = ConstMatrixView(job.d.data(), m, n);
      step.u = MatrixView(job.u.data(), m, n);
      step.steps = 2 + i % 4;
      step.precision = i % 2 == 0 ? ProductPrecision::kBf16 : ProductPrecision::kTf32;
      step.squares = absl::MakeSpan(job.squares);
      operations.push_back(&step);
    }
    ASSERT_TRUE(cuda::RunNewtonSchulz(*device, operations, most_scratch_bytes).ok());
    std::vector<float> answers;
    for (const Job& job : jobs) {
      std::vector<float> answer(static_cast<size_t>(job.u.size()));
      ASSERT_TRUE(device->Receive(job.u, absl::MakeSpan(answer)).ok());
      answers.insert(answers.end(), answer.begin(), answer.end());
      for (const double square : job.squares) answers.push_back(static_cast<float>(square));
    }
    if (expected.empty()) expected = answers;
    EXPECT_EQ(answers, expected) << most_scratch_bytes;
  }
}

TEST(CudaPrecisionTest, ABatchFillsADeviceOnce) {
  EXPECT_EQ(cuda::BatchSize(1, 1, 1), 256);
  EXPECT_EQ(cuda::BatchSize(256, 256, 256), 256);
  EXPECT_EQ(cuda::BatchSize(512, 512, 512), 128);
  EXPECT_EQ(cuda::BatchSize(1024, 1024, 1024), 16);
  EXPECT_EQ(cuda::BatchSize(1024, 4096, 1024), 4);
  EXPECT_EQ(cuda::BatchSize(8192, 8192, 8192), 1);
  EXPECT_EQ(cuda::BatchSize(1 << 20, 1 << 20, 1 << 20), 1);
}

}  // namespace
}  // namespace precondor
