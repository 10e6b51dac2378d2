// SPDX-License-Identifier: Apache-2.0
// Which uploads may run beside the operations under way.
#include "server/core/resources/scratch_pool.h"

#include <memory>
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

}  // namespace
}  // namespace precondor
