// SPDX-License-Identifier: Apache-2.0
// Stores the factors that sessions release in first order until the job returns to second order: a snapshot store for
// each session, with one snapshot for each eviction.
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
#include "server/core/api/shard_journal.h"
#include "server/core/api/store_observer.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {

// Writes released factors to the disk and reads them back. Each session has the directory `<dir>/<session_id>`. Factors
// stay in memory until they are durable; a failed write is tried again. Thread-safe.
class KeptFactors {
 public:
  struct Options {
    absl::Duration retry = absl::Seconds(5);          // pause after a failed write
    std::function<void(std::function<void()>)> post;  // queues a job on the writer, the one thread that writes
    // Called on the writer before it writes factors: syncs the log, so that the records of the eviction are durable
    // first.
    std::function<void()> sync;
  };
  // Lifetime: the references outlive this object and all posted jobs.
  KeptFactors(store::FileSystem& fs, std::string dir, Options options, const Clock& clock, Logger& logger,
              StoreObserver& observer);

  // Opens the directories and returns the sessions that have one. Returns the disk's errors. Call it before all others.
  absl::StatusOr<std::vector<uint64_t>> Open();

  // Takes factors and queues their write. `session` is the session's name, for log lines and metrics. Factors that the
  // disk already holds unchanged under the same eviction are not written again.
  void Keep(std::string session, ReleasedFactors factors);
  // Returns false while the eviction's factors are in memory and not durable. Queues a failed write again if
  // Options::retry has passed.
  bool IsDurable(uint64_t session_id, uint64_t eviction_id);
  // Returns a layer's state. Returns NOT_FOUND if it was not kept, DATA_LOSS with the name of a damaged file, or the
  // disk's errors.
  absl::StatusOr<std::string> Read(uint64_t session_id, uint64_t eviction_id, uint32_t layer) const;
  // Drops the eviction's factors if they are not durable yet. Call it when the layers have these factors again.
  void DropPending(uint64_t session_id, uint64_t eviction_id);
  // Removes the factors of a session that has ended.
  void Remove(uint64_t session_id);

  // Returns OK if the eviction's factors are durable, so that a snapshot may depend on them. Returns ABORTED if they
  // are not. Runs on the writer.
  absl::Status CheckDurable(uint64_t session_id, uint64_t eviction_id) const;
  // Call it when a snapshot of the session is durable that needs no eviction below `floor`. Removes the evictions that
  // neither this snapshot nor the previous one needs. Runs on the writer.
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
  std::map<uint64_t, Evictions> pending_ ABSL_GUARDED_BY(mu_);  // by session; what is not durable yet
  // By session: the `floor` of the newest snapshot since the process started.
  std::map<uint64_t, uint64_t> floors_ ABSL_GUARDED_BY(mu_);

  // Separate from mu_ because it is held while a directory is opened.
  mutable Mutex stores_mu_;
  mutable std::map<uint64_t, std::unique_ptr<store::SnapshotStore>> stores_ ABSL_GUARDED_BY(stores_mu_);
};

}  // namespace precondor::recovery
