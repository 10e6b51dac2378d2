// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/factor_update.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"

namespace precondor {

FactorUpdateSink::FactorUpdateSink(std::string what, const Limits& limits, Done done)
    : what_(std::move(what)), limits_(limits), done_(std::move(done)) {}

absl::StatusOr<std::array<int64_t, 2>> FactorUpdateSink::RowsOf(absl::Span<const wire::TensorFormat> tensors,
                                                                uint64_t payload_bytes) const {
  std::array<int64_t, 2> rows = {0, 0};
  if (tensors.empty()) {
    if (payload_bytes <= static_cast<uint64_t>(limits_.most_bytes)) return rows;
    return absl::InvalidArgumentError(
        absl::StrCat(what_, ": expected factors of at most ", limits_.most_bytes, " bytes, got ", payload_bytes));
  }
  if (tensors.size() != rows.size()) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": expected a and g, got ", tensors.size(), " tensors"));
  }
  uint64_t bytes = 0;
  for (size_t side = 0; side < rows.size(); ++side) {
    const wire::TensorFormat& tensor = tensors[side];
    const bool fits = tensor.dtype == DType::kF32 && tensor.scale == 1.0f && tensor.dims.size() == 2 &&
                      tensor.dims[0] <= limits_.most_rows && tensor.dims[1] == limits_.dims[side];
    if (!fits) {
      return absl::InvalidArgumentError(absl::StrCat(what_, ": ", side == 0 ? "a" : "g", ": expected F32 [k, ",
                                                     limits_.dims[side], "] with k up to ", limits_.most_rows, ", got ",
                                                     DTypeName(tensor.dtype), " [", absl::StrJoin(tensor.dims, ", "),
                                                     "] times ", tensor.scale));
    }
    rows[side] = tensor.dims[0];
    bytes += static_cast<uint64_t>(tensor.dims[0] * tensor.dims[1]) * ByteSize(DType::kF32);
  }
  if (payload_bytes == bytes) return rows;
  return absl::InvalidArgumentError(absl::StrCat(what_, ": expected ", bytes, " bytes, got ", payload_bytes));
}

absl::Status FactorUpdateSink::Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto rows, RowsOf(tensors, payload_bytes));
  MutexLock lock(mu_);
  begun_ = true;
  expected_bytes_ = payload_bytes;
  update_.rows = rows;
  update_.bytes.clear();
  update_.bytes.reserve(payload_bytes);
  return absl::OkStatus();
}

absl::Status FactorUpdateSink::Append(uint64_t offset, const wire::ReceivedBytes& chunk) {
  MutexLock lock(mu_);
  if (over_) return absl::OkStatus();
  const uint64_t have = update_.bytes.size();
  if (!begun_ || offset != have || chunk.size() > expected_bytes_ - have) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": expected bytes from ", have, " to at most ",
                                                   expected_bytes_, ", got ", chunk.size(), " from ", offset));
  }
  for (const absl::string_view piece : chunk.pieces()) update_.bytes.append(piece.data(), piece.size());
  return absl::OkStatus();
}

bool FactorUpdateSink::HasAllBytes() const {
  MutexLock lock(mu_);
  return begun_ && update_.bytes.size() == expected_bytes_;
}

void FactorUpdateSink::Restart() {
  MutexLock lock(mu_);
  if (over_) return;
  begun_ = false;
  update_.bytes.clear();
}

bool FactorUpdateSink::Complete(Preconditioned outcome) {
  FactorUpdate update;
  {
    MutexLock lock(mu_);
    if (std::exchange(over_, true)) return false;
    update = std::move(update_);
  }
  update.decision = outcome.decision;
  update.factor_version = outcome.factor_version;
  update.reason = std::move(outcome.reason);
  done_(std::move(update));
  return true;
}

bool FactorUpdateSink::Fail(absl::Status status) {
  {
    MutexLock lock(mu_);
    if (std::exchange(over_, true)) return false;
  }
  done_(std::move(status));
  return true;
}

bool FactorUpdateSink::ready() const {
  MutexLock lock(mu_);
  return over_;
}

}  // namespace precondor
