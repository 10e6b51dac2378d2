// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/job.h"

#include <gtest/gtest.h>
#include <string>

namespace precondor::digits {
namespace {

Run SomeRun() {
  Run run;
  run.task = *FindTask("autoencoder");
  run.task.steps = 17;
  run.method = *FindMethod("signed-lowrank");
  run.method.fallback = "at-step:12";
  run.optimizer = "lamb";
  run.exchange = ExchangeMode::kDelegate;
  run.workers = 7;
  run.seed = 0xFFFFFFFFFFFFFFFFull;
  run.learning_rate = 0.016;
  run.on_shard_loss = ShardLossPolicy::kDegrade;
  return run;
}

TEST(JobTest, ComesBackAsItWas) {
  const auto decoded =
      DecodeJob(EncodeJob(Job{"a \"path\"", "host:1", "digits-1", 7, 3185, 3, "checkpoints", {SomeRun()}}));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->data_path, "a \"path\"");
  EXPECT_EQ(decoded->coordinator, "host:1");
  EXPECT_EQ(decoded->session_prefix, "digits-1");
  EXPECT_EQ(decoded->workers, 7);
  EXPECT_EQ(decoded->reducer_elements, 3185);
  EXPECT_EQ(decoded->worker_restarts, 3);
  EXPECT_EQ(decoded->checkpoint_dir, "checkpoints");
  ASSERT_EQ(decoded->runs.size(), 1u);
  const digits::Run& run = decoded->runs.front();
  EXPECT_EQ(run.task.steps, 17);
  EXPECT_EQ(run.optimizer, "lamb");
  EXPECT_EQ(run.seed, 0xFFFFFFFFFFFFFFFFull);
  EXPECT_EQ(run.learning_rate, 0.016);
  EXPECT_EQ(MakeSessionSpec(run, "s"), MakeSessionSpec(SomeRun(), "s"));
}

TEST(JobTest, ReportsComeBackAsTheyWere) {
  WorkerReport progress;
  progress.run = 3;
  progress.point = CurvePoint{250, 0.0161, 0.5, 0.25};
  const auto point = DecodeReport(EncodeReport(progress));
  ASSERT_TRUE(point.ok()) << point.status();
  EXPECT_FALSE(point->done);
  EXPECT_EQ(point->run, 3);
  EXPECT_EQ(point->point.step, 250);
  EXPECT_EQ(point->point.held_out_loss, 0.0161);
  EXPECT_EQ(point->point.training_loss, 0.25);

  WorkerReport end;
  end.done = true;
  end.result.curve = {CurvePoint{10, 1, 2, 3}};
  end.result.statistics_bytes = 5000000000;
  end.result.weights_hash = 0xF000000000000001ull;
  end.result.stretches = {Stretch{7, Mode::kFirstOrder, 3, 0.5, 11, 13}};
  const auto result = DecodeReport(EncodeReport(end));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->done);
  EXPECT_EQ(result->result.statistics_bytes, 5000000000);
  EXPECT_EQ(result->result.weights_hash, 0xF000000000000001ull);
  ASSERT_EQ(result->result.stretches.size(), 1u);
  const Stretch& stretch = result->result.stretches.front();
  EXPECT_EQ(stretch.first_step, 7u);
  EXPECT_EQ(stretch.mode, Mode::kFirstOrder);
  EXPECT_EQ(stretch.steps, 3);
  EXPECT_EQ(stretch.seconds, 0.5);
  EXPECT_EQ(stretch.statistics_bytes, 11);
  EXPECT_EQ(stretch.gradient_bytes, 13);
  ASSERT_EQ(result->result.curve.size(), 1u);
  EXPECT_EQ(result->result.curve[0].held_out_accuracy, 2);
}

TEST(JobTest, RefusesWhatItDidNotWrite) {
  for (const std::string text : {"", "{", "[]", "{\"run\": \"x\"}", "{\"run\": 1}", "{\"runs\": [{}]}"}) {
    EXPECT_EQ(DecodeReport(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(DecodeJob(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(HashWeightsTest, SeesEveryBit) {
  HostMatrix weight(2, 2);
  const uint64_t before = HashWeights({weight});
  weight.data()[3] = -0.0f;
  EXPECT_NE(HashWeights({weight}), before);
}

}  // namespace
}  // namespace precondor::digits
