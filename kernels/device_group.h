// SPDX-License-Identifier: Apache-2.0
// The devices of one process as ranks 0 ... size() - 1 that together compute what is too large for one device. Each
// rank has a backend, and a Collective over the memory of all ranks.
//
// Errors: if a rank fails while others may be in a collective operation, the group aborts the communicators, so that no
//   rank waits for the time-out. The next Run makes new communicators. The work under way is lost; the group stays
//   usable.
// Threads: Run may be called from any thread. Calls run one at a time, in order of arrival.
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
  // Makes one Collective for each backend, in their order, or returns an error.
  using Connect =
      std::function<absl::StatusOr<std::vector<std::unique_ptr<Collective>>>(const std::vector<Backend*>& backends)>;
  // Arguments of a rank's work.
  struct Rank {
    int rank = 0;
    Backend& backend;
    Collective& ranks;
    absl::Duration timeout;  // for each collective operation
  };

  // Makes a group. The first Run calls `connect`, and so does a Run that follows a failure. The backends must be of one
  // kind and outlive the group. Returns InvalidArgument for fewer than two backends, and ResourceExhausted if the
  // group's threads cannot be started.
  static absl::StatusOr<std::unique_ptr<DeviceGroup>> Make(std::vector<Backend*> backends, Connect connect,
                                                           absl::Duration timeout);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int size() const { return static_cast<int>(backends_.size()); }
  Backend& backend(int rank) const { return *backends_[rank]; }

  // Calls work(rank) for all ranks concurrently: for `mine` on this thread, for the others on the group's threads.
  // Returns when all calls have returned, with the error of the rank that failed first. If a rank's communicator is
  // intact, its FailedPrecondition or InvalidArgument does not abort the others: `work` must return these codes on all
  // ranks alike, before any rank sends anything.
  absl::Status Run(int mine, absl::FunctionRef<absl::Status(const Rank&)> work);

 private:
  // A thread that runs one function at a time; kernels/device_group.cc.
  struct Helper;
  DeviceGroup(std::vector<Backend*> backends, Connect connect, absl::Duration timeout);
  void TakeTurn();
  void PassTurn();
  absl::Status EnsureConnected();
  absl::Status RunConnected(int mine, absl::FunctionRef<absl::Status(const Rank&)> work);

  const std::vector<Backend*> backends_;
  const Connect connect_;
  const absl::Duration timeout_;
  std::vector<std::unique_ptr<Helper>> helpers_;  // one for each rank
  // Used by the Run whose turn it is. Empty if the next Run must make new ones.
  std::vector<std::unique_ptr<Collective>> collectives_;
  Mutex mu_;
  CondVar turn_changed_;
  uint64_t next_turn_ ABSL_GUARDED_BY(mu_) = 0;  // ticket of the next caller of Run
  uint64_t turn_ ABSL_GUARDED_BY(mu_) = 0;       // ticket of the Run under way
};

// Helper for a Connect. Calls make(rank, give_up) for all ranks concurrently, each on its own thread, because the calls
// wait for each other until *give_up is true. If one fails, sets *give_up for the others and returns the error of the
// rank that failed first.
absl::StatusOr<std::vector<std::unique_ptr<Collective>>> JoinTogether(
    int ranks,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Collective>>(int rank, const std::atomic<bool>* give_up)> make);

}  // namespace precondor
