// SPDX-License-Identifier: Apache-2.0
// The table of functions that libprecondor-nccl.so exports. The loader checks that `version` is its own.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"
#include "kernels/cuda/nccl_collective.h"

namespace precondor {

struct NcclModuleEntry {
  const char* version;
  absl::StatusOr<std::string> (*new_id)();
  absl::StatusOr<std::unique_ptr<Collective>> (*make)(absl::string_view, int, int, const NcclOptions&, absl::Duration);
  absl::StatusOr<std::unique_ptr<Collective>> (*make_for_host)(absl::string_view, int, int, const NcclOptions&,
                                                               absl::Duration);
};

constexpr char kNcclModuleSymbol[] = "precondor_nccl_module";

}  // namespace precondor
