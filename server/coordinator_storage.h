// SPDX-License-Identifier: Apache-2.0
// Where a coordinator's journal is, as the configuration says: nowhere, in a directory, or in etcd, where one of
// several candidates leads and the others stand by.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/config.h"
#include "server/core/coordinator/coordinator_journal.h"
#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"
#include "server/store/file_system.h"

namespace precondor {

// The journal that it makes available is this object: it refuses everything before Recover. Recover and Stop may be
// called by different threads.
class CoordinatorStorage final : public CoordinatorJournal {
 public:
  // `fs` outlives it. `on_waiting`: what Recover waits for (ElectionOptions); `on_lost`: another one leads from now on
  // (EtcdElection).
  CoordinatorStorage(const ServerConfig& config, store::FileSystem& fs,
                     std::function<void(const absl::Status&)> on_waiting,
                     std::function<void(const absl::Status&)> on_lost);
  ~CoordinatorStorage() override { Stop(); }

  // Recover may take as long as another candidate leads.
  bool standby() const { return election_ != nullptr; }
  // Opens the journal; what was written down. Once. Cancelled after Stop, and the storage's errors.
  absl::StatusOr<std::vector<CoordinatorRecord>> Recover();
  // Ends Recover, and gives leadership up.
  void Stop();
  // Where candidates stand by: another one leads, which came to light elsewhere. See EtcdElection::Lose.
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
  std::unique_ptr<CoordinatorJournal> journal_ ABSL_GUARDED_BY(mu_);  // null before Recover; then it stays
};

}  // namespace precondor
