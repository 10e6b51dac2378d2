// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include <nlohmann/json.hpp>

#include "client/cpp/src/control.h"
#include "client/cpp/tools/ctl_commands.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/recovery/stored_session.h"
#include "server/store/crc32c.h"
#include "server/store/posix_file_system.h"

namespace precondor {
namespace {

constexpr absl::Duration kPause = absl::Milliseconds(20);

absl::Status AwaitComplete(ControlClient& server, const v1::RestoreSessionResponse& opened, absl::Duration timeout,
                           Canceller& canceller) {
  const absl::Time deadline = MonotonicNow() + timeout;
  do {
    PRECONDOR_ASSIGN_OR_RETURN(const auto listed,
                               server.Call<v1::ListSnapshotsResponse>(v1::ListSnapshotsRequest(), canceller));
    for (const v1::SessionSnapshot& snapshot : listed.session_snapshots()) {
      if (snapshot.session_id() != opened.session_id() || snapshot.snapshot_id() != opened.snapshot_id()) continue;
      if (snapshot.state() == v1::SNAPSHOT_STATE_COMPLETE) return absl::OkStatus();
      if (snapshot.state() == v1::SNAPSHOT_STATE_FAILED) return absl::AbortedError(snapshot.reason());
    }
  } while (MonotonicNow() < deadline && canceller.Pause(kPause));
  return absl::DeadlineExceededError(
      absl::StrCat("all layers have been sent, and not every shard has them on its disk within ",
                   absl::FormatDuration(timeout), "; snapshot list shows it as complete when they have"));
}

absl::Status SendAll(const CtlOptions& options, ControlClient& server, const recovery::StoredSession& stored,
                     const v1::RestoreSessionResponse& opened) {
  Canceller canceller;
  for (const v1::ShardAssignment& assignment : opened.shard_map().assignments()) {
    ControlClient shard(assignment.address(), options.timeout, options.security);
    for (const uint32_t layer : assignment.layers()) {
      const auto found = stored.layers.find(layer);
      if (found == stored.layers.end()) {
        return absl::InternalError(absl::StrCat("layer ", layer, ": the coordinator has placed it, the snapshot has ",
                                                stored.layers.size(), " layers"));
      }
      PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, recovery::ReadLayer(found->second));
      v1::RestoreLayerRequest piece;
      piece.set_session_id(opened.session_id());
      piece.set_secret(opened.secret());
      piece.set_step(stored.step);
      piece.set_layer(layer);
      piece.set_checksum(store::Crc32c(bytes));
      PRECONDOR_RETURN_IF_ERROR(SendLayer(shard, std::move(piece), bytes, canceller));
    }
  }
  return AwaitComplete(server, opened, options.timeout, canceller);
}

}  // namespace

absl::StatusOr<CtlOutput> RunRestore(const CtlOptions& options) {
  store::PosixFileSystem disk;
  PRECONDOR_ASSIGN_OR_RETURN(
      const recovery::StoredSession stored,
      recovery::FindStoredSession(disk, options.snapshot_paths, options.argument, options.snapshot));
  PRECONDOR_RETURN_IF_ERROR(recovery::VerifyStoredSession(stored));
  v1::RestoreSessionRequest request;
  SessionSpec spec = stored.spec;
  spec.delegates.clear();  // of the shards and ranks that there were
  if (options.world_size > 0) spec.world_size = static_cast<int32_t>(options.world_size);
  PRECONDOR_ASSIGN_OR_RETURN(*request.mutable_spec(), wire::EncodeSessionSpec(spec));
  request.set_step(stored.step);
  ControlClient server(options.server, options.timeout, options.security);
  Canceller canceller;
  PRECONDOR_RETURN_IF_ERROR(server.WaitForServer(options.timeout, canceller).status());
  // The end of the restore is read there, for which a caller needs the role operator: before anything is closed.
  PRECONDOR_RETURN_IF_ERROR(server.Call<v1::ListSnapshotsResponse>(v1::ListSnapshotsRequest(), canceller).status());
  if (options.replace) {
    PRECONDOR_RETURN_IF_ERROR(recovery::CheckDirectoriesNotInUse(disk, stored));
    v1::CloseSessionRequest close;
    close.set_name(options.argument);
    PRECONDOR_RETURN_IF_ERROR(server.Call<v1::CloseSessionResponse>(close, canceller).status());
  }
  PRECONDOR_ASSIGN_OR_RETURN(const auto opened, server.Call<v1::RestoreSessionResponse>(request, canceller));
  if (const absl::Status sent = SendAll(options, server, stored, opened); !sent.ok()) {
    return absl::Status(
        sent.code(),
        absl::StrCat("session ", options.argument,
                     ": no rank can join it before it is restored; --replace begins anew: ", sent.message()));
  }
  const int shards = opened.shard_map().assignments_size();
  if (options.json) {
    const nlohmann::json document = {
        {"session", options.argument}, {"step", stored.step}, {"layers", stored.layers.size()}, {"shards", shards}};
    return CtlOutput{document.dump(2) + "\n", true};
  }
  return CtlOutput{absl::StrCat(options.argument, ": ", stored.layers.size(), " layers restored on ", shards,
                                " shards; the job begins with step ", stored.step, "\n"),
                   true};
}

}  // namespace precondor
