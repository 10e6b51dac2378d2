// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/method.h"

#include "absl/strings/str_cat.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<LayerState>> Method::MakeSplitState(const LayerSpec& layer, DeviceGroup& group,
                                                                   int primary) const {
  return absl::UnimplementedError(
      absl::StrCat("method ", name(), ": layer ", layer.name, ": its factors are not split over devices"));
}

}  // namespace precondor
