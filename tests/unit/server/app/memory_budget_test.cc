// SPDX-License-Identifier: Apache-2.0
#include "server/app/memory_budget.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

ShardSessionSummary Session(int32_t world_size, int64_t side) {
  ShardSessionSummary session;
  session.spec.world_size = world_size;
  session.spec.layers = {{.name = "small", .d_out = 4, .d_in = 4}, {.name = "large", .d_out = side, .d_in = side}};
  return session;
}

TEST(MemoryBudgetTest, HasTheRuleOfOperationsMd) {
  ServerConfig config;
  config.memory_limit_bytes = 100 * kMiB;
  config.transport_memory = 200 * kMiB;
  config.shared_memory_bytes = 16 * kMiB;
  config.credit_bytes = 8 * kMiB;
  // Two credits and a gradient of 16 KiB of each of 3 ranks, and three gradients of 16 MiB of each of 5.
  const MemoryBudget budget = BudgetOf(config, /*sessions_on_host=*/true, {Session(3, 64), Session(5, 2048)});
  EXPECT_EQ(budget, (MemoryBudget{{"sessions", 100 * kMiB},
                                  {"messages", 200 * kMiB},
                                  {"shared_memory", 16 * kMiB},
                                  {"requests", 64 * kMiB},
                                  {"contributions", (3 * 2 * 8 + 5 * 3 * 16) * kMiB + (48 << 10)},
                                  {"process", 64 * kMiB}}));
  EXPECT_EQ(SumOf(budget), (100 + 200 + 16 + 64 + 288 + 64) * kMiB + (48 << 10));
}

TEST(MemoryBudgetTest, PartsThatAServerDoesNotHaveNeedNothing) {
  ServerConfig config;
  config.transport_memory = 200 * kMiB;
  config.shared_memory_bytes = 0;
  EXPECT_EQ(SumOf(BudgetOf(config, /*sessions_on_host=*/false, {})), 328 * kMiB);
  config.role = ServerRole::kCoordinator;
  config.shared_memory_bytes = 16 * kMiB;  // of shards alone
  EXPECT_EQ(SumOf(BudgetOf(config, /*sessions_on_host=*/false, {})), (328 + 128) * kMiB) << "descriptions and ranks";
  config.memory_limit_bytes = 100 * kMiB;
  config.origins["memory_limit"] = "flag --memory-limit";
  EXPECT_EQ(SumOf(BudgetOf(config, /*sessions_on_host=*/false, {})), 428 * kMiB);
}

class ContainerMemoryTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text << "\n";
  }
  TempDir dir_;
  const std::string root_ = dir_.path() + "/root";
};

TEST_F(ContainerMemoryTest, IsTheLowestOnTheWayUp) {
  EXPECT_EQ(ContainerMemory(root_), std::nullopt);
  Write("/proc/self/cgroup", "0::/kubepods/pod1/container");
  Write("/sys/fs/cgroup/kubepods/pod1/container/memory.max", "max");
  EXPECT_EQ(ContainerMemory(root_), std::nullopt);
  Write("/sys/fs/cgroup/kubepods/pod1/memory.max", "3000000");
  Write("/sys/fs/cgroup/kubepods/memory.max", "9000000");
  EXPECT_EQ(ContainerMemory(root_), 3000000);
}

TEST_F(ContainerMemoryTest, IsReadFromTheRootInACgroupNamespace) {
  Write("/proc/self/cgroup", "0::/");
  Write("/sys/fs/cgroup/memory.max", "4096000");
  EXPECT_EQ(ContainerMemory(root_), 4096000);
}

TEST_F(ContainerMemoryTest, KnowsTheFirstVersionWhosePathMayBeTheHosts) {
  Write("/proc/self/cgroup", "5:devices:/docker/1\n4:memory:/docker/1\n0::/");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "512000");
  EXPECT_EQ(ContainerMemory(root_), 512000);
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(ContainerMemory(root_), std::nullopt);
  Write("/proc/self/cgroup", "4:cpu,memory:/");
  Write("/sys/fs/cgroup/cpu,memory/memory.limit_in_bytes", "256000");
  EXPECT_EQ(ContainerMemory(root_), 256000);
}

}  // namespace
}  // namespace precondor
