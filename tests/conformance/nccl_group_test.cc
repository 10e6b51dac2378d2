// SPDX-License-Identifier: Apache-2.0
// Groups of devices that meet by NCCL, out of a library that the program loads: fake_nccl.cc, whose devices' memory is
// the host's, so that backends of the CPU pass for CUDA's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "kernels/cuda/nccl_module.h"
#include "kernels/grouping/forwarding_backend.h"
#include "kernels/methods/mkor.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kAmple = absl::Seconds(100);

class CudaByName final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  absl::string_view name() const override { return "cuda"; }
};

class NcclGroupTest : public testing::Test {
 protected:
  std::unique_ptr<DeviceGroup> Group(const std::vector<int>& devices, size_t backends) {
    std::vector<Backend*> all;
    for (size_t i = 0; i < backends; ++i) {
      cpus_.push_back(MakeTestBackend());
      named_.push_back(std::make_unique<CudaByName>(*cpus_.back()));
      all.push_back(named_.back().get());
    }
    return DeviceGroup::Make(all, ConnectByNccl(devices, kAmple), kAmple).value();
  }
  static absl::Status Meet(DeviceGroup& group) {
    return group.Run(0, [](const DeviceGroup::Rank& rank) { return rank.ranks.Barrier(rank.timeout); });
  }

  std::vector<std::unique_ptr<Backend>> cpus_;
  std::vector<std::unique_ptr<Backend>> named_;
};

TEST_F(NcclGroupTest, PreconditionsASplitLayer) {
  const LayerSpec layer{"layer", 9, 14, false};
  MethodConfig config;
  config.options["rule"] = std::string("BLEND");
  config.options["representation"] = std::string("DENSE");
  config.options["split_dim"] = 9.0;
  const std::unique_ptr<Method> method = MakeMkor(config).value();
  const std::unique_ptr<DeviceGroup> group = Group({2, 0, 3}, 3);
  reference::MkorOptions options;
  options.rule = reference::Rule::kBlend;
  reference::Mkor oracle(options, layer.d_out, layer.d_in, false);
  LayerDriver driver(layer, group->backend(1), method->MakeSplitState(layer, *group, 1).value());
  VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
  for (int step = 0; step < 5; ++step) {
    const reference::Vectors va = a.Next(2), vg = g.Next(2);
    ASSERT_EQ(driver.Update(va, vg), absl::OkStatus());
    oracle.Update(va, vg);
  }
  const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
  const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
  ASSERT_TRUE(u.ok()) << u.status();
  EXPECT_LE(RelativeDifference(*u, oracle.Precondition(d)), 2e-5);
}

TEST_F(NcclGroupTest, MeetsAgainAfterAFailure) {
  const std::unique_ptr<DeviceGroup> group = Group({0, 1, 2, 3}, 4);
  for (int failing = 0; failing < 4; ++failing) {
    const absl::Status fault = absl::InternalError("lost");
    EXPECT_EQ(group->Run(1,
                         [&](const DeviceGroup::Rank& rank) {
                           EXPECT_EQ(rank.ranks.name(), "nccl");
                           return rank.rank == failing ? fault : rank.ranks.Barrier(rank.timeout);
                         }),
              fault);
    EXPECT_EQ(Meet(*group), absl::OkStatus());
  }
}

TEST_F(NcclGroupTest, SaysWhatItLacks) {
  EXPECT_EQ(Meet(*Group({0, 1}, 3)),
            absl::InvalidArgumentError("NCCL: expected a device for each of 3 backends, got 2"));
  const absl::Status no_device = Meet(*Group({4, 1}, 2));  // the other rank gives up
  EXPECT_EQ(no_device, absl::UnavailableError("NCCL: expected a CUDA device from 0 to 3, got 4"));
}

}  // namespace
}  // namespace precondor
