// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal in etcd, for several coordinators of which one leads.
//
// Keys under the election's prefix: session/<id, 20 digits>/<kind> holds the last record of each kind of each session,
// so that little needs compaction. Every transaction writes `sequence`. A transaction succeeds only if the leader's key
// is the one that this election created, and if `sequence` is as the previous transaction left it. So a replaced leader
// cannot write, and a write that timed out cannot take effect after a later one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/core/api/coordinator_journal.h"
#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"

namespace precondor::etcd {

// Implements CoordinatorJournal. Threads: calls must not overlap.
class EtcdLog final : public CoordinatorJournal {
 public:
  struct Opened {
    std::unique_ptr<EtcdLog> journal;
    std::vector<CoordinatorRecord> records;  // for Coordinator::Restore
  };
  // Reads all records. Precondition: Campaign has returned OK. Returns FAILED_PRECONDITION if this process is not the
  // leader or a record is from a newer release; DATA_LOSS with the key if a record cannot be decoded; or the errors of
  // EtcdClient. Lifetime: `client` and `election` outlive the log.
  static absl::StatusOr<Opened> Open(EtcdClient& client, EtcdElection& election);

  // Writes a record. Returns FAILED_PRECONDITION, then permanently, once another candidate leads or may lead;
  // INVALID_ARGUMENT if the record exceeds etcd's request limit (1.5 MiB by default); or the errors of EtcdClient,
  // after which etcd may have the record or not.
  absl::Status Append(const CoordinatorRecord& record) override;
  // Uses one transaction for each record, and one for up to 64 removals of keys. If one fails, each record in etcd is
  // either as it was or as in `records`.
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override;
  bool wants_compaction() const override { return doubtful_; }
  // Returns the revision that made this process the leader.
  uint64_t leadership() const override { return static_cast<uint64_t>(election_.revision()); }

 private:
  EtcdLog(EtcdClient& client, EtcdElection& election) : client_(client), election_(election) {}
  // Returns all keys of sessions and their values, as of one revision.
  absl::StatusOr<std::vector<etcdserverpb::KeyValue>> ReadSessions();
  // Executes `operations` in one transaction (see the top of this file). Retries if only `sequence` is not as expected.
  absl::Status Commit(const std::vector<etcdserverpb::RequestOp>& operations);
  absl::StatusOr<std::vector<etcdserverpb::RequestOp>> Operations(const CoordinatorRecord& record) const;
  std::string SequenceKey() const { return election_.prefix() + "/sequence"; }
  std::string SessionPrefix(uint64_t session_id) const;

  EtcdClient& client_;
  EtcdElection& election_;
  int64_t sequence_ = 0;   // revision of the sequence key after the last transaction
  bool doubtful_ = false;  // an Append has failed, and etcd may have its record or not
};

}  // namespace precondor::etcd
