// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_replay.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/core/shard/shard_session.h"

namespace precondor {

void ShardReplay::GiveUp(uint64_t session_id, const absl::Status& why) {
  shard_.logger.Log(Severity::kError,
                    IsQuarantined(session_id) ? "session cannot come back from quarantine, and stays there"
                                              : "session cannot come back; its factors are lost",
                    {{"session_id", session_id}, {"reason", absl::string_view(why.message())}});
  if (const absl::StatusOr<bool> removed = sessions_.Remove(session_id, Removal::kReplayed); !removed.ok()) return;
  MutexLock lock(mu_);
  given_up_.insert(session_id);
}

void ShardReplay::LeaveStored(uint64_t session_id, const absl::Status& why) {
  MutexLock lock(mu_);
  given_up_.insert(session_id);
  no_room_[session_id] = why;
}

absl::Status ShardReplay::status() const {
  MutexLock lock(mu_);
  return no_room_.empty() ? absl::OkStatus() : no_room_.begin()->second;
}

bool ShardReplay::IsGivenUp(uint64_t session_id) const {
  MutexLock lock(mu_);
  return given_up_.contains(session_id);
}

void ShardReplay::AddInstall(const SessionInstall& install) {
  // Skips later epochs of a session that was given up, and an install that was in progress when the session moved to
  // quarantine.
  if (IsGivenUp(install.session_id) || !sessions_.CheckNotLeaving(install.session_id).ok()) return;
  const bool known = sessions_.FindAny(install.session_id).ok();
  const absl::Status status = installer_.Install(install, SessionInstaller::Source::kJournal).status();
  // A known session ignores an older install, and again refuses one that it refused before.
  if (status.ok() || known) return;
  if (absl::IsResourceExhausted(status)) return LeaveStored(install.session_id, status);
  GiveUp(install.session_id, status);
}

void ShardReplay::Add(ShardRecord record) {
  if (const auto* install = std::get_if<InstallRecord>(&record)) return AddInstall(install->install);
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    sessions_.Remove(removal->session_id, Removal::kReplayed).IgnoreError();
    sessions_.Release(removal->session_id, /*gone=*/true);
    MutexLock lock(mu_);
    given_up_.erase(removal->session_id);
    no_room_.erase(removal->session_id);
    return;
  }
  if (const auto* quarantine = std::get_if<QuarantineRecord>(&record)) {
    if (quarantine->back) return;
    sessions_.Remove(quarantine->session_id, Removal::kReplayed).IgnoreError();
    return sessions_.SetQuarantined(quarantine->session_id, QuarantineState::kClosing, quarantine->last_step);
  }
  std::visit(
      [this](auto& of_layer) {
        if constexpr (requires { of_layer.at; }) {
          ReplayLayer(of_layer.at, [&of_layer](LayerDriver& layer) { return layer.replay().Add(std::move(of_layer)); });
        }
      },
      record);
}

void ShardReplay::Add(GradientRecord record) {
  const LayerStep at = record.at;
  ReplayLayer(at, [&record](LayerDriver& layer) { return layer.replay().Add(std::move(record)); });
}

void ShardReplay::Load(const LayerImage& image) {
  ReplayLayer(image.at, [&image](LayerDriver& layer) { return layer.replay().Load(image); });
}

void ShardReplay::ReplayLayer(const LayerStep& at, absl::FunctionRef<absl::Status(LayerDriver&)> apply) {
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.FindAny(at.session_id);
  if (!session.ok()) return;
  LayerDriver* const layer = (*session)->layer(at.layer);
  const absl::Status status =
      layer == nullptr ? absl::DataLossError(absl::StrCat("layer ", at.layer, ": not one of the session's here"))
                       : apply(*layer);
  if (!status.ok()) GiveUp(at.session_id, status);
}

absl::Status ShardReplay::CheckReturned(uint64_t session_id) {
  bool lost = false;
  {
    MutexLock lock(mu_);
    const auto no_room = no_room_.find(session_id);
    absl::Status crowded = no_room == no_room_.end() ? absl::OkStatus() : no_room->second;
    no_room_.erase(session_id);
    lost = given_up_.erase(session_id) > 0;
    if (!crowded.ok()) return crowded;
  }
  if (!lost && sessions_.FindAny(session_id).ok()) return absl::OkStatus();
  return absl::DataLossError("what the disk has of it is not whole; the log of the shard says what is missing");
}

std::vector<uint64_t> ShardReplay::Finish() {
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) session->FinishReplay();
  std::vector<uint64_t> given_up;
  {
    MutexLock lock(mu_);
    given_up.assign(given_up_.begin(), given_up_.end());
    given_up_.clear();
  }
  ShardJournal* const journal = shard_.options.journal;
  if (journal != nullptr) {
    // Their records cannot be used, and the sessions may be installed again: the remove record separates the two.
    for (const uint64_t session_id : given_up) journal->Append(RemoveRecord{session_id});
  }
  serving_.FinishReplay();
  if (journal != nullptr) {
    for (const QuarantinedSession& session : journal->ListQuarantined()) {
      sessions_.SetQuarantined(session.install.session_id, QuarantineState::kStored, /*last_step=*/0);
    }
  }
  return given_up;
}

}  // namespace precondor
