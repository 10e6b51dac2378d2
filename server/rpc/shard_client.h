// SPDX-License-Identifier: Apache-2.0
// ShardControl over gRPC: how a coordinator reaches its shards.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"

#include "proto/wire/channel_security.h"
#include "server/core/shard/shard_control.h"

namespace precondor::rpc {

// Every call has the deadline `timeout` and waits within it for the shard to come up. Errors keep the shard's code and
// reason and name its address. Thread-safe.
std::unique_ptr<ShardControl> MakeShardClient(std::string address, absl::Duration timeout,
                                              const wire::ChannelSecurity& security);

}  // namespace precondor::rpc
