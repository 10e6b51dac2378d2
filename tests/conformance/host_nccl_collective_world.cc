// SPDX-License-Identifier: Apache-2.0
// The contract over HostNcclCollective, rank r on device r: memory is the host's.
#include "kernels/cuda/host_nccl_collective.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

class HostNcclWorld final : public HostMemoryWorld {
 public:
  absl::StatusOr<std::string> NewId() override { return NewNcclId(); }
  absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                   absl::Duration timeout) override {
    return MakeHostNcclCollective(id, rank, size, NcclOptions{.device = rank}, timeout);
  }
  bool sums_in_rank_order() const override { return false; }
  bool names_ranks() const override { return false; }
};

}  // namespace

CollectiveWorld& World() {
  static HostNcclWorld world;
  return world;
}

}  // namespace precondor
