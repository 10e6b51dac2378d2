// SPDX-License-Identifier: Apache-2.0
// Wraps a coordinator's calls to one shard, and stops them when a shard reports that another coordinator has taken
// over.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/error_reason.h"
#include "server/core/api/shard_control.h"

namespace precondor {

// As thread-safe as the wrapped control.
class LeaderCalls final : public ShardControl {
 public:
  // Makes no more calls once `replaced` is true. Passes each STALE_LEADER refusal to `on_refused`. `replaced`, and what
  // `on_refused` refers to, must outlive the object.
  LeaderCalls(std::unique_ptr<ShardControl> shard, const std::atomic<bool>& replaced,
              std::function<void(const absl::Status&)> on_refused)
      : shard_(std::move(shard)), replaced_(replaced), on_refused_(std::move(on_refused)) {}

  void BecomeLeader(uint64_t token) override { shard_->BecomeLeader(token); }
  std::string own_address() const override { return shard_->own_address(); }
  absl::StatusOr<ShardDescription> Describe() override {
    return Call([&] { return shard_->Describe(); });
  }
  absl::StatusOr<ShardDescription> Probe() override {
    return Call([&] { return shard_->Probe(); });
  }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override {
    return Call([&] { return shard_->Install(install); });
  }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    return Call([&] { return shard_->Fence(fence); });
  }
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override {
    return Call([&] { return shard_->TakeSnapshot(order); });
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) override {
    return Call([&] { return shard_->Remove(session_id); });
  }
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override {
    return Call([&] { return shard_->Quarantine(session_id); });
  }
  void CancelCalls() override { shard_->CancelCalls(); }

 private:
  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }
  // UNAVAILABLE makes workers ask again, and they may then reach the coordinator that leads.
  static absl::Status Replaced() { return absl::UnavailableError("another coordinator has taken over"); }

  template <typename Make>
  auto Call(const Make& make) -> decltype(make()) {
    if (replaced_.load()) return Replaced();
    auto result = make();
    if (GetErrorReason(StatusOf(result)) != ErrorReason::kStaleLeader) return result;
    on_refused_(StatusOf(result));
    return Replaced();
  }

  const std::unique_ptr<ShardControl> shard_;
  const std::atomic<bool>& replaced_;
  const std::function<void(const absl::Status&)> on_refused_;
};

}  // namespace precondor
