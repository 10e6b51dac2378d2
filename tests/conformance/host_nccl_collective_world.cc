// SPDX-License-Identifier: Apache-2.0
// The contract over HostNcclCollective, rank r on device r: memory is the host's.
#include <cstring>

#include "kernels/cuda/host_nccl_collective.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

class HostNcclWorld final : public CollectiveWorld {
 public:
  std::string Lacks(int size) const override { return {}; }
  absl::StatusOr<std::string> NewId() override { return NewNcclId(); }
  absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                   absl::Duration timeout) override {
    return MakeHostNcclCollective(id, rank, size, NcclOptions{.device = rank}, timeout);
  }
  void* Allocate(int rank, size_t bytes) override { return ::operator new(bytes); }
  void Free(int rank, void* memory) override { ::operator delete(memory); }
  void Upload(int rank, const std::string& host, void* memory) override {
    std::memcpy(memory, host.data(), host.size());
  }
  void Download(int rank, const void* memory, std::string& host) override {
    std::memcpy(host.data(), memory, host.size());
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
