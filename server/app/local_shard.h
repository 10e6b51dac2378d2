// SPDX-License-Identifier: Apache-2.0
// The shard of role `all` as its coordinator calls it, in the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "server/core/shard/shard.h"

namespace precondor {

// Name of the shard of role `all` in the coordinator's journal: the address may be another one after a restart.
inline constexpr char kOwnShard[] = "own";

// Adds this process' address, and shows the coordinator's token. Thread-safe. `shard` must outlive the object.
class LocalShard final : public ShardControl {
 public:
  explicit LocalShard(Shard& shard) : shard_(shard) {}
  void set_advertise_address(std::string address) {
    MutexLock lock(mu_);
    address_ = std::move(address);
  }
  std::string own_address() const override {
    MutexLock lock(mu_);
    return address_;
  }
  void BecomeLeader(uint64_t token) override { token_.store(token); }
  absl::StatusOr<ShardDescription> Describe() override {
    return Addressed(Call([&] { return shard_.Describe(); }));
  }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override {
    return Call([&] { return shard_.Install(install); });
  }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    return Call([&] { return shard_.Fence(fence); });
  }
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override {
    return Call([&] { return shard_.TakeSnapshot(order); });
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) override {
    return Call([&] { return shard_.Remove(session_id); });
  }
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override {
    return Call([&] { return shard_.Quarantine(session_id); });
  }

 private:
  template <typename Make>
  auto Call(const Make& make) -> decltype(make()) {
    PRECONDOR_ASSIGN_OR_RETURN(const FencingGate::Pass pass, shard_.Admit(token_.load()));
    return make();
  }
  absl::StatusOr<ShardDescription> Addressed(absl::StatusOr<ShardDescription> description) {
    MutexLock lock(mu_);
    if (description.ok()) description->advertise_address = address_;
    return description;
  }

  Shard& shard_;
  std::atomic<uint64_t> token_ = 0;
  mutable Mutex mu_;
  std::string address_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
