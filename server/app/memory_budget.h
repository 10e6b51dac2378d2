// SPDX-License-Identifier: Apache-2.0
// The memory that a server may come to use, and what its container has. docs/operate/operations.md has the rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/app/config.h"
#include "server/core/api/shard_summary.h"

namespace precondor {

// Parts with their bytes: "sessions", "messages", "requests", "contributions" and "process".
using MemoryBudget = std::vector<std::pair<absl::string_view, int64_t>>;

// Returns the bytes that a coordinator may keep of its sessions' descriptions and ranks: memory_limit, or 128 MiB if it
// has its default, which is made for factors.
int64_t TableBytes(const ServerConfig& config);

// Returns the most that each part may use while the shard has these sessions. `sessions_on_host` is false where the
// memory of devices holds what sessions reserve.
MemoryBudget BudgetOf(const ServerConfig& config, bool sessions_on_host,
                      absl::Span<const ShardSessionSummary> sessions);

int64_t SumOf(const MemoryBudget& budget);

// Returns ResourceExhausted if the process may not have the address space that its threads need (`ulimit -v`): gRPC
// would wait for a thread that cannot start, or end the process.
absl::Status CheckAddressSpace(const ServerConfig& config);

// Returns the lowest memory limit, in bytes, of this process's cgroup and those above it; nullopt without a limit.
// `root` is a folder that stands for / in tests.
std::optional<int64_t> ContainerMemory(const std::string& root = "");

}  // namespace precondor
