// SPDX-License-Identifier: Apache-2.0
// Opens a coordinator's journal as the configuration says: none, in a directory, or in etcd, where one of several
// candidates leads and the others stand by.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/app/config.h"
#include "server/core/api/coordinator_journal.h"
#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"
#include "server/store/file_system.h"

namespace precondor {

// Opens the journal and forwards to it. Append and Compact fail with Unavailable until Recover has returned. Recover
// and Stop may be called on different threads.
class CoordinatorStorage final : public CoordinatorJournal {
 public:
  // `fs` must outlive this. `on_waiting` is called with what Recover waits for (ElectionOptions), and `on_lost` when
  // another candidate leads (EtcdElection).
  CoordinatorStorage(const ServerConfig& config, store::FileSystem& fs,
                     std::function<void(const absl::Status&)> on_waiting,
                     std::function<void(const absl::Status&)> on_lost);
  ~CoordinatorStorage() override { Stop(); }

  // Returns true if Recover may block, because another candidate leads.
  bool standby() const { return election_ != nullptr; }
  // Opens the journal and returns its records. Call once. Returns Cancelled after Stop, or the storage's errors.
  absl::StatusOr<std::vector<CoordinatorRecord>> Recover();
  // Ends Recover and gives leadership up.
  void Stop();
  // Gives leadership up because a shard has reported another leader. See EtcdElection::Lose. No effect without etcd.
  void Lose(const absl::Status& why);

  absl::Status Append(const CoordinatorRecord& record) override;
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override;
  bool wants_compaction() const override;
  uint64_t leadership() const override;

 private:
  CoordinatorJournal* journal() const;
  void Open(std::unique_ptr<CoordinatorJournal> journal);

  store::FileSystem& fs_;
  const std::string data_dir_;
  std::unique_ptr<etcd::EtcdClient> client_;
  std::unique_ptr<etcd::EtcdElection> election_;  // null without etcd

  mutable Mutex mu_;
  std::unique_ptr<CoordinatorJournal> journal_ ABSL_GUARDED_BY(mu_);  // null before Recover; not replaced afterwards
};

}  // namespace precondor
