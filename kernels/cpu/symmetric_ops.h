// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices by the kernels of symmetric_tiles.h. Arguments as Backend has checked
// them; the backend gives scratch, and its memory is the host's.
#pragma once

#include "absl/status/status.h"

#include "kernels/backend.h"

namespace precondor::tiles {

absl::Status Run(Backend& backend, const operation::SymmetricUpdateMultiply& update);
absl::Status Run(Backend& backend, const operation::SymmetricExpand& expand);
absl::Status Run(const operation::SymmetricCompress& compress);

}  // namespace precondor::tiles
