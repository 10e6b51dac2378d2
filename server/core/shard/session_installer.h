// SPDX-License-Identifier: Apache-2.0
// How a session gets onto a shard, and how its membership and layers there become others.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/shard/serving_state.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_layers.h"
#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe.
class SessionInstaller {
 public:
  // References outlive it.
  SessionInstaller(std::shared_ptr<ShardContext> shard, ShardSessions& sessions, ShardQuarantine& quarantine,
                   const ServingState& serving)
      : shard_(std::move(shard)), sessions_(sessions), quarantine_(quarantine), serving_(serving) {}

  // What asks for the install. One from the journal is not recorded again, and replaces no session of its name: a
  // record of its own says which has gone.
  enum class Source : uint8_t { kCoordinator, kJournal };
  // See ShardControl::Install. Returns the bytes that the session has reserved.
  absl::StatusOr<int64_t> Install(const SessionInstall& install, Source source);

 private:
  // A new session: admission, reservation, states.
  absl::StatusOr<int64_t> InstallNew(const SessionInstall& install, Source source);
  // The session goes on with other layers, in a later epoch: those that stay keep their factors, those that come begin
  // with fresh ones.
  absl::StatusOr<int64_t> ChangeLayers(const std::shared_ptr<ShardSession>& session, const SessionInstall& install,
                                       Source source);
  void Record(const SessionInstall& install, Source source);
  // What the session now reserves, to observer and log.
  void Report(const SessionInstall& install, const LayerRoom& room, absl::string_view event);

  const std::shared_ptr<ShardContext> shard_;
  ShardSessions& sessions_;
  ShardQuarantine& quarantine_;
  const ServingState& serving_;
};

}  // namespace precondor
