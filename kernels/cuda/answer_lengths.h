// SPDX-License-Identifier: Apache-2.0
// What grouped products tell the host of their answers.
#pragma once

#include <algorithm>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"

namespace precondor::cuda {

// |d|^2 and |u|^2 of the operations that ask for them, in whose order they lie in `squares`; waits for the device where
// one does. `Operations` has pointers to operations with a span `squares` [2], or without elements.
template <typename Operations>
absl::Status ReceiveSquares(Device& device, const DeviceArray<double>& squares, const Operations& operations) {
  size_t asked = 0;
  for (const auto* operation : operations) asked += operation->squares.empty() ? 0 : 1;
  if (asked == 0) return absl::OkStatus();
  std::vector<double> known(2 * asked);
  PRECONDOR_RETURN_IF_ERROR(device.Receive(squares, absl::MakeSpan(known)));
  auto pair = known.begin();
  for (const auto* operation : operations) {
    if (operation->squares.empty()) continue;
    std::copy_n(pair, 2, operation->squares.begin());
    pair += 2;
  }
  return absl::OkStatus();
}

}  // namespace precondor::cuda
