// SPDX-License-Identifier: Apache-2.0
// The device plane over CUDA's sources as the host runs them; tests/conformance/device_ring_test.cc has it between
// processes.
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <thread>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "tests/support/cuda_host/stream.h"

namespace precondor {
namespace {

std::unique_ptr<DevicePlane> MakePlane(int device = 0) {
  absl::StatusOr<std::unique_ptr<DevicePlane>> plane = MakeCudaPlane(device);
  EXPECT_TRUE(plane.ok()) << plane.status();
  return *std::move(plane);
}

std::vector<float> Values(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<float>(i)) * 3;
  return values;
}

// The formula of kernels/base/payload_digest.h, from its text.
uint64_t NaiveDigest(const std::vector<float>& values) {
  uint64_t sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &values[i], 4);
    uint64_t h = (static_cast<uint64_t>(i) + 1) * 11400714819323198485u;
    h ^= bits;
    for (int round = 0; round < 2; ++round) {
      h ^= h >> 32;
      h *= 0xd6e8feb86659fd93u;
    }
    sum += h ^ (h >> 32);
  }
  return sum;
}

TEST(CudaPlaneTest, TellsDigestAndFinitenessOfAnyShape) {
  const auto plane = MakePlane();
  for (const int64_t count : {1, 31, 4096, 4097, 300000}) {
    std::vector<float> values = Values(static_cast<size_t>(count));
    absl::StatusOr<PayloadFacts> facts = plane->Inspect(ConstMatrixView(values.data(), 1, count));
    ASSERT_TRUE(facts.ok()) << facts.status();
    EXPECT_EQ(facts->digest, NaiveDigest(values));
    EXPECT_TRUE(facts->finite);
    const uint64_t before = facts->digest;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      values.back() = bad;
      facts = plane->Inspect(ConstMatrixView(values.data(), 1, count));
      ASSERT_TRUE(facts.ok()) << facts.status();
      EXPECT_FALSE(facts->finite);
      EXPECT_NE(facts->digest, before);
    }
  }
}

TEST(CudaPlaneTest, LooksAtManyAndCopiesManyWithOneWait) {
  const auto plane = MakePlane();
  constexpr size_t kCount = 1000;
  std::vector<std::vector<float>> values, copies;
  std::vector<ConstMatrixView> views;
  std::vector<RegionCopy> jobs;
  for (size_t i = 0; i < kCount; ++i) {
    values.push_back(Values(i % 7 == 0 ? 9000 + i : 1 + i));
    copies.emplace_back(values.back().size());
  }
  values[5][3] = NAN;
  for (size_t i = 0; i < kCount; ++i) {
    const auto size = static_cast<int64_t>(values[i].size());
    views.emplace_back(values[i].data(), 1, size);
    jobs.push_back({views.back(), MatrixView(copies[i].data(), 1, size)});
  }
  const int64_t before = cuda_host::Waits();
  const absl::StatusOr<std::vector<PayloadFacts>> facts = plane->Inspect(views);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(cuda_host::Waits() - before, 1);
  ASSERT_EQ(facts->size(), kCount);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ((*facts)[i].digest, NaiveDigest(values[i])) << i;
    EXPECT_EQ((*facts)[i].finite, i != 5);
  }
  values[5][3] = 0;
  ASSERT_TRUE(plane->Copy(jobs).ok());
  EXPECT_EQ(cuda_host::Waits() - before, 2);
  EXPECT_EQ(copies, values);
  // More than one pass takes.
  views.resize(3000, views.front());
  const absl::StatusOr<std::vector<PayloadFacts>> more = plane->Inspect(views);
  ASSERT_TRUE(more.ok()) << more.status();
  ASSERT_EQ(more->size(), views.size());
  EXPECT_EQ(more->back().digest, NaiveDigest(values.front()));
}

TEST(CudaPlaneTest, LooksAtRowsAndNotBetweenThem) {
  const auto plane = MakePlane();
  const std::vector<float> wide = {1, 2, 3, NAN, 4, 5, 6, NAN};
  const absl::StatusOr<PayloadFacts> facts = plane->Inspect(ConstMatrixView(wide.data(), 2, 3, 4));
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_TRUE(facts->finite);
  EXPECT_EQ(facts->digest, NaiveDigest({1, 2, 3, 4, 5, 6}));
}

TEST(CudaPlaneTest, CopiesBothWaysWithStrides) {
  const auto plane = MakePlane();
  const std::vector<float> host = {1, 2, -1, 3, 4, -1};
  std::vector<float> device(4), other(6, 9), back(4);
  ASSERT_TRUE(plane->Upload(ConstMatrixView(host.data(), 2, 2, 3), MatrixView(device.data(), 2, 2)).ok());
  ASSERT_TRUE(plane->Copy(ConstMatrixView(device.data(), 2, 2), MatrixView(other.data(), 2, 2, 3)).ok());
  ASSERT_TRUE(plane->Download(ConstMatrixView(other.data(), 2, 2, 3), MatrixView(back.data(), 2, 2)).ok());
  EXPECT_EQ(other, (std::vector<float>{1, 2, 9, 3, 4, 9}));
  EXPECT_EQ(back, (std::vector<float>{1, 2, 3, 4}));
}

TEST(CudaPlaneTest, AMarkIsReachedOnceItsStreamHasComeThere) {
  const auto plane = MakePlane();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (cudaStream_t of : {stream, cudaStream_t{nullptr}}) {
    int value = 0;
    ASSERT_EQ(cudaMemsetAsync(&value, 0xff, sizeof(value), of), cudaSuccess);
    const auto mark = plane->Record(of);
    ASSERT_TRUE(mark.ok()) << mark.status();
    EXPECT_EQ(value, 0);
    // The device of these tests goes on while it is asked.
    const auto at_once = plane->Reached(**mark);
    ASSERT_TRUE(at_once.ok()) << at_once.status();
    EXPECT_FALSE(*at_once);
    const auto then = plane->Reached(**mark);
    ASSERT_TRUE(then.ok()) << then.status();
    EXPECT_TRUE(*then);
    EXPECT_EQ(value, -1);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(CudaPlaneTest, LeavesTheCallersDeviceAsItIs) {
  cuda_host::SetDeviceCount(2);
  {
    const auto first = MakePlane(0), plane = MakePlane(1);
    EXPECT_NE(plane->device(), first->device());
    EXPECT_EQ(plane->device().size(), 16u);
    const float value = 1;
    ASSERT_TRUE(plane->Inspect(ConstMatrixView(&value, 1, 1)).ok());
    int device = -1;
    ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
  }
  cuda_host::SetDeviceCount(1);
}

// A thread that has chosen none has device 0, which another rank of the host may use.
TEST(CudaPlaneTest, MakesNoContextOnADeviceThatTheProcessDoesNotUse) {
  cuda_host::SetDeviceCount(2);
  cuda_host::ForgetContexts();
  std::thread([] {
    const auto plane = MakePlane(1);
    const float value = 1;
    EXPECT_TRUE(plane->Inspect(ConstMatrixView(&value, 1, 1)).ok());
  }).join();
  EXPECT_FALSE(cuda_host::HasContext(0));
  EXPECT_TRUE(cuda_host::HasContext(1));
  cuda_host::SetDeviceCount(1);
}

// Everything that a plane does; the first error.
int64_t calls_before_its_end = 0;
absl::Status UseAll() {
  absl::StatusOr<std::unique_ptr<DevicePlane>> plane = MakeCudaPlane(0);
  if (!plane.ok()) return plane.status();
  std::vector<float> host(8, 1), other(8);
  const ConstMatrixView from(host.data(), 2, 4);
  const MatrixView to(other.data(), 2, 4);
  absl::Status status = (*plane)->Upload(from, to);
  status.Update((*plane)->Copy(from, to));
  status.Update((*plane)->Download(from, to));
  status.Update((*plane)->Inspect(from).status());
  status.Update((*plane)->Export(1).status());
  const auto mark = (*plane)->Record(nullptr);
  status.Update(mark.status());
  if (mark.ok()) status.Update((*plane)->Reached(**mark).status());
  calls_before_its_end = cuda_host::Calls();
  return status;
}

TEST(CudaPlaneTest, TellsOfEveryCallThatFailsAndKeepsNothing) {
  const int64_t live = cuda_host::LiveObjects();
  const int64_t before = cuda_host::Calls();
  ASSERT_TRUE(UseAll().ok());
  const int64_t calls = calls_before_its_end - before;
  ASSERT_GT(calls, 20);
  for (int64_t failing = 0; failing < calls; ++failing) {
    cuda_host::FailCall(failing, cudaErrorMemoryAllocation);
    EXPECT_EQ(UseAll().code(), absl::StatusCode::kResourceExhausted) << "call " << failing;
    cuda_host::Recover();
    EXPECT_EQ(cuda_host::LiveObjects(), live) << "call " << failing;
  }
}

TEST(CudaPlaneTest, NeedsADevice) {
  const absl::Status status = MakeCudaPlane(7).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "CUDA device: expected 0 ... 0, got 7");
  cuda_host::SetComputeCapability(7);
  EXPECT_EQ(MakeCudaPlane(0).status().message(), "CUDA device 0: expected compute capability 8.0 or later, got 7.x");
  cuda_host::SetComputeCapability(9);
}

}  // namespace
}  // namespace precondor
