// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_backend.h"

#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

TEST(CpuBackendTest, RefusesLimitsThatMakeNoSense) {
  for (const CpuBackendOptions& options :
       {CpuBackendOptions{0, 0}, CpuBackendOptions{-1, 0}, CpuBackendOptions{1, -1}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakeCpuBackend(options).status()));
  }
}

TEST(CpuBackendTest, AlignsMatricesToCacheLines) {
  const auto backend = *MakeCpuBackend({});
  for (int64_t columns : {1, 3, 17}) {
    const DeviceMatrix a = *backend->Allocate(5, columns);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.view().data) % 64, 0u);
  }
}

TEST(CpuBackendTest, RunsOutOfMemoryWithTheNumbersAndRecovers) {
  // Room for d, u and one side, none for scratch.
  const auto backend = *MakeCpuBackend({4 * (2 * 64 * 64 + 8 * 64 + 64), 0});
  DeviceMatrix d = *backend->Allocate(64, 64), u = *backend->Allocate(64, 64), v = *backend->Allocate(8, 64),
               core = *backend->Allocate(8, 8);
  const int64_t held = backend->allocated_bytes();
  const absl::Status status = backend->LowRankPrecondition({}, {1.0, v.view(), core.view()}, d.view(), u.view());
  ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(std::to_string(held)));
  EXPECT_EQ(backend->allocated_bytes(), held);
  EXPECT_TRUE(backend->LowRankPrecondition({}, {}, d.view(), u.view()).ok()) << "needs no scratch";
  d = DeviceMatrix();
  EXPECT_TRUE(backend->Allocate(32, 64).ok());
}

}  // namespace
}  // namespace precondor
