// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/shared_regions.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"

#include "kernels/base/status_macros.h"
#include "proto/wire/slot_table.h"

namespace precondor::rpc {

StreamRegion::~StreamRegion() { regions_.Retire(std::move(memory_), unmapped_.load(std::memory_order_relaxed)); }

MatrixView StreamRegion::View(uint64_t offset, int64_t rows, int64_t cols) const {
  return MatrixView(memory_->data() + offset / sizeof(float), rows, cols);
}

absl::StatusOr<StreamRegion::Gradient> StreamRegion::Take(uint64_t offset, int64_t rows, int64_t cols) {
  const uint64_t bytes = static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * sizeof(float);
  PRECONDOR_ASSIGN_OR_RETURN(const wire::Slot slot, slots_.Take(offset, bytes));
  auto payload = std::make_shared<DevicePayload>();
  payload->values = View(offset, rows, cols);
  payload->memory = shared_from_this();
  return Gradient{shared_from_this(), slot, std::move(payload)};
}

absl::Status StreamRegion::Inspect(absl::Span<const Gradient> gradients) {
  std::vector<ConstMatrixView> values;
  for (const Gradient& gradient : gradients) values.push_back(gradient.payload->values);
  const absl::StatusOr<std::vector<PayloadFacts>> facts = regions_.memory_.Inspect(values);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (facts.ok()) {
      gradients[i].payload->facts = (*facts)[i];
    } else {
      GiveBack(gradients[i].slot);
    }
  }
  return facts.status();
}

void StreamRegion::Write(const wire::Slot& slot, ConstMatrixView answer, RegionCopyQueue::Done done) {
  if (!slots_.Holds(slot)) return done(absl::FailedPreconditionError("ring: the slot has been given back"));
  regions_.answers_->Post({answer, View(slot.offset, answer.rows, answer.cols)}, slots_.in_use(), std::move(done));
}

SharedRegions::~SharedRegions() {
  answers_ = nullptr;  // its last copies may end the use of regions
  MutexLock lock(mu_);
  for (const Retired& region : retired_) account_->Release(region.memory->bytes());
}

// The server accepts connections on Unix sockets itself and passes gRPC their file descriptors. gRPC uses the prefix
// "fd:" for these peers alone.
bool SharedRegions::IsOnThisHost(const std::string& peer) { return absl::StartsWith(peer, "fd:"); }

v1::Ring SharedRegions::Offer() const {
  return wire::EncodeRegion(memory_.device(), static_cast<uint64_t>(most_bytes_));
}

absl::StatusOr<std::shared_ptr<StreamRegion>> SharedRegions::Open(const v1::Ring& request) {
  PRECONDOR_RETURN_IF_ERROR(wire::CheckRegion(request, memory_.device()));
  const int64_t wanted = static_cast<int64_t>(std::min<uint64_t>(request.bytes(), static_cast<uint64_t>(most_bytes_)));
  const int64_t bytes =
      (wanted + DevicePlane::kGranularity - 1) / DevicePlane::kGranularity * DevicePlane::kGranularity;
  PRECONDOR_RETURN_IF_ERROR(account_->Reserve("ring of a worker", bytes));
  absl::StatusOr<std::unique_ptr<SharedRegion>> memory = memory_.Export(bytes);
  if (!memory.ok()) {
    account_->Release(bytes);
    return memory.status();
  }
  logger_.Log(Severity::kInfo, "ring opened", {{"bytes", bytes}});
  return std::make_shared<StreamRegion>(*this, *std::move(memory));
}

void SharedRegions::Retire(std::unique_ptr<SharedRegion> memory, bool unmapped) {
  MutexLock lock(mu_);
  retired_.push_back({std::move(memory), clock_.Now() + (unmapped ? absl::ZeroDuration() : kLinger)});
}

void SharedRegions::Collect() {
  const absl::Time now = clock_.Now();
  std::vector<Retired> due;
  {
    MutexLock lock(mu_);
    const auto first =
        std::partition(retired_.begin(), retired_.end(), [&](const Retired& region) { return region.due > now; });
    std::move(first, retired_.end(), std::back_inserter(due));
    retired_.erase(first, retired_.end());
  }
  for (Retired& region : due) {
    const int64_t bytes = region.memory->bytes();
    region.memory.reset();
    account_->Release(bytes);
    logger_.Log(Severity::kInfo, "ring closed", {{"bytes", bytes}});
  }
}

}  // namespace precondor::rpc
