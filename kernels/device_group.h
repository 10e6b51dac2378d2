// SPDX-License-Identifier: Apache-2.0
// The devices of one process as ranks 0 ... size() - 1 that compute together what is too large for one of them. Each
// rank has a backend, and a Collective over the memory of all.
//
// Errors: a rank that fails while others may be in a collective operation ends that for them by Abort, so that no rank
//   waits for the time-out; the communicators are made anew by the next Run. What was under way is lost, the group is
//   not.
// Threads: Run from any; one at a time, in the order in which they come, others wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/collective.h"

namespace precondor {

class DeviceGroup {
 public:
  // One for each of the backends, in their order, or an error.
  using Connect =
      std::function<absl::StatusOr<std::vector<std::unique_ptr<Collective>>>(const std::vector<Backend*>& backends)>;
  // What the ranks of a Run are given.
  struct Rank {
    int rank = 0;
    Backend& backend;
    Collective& ranks;
    absl::Duration timeout;  // of each collective operation
  };

  // `connect` is called by the first Run, and by one that follows a failure. The backends, of one kind, must outlive
  // the group. InvalidArgument for fewer than two; ResourceExhausted where their threads cannot be.
  static absl::StatusOr<std::unique_ptr<DeviceGroup>> Make(std::vector<Backend*> backends, Connect connect,
                                                           absl::Duration timeout);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int size() const { return static_cast<int>(backends_.size()); }
  Backend& backend(int rank) const { return *backends_[rank]; }

  // work(rank) of all ranks at once: that of `mine` on this thread, the others' on threads of the group. Returns when
  // all have returned, with the error of the one that failed first. FailedPrecondition and InvalidArgument are taken
  // for errors that all ranks find alike, before they send anything.
  absl::Status Run(int mine, absl::FunctionRef<absl::Status(const Rank&)> work);

 private:
  // What waits for its thread's next work; kernels/device_group.cc.
  struct Helper;
  DeviceGroup(std::vector<Backend*> backends, Connect connect, absl::Duration timeout);
  void TakeTurn();
  void PassTurn();
  absl::Status EnsureConnected();
  absl::Status RunConnected(int mine, absl::FunctionRef<absl::Status(const Rank&)> work);

  const std::vector<Backend*> backends_;
  const Connect connect_;
  const absl::Duration timeout_;
  std::vector<std::unique_ptr<Helper>> helpers_;          // one a rank
  std::vector<std::unique_ptr<Collective>> collectives_;  // whose turn it is; none where they must be made
  Mutex mu_;
  CondVar turn_changed_;
  uint64_t next_turn_ ABSL_GUARDED_BY(mu_) = 0;  // of the next that comes
  uint64_t turn_ ABSL_GUARDED_BY(mu_) = 0;       // of the Run under way
};

// For a Connect: make(rank, give_up) of all ranks at once, each on a thread of its own, as they wait for each other
// until *give_up. Where one fails the others give up; the error of the one that failed first.
absl::StatusOr<std::vector<std::unique_ptr<Collective>>> JoinTogether(
    int ranks,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Collective>>(int rank, const std::atomic<bool>* give_up)> make);

}  // namespace precondor
