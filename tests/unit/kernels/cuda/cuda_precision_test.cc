// SPDX-License-Identifier: Apache-2.0
// The errors that mkor's option `products` and muon's and soap's `precision` cause in answers, on the host's imitation
// of a device: against F32's, and against naive f64. The numbers that docs/use/methods gives are these.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/launch_count.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "tests/reference/muon.h"
#include "tests/reference/soap.h"
#include "tests/support/cuda_host/cuda_host.h"
#include "tests/support/cuda_host/libraries.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"
#include "tests/support/random_dense.h"
#include "tests/support/soap_bases.h"
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
  // The part that the factors damp most is less than TF32's error of the whole gradient. So F32 is the default.
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

// The largest errors of soap's second answer, whose elements in the eigenbasis are signs, and of the 29 after it, with
// two refreshes. Sides that are longer than `longest` have no factor.
struct SoapErrors {
  double of_signs = 0, later = 0;
  bool operator==(const SoapErrors&) const = default;
};
SoapErrors ErrorsOfSoap(const std::string& precision, const std::vector<std::vector<int64_t>>& shapes,
                        int64_t longest = 1000) {
  SoapErrors worst;
  for (const std::vector<int64_t>& shape : shapes) {
    const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
    const std::unique_ptr<Method> method =
        MakeMethod(
            {"soap",
             {{"precision", precision}, {"merge_small_dims", false}, {"max_factor_dim", static_cast<double>(longest)}}})
            .value();
    const int64_t m = shape[0], n = ElementsOf(shape) / m;
    LayerDriver driver(*method, {"any", m, n, false, shape}, *backend);
    reference::SoapOptions options;
    options.dims = shape;
    for (const int64_t d : shape) options.factor.push_back(d > 1 && d <= longest);
    GradientStream gradients(m, n, 5);
    const reference::Dense first = gradients.Next();
    const ProductPrecision of_first = precision == "F32" ? ProductPrecision::kF32 : ProductPrecision::kTf32;
    reference::Soap oracle(options, FirstBases(*backend, options, first.data, of_first));
    oracle.Step(first.data);
    EXPECT_EQ(driver.Precondition(first.data).value(), reference::Vector(m * n, 0.0));
    for (int step = 1; step <= 30; ++step) {
      const reference::Dense d = gradients.Next();
      double& of = step == 1 ? worst.of_signs : worst.later;
      of = std::max(of, RelativeDifference(driver.Precondition(d.data).value(), oracle.Step(d.data)));
    }
  }
  std::printf("soap, %s: %.2g where it is signs, %.2g later\n", precision.c_str(), worst.of_signs, worst.later);
  return worst;
}

TEST(CudaPrecisionTest, AnswersOfSoapAreAsFarOffAsTheDocsSay) {
  // Square, wide and tall ones and a tensor, with rows that begin anywhere.
  const std::vector<std::vector<int64_t>> shapes = {{40, 40}, {24, 90}, {90, 24}, {33, 47}, {51, 35}, {6, 20, 9}};
  const SoapErrors f32 = ErrorsOfSoap("F32", shapes), tf32 = ErrorsOfSoap("TF32", shapes);
  EXPECT_LE(std::max(f32.of_signs, f32.later), 1e-5);
  EXPECT_LE(tf32.later, 1.5e-2);
  EXPECT_GE(tf32.later, 1e-3) << "it is another product";
  EXPECT_LE(tf32.of_signs, 1e-1) << "a sign or two are others";
  EXPECT_EQ(ErrorsOfSoap("AUTO", {{33, 47}}), ErrorsOfSoap("TF32", {{33, 47}})) << "the default";
  EXPECT_LE(ErrorsOfSoap("TF32", shapes, 40).later, 1.5e-2) << "with one side, or none";
  // Few numbers, whose errors do not average.
  const std::vector<std::vector<int64_t>> tiny = {{5, 3}, {3, 8}, {4, 1}, {1, 4}, {1, 1}, {2, 3, 4}};
  const SoapErrors of_tiny = ErrorsOfSoap("F32", tiny);
  EXPECT_LE(std::max(of_tiny.of_signs, of_tiny.later), 1e-5);
  EXPECT_LE(ErrorsOfSoap("TF32", tiny).later, 1e-2);
}

// The matrices of one call: most are well-conditioned, one has no full rank, and one is not finite. The others have the
// bits that they have alone, whatever the parts. The library may compute other bits in a batch of another size.
TEST(CudaPrecisionTest, IterationsHaveTheSameBitsInAnyCompanyAndParts) {
  cuda_host::libraries.company_changes_bits = true;
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  struct Job {
    cuda::DeviceArray<float> a, q, next;
    std::vector<int64_t> order;
  };
  constexpr size_t kJobs = 9, kRankOne = 4, kNotFinite = 7;
  std::deque<Job> jobs;
  std::deque<operation::OrthogonalIteration> steps;
  for (size_t i = 0; i < kJobs; ++i) {
    const int64_t n = 20 + static_cast<int64_t>(i % 3);
    const reference::Dense x = RandomDense(i == kRankOne ? 1 : n, n, i);
    std::vector<float> a = ToFloats(reference::Product(reference::Transposed(x), x).data);
    for (int64_t j = 0; i != kRankOne && j < n; ++j) a[static_cast<size_t>(j * (n + 1))] += static_cast<float>(n + j);
    if (i == kNotFinite) a[3] = NAN;
    Job& job = jobs.emplace_back();
    job.a = device->Send(absl::MakeConstSpan(a)).value();
    const std::vector<float> q = ToFloats(reference::Identity(n).data);
    job.q = device->Send(absl::MakeConstSpan(q)).value();
    job.next = device->Array<float>(n * n).value();
    job.order.resize(static_cast<size_t>(n));
    steps.push_back({{job.a.data(), n, n}, {job.q.data(), n, n}, {job.next.data(), n, n}, absl::MakeSpan(job.order)});
  }
  const auto run = [&](absl::Span<const operation::OrthogonalIteration* const> some, int64_t most_scratch_bytes) {
    std::array<bool, kJobs> done = {};
    EXPECT_TRUE(
        cuda::RunOrthogonalIterations(*device, some, absl::MakeSpan(done).first(some.size()), most_scratch_bytes).ok());
    for (size_t i = 0; i < some.size(); ++i) {
      EXPECT_EQ(done[i], some[i] != &steps[kRankOne] && some[i] != &steps[kNotFinite]) << i;
    }
  };
  const auto outcome = [&](size_t i) {
    std::vector<float> all(static_cast<size_t>(jobs[i].next.size()));
    EXPECT_TRUE(device->Receive(jobs[i].next, absl::MakeSpan(all)).ok());
    all.insert(all.end(), jobs[i].order.begin(), jobs[i].order.end());
    return all;
  };
  std::vector<std::vector<float>> alone;
  std::vector<const operation::OrthogonalIteration*> all;
  for (size_t i = 0; i < kJobs; ++i) {
    all.push_back(&steps[i]);
    run({&all.back(), 1}, int64_t{1} << 30);
    alone.push_back(outcome(i));
  }
  for (const int64_t most_scratch_bytes : {int64_t{1} << 30, int64_t{10000}, int64_t{1}}) {
    run(all, most_scratch_bytes);
    for (size_t i = 0; i < kJobs; ++i) {
      if (i == kRankOne || i == kNotFinite) continue;
      EXPECT_EQ(outcome(i), alone[i]) << i << " with " << most_scratch_bytes;
    }
  }
  cuda_host::libraries.company_changes_bits = false;
}

// The matrices have two sizes; one is not positive definite and one not finite. The others have the bits that they have
// alone, whatever the parts, and calls do not wait for each other.
TEST(CudaPrecisionTest, LargeInversesHaveTheSameBitsInAnyCompanyAndParts) {
  cuda_host::libraries.company_changes_bits = true;
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  constexpr size_t kJobs = 6, kIndefinite = 2, kNotFinite = 3;
  const auto rows = [](size_t i) { return int64_t{i % 2 == 0 ? 270 : 259}; };
  std::deque<std::vector<float>> inputs;
  for (size_t i = 0; i < kJobs; ++i) {
    const int64_t n = rows(i);
    const reference::Dense x = RandomDense(n / 2, n, i);
    std::vector<float>& a = inputs.emplace_back(ToFloats(reference::Product(reference::Transposed(x), x).data));
    for (int64_t j = 0; j < n; ++j) a[static_cast<size_t>(j * (n + 1))] += 20;
    if (i == kIndefinite) a[static_cast<size_t>(9 * (n + 1))] = -1;
    if (i == kNotFinite) a[static_cast<size_t>(7 * n + 3)] = NAN;
  }
  const auto invert = [&](const std::vector<size_t>& which, int64_t most_scratch_bytes) {
    std::deque<cuda::DeviceArray<float>> matrices;
    std::deque<operation::SpdInverse> inverses;
    std::vector<const operation::SpdInverse*> some;
    for (const size_t i : which) {
      const MatrixView x(matrices.emplace_back(device->Send(absl::MakeConstSpan(inputs[i])).value()).data(), rows(i),
                         rows(i));
      some.push_back(&inverses.emplace_back(operation::SpdInverse{x, x}));
    }
    std::vector<absl::Status> statuses(which.size());
    EXPECT_TRUE(cuda::RunLarge(*device, some, absl::MakeSpan(statuses), most_scratch_bytes).ok());
    std::vector<std::vector<float>> results;
    for (size_t at = 0; at < which.size(); ++at) {
      const size_t i = which[at];
      std::vector<float>& result = results.emplace_back(inputs[i].size());
      EXPECT_TRUE(device->Receive(matrices[at], absl::MakeSpan(result)).ok());
      EXPECT_EQ(statuses[at].message(),
                i == kIndefinite  ? "SpdInverse: a: expected positive definite, but leading minor 10 of 270 is not"
                : i == kNotFinite ? "SpdInverse: a: expected finite elements"
                                  : "");
      if (statuses[at].ok()) continue;
      EXPECT_EQ(std::memcmp(result.data(), inputs[i].data(), result.size() * sizeof(float)), 0) << "unchanged";
    }
    return results;
  };
  std::vector<std::vector<float>> alone;
  for (size_t i = 0; i < kJobs; ++i) alone.push_back(invert({i}, int64_t{1} << 30)[0]);
  for (const int64_t most_scratch_bytes : {int64_t{1} << 30, int64_t{3} << 20, int64_t{1}}) {
    const int64_t launches = cuda::launch_count, waits = cuda_host::Waits();
    const auto together = invert({0, 1, 2, 3, 4, 5}, most_scratch_bytes);
    if (most_scratch_bytes > int64_t{1} << 29) {
      EXPECT_EQ(cuda::launch_count - launches, 2 + 2 * 3);
      EXPECT_EQ(cuda_host::Waits() - waits, 1 + static_cast<int64_t>(kJobs))
          << "for the outcomes, and for the results here";
    }
    for (size_t i = 0; i < kJobs; ++i) {
      if (i == kIndefinite || i == kNotFinite) continue;
      EXPECT_EQ(together[i], alone[i]) << i << " with " << most_scratch_bytes;
    }
  }
  cuda_host::libraries.company_changes_bits = false;
}

// Layers of one shape have the same bits alone, in company and again, although the library may compute other bits in a
// batch of another size. A gradient that is not finite has the error that it has alone, and changes no other answer.
void ExpectTheSameInCompany(const MethodConfig& config, int steps, int64_t d_in = 14) {
  const std::unique_ptr<Backend> backend = MakeGroupingBackend(MakeCudaBackend({}).value(), {});
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  constexpr int kLayers = 3;
  std::vector<reference::Vector> answers[2];
  for (const bool together : {false, true}) {
    TaskGroup tasks(*backend);
    std::vector<std::unique_ptr<LayerDriver>> drivers;
    for (int i = 0; i < kLayers; ++i)
      drivers.push_back(std::make_unique<LayerDriver>(*method, LayerSpec{"any", 9, d_in}, *backend));
    answers[together].resize(kLayers);
    for (int step = 0; step < steps; ++step) {
      // soap's first gradient takes eigenvectors, of which the library promises no bits in company.
      cuda_host::libraries.company_changes_bits = step > 0;
      const auto run = [&](int i) {
        reference::Vector d = VectorStream(Stream::kCorrelated, 14, 3 * step + i).Gaussian(9 * d_in);
        if (step == steps / 3 && i == 1) d[5] = together ? NAN : INFINITY;
        const absl::StatusOr<reference::Vector> u = drivers[i]->Precondition(d);
        EXPECT_EQ(u.ok(), step != steps / 3 || i != 1) << u.status();
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

TEST(CudaPrecisionTest, AnswersDoNotDependOnTheirCompany) {
  ExpectTheSameInCompany({"muon", {}}, 3);
  for (const int64_t d_in : {14, 270}) {
    ExpectTheSameInCompany({"muon", {{"input_factor", true}, {"refresh_interval", 2.0}}}, 6, d_in);
  }
  ExpectTheSameInCompany({"soap", {{"refresh_interval", 2.0}}}, 9);
  ExpectTheSameInCompany({"soap", {{"rule", std::string("SHAMPOO")}}}, 3);
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
    ASSERT_TRUE(cuda::RunTogether(*device, operations, most_scratch_bytes).ok());
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

// From a basis that has turned by a tenth, of eigenvalues that span six decades: the rows of small ones are nearly in
// the space of those of large ones. Without a shift the first factorization would fail.
TEST(CudaPrecisionTest, AnOldBasisTakesNoF64) {
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  for (const int64_t n : {30, 150}) {
    const reference::Dense vectors = reference::OrthonormalColumns(RandomDense(n, n, 1));
    reference::Dense scaled = vectors, turned = vectors;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        scaled.at(i, j) *= std::pow(1e-6, static_cast<double>(j) / static_cast<double>(n - 1));
      }
    }
    const reference::Dense noise = RandomDense(n, n, 2);
    for (size_t i = 0; i < turned.data.size(); ++i) turned.data[i] += 0.1 / std::sqrt(n) * noise.data[i];
    const std::vector<float> a = ToFloats(reference::Product(scaled, reference::Transposed(vectors)).data);
    const std::vector<float> q = ToFloats(reference::Transposed(reference::OrthonormalColumns(turned)).data);
    const auto of_a = device->Send(absl::MakeConstSpan(a)).value(), of_q = device->Send(absl::MakeConstSpan(q)).value();
    const auto of_next = device->Array<float>(n * n).value();
    std::vector<int64_t> order(static_cast<size_t>(n));
    const operation::OrthogonalIteration step{
        {of_a.data(), n, n}, {of_q.data(), n, n}, {of_next.data(), n, n}, absl::MakeSpan(order)};
    const operation::OrthogonalIteration* const only = &step;
    bool done = false;
    ASSERT_TRUE(cuda::RunOrthogonalIterations(*device, {&only, 1}, {&done, 1}).ok());
    EXPECT_TRUE(done) << n;
    reference::Dense next(n, n);
    std::vector<float> values(static_cast<size_t>(n * n));
    ASSERT_TRUE(device->Receive(of_next, absl::MakeSpan(values)).ok());
    next.data.assign(values.begin(), values.end());
    const reference::Dense gram = reference::Product(next, reference::Transposed(next));
    EXPECT_LE(reference::FrobeniusNorm(reference::Combination(1, gram, -1, reference::Identity(n))), 1e-5);
  }
}

// More rows than a batch of several matrices may have: cuSOLVER's and cuBLAS' routines for one.
TEST(CudaPrecisionTest, ALargeMatrixIsABatchOfItsOwn) {
  constexpr int64_t kRows = 2600;
  ASSERT_EQ(cuda::BatchSize(kRows, kRows, kRows), 1);
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  // Eigenvalues grow along the diagonal, and neighbours are coupled.
  std::vector<float> a(kRows * kRows), q(kRows * kRows), next(kRows * kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    q[i * kRows + i] = 1;
    a[i * kRows + i] = static_cast<float>(i + kRows);
    if (i > 0) a[i * kRows + i - 1] = a[(i - 1) * kRows + i] = 500;
  }
  const auto of_a = device->Send(absl::MakeConstSpan(a)).value(), of_q = device->Send(absl::MakeConstSpan(q)).value();
  const auto of_next = device->Array<float>(kRows * kRows).value();
  std::vector<int64_t> order(kRows);
  const operation::OrthogonalIteration step{
      {of_a.data(), kRows, kRows}, {of_q.data(), kRows, kRows}, {of_next.data(), kRows, kRows}, absl::MakeSpan(order)};
  const operation::OrthogonalIteration* const only = &step;
  bool done = false;
  ASSERT_TRUE(cuda::RunOrthogonalIterations(*device, {&only, 1}, {&done, 1}).ok());
  EXPECT_TRUE(done);
  ASSERT_TRUE(device->Receive(of_next, absl::MakeSpan(next)).ok());
  for (int64_t i = 0; i < kRows; ++i) ASSERT_EQ(order[i], kRows - 1 - i);
  // The first row is a's last one, and the others are orthonormal to it and to their neighbours.
  const float* const last = a.data() + (kRows - 1) * kRows;
  double length = 0;
  for (int64_t j = 0; j < kRows; ++j) length += double{last[j]} * last[j];
  for (int64_t j = 0; j < kRows; ++j) ASSERT_NEAR(next[j], last[j] / std::sqrt(length), 1e-6);
  for (int64_t i = 0; i < kRows; ++i) {
    for (const int64_t other : {int64_t{0}, i - 2, i - 1, i}) {
      if (other < 0) continue;
      double product = 0;
      for (int64_t j = 0; j < kRows; ++j) product += double{next[i * kRows + j]} * next[other * kRows + j];
      ASSERT_NEAR(product, other == i ? 1 : 0, 1e-5) << i << ", " << other;
    }
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
