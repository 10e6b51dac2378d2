// SPDX-License-Identifier: Apache-2.0
// Behaviour that cuBLAS and cuSOLVER may have, and that their imitation has when a test asks for it.
#pragma once

#include <atomic>

namespace precondor::cuda_host {

struct Libraries {
  // Products and eigenvectors in batches have other last bits than alone, which the libraries do not rule
  // out. $CUDA_HOST_COMPANY_CHANGES_BITS sets it.
  std::atomic<bool> company_changes_bits = false;
};
extern Libraries libraries;

}  // namespace precondor::cuda_host
