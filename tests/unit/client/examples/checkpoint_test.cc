// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/checkpoint.h"

#include <fstream>
#include <string>
#include <unistd.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::digits {
namespace {

using ::testing::HasSubstr;

Checkpoint Some() {
  Checkpoint checkpoint;
  checkpoint.run = 3;
  checkpoint.state.step = 41;
  checkpoint.state.optimizer = std::string("moments\0and more", 16);
  checkpoint.state.so_far.curve = {CurvePoint{10, 0.5, 0.25, 0.125}, CurvePoint{20, 0.4, 0.3, 0.2}};
  checkpoint.state.so_far.skipped_steps = 2;
  checkpoint.state.so_far.seconds = 1.5;
  for (int64_t rows : {2, 5}) {
    HostMatrix matrix(rows, 3);
    for (size_t i = 0; i < matrix.data().size(); ++i) matrix.data()[i] = 0.1f * static_cast<float>(i) - 0.2f;
    checkpoint.state.so_far.weights.push_back(matrix);
  }
  return checkpoint;
}

TEST(CheckpointTest, ComesBackAsItWas) {
  const std::string path = ::testing::TempDir() + "checkpoint_test_" + std::to_string(getpid());
  const auto none = ReadCheckpoint(path);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->has_value());
  ASSERT_TRUE(WriteCheckpoint(path, Some()).ok());
  const auto read = ReadCheckpoint(path);
  ASSERT_TRUE(read.ok()) << read.status();
  const Checkpoint& checkpoint = **read;
  EXPECT_EQ(checkpoint.run, 3);
  EXPECT_EQ(checkpoint.state.step, 41);
  EXPECT_EQ(checkpoint.state.optimizer.size(), 16u);
  EXPECT_EQ(checkpoint.state.so_far.skipped_steps, 2);
  EXPECT_EQ(checkpoint.state.so_far.seconds, 1.5);
  ASSERT_EQ(checkpoint.state.so_far.curve.size(), 2u);
  EXPECT_EQ(checkpoint.state.so_far.curve[1].held_out_accuracy, 0.3);
  ASSERT_EQ(checkpoint.state.so_far.weights.size(), 2u);
  EXPECT_EQ(checkpoint.state.so_far.weights[1].data(), Some().state.so_far.weights[1].data());
  EXPECT_EQ(EncodeCheckpoint(checkpoint), EncodeCheckpoint(Some()));
  EXPECT_THAT(std::string(WriteCheckpoint(path + "/x", Some()).message()), HasSubstr("cannot write"));
}

TEST(CheckpointTest, RefusesWhatIsCutShort) {
  const std::string bytes = EncodeCheckpoint(Some());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeCheckpoint(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeCheckpoint(bytes + "x").ok());
}

}  // namespace
}  // namespace precondor::digits
