// SPDX-License-Identifier: Apache-2.0
// Installs sessions on a shard, and changes the members and layers of installed ones.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "server/core/api/shard_control.h"
#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe.
class SessionInstaller {
 public:
  // All references must outlive the object.
  SessionInstaller(std::shared_ptr<ShardContext> shard, ShardSessions& sessions, ShardQuarantine& quarantine,
                   const ServingState& serving)
      : shard_(std::move(shard)), sessions_(sessions), quarantine_(quarantine), serving_(serving) {}

  // The origin of an install. An install from the journal is not recorded again. It also replaces no session of the
  // same name, because the journal has a record of its own for the removed session.
  enum class Source : uint8_t { kCoordinator, kJournal };
  // See ShardControl::Install. Returns the bytes reserved for the session.
  absl::StatusOr<int64_t> Install(const SessionInstall& install, Source source);

 private:
  // Installs a session that is not on the shard: makes room for it, makes its factors and adds it to the table.
  absl::StatusOr<int64_t> InstallNew(const SessionInstall& install, Source source);
  void Record(const SessionInstall& install, Source source);

  const std::shared_ptr<ShardContext> shard_;
  ShardSessions& sessions_;
  ShardQuarantine& quarantine_;
  const ServingState& serving_;
};

}  // namespace precondor
