// SPDX-License-Identifier: Apache-2.0
// ShardService: the calls by which a coordinator controls a shard.
#pragma once

#include "server/core/shard/shard.h"
#include "server/rpc/control_service.h"

namespace precondor::rpc {

// Implements v1.ShardService for a Shard. A call runs if the shard's FencingGate admits its fencing token. Thread-safe.
// Lifetime: both references outlive the service.
class ShardService final : public ControlService {
 public:
  ShardService(Shard& shard, ControlRunner& runner);
};

}  // namespace precondor::rpc
