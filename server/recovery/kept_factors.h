// SPDX-License-Identifier: Apache-2.0
// Factors that sessions in first order have let go of, on the disk until the job wants them back: a snapshot store for
// each session, with one snapshot an eviction.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/shard/shard_journal.h"
#include "server/core/shard/store_observer.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {

// Thread-safe. One directory a session, `<dir>/<session_id>`. What is not durable yet is in memory, and what could not
// be written is written again.
class KeptFactors {
 public:
  struct Options {
    absl::Duration retry = absl::Seconds(5);          // after a failure
    std::function<void(std::function<void()>)> post;  // has a job run on the one thread that writes
    std::function<void()>
        sync;  // on it: what the log has of an eviction outlives the machine no later than its factors
  };
  // References outlive it, and jobs do not outlive those.
  KeptFactors(store::FileSystem& fs, std::string dir, Options options, const Clock& clock, Logger& logger,
              StoreObserver& observer);

  // Before anything else. Returns the sessions that there is something of. Errors: the disk's.
  absl::StatusOr<std::vector<uint64_t>> Open();

  // `session`: the name, for log and metrics. What is on the disk under the same eviction already, as it is, is not
  // written again.
  void Keep(std::string session, ReleasedFactors factors);
  // False: on the way to the disk. Tries again what failed, when it is time.
  bool Kept(uint64_t session_id, uint64_t eviction_id);
  // NotFound; DataLoss naming the file; those of the disk.
  absl::StatusOr<std::string> Read(uint64_t session_id, uint64_t eviction_id, uint32_t layer) const;
  // The layers have them again: those that are not durable need not become so.
  void TakenBack(uint64_t session_id, uint64_t eviction_id);
  // The session is gone, and so are its factors.
  void Remove(uint64_t session_id);

  // On the thread that writes. A snapshot whose images need these factors may count on them: OK when they are durable.
  absl::Status CheckDurable(uint64_t session_id, uint64_t eviction_id) const;
  // On the thread that writes. A session's snapshot is durable that needs no eviction below `floor`. Removes
  // what neither this nor the one before it needs.
  void OnSnapshot(uint64_t session_id, uint64_t floor);

 private:
  struct Pending {
    std::string session;
    ReleasedFactors factors;
    bool posted = true;
    absl::Time failed_at = absl::InfinitePast();
  };

  absl::StatusOr<store::SnapshotStore*> StoreOf(uint64_t session_id) const;
  void PostWrite(const std::shared_ptr<Pending>& pending);
  void Write(const std::shared_ptr<Pending>& pending);
  absl::Status WriteFiles(const ReleasedFactors& factors) const;
  void Erase(uint64_t session_id);

  store::FileSystem& fs_;
  const std::string dir_;
  const Options options_;
  const Clock& clock_;
  Logger& logger_;
  StoreObserver& observer_;

  mutable Mutex mu_;
  using Evictions = std::map<uint64_t, std::shared_ptr<Pending>>;
  std::map<uint64_t, Evictions> pending_ ABSL_GUARDED_BY(mu_);  // by session
  std::map<uint64_t, uint64_t> floors_ ABSL_GUARDED_BY(mu_);    // of the newest snapshot since the process began

  // Held while a directory is opened, hence apart from mu_.
  mutable Mutex stores_mu_;
  mutable std::map<uint64_t, std::unique_ptr<store::SnapshotStore>> stores_ ABSL_GUARDED_BY(stores_mu_);
};

}  // namespace precondor::recovery
