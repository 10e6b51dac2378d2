// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/nccl_module.h"

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
  return entry->make(unique_id, rank, size, options, timeout);
}

}  // namespace precondor
