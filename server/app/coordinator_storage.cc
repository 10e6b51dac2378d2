// SPDX-License-Identifier: Apache-2.0
#include "server/app/coordinator_storage.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/etcd/etcd_log.h"
#include "server/recovery/coordinator_log.h"

namespace precondor {

CoordinatorStorage::CoordinatorStorage(const ServerConfig& config, store::FileSystem& fs,
                                       std::function<void(const absl::Status&)> on_waiting,
                                       std::function<void(const absl::Status&)> on_lost)
    : fs_(fs), data_dir_(config.data_dir) {
  if (config.etcd_endpoints.empty()) return;
  etcd::EtcdOptions options;
  options.endpoints = config.etcd_endpoints;
  client_ = std::make_unique<etcd::EtcdClient>(options);
  etcd::ElectionOptions election;
  election.prefix = config.etcd_prefix;
  election.identity = DialAddress(config);
  election.lease_ttl = absl::Milliseconds(config.etcd_lease_ms);
  election.on_waiting = std::move(on_waiting);
  election_ = std::make_unique<etcd::EtcdElection>(*client_, std::move(election), std::move(on_lost));
}

absl::StatusOr<std::vector<CoordinatorRecord>> CoordinatorStorage::Recover() {
  if (election_ != nullptr) {
    PRECONDOR_RETURN_IF_ERROR(election_->Campaign());
    PRECONDOR_ASSIGN_OR_RETURN(etcd::EtcdLog::Opened opened, etcd::EtcdLog::Open(*client_, *election_));
    Open(std::move(opened.journal));
    return std::move(opened.records);
  }
  if (data_dir_.empty()) {
    Open(std::make_unique<NullCoordinatorJournal>());
    return std::vector<CoordinatorRecord>();
  }
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, data_dir_));
  PRECONDOR_ASSIGN_OR_RETURN(recovery::CoordinatorLog::Opened opened,
                             recovery::CoordinatorLog::Open(fs_, absl::StrCat(data_dir_, "/coordinator")));
  Open(std::move(opened.journal));
  return std::move(opened.records);
}

void CoordinatorStorage::Stop() {
  if (election_ != nullptr) election_->Stop();
}

void CoordinatorStorage::Lose(const absl::Status& why) {
  if (election_ != nullptr) election_->Lose(why);
}

uint64_t CoordinatorStorage::leadership() const {
  const CoordinatorJournal* const opened = journal();
  return opened == nullptr ? 0 : opened->leadership();
}

void CoordinatorStorage::Open(std::unique_ptr<CoordinatorJournal> journal) {
  MutexLock lock(mu_);
  journal_ = std::move(journal);
}

CoordinatorJournal* CoordinatorStorage::journal() const {
  MutexLock lock(mu_);
  return journal_.get();
}

absl::Status CoordinatorStorage::Append(const CoordinatorRecord& record) {
  CoordinatorJournal* const opened = journal();
  return opened == nullptr ? absl::UnavailableError("the journal is not open yet") : opened->Append(record);
}

absl::Status CoordinatorStorage::Compact(absl::Span<const CoordinatorRecord> records) {
  CoordinatorJournal* const opened = journal();
  return opened == nullptr ? absl::UnavailableError("the journal is not open yet") : opened->Compact(records);
}

bool CoordinatorStorage::wants_compaction() const {
  CoordinatorJournal* const opened = journal();
  return opened != nullptr && opened->wants_compaction();
}

}  // namespace precondor
