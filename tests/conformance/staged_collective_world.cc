// SPDX-License-Identifier: Apache-2.0
// The contract over StagedCollective between threads, each rank's memory on a backend of its own.
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/local_collective.h"
#include "kernels/cpu/staged_collective.h"
#include "tests/conformance/collective_contract.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

class StagedWorld final : public CollectiveWorld {
 public:
  StagedWorld() {
    for (int rank = 0; rank < kRanks; ++rank) backends_.push_back(MakeTestBackend(rank));
  }
  std::string Lacks(int size) const override { return size <= kRanks ? "" : "more ranks than backends"; }
  absl::StatusOr<std::string> NewId() override {
    PRECONDOR_ASSIGN_OR_RETURN(rendezvous_, LocalRendezvous::Start());
    return rendezvous_->unique_id();
  }
  absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                   absl::Duration timeout) override {
    PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Collective> ranks, MakeLocalCollective(id, rank, size, timeout));
    return MakeStagedCollective(std::move(ranks), *backends_[rank]);
  }
  void* Allocate(int rank, size_t bytes) override {
    DeviceMatrix words = backends_[rank]->AllocateScratch(1, Words(bytes)).value();
    void* const memory = words.view().data;
    MutexLock lock(mu_);
    memory_[memory] = std::move(words);
    return memory;
  }
  void Free(int rank, void* memory) override {
    MutexLock lock(mu_);
    memory_.erase(memory);
  }
  void Upload(int rank, const std::string& host, void* memory) override {
    std::vector<float> words(Words(host.size()));
    std::memcpy(words.data(), host.data(), host.size());
    const int64_t count = Words(host.size());
    PRECONDOR_CHECK(
        backends_[rank]
            ->Upload(ConstMatrixView(words.data(), 1, count), MatrixView(static_cast<float*>(memory), 1, count))
            .ok());
  }
  void Download(int rank, const void* memory, std::string& host) override {
    const int64_t count = Words(host.size());
    std::vector<float> words(count);
    PRECONDOR_CHECK(
        backends_[rank]
            ->Download(ConstMatrixView(static_cast<const float*>(memory), 1, count), MatrixView(words.data(), 1, count))
            .ok());
    std::memcpy(host.data(), words.data(), host.size());
  }
  bool sums_in_rank_order() const override { return true; }
  bool names_ranks() const override { return true; }

 private:
  static constexpr int kRanks = 4;
  static int64_t Words(size_t bytes) { return static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float)); }

  std::vector<std::unique_ptr<Backend>> backends_;
  std::unique_ptr<LocalRendezvous> rendezvous_;  // of the last id: tests make one communicator after the other
  Mutex mu_;
  std::map<void*, DeviceMatrix> memory_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

CollectiveWorld& World() {
  static StagedWorld& world = *new StagedWorld;  // backends must not outlive what they are made with
  return world;
}

}  // namespace precondor
