// SPDX-License-Identifier: Apache-2.0
#include "server/app/memory_budget.h"

#include <algorithm>
#include <fstream>
#include <sys/resource.h>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "kernels/base/dtype.h"
#include "server/core/resources/memory_pools.h"
#include "server/rpc/request_budget.h"

namespace precondor {
namespace {

constexpr int64_t kProcess = int64_t{64} << 20;  // measured with two threads

// The bytes of one rank: two credits, or two of the largest gradients (rpc::OpenPayloads).
int64_t OpenBytesOf(const SessionSpec& spec, int64_t credit_bytes) {
  int64_t largest = 0;
  for (const LayerSpec& layer : spec.layers) {
    largest = std::max(largest, layer.d_out * layer.d_in * static_cast<int64_t>(ByteSize(spec.gradient_dtype)));
  }
  return 2 * std::max(credit_bytes, largest);
}

std::optional<int64_t> ReadLimit(const std::string& path) {
  // Version 1 writes the largest number of whole pages where there is no limit, version 2 "max".
  constexpr int64_t kNoLimit = int64_t{1} << 60;
  std::ifstream file(path);
  std::string text;
  int64_t bytes = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &bytes) || bytes >= kNoLimit) return std::nullopt;
  return bytes;
}

}  // namespace

int64_t TableBytes(const ServerConfig& config) {
  const auto origin = config.origins.find("memory_limit");
  const bool chosen = origin != config.origins.end() && origin->second != "default";
  return chosen ? config.memory_limit_bytes : int64_t{128} << 20;
}

MemoryBudget BudgetOf(const ServerConfig& config, bool sessions_on_host,
                      absl::Span<const ShardSessionSummary> sessions) {
  const bool is_shard = config.role != ServerRole::kCoordinator;
  int64_t contributions = 0;
  for (const ShardSessionSummary& session : sessions) {
    contributions += session.spec.world_size * OpenBytesOf(session.spec, config.credit_bytes);
    contributions += MostKeptBytes(session.spec);
  }
  const int64_t reserved = sessions_on_host ? config.memory_limit_bytes : 0;
  return {{"sessions", is_shard ? reserved : TableBytes(config)},
          {"messages", config.transport_memory},
          {"shared_memory", is_shard ? config.shared_memory_bytes : 0},
          {"requests", static_cast<int64_t>(rpc::RequestBudget::kMostBytes)},
          {"contributions", contributions},
          {"process", kProcess}};
}

int64_t SumOf(const MemoryBudget& budget) {
  int64_t sum = 0;
  for (const auto& [part, bytes] : budget) sum += bytes;
  return sum;
}

absl::Status CheckAddressSpace(const ServerConfig& config) {
  // A server with one thread has come to 0.8 GiB when it starts, and each thread to 8 MiB of stack and more.
  const int64_t threads = std::max<int64_t>(config.threads, std::thread::hardware_concurrency());
  const int64_t needed = (int64_t{1} << 30) + (threads << 24);
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur >= static_cast<rlim_t>(needed)) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("address space (ulimit -v): expected at least ", needed >> 10, " KiB, got ", limit.rlim_cur >> 10));
}

std::optional<int64_t> ContainerMemory(const std::string& root) {
  std::optional<int64_t> lowest;
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  std::string line;
  while (std::getline(groups, line)) {  // number:controllers:path, of version 2 "0::path"
    const bool unified = absl::StartsWith(line, "0::");
    const size_t path_begin = line.find(":/");
    if (path_begin == std::string::npos) continue;
    const std::string controllers = line.substr(line.find(':') + 1, path_begin - line.find(':') - 1);
    const std::vector<std::string> names = absl::StrSplit(controllers, ',');
    if (!unified && !absl::c_linear_search(names, "memory")) continue;
    const std::string folder = absl::StrCat(root, "/sys/fs/cgroup", unified ? "" : absl::StrCat("/", controllers));
    const char* const file = unified ? "memory.max" : "memory.limit_in_bytes";
    // In a container the path may be one of the host's, of which only the root is there.
    std::string path = line.substr(path_begin + 1);
    for (;;) {
      const std::optional<int64_t> limit = ReadLimit(absl::StrCat(folder, absl::StripSuffix(path, "/"), "/", file));
      if (limit.has_value()) lowest = std::min(lowest.value_or(*limit), *limit);
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
  return lowest;
}

}  // namespace precondor
