// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/region_codec.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::wire {

v1::Ring EncodeRegion(const std::string& device, uint64_t bytes, const std::string& handle) {
  v1::Ring ring;
  ring.set_kind(v1::RING_KIND_CUDA);
  ring.set_device(device);
  ring.set_bytes(bytes);
  ring.set_handle(handle);
  return ring;
}

absl::Status CheckRegion(const v1::Ring& got, const std::string& device) {
  if (got.kind() == v1::RING_KIND_CUDA && got.device() == device && got.bytes() > 0) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
      absl::StrCat("ring: expected ", v1::RingKind_Name(v1::RING_KIND_CUDA),
                   " on the device that was offered, and bytes above 0, got kind ", static_cast<int>(got.kind()),
                   got.device() == device ? "" : ", another device", " and ", got.bytes(), " bytes"));
}

}  // namespace precondor::wire
