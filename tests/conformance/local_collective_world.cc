// SPDX-License-Identifier: Apache-2.0
// The contract over LocalCollective between threads; collective_process_test.cc has it between processes.
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/local_collective.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

class LocalWorld final : public HostMemoryWorld {
 public:
  absl::StatusOr<std::string> NewId() override {
    PRECONDOR_ASSIGN_OR_RETURN(rendezvous_, LocalRendezvous::Start());
    return rendezvous_->unique_id();
  }
  absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                   absl::Duration timeout) override {
    return MakeLocalCollective(id, rank, size, timeout);
  }
  bool sums_in_rank_order() const override { return true; }
  bool names_ranks() const override { return true; }

 private:
  std::unique_ptr<LocalRendezvous> rendezvous_;  // of the last id: tests make one communicator after the other
};

}  // namespace

CollectiveWorld& World() {
  static LocalWorld world;
  return world;
}

}  // namespace precondor
