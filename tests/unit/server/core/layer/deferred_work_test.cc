// SPDX-License-Identifier: Apache-2.0
// Deferred work of factors, done beside the steps: the thread and the time at which it runs change no answer.
#include <deque>

#include "kernels/methods/registry.h"
#include "server/core/executors/thread_pool.h"
#include "server/core/resources/reservation.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

// Runs strands at once and keeps what is for the background.
class HoldingExecutor final : public Executor {
 public:
  uint64_t NewStrand() override { return strands_.NewStrand(); }
  void Post(uint64_t strand, Task task) override { strands_.Post(strand, std::move(task)); }
  void PostBackground(Task task) override { held.push_back(std::move(task)); }
  void Drain() override { strands_.Drain(); }
  int parallelism() const override { return 1; }
  void RunHeld() {
    for (; !held.empty(); held.pop_front()) held.front()();
  }

  std::deque<Task> held;

 private:
  InlineExecutor strands_;
};

class DeferredWorkTest : public ShardFixture {
 protected:
  DeferredWorkTest() {
    spec.method = {.name = "kfac",
                   .options = {{"refresh_lag", 1.0}, {"inv_update_steps", std::string("2")}, {"stagger", false}}};
    spec.inv_freq = 2;
    spec.layers = {{.name = "first", .d_out = 24, .d_in = 40, .has_bias = false},
                   {.name = "second", .d_out = 33, .d_in = 9, .has_bias = false}};
    options.make_method = MakeMethod;
  }

  std::vector<std::vector<Payload>> RunJob(Executor& by) {
    Shard job(options, *backend, by, clock, logger, observer);
    EXPECT_TRUE(job.Install(MakeInstall()).ok());
    std::vector<std::vector<Payload>> answers;
    for (uint64_t step = 0; step < 24; ++step) {
      std::vector<Payload>& of_step = answers.emplace_back();
      for (const GradientResult& result : RunStep(job, by, step)) {
        of_step.push_back(result.bytes == nullptr ? Payload() : *result.bytes);
      }
    }
    return answers;
  }
};

TEST_F(DeferredWorkTest, ChangesNoAnswer) {
  for (const double lag : {1.0, 2.0, 5.0}) {
    SCOPED_TRACE(lag);
    spec.method.options["refresh_lag"] = lag;
    HoldingExecutor executor;
    const std::vector<std::vector<Payload>> expected = RunJob(executor);
    EXPECT_FALSE(executor.held.empty());
    executor.RunHeld();  // without effect: the shard is gone
    EXPECT_EQ(backend->allocated_bytes(), 0);
    EXPECT_EQ(RunJob(executor), expected);
    ThreadPoolExecutor pool(2);
    EXPECT_EQ(RunJob(pool), expected);
  }
}

// A step in which a decomposition is due is answered before the decomposition exists, and the next one as well.
TEST_F(DeferredWorkTest, StepsDoNotWaitForIt) {
  HoldingExecutor holding;
  Shard job(options, *backend, holding, clock, logger, observer);
  ASSERT_TRUE(job.Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 4; ++step) RunStep(job, holding, step);
  EXPECT_TRUE(holding.held.empty());  // the first decomposition is made at once, the next is due at step 4
  for (uint64_t step = 4; step < 6; ++step) RunStep(job, holding, step);
  EXPECT_EQ(holding.held.size(), spec.layers.size());
  holding.RunHeld();
  RunStep(job, holding, 6);
  EXPECT_TRUE(holding.held.empty());
  RunStep(job, holding, 8);
  EXPECT_EQ(holding.held.size(), spec.layers.size());
  ASSERT_TRUE(*job.Remove(kSession));
  holding.RunHeld();
}

TEST_F(DeferredWorkTest, SessionsEndInTheMidstOfIt) {
  for (int run = 0; run < 20; ++run) {
    ThreadPoolExecutor pool(2);
    Shard job(options, *backend, pool, clock, logger, observer);
    ASSERT_TRUE(job.Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 5; ++step) RunStep(job, pool, step);
    ASSERT_TRUE(*job.Remove(kSession));
    EXPECT_EQ(job.in_flight(), 0);
  }
  EXPECT_EQ(backend->allocated_bytes(), 0);
}

TEST_F(DeferredWorkTest, ReservesItsMemory) {
  const auto reserved = [this](double lag, int parallelism) {
    SessionSpec with = spec;
    with.method.options["refresh_lag"] = lag;
    const MethodSet methods = MethodSet::Make(with).value();
    return ComputeReservation(with, methods, {0, 1}, options.window_steps, parallelism);
  };
  // By hand, in f32: beside a layer's state its packed factors and what becomes of them.
  const int64_t first = 24 * 25 / 2 + 40 * 41 / 2 + 24 * 24 + 40 * 40;
  const int64_t second = 33 * 34 / 2 + 9 * 10 / 2 + 33 * 33 + 9 * 9;
  EXPECT_EQ(reserved(1, 1).states - reserved(0, 1).states, 4 * (first + second));
  // A layer's work matrix of its widest side, and both diagonals; an update's packed factors on top; and a
  // decomposition of the widest side in f64: a copy, eigenvalues and LAPACK's work space, each rounded up by an eighth
  // at most.
  const auto floats = [](int64_t wide, int64_t narrow) {
    return wide * wide + wide + narrow + wide * (wide + 1) / 2 + narrow * (narrow + 1) / 2;
  };
  const auto lapack = [](int64_t n) { return 8 * (n * n + n) + 8 * (1 + 6 * n + 2 * n * n) + 4 * (3 + 5 * n); };
  for (const int parallelism : {1, 2, 32}) {
    const int64_t more = reserved(1, parallelism).scratch - reserved(0, parallelism).scratch;
    // Both layers' own where both run at once, the wider one's where they do not.
    int64_t of_floats = floats(40, 24), of_lapack = lapack(40);
    if (parallelism > 1) {
      of_floats += floats(33, 9);
      of_lapack += lapack(33);
    }
    EXPECT_GE(more, 4 * of_floats + of_lapack);
    EXPECT_LE(more, 4 * of_floats + of_lapack * 9 / 8 + 200);
  }
}

}  // namespace
}  // namespace precondor
