// SPDX-License-Identifier: Apache-2.0
// How many kernels a step takes, on the host's imitation of a device.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/launch_count.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "tests/support/cuda_host/stream.h"
#include "tests/support/method_driver.h"
#include "tests/support/task_group.h"

namespace precondor {
namespace {

struct Cost {
  int64_t launches, waits;
};

// Layers and shapes of them: a step takes as many launches for 144 layers as for 3.
constexpr std::pair<int, int> kCases[] = {{3, 1}, {3, 3}, {24, 3}, {144, 1}};

// The cost of each step of so many layers at once, of so many shapes. Methods that take statistics get `vectors` of
// them a side before each gradient.
std::vector<Cost> CostOfSteps(const MethodConfig& config, int layers, int steps, int vectors, int shapes) {
  const std::unique_ptr<Backend> backend = MakeGroupingBackend(MakeCudaBackend({}).value(), {});
  TaskGroup tasks(*backend);
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  const bool updates = method->needs_statistics();
  std::vector<LayerSpec> specs;
  std::vector<std::unique_ptr<LayerState>> states;
  std::vector<DeviceMatrix> a, g, d, u;
  VectorStream stream(Stream::kCorrelated, 140, 1);
  for (int i = 0; i < layers; ++i) {
    const int shape = i % shapes;
    specs.push_back(updates ? LayerSpec{"any", 13 + 5 * shape, 40 + 3 * shape}
                            : LayerSpec{"any", 12 + shape, 17 - 3 * shape});
    states.push_back(method->MakeState(specs[i], *backend).value());
    d.push_back(ToDevice(*backend, {stream.Gaussian(specs[i].d_out * specs[i].d_in)}));
    u.push_back(backend->Allocate(specs[i].d_out, specs[i].d_in).value());
  }
  std::vector<Cost> costs;
  for (int step = 0; step < steps; ++step) {
    a.clear();
    g.clear();
    for (const LayerSpec& spec : specs) {
      reference::Vectors of_a, of_g;
      for (int vector = 0; updates && vector < vectors; ++vector) {
        of_a.push_back(stream.Gaussian(spec.d_in));
        of_g.push_back(stream.Gaussian(spec.d_out));
      }
      a.push_back(ToDevice(*backend, of_a));
      g.push_back(ToDevice(*backend, of_g));
    }
    EXPECT_FALSE(ToHost(*backend, u.back().view()).empty());  // waits for all that was launched
    const int64_t launches = cuda::launch_count, waits = cuda_host::Waits();
    tasks.Run(layers, [&](int i) {
      if (updates) {
        EXPECT_TRUE(states[i]->Update({a[i].view(), g[i].view()}).ok());
      }
      const ConstMatrixView gradient(d[i].view().data, specs[i].d_out, specs[i].d_in);
      const absl::Status answered = states[i]->Precondition(gradient, u[i].view());
      EXPECT_TRUE(answered.ok()) << answered;
    });
    costs.push_back({cuda::launch_count - launches, cuda_host::Waits() - waits});
  }
  return costs;
}
std::vector<Cost> CostsByGradients(const MethodConfig& config, int layers, int shapes, int steps) {
  return CostOfSteps(config, layers, steps, /*vectors=*/0, shapes);
}
std::vector<int64_t> LaunchesOfSteps(const MethodConfig& config, int layers, int steps, int vectors = 2,
                                     int shapes = 100) {
  std::vector<int64_t> launches;
  for (const Cost& cost : CostOfSteps(config, layers, steps, vectors, shapes)) launches.push_back(cost.launches);
  return launches;
}

MethodConfig InLowRank(double rank, const std::string& products = "F32") {
  return {"mkor", {{"representation", std::string("LOW_RANK")}, {"rank", rank}, {"products", products}}};
}

// Norms, columns, cores, padded copies, four rounds of small products, the answers and the scale. The host waits for
// the norms, the cores and the answers' lengths. In BF16 each shape takes seven products of its own.
TEST(CudaLaunchesTest, StepsInLowRankTakeAsManyWhateverTheLayersOfAShape) {
  for (const std::string products : {"F32", "TF32", "BF16"}) {
    for (const auto& [layers, shapes] : kCases) {
      if (layers == 144 && products != "F32") continue;  // as F32 groups them, and slow
      SCOPED_TRACE(products + " " + std::to_string(layers) + " " + std::to_string(shapes));
      const Cost cost = CostOfSteps(InLowRank(64, products), layers, 2, 2, shapes).back();
      EXPECT_EQ(cost.launches, products == "BF16" ? 6 + 7 * shapes : 10);
      EXPECT_EQ(cost.waits, 3);
    }
  }
}

// Rank 4 and two vectors a side: from the third step on both factors of each layer are recompressed.
TEST(CudaLaunchesTest, RecompressionsOfOneRankTakeAsManyWhateverTheLayers) {
  const std::vector<int64_t> of_one = LaunchesOfSteps(InLowRank(4), 1, 5);
  EXPECT_EQ(LaunchesOfSteps(InLowRank(4), 6, 5), of_one);
  EXPECT_LE(of_one.back(), 28);
}

// Norms, two for products with what is stored, terms, six for the answers. The waiting terms move into the matrices
// once in 16 steps. Where the products are cuBLAS', layers of a further shape take two more. TF32 takes two more where
// any layer's gradient has to be copied, to rows that begin at multiples of 16 bytes: here those of all shapes but the
// first.
TEST(CudaLaunchesTest, DenseStepsTakeAsManyWhateverTheLayersOfAShape) {
  for (const std::string products : {"BF16", "TF32", "F32"}) {
    const MethodConfig config = {
        "mkor", {{"representation", std::string("DENSE")}, {"rule", std::string("BLEND")}, {"products", products}}};
    std::vector<int64_t> of_two = LaunchesOfSteps(config, 2, 18, 1, 1);
    EXPECT_LE(*std::max_element(of_two.begin(), of_two.end()), 10) << products;
    of_two.resize(3);
    EXPECT_EQ(LaunchesOfSteps(config, 20, 3, 1, 1), of_two) << products;
    EXPECT_EQ(LaunchesOfSteps(config, 6, 3, 2, 1), of_two) << products << ", two vectors a side";
    for (int64_t& launches : of_two) launches += products == "F32" ? 0 : products == "BF16" ? 4 : 6;
    EXPECT_EQ(LaunchesOfSteps(config, 6, 3, 1, 3), of_two) << products << ", three shapes";
  }
}

// The momentum of all layers, the input of their iterations, four launches for each of five iterations, and the
// answers. A further shape takes three products an iteration.
TEST(CudaLaunchesTest, StepsOfMuonTakeAsManyWhateverTheLayersOfAShape) {
  for (const std::string precision : {"AUTO", "BF16", "TF32", "F32"}) {
    for (const auto& [layers, shapes] : kCases) {
      if (layers == 144 && precision != "AUTO") continue;  // as the default groups them, and slow
      SCOPED_TRACE(precision + " " + std::to_string(layers) + " " + std::to_string(shapes));
      const Cost cost = CostsByGradients({"muon", {{"precision", precision}}}, layers, shapes, 2).back();
      EXPECT_EQ(cost.launches, 23 + 15 * (shapes - 1));
      EXPECT_EQ(cost.waits, 1);
    }
  }
}

// The lengths of the gradients, the momentum, the direction, its product with the factor, muon's own, and the next
// covariance; and a factor each second step.
TEST(CudaLaunchesTest, StepsOfMuonWithAFactorTakeAsManyWhateverTheLayersOfAShape) {
  const MethodConfig config{"muon", {{"input_factor", true}, {"refresh_interval", 2.0}}};
  for (const auto& [layers, shapes] : kCases) {
    SCOPED_TRACE(std::to_string(layers) + " " + std::to_string(shapes));
    const std::vector<Cost> costs = CostsByGradients(config, layers, shapes, 4);
    EXPECT_EQ(costs[3].launches, 30 + 17 * (shapes - 1));
    EXPECT_EQ(costs[3].waits, 2);
    EXPECT_EQ(costs[2].launches, costs[3].launches + 3);
    EXPECT_EQ(costs[2].waits, 3);
  }
}

// Copies, six products, the moments, the ratio, the answers, and two launches for norms; a further shape takes six
// products. A refresh takes 25 launches for bases of two sizes, ten for those of a further size, four products of the
// momentum for each shape, and two reorderings.
TEST(CudaLaunchesTest, StepsOfSoapTakeAsManyWhateverTheLayersOfAShape) {
  for (const auto& [layers, shapes] : kCases) {
    SCOPED_TRACE(std::to_string(layers) + " " + std::to_string(shapes));
    const std::vector<Cost> costs = CostsByGradients({"soap", {{"refresh_interval", 2.0}}}, layers, shapes, 4);
    EXPECT_EQ(costs[2].launches, 12 + 6 * (shapes - 1));
    EXPECT_EQ(costs[2].waits, 1);
    EXPECT_EQ(costs[3].launches, shapes == 1 ? 43 : 93);
    EXPECT_EQ(costs[3].waits, 2);
  }
}

TEST(CudaLaunchesTest, StepsOfKronWaitAsOftenWhateverTheLayersOfAShape) {
  for (const int layers : {3, 24}) EXPECT_EQ(CostsByGradients({"kron", {}}, layers, 1, 2).back().waits, 9) << layers;
}

TEST(CudaLaunchesTest, StepsOfKfacTakeAsManyWhateverTheLayersOfAShape) {
  const MethodConfig config = {"kfac", {{"inv_update_steps", std::string("3")}}};
  const std::vector<int64_t> of_two = LaunchesOfSteps(config, 2, 6, 2, 1);
  EXPECT_EQ(LaunchesOfSteps(config, 20, 6, 2, 1), of_two);
  EXPECT_LE(of_two.back(), 33);
}

// Expects `steps` answers from a backend without room for more than what is reserved and `tables` bytes.
void ExpectToFit(const MethodConfig& config, const LayerSpec& layer, int steps, int64_t tables) {
  SCOPED_TRACE(testing::Message() << Describe(config) << ": " << layer.d_out << " x " << layer.d_in);
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  const bool updates = method->needs_statistics();
  const int64_t elements = layer.d_out * layer.d_in, of_vectors = updates ? layer.d_out + layer.d_in : 0;
  const int64_t limit =
      method->StateBytes(layer) + method->ScratchBytes(layer, 1) + 4 * (2 * elements + of_vectors) + tables;
  const std::unique_ptr<Backend> backend = MakeCudaBackend({.memory_limit_bytes = limit}).value();
  const std::unique_ptr<LayerState> state = method->MakeState(layer, *backend).value();
  VectorStream stream(Stream::kCorrelated, 100, 1);
  DeviceMatrix a, g, u = backend->Allocate(layer.d_out, layer.d_in).value();
  if (updates) {
    a = ToDevice(*backend, {stream.Gaussian(layer.d_in)});
    g = ToDevice(*backend, {stream.Gaussian(layer.d_out)});
  }
  for (int step = 0; step < steps; ++step) {
    if (updates) {
      const absl::Status updated = state->Update({a.view(), g.view()});
      ASSERT_TRUE(updated.ok()) << "step " << step << ": " << updated;
    }
    const DeviceMatrix d = ToDevice(*backend, {stream.Gaussian(elements)});
    const absl::Status answered =
        state->Precondition(ConstMatrixView(d.view().data, layer.d_out, layer.d_in), u.view());
    ASSERT_TRUE(answered.ok()) << "step " << step << ": " << answered;
  }
}

constexpr int64_t kTables = 64 << 10;  // of jobs and addresses, and partial sums

TEST(CudaLaunchesTest, StepsOfMuonAndSoapTakeNoMoreMemoryThanIsReserved) {
  for (const std::string precision : {"AUTO", "TF32", "F32"}) {
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>(97, 201), {201, 97}, {130, 130}, {300, 1}, {40, 270}}) {
      ExpectToFit({"muon", {{"precision", precision}}}, {"any", m, n}, 1, kTables);
      ExpectToFit({"muon", {{"precision", precision}, {"input_factor", true}, {"refresh_interval", 1.0}}},
                  {"any", m, n}, 3, kTables);
    }
    MethodConfig soap{"soap", {{"precision", precision}, {"refresh_interval", 1.0}, {"max_factor_dim", 300.0}}};
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>(97, 201), {201, 97}, {130, 130}, {300, 1}, {500, 60}}) {
      ExpectToFit(soap, {"any", m, n}, 4, kTables);
    }
    soap.options["merge_small_dims"] = false;
    ExpectToFit(soap, {"any", 64, 30 * 20, false, {64, 30, 20}}, 4, kTables);
  }
}

TEST(CudaLaunchesTest, StepsInLowRankTakeNoMoreMemoryThanIsReserved) {
  for (const char* products : {"F32", "TF32", "BF16"}) {
    for (const double rank : {4.0, 64.0}) {
      for (const auto& [m, n] : {std::pair<int64_t, int64_t>(97, 201), {200, 96}, {130, 130}, {300, 1}, {8, 512}}) {
        ExpectToFit(InLowRank(rank, products), {"any", m, n}, 6, kTables);
      }
    }
  }
}

// Low rank has next to nothing of what is reserved, which dense steps could use.
TEST(CudaLaunchesTest, DenseStepsTakeNoMoreMemoryThanIsReserved) {
  for (const std::string products : {"BF16", "TF32", "F32"}) {
    for (const auto& [rule, d_in, d_out] :
         {std::tuple<std::string, int64_t, int64_t>("BLEND", 97, 201), {"EXACT_DAMPED", 97, 201}, {"BLEND", 200, 96}}) {
      ExpectToFit(
          {"mkor", {{"representation", std::string("DENSE")}, {"rule", rule}, {"rank", 1.0}, {"products", products}}},
          {"any", d_out, d_in}, 18, /*tables=*/0);
    }
  }
}

}  // namespace
}  // namespace precondor
