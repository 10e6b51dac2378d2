// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/nccl_module.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/loaded_library.h"
#include "kernels/cuda/nccl_module_entry.h"

namespace precondor {
namespace {

absl::StatusOr<const NcclModuleEntry*> Load() {
  return LoadEntry<NcclModuleEntry>("NCCL", "libprecondor-nccl.so", kNcclModuleSymbol, PRECONDOR_VERSION);
}

}  // namespace

absl::Status FindNccl() { return Load().status(); }

absl::StatusOr<std::string> LoadNewNcclId() {
  PRECONDOR_ASSIGN_OR_RETURN(const NcclModuleEntry* const entry, Load());
  return entry->new_id();
}

absl::StatusOr<std::unique_ptr<Collective>> LoadHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout) {
  PRECONDOR_ASSIGN_OR_RETURN(const NcclModuleEntry* const entry, Load());
  return entry->make_for_host(unique_id, rank, size, options, timeout);
}

DeviceGroup::Connect ConnectByNccl(std::vector<int> devices, absl::Duration timeout) {
  return [devices = std::move(devices),
          timeout](const std::vector<Backend*>& backends) -> absl::StatusOr<std::vector<std::unique_ptr<Collective>>> {
    if (devices.size() != backends.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL: expected a device for each of ", backends.size(), " backends, got ", devices.size()));
    }
    PRECONDOR_ASSIGN_OR_RETURN(const NcclModuleEntry* const entry, Load());
    PRECONDOR_ASSIGN_OR_RETURN(const std::string unique_id, entry->new_id());
    return JoinTogether(static_cast<int>(backends.size()), [&](int rank, const std::atomic<bool>* give_up) {
      const NcclOptions options = {
          .device = devices[rank], .stream = static_cast<CUstream_st*>(backends[rank]->stream()), .give_up = give_up};
      return entry->make(unique_id, rank, static_cast<int>(backends.size()), options, timeout);
    });
  };
}

}  // namespace precondor
