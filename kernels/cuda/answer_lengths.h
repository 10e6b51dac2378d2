// SPDX-License-Identifier: Apache-2.0
// Copies the squared lengths that grouped products compute on the device to the host.
#pragma once

#include <algorithm>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"

namespace precondor::cuda {

// Copies |d|^2 and |u|^2 to the span `squares` [2] of each operation that asks for them; the span of every other
// operation is empty. The array `squares` on the device has one pair for each operation that asks, in the order of
// `operations`, which holds pointers to operations. Waits for the device if at least one operation asks.
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
