// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices, with the kernels of symmetric_tiles.h. Precondition: Backend has checked
// the arguments. The backend provides scratch; its memory is the host's.
#pragma once

#include "absl/status/status.h"

#include "kernels/backend.h"

namespace precondor::tiles {

absl::Status Run(Backend& backend, const operation::SymmetricUpdateMultiply& update);
absl::Status Run(Backend& backend, const operation::SymmetricExpand& expand);

}  // namespace precondor::tiles
