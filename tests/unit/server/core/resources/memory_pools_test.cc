// SPDX-License-Identifier: Apache-2.0
// Which uploads may run beside the operations under way.
#include "server/core/resources/memory_pools.h"

#include <gtest/gtest.h>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/grouping/forwarding_backend.h"

namespace precondor {
namespace {

class UploadCounter final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  int in_order = 0, to_idle = 0;

 private:
  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override {
    ++in_order;
    return inner().Upload(host, device);
  }
  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    ++to_idle;
    return inner().UploadToIdle(host, device);
  }
};

class ScratchPoolTest : public testing::Test {
 protected:
  // Borrows the block, uploads twice, says that it is idle or not and gives it back.
  void Use(bool becomes_idle) {
    ScratchPool::Lease lease = pool_.Acquire(6).value();
    for (const int64_t offset : {0, 3}) {
      ASSERT_TRUE(lease.Upload(ConstMatrixView(host_.data(), 1, 3), lease.view(offset, 1, 3)).ok());
    }
    if (becomes_idle) lease.NoteIdle();
  }

  const std::vector<float> host_ = {1, 2, 3};
  const std::unique_ptr<Backend> cpu_ = MakeCpuBackend({}).value();
  UploadCounter backend_{*cpu_};
  ScratchPool pool_{backend_};
};

TEST_F(ScratchPoolTest, OnlyTheFirstUploadIntoWhatWasLeftIdleIsBesideTheRest) {
  Use(false);  // fresh memory may be what an operation under way has just given back
  EXPECT_EQ(backend_.to_idle, 0);
  Use(true);  // the one before did not say
  EXPECT_EQ(backend_.to_idle, 0);
  Use(false);
  EXPECT_EQ(backend_.to_idle, 1);
  Use(true);  // as after an error
  EXPECT_EQ(backend_.to_idle, 1);
  EXPECT_EQ(backend_.in_order, 7);
}

TEST_F(ScratchPoolTest, WhoUsesABlockWithoutSayingSoLeavesItBusy) {
  Use(true);
  {
    ScratchPool::Lease lease = pool_.Acquire(6).value();
    ASSERT_TRUE(backend_.Axpby(2.0, lease.view(0, 1, 3), 0.0, lease.view(3, 1, 3)).ok());
  }
  Use(true);
  EXPECT_EQ(backend_.to_idle, 0);
}

TEST_F(ScratchPoolTest, KeepsABlockOfEachSizeThatIsAskedFor) {
  const int64_t before = backend_.allocated_bytes();
  for (int round = 0; round < 3; ++round) {
    const ScratchPool::Lease wide = pool_.Acquire(4096).value();
    (void)pool_.Acquire(1024);
    (void)pool_.Acquire(1024);
  }
  EXPECT_EQ(backend_.allocated_bytes() - before, (4096 + 1024) * 4);
}

TEST_F(ScratchPoolTest, BlocksOfOneSizeServeAllWhoAskForLess) {
  ScratchPool pool(backend_, 4096);
  const int64_t before = backend_.allocated_bytes();
  (void)pool.Acquire(4096);
  (void)pool.Acquire(1024);
  EXPECT_EQ(backend_.allocated_bytes() - before, 4096 * 4);
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

Payload Filled(uint64_t bytes) { return Payload(bytes, 7); }

TEST(PayloadPoolTest, GivesTheMemoryOfASharedPayloadToTheNextOne) {
  const auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  std::shared_ptr<const Payload> shared = pool->Share(Filled(2 * kMiB));
  const uint8_t* const memory = shared->data();
  EXPECT_NE(pool->Take(2 * kMiB).data(), memory) << "it is in use";
  shared = nullptr;
  const Payload next = pool->Take(2 * kMiB - 100);
  EXPECT_EQ(next.data(), memory);
  EXPECT_TRUE(next.empty());
  EXPECT_NE(pool->Take(2 * kMiB).data(), memory) << "it is in use again";
}

TEST(PayloadPoolTest, GivesNoMemoryThatIsTooSmallOrMuchTooLarge) {
  const auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  Payload payload = Filled(4 * kMiB);
  const uint8_t* const memory = payload.data();
  pool->Give(std::move(payload));
  EXPECT_NE(pool->Take(4 * kMiB + 1).data(), memory);
  EXPECT_NE(pool->Take(3 * kMiB).data(), memory);
  EXPECT_EQ(pool->Take(4 * kMiB - 100).data(), memory);
}

TEST(PayloadPoolTest, KeepsTheNewestUpToItsLimit) {
  const auto pool = std::make_shared<PayloadPool>(5 * kMiB);
  Payload oldest = Filled(2 * kMiB), newer = Filled(2 * kMiB), newest = Filled(2 * kMiB);
  const uint8_t* const memory[] = {newest.data(), newer.data()};
  for (Payload* payload : {&oldest, &newer, &newest}) pool->Give(std::move(*payload));
  const Payload first = pool->Take(2 * kMiB), second = pool->Take(2 * kMiB);
  EXPECT_EQ(first.data(), memory[0]);
  EXPECT_EQ(second.data(), memory[1]);
  EXPECT_EQ(first.capacity(), 2 * kMiB);
}

TEST(PayloadPoolTest, SharedPayloadsOutliveIt) {
  auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  const std::shared_ptr<const Payload> shared = pool->Share(Filled(2 * kMiB));
  pool = nullptr;
  EXPECT_EQ(shared->size(), 2 * kMiB);
  EXPECT_EQ(shared->back(), 7);
}

TEST(PayloadPoolTest, ASessionKeepsAGradientForEachRank) {
  SessionSpec spec;
  spec.world_size = 3;
  spec.gradient_dtype = DType::kBF16;
  spec.layers = {{.name = "small", .d_out = 4, .d_in = 4}, {.name = "large", .d_out = 1024, .d_in = 1024}};
  EXPECT_EQ(MostKeptBytes(spec), static_cast<int64_t>(3 * 2 * kMiB));
  spec.layers[0].d_out = spec.layers[0].d_in = 1 << 16;
  EXPECT_EQ(MostKeptBytes(spec), static_cast<int64_t>(3 * 64 * kMiB));
}

}  // namespace

}  // namespace precondor
