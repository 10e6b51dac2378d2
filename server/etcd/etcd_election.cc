// SPDX-License-Identifier: Apache-2.0
#include "server/etcd/etcd_election.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace precondor::etcd {
namespace {

// Returns whether Campaign retries after this error: etcd is not reachable, is electing its own leader, or is slow.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

}  // namespace

EtcdElection::EtcdElection(EtcdClient& client, ElectionOptions options,
                           std::function<void(const absl::Status&)> on_lost)
    : client_(client), options_(std::move(options)), on_lost_(std::move(on_lost)) {}

EtcdElection::~EtcdElection() { Stop(); }

absl::Status EtcdElection::Campaign() {
  absl::Status told;
  while (true) {
    const absl::StatusOr<std::optional<std::string>> other = TryOnce();
    if (!other.ok() && !MayPass(other.status())) return other.status();
    const bool elected = other.ok() && !other->has_value();
    const absl::Status why = elected      ? absl::OkStatus()
                             : other.ok() ? absl::FailedPreconditionError(absl::StrCat(**other, " leads"))
                                          : other.status();
    if (!elected && why != told && options_.on_waiting != nullptr) options_.on_waiting(told = why);
    mu_.Lock();
    const bool leads = elected && state_ == State::kLeader;
    if (!leads && state_ != State::kStopped) {
      changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.retry));
    }
    const bool stopped = state_ == State::kStopped;
    if (leads && !stopped) {
      keeper_ = std::thread([this] {
        NameThisThread("etcd-lease");
        KeepAlive();
      });
    }
    mu_.Unlock();
    if (stopped) return absl::CancelledError("the election was stopped");
    if (leads) return absl::OkStatus();
  }
}

absl::StatusOr<std::optional<std::string>> EtcdElection::TryOnce() {
  const std::string key = LeaderKey();
  etcdserverpb::RangeRequest look;
  look.set_key(key);
  PRECONDOR_ASSIGN_OR_RETURN(const etcdserverpb::RangeResponse holder, client_.Range(look));
  if (holder.kvs_size() > 0) return holder.kvs(0).value();

  const Steady::time_point asked = Steady::now();
  PRECONDOR_ASSIGN_OR_RETURN(const int64_t lease, client_.GrantLease(options_.lease_ttl));
  etcdserverpb::TxnRequest request;
  *request.add_compare() = CreatedAt(key, 0);
  etcdserverpb::PutRequest& put = *request.add_success()->mutable_request_put();
  put.set_key(key);
  put.set_value(options_.identity);
  put.set_lease(lease);
  // If the key exists, another candidate was faster, or this request was executed before and its answer was lost.
  *request.add_failure()->mutable_request_range() = look;
  const absl::StatusOr<etcdserverpb::TxnResponse> response = client_.Txn(request);
  int64_t revision = 0;
  std::optional<std::string> winner;
  if (response.ok() && response->succeeded()) {
    revision = response->header().revision();
  } else if (response.ok() && response->responses_size() == 1 &&
             response->responses(0).response_range().kvs_size() == 1) {
    const etcdserverpb::KeyValue& key_value = response->responses(0).response_range().kvs(0);
    if (key_value.lease() == lease) {
      revision = key_value.create_revision();
    } else {
      winner = key_value.value();
    }
  }
  const Steady::time_point until = asked + absl::ToChronoNanoseconds(options_.lease_ttl);
  const bool in_time = Steady::now() < until;
  if (revision != 0 && in_time) {
    MutexLock lock(mu_);
    if (state_ == State::kFollower) {
      state_ = State::kLeader;
      lease_ = lease;
      revision_ = revision;
      leads_until_ = until;
      return std::nullopt;
    }
  }
  // Revoking the lease also removes the key if the request was executed nevertheless.
  client_.RevokeLease(lease).IgnoreError();
  if (!in_time || absl::IsNotFound(response.status())) {
    return absl::UnavailableError(
        absl::StrCat("etcd took longer than the lease, ", absl::FormatDuration(options_.lease_ttl), ", to grant it"));
  }
  PRECONDOR_RETURN_IF_ERROR(response.status());
  if (winner.has_value()) return winner;
  return absl::CancelledError("the election was stopped, or the key went meanwhile");
}

void EtcdElection::KeepAlive() {
  const auto interval = absl::ToChronoNanoseconds(options_.lease_ttl / 3);
  mu_.Lock();
  const int64_t lease = lease_;
  while (state_ == State::kLeader) {
    changed_.wait_for(mu_, interval, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ != State::kLeader; });
    if (state_ != State::kLeader) break;
    mu_.Unlock();
    KeepAliveOnce(lease);
    mu_.Lock();
  }
  mu_.Unlock();
}

void EtcdElection::KeepAliveOnce(int64_t lease) {
  const Steady::time_point asked = Steady::now();
  const absl::Status status = client_.KeepLeaseAlive(lease);
  if (status.ok()) {
    MutexLock lock(mu_);
    // A late answer does not restore a leadership that Check may already have reported as lost.
    if (Steady::now() < leads_until_) {
      leads_until_ = asked + absl::ToChronoNanoseconds(options_.lease_ttl);
      return;
    }
  }
  if (absl::IsNotFound(status)) {
    Lose(status);
  } else if (const absl::Status check = Check(); !check.ok()) {
    Lose(check);
  }
}

absl::Status EtcdElection::Check() const {
  MutexLock lock(mu_);
  if (state_ == State::kLeader && Steady::now() < leads_until_) return absl::OkStatus();
  if (state_ == State::kLost) return lost_;
  return absl::FailedPreconditionError(
      absl::StrCat(options_.identity, state_ == State::kLeader ? " led, but its lease has run out" : " does not lead"));
}

void EtcdElection::Lose(const absl::Status& why) {
  absl::Status lost;
  {
    MutexLock lock(mu_);
    if (state_ != State::kLeader) return;
    state_ = State::kLost;
    lost_ = absl::FailedPreconditionError(
        absl::StrCat(options_.identity, " no longer leads ", options_.prefix, ": ", why.message()));
    lost = lost_;
  }
  changed_.notify_all();
  if (on_lost_ != nullptr) on_lost_(lost);
}

void EtcdElection::Stop() {
  int64_t lease = 0;
  {
    MutexLock lock(mu_);
    if (state_ == State::kLeader) lease = lease_;
    state_ = State::kStopped;
  }
  changed_.notify_all();
  if (keeper_.joinable()) keeper_.join();
  if (lease != 0) client_.RevokeLease(lease).IgnoreError();
}

int64_t EtcdElection::revision() const {
  MutexLock lock(mu_);
  return revision_;
}

}  // namespace precondor::etcd
