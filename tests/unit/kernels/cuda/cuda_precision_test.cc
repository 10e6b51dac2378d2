// SPDX-License-Identifier: Apache-2.0
// What mkor's option `products` costs its answers, on the host's imitation of a device: against F32's. The numbers that
// docs/methods/mkor.md gives are these.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/cuda_backend.h"
#include "kernels/methods/registry.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

// After 10 updates by two vectors a side; where they stay close to the first ones, columns are nearly parallel.
reference::Vector Answer(Stream kind, double damping, bool parallel, const std::string& products,
                         const std::string& representation) {
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  MethodConfig config{"mkor", {{"rank", 64.0}, {"damping", damping}}};
  config.options["representation"] = representation;
  config.options["products"] = products;
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  const LayerSpec layer{"any", 40, 70, false};
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
  return driver.Precondition(VectorStream(kind, layer.d_in, 9).Gaussian(layer.d_out * layer.d_in)).value();
}

double Worst(double damping, const std::string& products, const std::string& representation = "LOW_RANK") {
  double worst = 0;
  for (const Stream kind : {Stream::kCorrelated, Stream::kSubspace}) {
    for (const bool parallel : {false, true}) {
      const auto answer = [&](const std::string& by) { return Answer(kind, damping, parallel, by, representation); };
      worst = std::max(worst, RelativeDifference(answer(products), answer("F32")));
    }
  }
  return worst;
}

TEST(CudaPrecisionTest, LowRankAnswersAreAsFarOffAsTheDocsSay) {
  const double one_term = Worst(1, "BF16"), two_terms = Worst(1, "BF16X3");
  EXPECT_LE(one_term, 1e-2);
  EXPECT_GE(one_term, 1e-3) << "it is another product";
  EXPECT_LE(two_terms, 2e-5);
  EXPECT_GE(two_terms, 1e-6) << "it is another product";
  EXPECT_LE(Worst(.01, "BF16X3"), 3e-3);
  EXPECT_LE(Worst(.01, "BF16"), 0.6);
  EXPECT_EQ(Worst(1, "TF32"), 0) << "F32 in low rank";
}

TEST(CudaPrecisionTest, DenseAnswersAreAsFarOffAsTheDocsSay) {
  const double bf16 = Worst(1, "BF16", "DENSE"), tf32 = Worst(1, "TF32", "DENSE");
  EXPECT_LE(bf16, 5e-3);
  EXPECT_GE(bf16, 1e-3) << "it is another product";
  EXPECT_LE(tf32, 5e-4);
  EXPECT_GE(tf32, 1e-4) << "it is another product";
}

}  // namespace
}  // namespace precondor
