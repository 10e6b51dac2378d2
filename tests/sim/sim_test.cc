// SPDX-License-Identifier: Apache-2.0
// Runs many seeds, or one: sim_test --seed=N, sim_test --seeds=N.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

uint64_t first_seed = 1;
uint64_t seeds = 500;

TEST(SimTest, InvariantsHoldForEverySeed) {
  std::printf("seeds %llu ... %llu\n", static_cast<unsigned long long>(first_seed),
              static_cast<unsigned long long>(first_seed + seeds - 1));
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    World world(MakeScenario(seed));
    EXPECT_EQ(world.Run(), "") << "replay with --seed=" << seed;
  }
}

TEST(SimTest, RunsAreFunctionsOfTheirSeed) {
  for (uint64_t seed = first_seed; seed < first_seed + 3; ++seed) {
    int64_t end[2];
    for (int64_t& time : end) {
      World world(MakeScenario(seed));
      EXPECT_EQ(world.Run(), "");
      time = world.queue().now_us();
    }
    EXPECT_EQ(end[0], end[1]) << seed;
  }
}

}  // namespace

void SetSeeds(uint64_t first, uint64_t count) {
  first_seed = first;
  seeds = count;
}

}  // namespace precondor::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    uint64_t value = 0;
    const bool one = absl::ConsumePrefix(&argument, "--seed=");
    if ((!one && !absl::ConsumePrefix(&argument, "--seeds=")) || !absl::SimpleAtoi(argument, &value)) {
      std::fprintf(stderr, "usage: %s [--seed=N | --seeds=COUNT], got %s\n", argv[0], argv[i]);
      return 2;
    }
    precondor::sim::SetSeeds(one ? value : 1, one ? 1 : value);
  }
  return RUN_ALL_TESTS();
}
