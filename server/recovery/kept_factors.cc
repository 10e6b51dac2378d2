// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/kept_factors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/shard_snapshots.h"

namespace precondor::recovery {
namespace {

constexpr uint32_t kMetadataFormat = 1;

std::string Metadata(uint64_t session_id) {
  std::string out;
  PutU32(out, kMetadataFormat);
  PutU64(out, session_id);
  return out;
}

// Returns whether the store holds these factors unchanged. Returns false if the snapshot is missing or damaged.
bool Holds(const store::SnapshotStore& store, const ReleasedFactors& factors) {
  const absl::StatusOr<store::SnapshotManifest> manifest = store.ReadManifest(factors.eviction_id);
  if (!manifest.ok()) return false;
  return std::all_of(factors.states.begin(), factors.states.end(), [&](const auto& one) {
    const absl::StatusOr<std::string> state = store.Read(*manifest, LayerKey(one.first));
    return state.ok() && *state == one.second;
  });
}

}  // namespace

KeptFactors::KeptFactors(store::FileSystem& fs, std::string dir, Options options, const Clock& clock, Logger& logger,
                         StoreObserver& observer)
    : fs_(fs),
      dir_(std::move(dir)),
      options_(std::move(options)),
      clock_(clock),
      logger_(logger),
      observer_(observer) {}

absl::StatusOr<std::vector<uint64_t>> KeptFactors::Open() {
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  std::vector<uint64_t> sessions;
  for (const std::string& name : names) {
    uint64_t session_id = 0;
    if (!absl::SimpleAtoi(name, &session_id)) continue;
    PRECONDOR_RETURN_IF_ERROR(StoreOf(session_id).status());
    sessions.push_back(session_id);
  }
  return sessions;
}

absl::StatusOr<store::SnapshotStore*> KeptFactors::StoreOf(uint64_t session_id) const {
  MutexLock lock(stores_mu_);
  const auto found = stores_.find(session_id);
  if (found != stores_.end()) return found->second.get();
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<store::SnapshotStore> store,
                             store::SnapshotStore::Open(fs_, store::JoinPath(dir_, absl::StrCat(session_id))));
  return stores_.emplace(session_id, std::move(store)).first->second.get();
}

void KeptFactors::Keep(std::string session, ReleasedFactors factors) {
  auto pending = std::make_shared<Pending>(Pending{.session = std::move(session), .factors = std::move(factors)});
  {
    MutexLock lock(mu_);
    pending_[pending->factors.session_id][pending->factors.eviction_id] = pending;
  }
  PostWrite(pending);
}

void KeptFactors::PostWrite(const std::shared_ptr<Pending>& pending) {
  options_.post([this, pending] { Write(pending); });
}

bool KeptFactors::IsDurable(uint64_t session_id, uint64_t eviction_id) {
  std::shared_ptr<Pending> again;
  {
    MutexLock lock(mu_);
    const auto session = pending_.find(session_id);
    if (session == pending_.end()) return true;
    const auto found = session->second.find(eviction_id);
    if (found == session->second.end()) return true;
    Pending& pending = *found->second;
    if (pending.posted || clock_.Now() < pending.failed_at + options_.retry) return false;
    pending.posted = true;
    again = found->second;
  }
  PostWrite(again);
  return false;
}

void KeptFactors::Write(const std::shared_ptr<Pending>& pending) {
  const ReleasedFactors& factors = pending->factors;
  const auto awaited = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto session = pending_.find(factors.session_id);
    if (session == pending_.end()) return false;
    const auto found = session->second.find(factors.eviction_id);
    return found != session->second.end() && found->second == pending;
  };
  {
    MutexLock lock(mu_);
    if (!awaited()) return;
  }
  options_.sync();
  const absl::Status written = WriteFiles(factors);
  {
    MutexLock lock(mu_);
    if (!awaited()) return;
    if (written.ok()) {
      pending_[factors.session_id].erase(factors.eviction_id);
    } else {
      pending->posted = false;
      pending->failed_at = clock_.Now();
    }
  }
  observer_.OnFactorsKept(pending->session, written.ok());
  logger_.Log(
      written.ok() ? Severity::kInfo : Severity::kError,
      written.ok() ? "released factors are on the disk" : "released factors cannot be written; they stay in memory",
      {{"session", pending->session},
       {"eviction_id", factors.eviction_id},
       {"layers", static_cast<uint64_t>(factors.states.size())},
       {"reason", absl::string_view(written.message())}});
}

absl::Status KeptFactors::WriteFiles(const ReleasedFactors& factors) const {
  PRECONDOR_ASSIGN_OR_RETURN(store::SnapshotStore* const store, StoreOf(factors.session_id));
  if (Holds(*store, factors)) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(store->Remove(factors.eviction_id));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<store::SnapshotWriter> writer, store->Begin(factors.eviction_id));
  for (const auto& [layer, state] : factors.states) PRECONDOR_RETURN_IF_ERROR(writer->Add(LayerKey(layer), state));
  return writer->Commit(Metadata(factors.session_id));
}

absl::StatusOr<std::string> KeptFactors::Read(uint64_t session_id, uint64_t eviction_id, uint32_t layer) const {
  {
    MutexLock lock(mu_);
    if (const auto session = pending_.find(session_id); session != pending_.end()) {
      if (const auto found = session->second.find(eviction_id); found != session->second.end()) {
        const auto state = found->second->factors.states.find(layer);
        if (state != found->second->factors.states.end()) return state->second;
        return absl::NotFoundError(absl::StrCat("eviction ", eviction_id, ": nothing of layer ", layer));
      }
    }
  }
  PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotStore* const store, StoreOf(session_id));
  PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotManifest manifest, store->ReadManifest(eviction_id));
  return store->Read(manifest, LayerKey(layer));
}

void KeptFactors::DropPending(uint64_t session_id, uint64_t eviction_id) {
  MutexLock lock(mu_);
  if (const auto session = pending_.find(session_id); session != pending_.end()) session->second.erase(eviction_id);
}

void KeptFactors::Remove(uint64_t session_id) {
  {
    MutexLock lock(mu_);
    pending_.erase(session_id);
  }
  options_.post([this, session_id] { Erase(session_id); });
}

absl::Status KeptFactors::CheckDurable(uint64_t session_id, uint64_t eviction_id) const {
  PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotStore* const store, StoreOf(session_id));
  const absl::StatusOr<store::SnapshotManifest> manifest = store->ReadManifest(eviction_id);
  if (manifest.ok()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("the factors of eviction ", eviction_id, " are not on the disk"));
}

void KeptFactors::OnSnapshot(uint64_t session_id, uint64_t floor) {
  {
    MutexLock lock(mu_);
    const auto [before, first] = floors_.try_emplace(session_id, floor);
    floor = std::min(floor, std::exchange(before->second, floor));
    if (first) return;
  }
  {
    MutexLock lock(stores_mu_);
    if (!stores_.contains(session_id)) return;
  }
  const absl::StatusOr<store::SnapshotStore*> store = StoreOf(session_id);
  absl::StatusOr<std::vector<uint64_t>> ids = store.ok() ? (*store)->List() : store.status();
  absl::Status status = ids.status();
  for (size_t i = 0; status.ok() && i < ids->size() && (*ids)[i] < floor; ++i) status = (*store)->Remove((*ids)[i]);
  if (status.ok()) return;
  logger_.Log(Severity::kWarning, "released factors that are not needed stay on the disk",
              {{"session_id", session_id}, {"reason", absl::string_view(status.message())}});
}

void KeptFactors::Erase(uint64_t session_id) {
  std::unique_ptr<store::SnapshotStore> store;
  {
    MutexLock lock(mu_);
    floors_.erase(session_id);
  }
  {
    MutexLock lock(stores_mu_);
    const auto found = stores_.find(session_id);
    if (found == stores_.end()) return;
    store = std::move(found->second);
    stores_.erase(found);
  }
  const absl::Status status = RemoveStore(fs_, std::move(store), store::JoinPath(dir_, absl::StrCat(session_id)));
  if (status.ok()) return;
  logger_.Log(Severity::kWarning, "released factors of a closed session stay on the disk",
              {{"session_id", session_id}, {"reason", absl::string_view(status.message())}});
}

}  // namespace precondor::recovery
