// SPDX-License-Identifier: Apache-2.0
#include "server/etcd/etcd_log.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"

namespace precondor::etcd {
namespace {

constexpr int64_t kPageKeys = 64;
constexpr size_t kOperationsATransaction = 64;  // etcd's default limit is 128
constexpr int kAttempts = 4;

constexpr absl::string_view kSessionFolder = "/session/";

std::string KindName(uint8_t kind) { return absl::StrCat("/", kind); }

etcdserverpb::RequestOp Put(const std::string& key, const std::string& value) {
  etcdserverpb::RequestOp operation;
  operation.mutable_request_put()->set_key(key);
  operation.mutable_request_put()->set_value(value);
  return operation;
}

etcdserverpb::RequestOp Delete(const std::string& key) {
  etcdserverpb::RequestOp operation;
  operation.mutable_request_delete_range()->set_key(key);
  return operation;
}

etcdserverpb::RequestOp Read(const std::string& key) {
  etcdserverpb::RequestOp operation;
  operation.mutable_request_range()->set_key(key);
  return operation;
}

}  // namespace

std::string EtcdLog::SessionPrefix(uint64_t session_id) const {
  return absl::StrCat(election_.prefix(), kSessionFolder, absl::Dec(session_id, absl::kZeroPad20));
}

absl::StatusOr<std::vector<etcdserverpb::KeyValue>> EtcdLog::ReadSessions() {
  const std::string prefix = absl::StrCat(election_.prefix(), kSessionFolder);
  etcdserverpb::RangeRequest request;
  request.set_key(prefix);
  request.set_range_end(EndOfPrefix(prefix));
  request.set_limit(kPageKeys);
  std::vector<etcdserverpb::KeyValue> found;
  while (true) {
    PRECONDOR_ASSIGN_OR_RETURN(etcdserverpb::RangeResponse page, client_.Range(request));
    for (etcdserverpb::KeyValue& entry : *page.mutable_kvs()) found.push_back(std::move(entry));
    if (!page.more() || page.kvs_size() == 0) return found;
    request.set_key(absl::StrCat(found.back().key(), absl::string_view("\0", 1)));  // the smallest greater key
    request.set_revision(request.revision() != 0 ? request.revision() : page.header().revision());
  }
}

absl::StatusOr<EtcdLog::Opened> EtcdLog::Open(EtcdClient& client, EtcdElection& election) {
  std::unique_ptr<EtcdLog> journal(new EtcdLog(client, election));
  // Writes first: from then on etcd refuses all pending writes of an earlier leader.
  PRECONDOR_RETURN_IF_ERROR(journal->Commit({}));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<etcdserverpb::KeyValue> entries, journal->ReadSessions());
  std::vector<CoordinatorRecord> records;
  for (const etcdserverpb::KeyValue& entry : entries) {
    const std::vector<absl::string_view> parts = absl::StrSplit(entry.key(), '/');
    int kind = 0;
    if (!absl::SimpleAtoi(parts.back(), &kind) || kind < 1 || kind > 255) {
      return absl::DataLossError(absl::StrCat("etcd key ", entry.key(), ": ends in no kind of record"));
    }
    absl::StatusOr<CoordinatorRecord> record =
        recovery::DecodeCoordinatorRecord(static_cast<uint8_t>(kind), entry.value());
    if (record.ok() && !absl::StartsWith(entry.key(), journal->SessionPrefix(recovery::SessionIdOf(*record)))) {
      record = absl::DataLossError(absl::StrCat("holds a record of session ", recovery::SessionIdOf(*record)));
    }
    if (!record.ok()) {
      return absl::Status(record.status().code(),
                          absl::StrCat("etcd key ", entry.key(), ": ", record.status().message()));
    }
    records.push_back(*std::move(record));
  }
  return Opened{std::move(journal), std::move(records)};
}

absl::Status EtcdLog::Commit(const std::vector<etcdserverpb::RequestOp>& operations) {
  PRECONDOR_RETURN_IF_ERROR(election_.Check());
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    etcdserverpb::TxnRequest request;
    *request.add_compare() = CreatedAt(election_.LeaderKey(), election_.revision());
    *request.add_compare() = ModifiedAt(SequenceKey(), sequence_);
    for (const etcdserverpb::RequestOp& operation : operations) *request.add_success() = operation;
    *request.add_success() = Put(SequenceKey(), "");
    *request.add_failure() = Read(election_.LeaderKey());
    *request.add_failure() = Read(SequenceKey());
    PRECONDOR_ASSIGN_OR_RETURN(const etcdserverpb::TxnResponse response, client_.Txn(request));
    if (response.succeeded()) {
      sequence_ = response.header().revision();
      return absl::OkStatus();
    }
    const etcdserverpb::RangeResponse& leader = response.responses(0).response_range();
    if (leader.kvs_size() == 0 || leader.kvs(0).create_revision() != election_.revision()) {
      election_.Lose(absl::FailedPreconditionError(leader.kvs_size() == 0
                                                       ? std::string("its key is gone")
                                                       : absl::StrCat("the leader is ", leader.kvs(0).value())));
      return election_.Check();
    }
    // An earlier write of this process, which timed out, has taken effect. Retries on top of it.
    const etcdserverpb::RangeResponse& sequence = response.responses(1).response_range();
    sequence_ = sequence.kvs_size() == 0 ? 0 : sequence.kvs(0).mod_revision();
  }
  return absl::UnavailableError(
      absl::StrCat("etcd: ", SequenceKey(), " was written by others in ", kAttempts, " attempts"));
}

absl::StatusOr<std::vector<etcdserverpb::RequestOp>> EtcdLog::Operations(const CoordinatorRecord& record) const {
  const std::string session = SessionPrefix(recovery::SessionIdOf(record));
  const uint8_t kind = recovery::KindOf(record);
  std::vector<etcdserverpb::RequestOp> operations;
  if (kind == recovery::kCloseRecord) {
    operations.push_back(Delete(session + KindName(recovery::kSessionRecord)));
  } else {
    PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, recovery::EncodeCoordinatorRecord(record));
    operations.push_back(Put(session + KindName(kind), bytes));
  }
  if (kind == recovery::kCloseRecord) {
    operations.push_back(Delete(session + KindName(recovery::kSnapshotsRecord)));
    operations.push_back(Delete(session + KindName(recovery::kClosingRecord)));
  }
  if (kind == recovery::kCloseRecord || kind == recovery::kSessionRecord) {
    operations.push_back(Delete(session + KindName(recovery::kMembershipRecord)));
    operations.push_back(Delete(session + KindName(recovery::kLeaseRecord)));
  }
  return operations;
}

absl::Status EtcdLog::Append(const CoordinatorRecord& record) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<etcdserverpb::RequestOp> operations, Operations(record));
  const absl::Status status = Commit(operations);
  if (!status.ok()) doubtful_ = true;
  return status;
}

absl::Status EtcdLog::Compact(absl::Span<const CoordinatorRecord> records) {
  std::set<std::string> kept;
  for (const CoordinatorRecord& record : records) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<etcdserverpb::RequestOp> operations, Operations(record));
    PRECONDOR_RETURN_IF_ERROR(Commit(operations));
    kept.insert(SessionPrefix(recovery::SessionIdOf(record)) + KindName(recovery::KindOf(record)));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<etcdserverpb::KeyValue> entries, ReadSessions());
  std::vector<etcdserverpb::RequestOp> removals;
  for (const etcdserverpb::KeyValue& entry : entries) {
    if (kept.count(entry.key()) == 0) removals.push_back(Delete(entry.key()));
    if (removals.size() == kOperationsATransaction) {
      PRECONDOR_RETURN_IF_ERROR(Commit(removals));
      removals.clear();
    }
  }
  if (!removals.empty()) PRECONDOR_RETURN_IF_ERROR(Commit(removals));
  doubtful_ = false;
  return absl::OkStatus();
}

}  // namespace precondor::etcd
