// SPDX-License-Identifier: Apache-2.0
// The contract over NcclCollective, rank r on device r.
#include <cuda_runtime_api.h>

#include "kernels/base/check.h"
#include "kernels/cuda/nccl_collective.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

class NcclWorld final : public CollectiveWorld {
 public:
  std::string Lacks(int size) const override {
    int devices = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
      return absl::StrCat("no CUDA device: ", cudaGetErrorString(error));
    }
    return size <= devices ? "" : absl::StrCat(size, " ranks need as many CUDA devices, there are ", devices);
  }
  absl::StatusOr<std::string> NewId() override { return NewNcclId(); }
  absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                   absl::Duration timeout) override {
    return MakeNcclCollective(id, rank, size, NcclOptions{.device = rank}, timeout);
  }
  void* Allocate(int rank, size_t bytes) override {
    void* memory = nullptr;
    PRECONDOR_CHECK(cudaSetDevice(rank) == cudaSuccess && cudaMalloc(&memory, bytes) == cudaSuccess);
    return memory;
  }
  void Free(int rank, void* memory) override {
    PRECONDOR_CHECK(cudaSetDevice(rank) == cudaSuccess && cudaFree(memory) == cudaSuccess);
  }
  void Upload(int rank, const std::string& host, void* memory) override {
    PRECONDOR_CHECK(cudaSetDevice(rank) == cudaSuccess &&
                    cudaMemcpy(memory, host.data(), host.size(), cudaMemcpyHostToDevice) == cudaSuccess &&
                    cudaDeviceSynchronize() == cudaSuccess);
  }
  void Download(int rank, const void* memory, std::string& host) override {
    PRECONDOR_CHECK(cudaSetDevice(rank) == cudaSuccess &&
                    cudaMemcpy(host.data(), memory, host.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
  }
  bool sums_in_rank_order() const override { return false; }
  bool names_ranks() const override { return false; }
};

}  // namespace

CollectiveWorld& World() {
  static NcclWorld world;
  return world;
}

}  // namespace precondor
