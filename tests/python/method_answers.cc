// SPDX-License-Identifier: Apache-2.0
// Gradients, the random numbers that docs/use/methods/kron.md says are drawn for them, and method kron's answers, as
// JSON for package_parity_test.py, which gives the same to the published package.
#include <iostream>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "nlohmann/json.hpp"

#include "kernels/base/random.h"
#include "kernels/methods/registry.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

constexpr int kSteps = 80;
constexpr char kLayer[] = "layer";

struct Case {
  std::string name;
  int64_t m, n;
  std::map<std::string, OptionValue> options;
  double scale = 1.0;
  std::vector<int64_t> shape = {};
};

CounterRandom RandomOf(uint64_t purpose, uint64_t update) {
  std::vector<uint64_t> key = {purpose, 0, update, 0};
  for (const char c : std::string(kLayer)) key.push_back(static_cast<uint64_t>(c));
  return CounterRandom(key);
}

nlohmann::json Run(const Case& c) {
  const LayerSpec layer{kLayer, c.m, c.n, false, c.shape};
  nlohmann::json out = {{"name", c.name}, {"shape", TensorDims(layer)}};
  for (const auto& option : c.options) {
    std::visit([&](const auto& held) { out["options"][option.first] = held; }, option.second);
  }
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeMethod({"kron", c.options}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(c.m, c.n, 11, c.scale);
  for (int step = 0; step < kSteps; ++step) {
    const reference::Dense d = gradients.Next();
    std::vector<float> probe(c.m * c.n);
    RandomOf(0, step).Normals(0, absl::MakeSpan(probe));
    out["gradients"].push_back(d.data);
    out["probes"].push_back(probe);
    out["draws"].push_back(static_cast<double>(RandomOf(1, step).Bits(0) >> 11) * 0x1p-53);
    out["answers"].push_back(driver.Precondition(d.data).value());
  }
  return out;
}

std::vector<Case> Cases() {
  const auto text = [](const char* value) { return OptionValue(std::string(value)); };
  return {{"square", 12, 12, {}},
          {"wide", 5, 17, {}},
          {"tall", 17, 5, {}},
          {"row", 1, 13, {}},
          {"column", 13, 1, {}},
          {"tiny gradients", 9, 14, {}, 1e-5},
          {"large gradients", 9, 14, {}, 1e3},
          {"one diagonal", 9, 14, {{"memory_save_mode", text("ONE_DIAG")}}},
          {"all diagonal", 9, 14, {{"memory_save_mode", text("ALL_DIAG")}}},
          {"long side", 9, 14, {{"max_size_triangular", 10.0}}},
          {"options",
           9,
           14,
           {{"momentum", 0.5},
            {"precondition_lr", 0.3},
            {"init_scale", 2.0},
            {"max_update_probability", 0.4},
            {"min_update_probability", 0.4}}},
          {"convolution merged to a matrix", 8, 12, {{"target_merged_dim_size", 10.0}}, 1.0, {8, 3, 2, 2}},
          {"merged to another matrix than the weight's", 3, 32, {{"target_merged_dim_size", 10.0}}, 1.0, {3, 2, 2, 8}},
          {"merged to three dimensions", 8, 42, {{"target_merged_dim_size", 7.0}}, 1.0, {8, 7, 3, 2}},
          {"merged to one dimension", 5, 12, {{"target_merged_dim_size", 64.0}}, 1.0, {5, 4, 3}},
          {"a dimension of 1 merged away", 6, 4, {{"target_merged_dim_size", 6.0}}, 1.0, {6, 1, 4}},
          {"three dimensions", 7, 20, {{"merge_small_dims", false}}, 1.0, {7, 5, 4}},
          // No more: JAX looks for the best order of each product, which are nine for four dimensions and take minutes.
          {"three dimensions, one diagonal",
           7,
           20,
           {{"merge_small_dims", false}, {"memory_save_mode", text("ONE_DIAG")}},
           1.0,
           {7, 5, 4}},
          {"three dimensions, one long",
           4,
           45,
           {{"merge_small_dims", false}, {"max_size_triangular", 8.0}},
           1.0,
           {4, 9, 5}},
          {"fewer dimensions than triangular ones need",
           4,
           15,
           {{"merge_small_dims", false}, {"min_ndim_triangular", 4.0}},
           1.0,
           {4, 5, 3}},
          {"one dimension", 1, 13, {}, 1.0, {13}},
          {"one dimension, triangular", 1, 13, {{"min_ndim_triangular", 1.0}}, 1.0, {13}}};
}

}  // namespace
}  // namespace precondor

int main() {
  nlohmann::json all = nlohmann::json::array();
  for (const precondor::Case& c : precondor::Cases()) all.push_back(precondor::Run(c));
  std::cout << all.dump() << "\n";
  return 0;
}
