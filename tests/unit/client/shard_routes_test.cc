// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/shard_routes.h"

#include <atomic>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "client/cpp/src/shard_link.h"

namespace precondor {
namespace {

v1::ShardMap AllOn(const std::string& address) {
  v1::ShardMap map;
  v1::ShardAssignment& assignment = *map.add_assignments();
  assignment.set_address(address);
  assignment.add_layers(0);
  return map;
}

class ShardRoutesTest : public ::testing::Test {
 protected:
  // Links without a tick: they never dial.
  ShardRoutes::Link Make(const std::string& address, uint64_t epoch) {
    ShardLink::Options options;
    options.security = std::make_shared<wire::ChannelSecurity>();
    options.address = address;
    options.epoch = epoch;
    ShardLink::Hooks hooks;
    hooks.wake = [] {};
    auto link = std::make_shared<ShardLink>(options, std::move(hooks), traffic_);
    made_[address] = link;
    return link;
  }

  TrafficCounters traffic_;
  std::map<std::string, std::weak_ptr<ShardLink>> made_;
  ShardRoutes routes_{"session", 1,
                      [this](const std::string& address, uint64_t epoch) { return Make(address, epoch); }};
};

TEST_F(ShardRoutesTest, LinksMayBeAskedForWhileTheyAreReplaced) {
  ASSERT_TRUE(routes_.Change(AllOn("0:1"), 1).ok());
  std::atomic<bool> over = false;
  std::thread asks([&] {
    while (!over) EXPECT_EQ(routes_.links().size(), 1u);
  });
  for (uint64_t epoch = 2; epoch < 2000; ++epoch) {
    EXPECT_TRUE(routes_.Change(AllOn(epoch % 2 == 0 ? "1:1" : "0:1"), epoch).ok());
  }
  over = true;
  asks.join();
}

TEST_F(ShardRoutesTest, ALinkThatIsReplacedWhileItFailsEndsInClear) {
  ASSERT_TRUE(routes_.Change(AllOn("before:1"), 1).ok());
  auto item = std::make_shared<Contribution>();
  item->id = {v1::FRAME_KIND_STATISTICS, 0, 0};
  bool replaced = false;
  // Given up in the middle of Fail: the map changes then, on the thread that such changes are made by.
  item->payload_owner = std::shared_ptr<const void>(this, [&](const void*) {
    std::thread([&] { replaced = routes_.Change(AllOn("after:1"), 2).code() == absl::StatusCode::kAborted; }).join();
  });
  ASSERT_TRUE(routes_.Submit(0, std::move(item)).ok());
  routes_.Fail(absl::AbortedError("the worker is done for"));
  EXPECT_TRUE(replaced);
  EXPECT_FALSE(made_["before:1"].expired()) << "it would have ended on the thread that failed it";
  EXPECT_EQ(routes_.links().at(0)->address(), "after:1");
  routes_.Clear();
  EXPECT_TRUE(made_["before:1"].expired());
  EXPECT_TRUE(made_["after:1"].expired());
}

}  // namespace
}  // namespace precondor
