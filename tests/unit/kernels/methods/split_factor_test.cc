// SPDX-License-Identifier: Apache-2.0
// What admission counts on of layers over several devices; what they compute is in split_conformance_test.
#include "kernels/methods/split_factor.h"

#include <gtest/gtest.h>
#include <tuple>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/staged_collective.h"
#include "kernels/methods/deferred_factor.h"
#include "kernels/methods/mkor.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

constexpr absl::Duration kAmple = absl::Seconds(100);

// With the backends' own kernels; with not a byte more they do.
TEST(SplitFactorTest, StateAndScratchAreAllThatALayerTakes) {
  for (const auto& [m, n, split_dim, rank] : {std::tuple<int64_t, int64_t, int64_t, int64_t>(40, 40, 40, 0),
                                              {65, 33, 50, 0},
                                              {33, 65, 50, 0},
                                              {96, 48, 40, 24},
                                              {200, 300, 10, 0},
                                              {3, 500, 400, 0}}) {
    for (const int size : {2, 3, 4}) {
      for (const int64_t k : {1, 4, 40}) {
        for (const char* rule : {"REFERENCE", "BLEND"}) {
          SCOPED_TRACE(testing::Message()
                       << m << " x " << n << ", " << size << " devices, " << k << " vectors, " << rule);
          MethodConfig config;
          config.options["rule"] = std::string(rule);
          config.options["representation"] = std::string(rank > 0 ? "AUTO" : "DENSE");
          if (rank > 0) config.options["rank"] = static_cast<double>(rank);
          config.options["split_dim"] = static_cast<double>(split_dim);
          const std::unique_ptr<Method> method = MakeMkor(config).value();
          const LayerSpec layer{"layer", m, n, false};
          ASSERT_TRUE(method->Splits(layer));
          const Method::SplitBytes state_bytes = method->SplitStateBytes(layer, size);
          const Method::SplitBytes scratch = method->SplitScratchBytes(layer, k, size);
          const int64_t own = (2 * m * n + k * (m + n)) * static_cast<int64_t>(sizeof(float));
          const int primary = size - 1;
          std::vector<std::unique_ptr<Backend>> backends;
          std::vector<Backend*> all;
          for (int r = 0; r < size; ++r) {
            CpuBackendOptions options;
            options.memory_limit_bytes =
                r == primary ? state_bytes.primary + scratch.primary + own : state_bytes.other + scratch.other;
            backends.push_back(MakeCpuBackend(options).value());
            all.push_back(backends.back().get());
          }
          const std::unique_ptr<DeviceGroup> group = DeviceGroup::Make(all, ConnectLocally(kAmple), kAmple).value();
          const std::unique_ptr<LayerState> state = method->MakeSplitState(layer, *group, primary).value();
          Backend& backend = *backends[primary];
          VectorStream a(Stream::kCorrelated, n, 1), g(Stream::kCorrelated, m, 2);
          const DeviceMatrix d = ToDevice(backend, reference::Vectors(m, a.Gaussian()));
          DeviceMatrix u = backend.Allocate(m, n).value();
          for (int step = 0; step < 3; ++step) {
            const DeviceMatrix va = ToDevice(backend, a.Next(k)), vg = ToDevice(backend, g.Next(k));
            ASSERT_EQ(state->Update({va.view(), vg.view()}), absl::OkStatus());
            ASSERT_EQ(state->Precondition(d.view(), u.view()), absl::OkStatus());
          }
          const std::string saved = state->Save().value();
          EXPECT_LE(static_cast<int64_t>(saved.size()), method->SavedBytes(layer));
          ASSERT_EQ(state->Load(saved), absl::OkStatus());
        }
      }
    }
  }
}

// Each device has about as many rows as the others.
TEST(SplitFactorTest, NoDeviceNeedsMoreThanItsShare) {
  MethodConfig config;
  config.options["rule"] = std::string("BLEND");
  config.options["representation"] = std::string("DENSE");
  config.options["split_dim"] = 4096.0;
  config.options["max_factor_dim"] = 65536.0;
  const std::unique_ptr<Method> method = MakeMkor(config).value();
  const LayerSpec layer{"layer", 1000, 50000, false};
  const Method::SplitBytes bytes = method->SplitStateBytes(layer, 4);
  EXPECT_EQ(bytes.other, int64_t{50000} * 50000);
  EXPECT_EQ(bytes.primary, bytes.other + DeferredFactor::StateBytes(MkorConfig(), 1000));
  EXPECT_FALSE(method->Splits({"small", 4095, 17, false}));
}

}  // namespace
}  // namespace precondor
