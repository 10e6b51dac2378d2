// SPDX-License-Identifier: Apache-2.0
// ShardControl over gRPC: the coordinator's client of one shard.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"

#include "proto/wire/channel_security.h"
#include "server/core/api/shard_control.h"

namespace precondor::rpc {

// Returns a client of the shard at `address`. Each call has the deadline `timeout` and waits within it until the shard
// accepts connections. Probe and TakeSnapshot have a deadline of at most 1 s and fail at once if no server listens.
// Errors keep the shard's code and reason and name its address; a call that exceeds its deadline, or that the shard
// ends with CANCELLED, fails with UNAVAILABLE. Thread-safe.
std::unique_ptr<ShardControl> MakeShardClient(std::string address, absl::Duration timeout,
                                              const wire::ChannelSecurity& security);

}  // namespace precondor::rpc
