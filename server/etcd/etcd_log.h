// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal in etcd, for several coordinators of which one leads.
//
// Keys under the election's prefix: session/<id, 20 digits>/<kind> holds the last record of each kind of each session,
// so that there is little to compact; `sequence` is written by every transaction. A transaction is carried out only
// while the leader's key is the one that this election created, and `sequence` the one that the transaction before
// left: a leader that was replaced cannot write, and a write that was given up on cannot overtake a later one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/core/coordinator/coordinator_journal.h"
#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"

namespace precondor::etcd {

// Threads: one caller at a time.
class EtcdLog final : public CoordinatorJournal {
 public:
  struct Opened {
    std::unique_ptr<EtcdLog> journal;
    std::vector<CoordinatorRecord> records;  // for Coordinator::Restore
  };
  // After Campaign. `client` and `election` must outlive the log. Errors: FailedPrecondition not the leader, or a
  // record of a newer program; DataLoss a record that does not decode, naming its key; those of EtcdClient.
  static absl::StatusOr<Opened> Open(EtcdClient& client, EtcdElection& election);

  // FailedPrecondition once another one leads or may lead, and then permanently; those of EtcdClient, after which the
  // record may be there. A record larger than etcd takes in a request (1.5 MiB unless set) is InvalidArgument.
  absl::Status Append(const CoordinatorRecord& record) override;
  // In transactions of a session or of several removals each; one that fails leaves every session as it was or as
  // `records` says.
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override;
  bool wants_compaction() const override { return doubtful_; }  // an Append failed and may be there
  // The revision that made this process the leader.
  uint64_t leadership() const override { return static_cast<uint64_t>(election_.revision()); }

 private:
  EtcdLog(EtcdClient& client, EtcdElection& election) : client_(client), election_(election) {}
  // All keys of sessions, at one revision.
  absl::StatusOr<std::vector<etcdserverpb::KeyValue>> ReadSessions();
  absl::Status Commit(const std::vector<etcdserverpb::RequestOp>& operations);
  std::vector<etcdserverpb::RequestOp> Operations(const CoordinatorRecord& record) const;
  std::string SequenceKey() const { return election_.prefix() + "/sequence"; }
  std::string SessionPrefix(uint64_t session_id) const;

  EtcdClient& client_;
  EtcdElection& election_;
  int64_t sequence_ = 0;  // revision of the sequence key as of the last transaction
  bool doubtful_ = false;
};

}  // namespace precondor::etcd
