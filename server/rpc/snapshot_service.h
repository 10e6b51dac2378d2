// SPDX-License-Identifier: Apache-2.0
// SnapshotService: lets operators take, list, verify and restore snapshots on a shard, a coordinator or both, and
// workers restore what they have read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/v1/snapshot.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/rpc/control_service.h"
#include "server/rpc/session_service.h"

namespace precondor::rpc {

// What the service calls. The functions are thread-safe and return the service's errors. `coordinator` is null if the
// server is not a coordinator; the functions are empty if it is not a shard.
struct SnapshotSubject {
  Coordinator* coordinator = nullptr;
  std::function<absl::Status(const std::string& session, uint64_t step)> create;
  std::function<absl::StatusOr<std::vector<v1::SnapshotInfo>>()> list;
  std::function<absl::StatusOr<v1::SnapshotInfo>(uint64_t session_id, uint64_t snapshot_id)> verify;
  // Returns true if this piece has completed the layer, which now has the factors.
  std::function<absl::StatusOr<bool>(const v1::RestoreLayerRequest& piece)> restore;
  CallerFn caller;
};

// Implements v1.SnapshotService for a SnapshotSubject. Thread-safe. Lifetime: `runner` and the objects that the subject
// uses outlive the service.
class SnapshotService final : public ControlService {
 public:
  SnapshotService(SnapshotSubject subject, ControlRunner& runner);

 private:
  const SnapshotSubject subject_;
};

}  // namespace precondor::rpc
