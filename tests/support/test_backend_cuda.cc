// SPDX-License-Identifier: Apache-2.0
// On a device, or on what tests/support/cuda_host makes of one. Without a device the program ends as skipped.
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/cuda_backend.h"
#include "tests/support/test_backend.h"

namespace precondor {

std::unique_ptr<Backend> MakeTestBackend() {
  constexpr int kSkipped = 77;  // CTest's SKIP_RETURN_CODE of these programs
  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCudaBackend({});
  if (!backend.ok()) {
    std::printf("skipped: %s\n", backend.status().ToString().c_str());
    std::fflush(stdout);
    std::_Exit(absl::IsUnavailable(backend.status()) ? kSkipped : 1);
  }
  return *std::move(backend);
}

}  // namespace precondor
