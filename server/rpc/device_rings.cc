// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/device_rings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor::rpc {
namespace {

constexpr uint64_t kAlignment = 256;

absl::Status Malformed(const absl::AlphaNum& what) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed, absl::StrCat("ring: ", what));
}

}  // namespace

StreamRing::~StreamRing() { rings_.Retire(std::move(memory_), unmapped_.load(std::memory_order_relaxed)); }

MatrixView StreamRing::View(uint64_t offset, int64_t rows, int64_t cols) const {
  return MatrixView(memory_->data() + offset / sizeof(float), rows, cols);
}

absl::StatusOr<std::shared_ptr<const DevicePayload>> StreamRing::Take(uint64_t offset, int64_t rows, int64_t cols) {
  const uint64_t size = static_cast<uint64_t>(memory_->bytes());
  const uint64_t bytes = static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * sizeof(float);
  if (offset % kAlignment != 0) return Malformed(absl::StrCat("expected a multiple of ", kAlignment, ", got ", offset));
  if (bytes > size || offset > size - bytes) {
    return Malformed(absl::StrCat("expected ", bytes, " bytes within ", size, ", got them from offset ", offset));
  }
  {
    MutexLock lock(mu_);
    const auto next = taken_.lower_bound(offset);
    const bool meets_next = next != taken_.end() && next->first < offset + bytes;
    const bool meets_last = next != taken_.begin() && std::prev(next)->second > offset;
    if (meets_next || meets_last) {
      return Malformed(absl::StrCat("offset ", offset,
                                    ": expected a range whose last answer has come, got one that is "
                                    "the shard's"));
    }
    taken_[offset] = offset + bytes;
  }
  const MatrixView values = View(offset, rows, cols);
  const absl::StatusOr<PayloadFacts> facts = rings_.plane_.Inspect(values);
  if (!facts.ok()) {
    GiveBack(offset);
    return facts.status();
  }
  auto payload = std::make_shared<DevicePayload>();
  payload->values = values;
  payload->facts = *facts;
  payload->memory = shared_from_this();
  return payload;
}

absl::Status StreamRing::Write(uint64_t offset, ConstMatrixView answer) {
  return rings_.plane_.Copy(answer, View(offset, answer.rows, answer.cols));
}

void StreamRing::GiveBack(uint64_t offset) {
  MutexLock lock(mu_);
  taken_.erase(offset);
}

DeviceRings::~DeviceRings() {
  MutexLock lock(mu_);
  for (const Retired& ring : retired_) account_->Release(Of(ring.memory->bytes()));
}

// Those are given to gRPC as descriptors, and it names no other connections so.
bool DeviceRings::IsOnThisHost(const std::string& peer) { return absl::StartsWith(peer, "fd:"); }

v1::Ring DeviceRings::Offer() const {
  v1::Ring offer;
  offer.set_kind(v1::RING_KIND_CUDA);
  offer.set_device(plane_.device());
  offer.set_bytes(static_cast<uint64_t>(most_bytes_));
  return offer;
}

absl::StatusOr<std::shared_ptr<StreamRing>> DeviceRings::Open(const v1::Ring& request) {
  if (request.kind() != v1::RING_KIND_CUDA || request.device() != plane_.device() || request.bytes() == 0) {
    return Malformed(
        absl::StrCat("expected one of kind CUDA on the device that was offered, and bytes above 0, got kind ",
                     static_cast<int>(request.kind()), request.device() == plane_.device() ? "" : ", another device",
                     " and ", request.bytes(), " bytes"));
  }
  const int64_t wanted = static_cast<int64_t>(std::min<uint64_t>(request.bytes(), static_cast<uint64_t>(most_bytes_)));
  const int64_t bytes =
      (wanted + DevicePlane::kRingGranularity - 1) / DevicePlane::kRingGranularity * DevicePlane::kRingGranularity;
  PRECONDOR_RETURN_IF_ERROR(account_->Reserve("ring of a worker", Of(bytes)));
  absl::StatusOr<std::unique_ptr<SharedRing>> memory = plane_.Export(bytes);
  if (!memory.ok()) {
    account_->Release(Of(bytes));
    return memory.status();
  }
  logger_.Log(Severity::kInfo, "ring opened", {{"bytes", bytes}});
  return std::make_shared<StreamRing>(*this, *std::move(memory));
}

void DeviceRings::Retire(std::unique_ptr<SharedRing> memory, bool unmapped) {
  MutexLock lock(mu_);
  retired_.push_back({std::move(memory), clock_.Now() + (unmapped ? absl::ZeroDuration() : kLinger)});
}

void DeviceRings::Collect() {
  const absl::Time now = clock_.Now();
  std::vector<Retired> due;
  {
    MutexLock lock(mu_);
    const auto first =
        std::partition(retired_.begin(), retired_.end(), [&](const Retired& ring) { return ring.due > now; });
    std::move(first, retired_.end(), std::back_inserter(due));
    retired_.erase(first, retired_.end());
  }
  for (Retired& ring : due) {
    const int64_t bytes = ring.memory->bytes();
    ring.memory.reset();
    account_->Release(Of(bytes));
    logger_.Log(Severity::kInfo, "ring closed", {{"bytes", bytes}});
  }
}

}  // namespace precondor::rpc
