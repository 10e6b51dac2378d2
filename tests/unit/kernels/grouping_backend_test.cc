// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/grouping_backend.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"
#include "kernels/grouping/forwarding_backend.h"
#include "kernels/operation.h"
#include "tests/support/task_group.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;

// Writes down how many operations each call had, spoils memory as it is freed, and fails on demand.
class Recorder final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  std::vector<size_t> TakeSizes() {
    MutexLock lock(mu_);
    return std::exchange(sizes_, {});
  }
  // Rows of the last call's operands, where they were dot products.
  std::vector<int64_t> TakeRows() {
    MutexLock lock(mu_);
    return std::exchange(rows_, {});
  }
  // From here on operations of this kind fail.
  void Fail(size_t kind) {
    MutexLock lock(mu_);
    failing_.insert(kind);
  }
  // The next call finds no memory, or none for its first and last operation, and Trim is what it takes.
  void LackMemory() { lacks_memory_ = true; }
  void LackMemoryAtEnds() { lacks_memory_at_ends_ = true; }
  // No memory for more than one operation at a time, whatever is given back.
  void LackMemoryForGroups() { lacks_memory_for_groups_ = true; }
  // No scratch beyond so much in all.
  void Limit(int64_t bytes) { limit_bytes_ = bytes; }

 private:
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    {
      MutexLock lock(mu_);
      sizes_.push_back(operations.size());
      rows_.clear();
      for (const Operation* operation : operations) {
        EXPECT_EQ(operation->kind(), operations[0]->kind());
        if (const auto* const dot = operation->As<operation::Dot>()) rows_.push_back(dot->x.rows);
        if (!failing_.contains(operation->kind())) continue;
        for (absl::Status& status : statuses) status = absl::InternalError("injected fault");
        return;
      }
      if (lacks_memory_ || (lacks_memory_for_groups_ && operations.size() > 1)) {
        for (absl::Status& status : statuses) status = absl::ResourceExhaustedError("injected want");
        return;
      }
    }
    if (lacks_memory_at_ends_) {
      statuses.front() = statuses.back() = absl::ResourceExhaustedError("injected want");
      operations = operations.subspan(1, operations.size() - 2);
      statuses = statuses.subspan(1, statuses.size() - 2);
    }
    ForwardingBackend::DoRun(operations, statuses);
  }
  void DoTrim() override { lacks_memory_ = lacks_memory_at_ends_ = false; }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    if (allocated_bytes() + elements * static_cast<int64_t>(sizeof(float)) > limit_bytes_) {
      return absl::ResourceExhaustedError("injected limit");
    }
    return ForwardingBackend::DoAllocateScratch(elements);
  }
  void DoFree(float* data, int64_t elements) override {
    std::vector<float> spoilt(elements, std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(inner().Upload(MatrixView(spoilt.data(), 1, elements), MatrixView(data, 1, elements)).ok());
    ForwardingBackend::DoFree(data, elements);
  }

  Mutex mu_;
  std::vector<size_t> sizes_ ABSL_GUARDED_BY(mu_);
  std::vector<int64_t> rows_ ABSL_GUARDED_BY(mu_);
  std::set<size_t> failing_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> lacks_memory_ = false;
  std::atomic<bool> lacks_memory_at_ends_ = false;
  std::atomic<bool> lacks_memory_for_groups_ = false;
  std::atomic<int64_t> limit_bytes_ = std::numeric_limits<int64_t>::max();
};

// Makes terms of primitives, and has no memory for what scales rows until it is trimmed.
class LacksMemoryForScales final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

 private:
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    if (const auto* const make = operations[0]->As<operation::ShermanMorrisonTerms>()) {
      statuses[0] = RunByPrimitives(*make);
      return;
    }
    const auto* const e = operations[0]->As<operation::Elementwise>();
    if (!lacks_memory_ || e == nullptr || e->kind != ElementwiseKind::kScaleRows) {
      return ForwardingBackend::DoRun(operations, statuses);
    }
    for (absl::Status& status : statuses) status = absl::ResourceExhaustedError("injected want");
  }
  void DoTrim() override { lacks_memory_ = false; }

  bool lacks_memory_ = true;
};

class GroupingBackendTest : public testing::Test {
 protected:
  GroupingBackendTest() : device_(MakeTestBackend()) {
    auto recorder = std::make_unique<Recorder>(*device_);
    recorder_ = recorder.get();
    backend_ = MakeGroupingBackend(std::move(recorder), {.patience = absl::Hours(1)});
  }

  DeviceMatrix Matrix(int64_t rows, int64_t cols, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> host(rows * cols);
    for (float& x : host) x = normal(random);
    DeviceMatrix matrix = backend_->Allocate(rows, cols).value();
    EXPECT_TRUE(backend_->Upload(MatrixView(host.data(), rows, cols), matrix.view()).ok());
    return matrix;
  }
  std::vector<float> Host(ConstMatrixView x) {
    std::vector<float> host(x.size());
    EXPECT_TRUE(backend_->Download(x, MatrixView(host.data(), x.rows, x.cols)).ok());
    return host;
  }
  // work(i) in a task, in `count` tasks that have all begun before any goes on.
  void InTasks(int count, const std::function<void(int)>& work) { TaskGroup(*backend_).Run(count, work); }

  const std::unique_ptr<Backend> device_;
  Recorder* recorder_ = nullptr;
  std::unique_ptr<Backend> backend_;
};

TEST_F(GroupingBackendTest, ARoundWaitsForATaskThatIsExpected) {
  DeviceMatrix x = Matrix(4, 4, 1);
  auto expected = std::make_unique<Backend::ExpectedTask>(*backend_);
  std::promise<void> first_has_run;
  std::future<void> first = first_has_run.get_future();
  recorder_->TakeSizes();
  TaskGroup(*backend_).RunWithoutTasks(2, [&](int i) {
    if (i == 1) {
      EXPECT_EQ(first.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    }
    Backend::Task task(*backend_);
    if (i == 1) expected = nullptr;
    EXPECT_TRUE(backend_->Dot(x.view(), x.view()).ok());
    if (i == 0) first_has_run.set_value();
  });
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(2));
}

TEST_F(GroupingBackendTest, ARoundGoesOnWhenNoTaskIsExpectedAnyMore) {
  DeviceMatrix x = Matrix(4, 4, 1);
  auto expected = std::make_unique<Backend::ExpectedTask>(*backend_);
  std::thread gives_up;
  TaskGroup(*backend_).RunWithoutTasks(1, [&](int) {
    Backend::Task task(*backend_);
    gives_up = std::thread([&] { expected = nullptr; });
    EXPECT_TRUE(backend_->Dot(x.view(), x.view()).ok());
  });
  gives_up.join();
}

TEST_F(GroupingBackendTest, ARoundWaitsForExpectedTasksWithABound) {
  backend_ = MakeGroupingBackend(MakeTestBackend(), {.patience = absl::Microseconds(50)});
  const Backend::ExpectedTask never(*backend_);
  DeviceMatrix x = Matrix(4, 4, 1);
  TaskGroup(*backend_).RunWithoutTasks(1, [&](int) {
    Backend::Task task(*backend_);
    EXPECT_TRUE(backend_->Dot(x.view(), x.view()).ok());
  });
}

TEST_F(GroupingBackendTest, ARoundDoesNotWaitWhereNoOtherTaskCanCome) {
  backend_ = MakeGroupingBackend(MakeTestBackend(), {.patience = absl::Hours(1), .most_tasks = 1});
  const Backend::ExpectedTask never(*backend_);
  DeviceMatrix x = Matrix(4, 4, 1);
  TaskGroup(*backend_).RunWithoutTasks(1, [&](int) {
    Backend::Task task(*backend_);
    EXPECT_TRUE(backend_->Dot(x.view(), x.view()).ok());
  });
}

TEST_F(GroupingBackendTest, RunsWhatTasksHaveInCommonTogether) {
  constexpr int kTasks = 5;
  std::vector<DeviceMatrix> a, c;
  for (int i = 0; i < kTasks; ++i) {
    a.push_back(Matrix(3 + i, 7, i));
    c.push_back(Matrix(3 + i, 3 + i, 100 + i));
  }
  const auto work = [&](int i) {
    ASSERT_TRUE(backend_->Axpby(2.0, a[i].view(), 0.5, a[i].view()).ok());
    ASSERT_TRUE(backend_->Gemm(1.0, a[i].view(), Transpose::kNo, a[i].view(), Transpose::kYes, 0.0, c[i].view()).ok());
    ASSERT_TRUE(backend_->AddDiagonal(1.0, c[i].view()).ok());
    ASSERT_TRUE(backend_->SpdInverse(c[i].view(), c[i].view()).ok());
    ASSERT_TRUE(backend_->Axpby(3.0, c[i].view(), 0.0, c[i].view()).ok());
  };
  recorder_->TakeSizes();
  InTasks(kTasks, work);
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(5, 5, 5, 5, 5));
  std::vector<std::vector<float>> together;
  for (const DeviceMatrix& x : c) together.push_back(Host(x.view()));
  for (int i = 0; i < kTasks; ++i) {
    a[i] = Matrix(3 + i, 7, i);
    work(i);
    EXPECT_EQ(Host(c[i].view()), together[i]) << "task " << i;
  }
  EXPECT_THAT(recorder_->TakeSizes(), Each(1));
}

// Two tasks of a round go on together, since they wait for each other; and rounds are as on one thread.
TEST_F(GroupingBackendTest, TasksRunOnSeveralThreads) {
  constexpr int kTasks = 40;
  auto recorder = std::make_unique<Recorder>(*device_);
  recorder_ = recorder.get();
  backend_ = MakeGroupingBackend(std::move(recorder), {.threads = 3});
  std::vector<DeviceMatrix> x;
  for (int i = 0; i < kTasks; ++i) x.push_back(Matrix(3, 5, i));
  recorder_->TakeSizes();
  std::latch both(2);
  InTasks(kTasks, [&](int i) {
    const double before = backend_->Dot(x[i].view(), x[i].view()).value();
    if (i == 3 || i == 30) both.arrive_and_wait();
    ASSERT_TRUE(backend_->Axpby(2.0, x[i].view(), 0.0, x[i].view()).ok());
    EXPECT_EQ(backend_->Dot(x[i].view(), x[i].view()).value(), 4 * before) << "task " << i;
  });
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(kTasks, kTasks, kTasks));
}

TEST_F(GroupingBackendTest, LinesUpTasksOfDifferentLengths) {
  std::vector<DeviceMatrix> x;
  for (int i = 0; i < 4; ++i) x.push_back(Matrix(2, 2, i));
  recorder_->TakeSizes();
  std::vector<double> dots(4);
  InTasks(4, [&](int i) {
    for (int n = 0; n < i; ++n) {  // zero to three products before what all do
      DeviceMatrix y = backend_->Allocate(2, 2).value();
      ASSERT_TRUE(backend_->Gemm(1.0, x[i].view(), Transpose::kNo, x[i].view(), Transpose::kNo, 0.0, y.view()).ok());
      ASSERT_TRUE(backend_->Copy(y.view(), x[i].view()).ok());
    }
    dots[i] = backend_->Dot(x[i].view(), x[i].view()).value();
  });
  // All zeros, on which nothing depends that has not run; rounds of product and copy, of three tasks, of two, of one;
  // then all dot products.
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(6, 3, 3, 2, 2, 1, 1, 4));
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> host = Host(x[i].view());
    double sum = 0;
    for (float element : host) sum += double{element} * element;
    EXPECT_NEAR(dots[i], sum, 1e-12 * sum);
  }
}

// Two chains of a task, one behind the other: what they do at the same place runs together, and each in its order.
TEST_F(GroupingBackendTest, ChainsOfOneTaskRunBesideEachOther) {
  std::vector<DeviceMatrix> x, y;
  for (int i = 0; i < 2; ++i) x.push_back(Matrix(3, 3, i));
  for (int i = 0; i < 2; ++i) y.push_back(Matrix(3, 3, 7));
  std::vector<std::vector<float>> alone;
  const auto chain = [&](int i) {
    const MatrixView of_x = x[i].view(), of_y = y[i].view();
    ASSERT_TRUE(backend_->Gemm(1.0, of_x, Transpose::kNo, of_x, Transpose::kNo, 0.0, of_y).ok());
    ASSERT_TRUE(backend_->Axpby(1.0, of_y, 0.5, of_x).ok());
    ASSERT_TRUE(backend_->Gemm(1.0, of_x, Transpose::kNo, of_y, Transpose::kYes, 1.0, of_y).ok());
  };
  const std::vector<float> before[] = {Host(x[0].view()), Host(x[1].view())};
  for (int i = 0; i < 2; ++i) {
    chain(i);
    alone.push_back(Host(y[i].view()));
    ASSERT_TRUE(backend_->Upload(ConstMatrixView(before[i].data(), 3, 3), x[i].view()).ok());
  }
  recorder_->TakeSizes();
  Backend::Task task(*backend_);
  for (int i = 0; i < 2; ++i) chain(i);
  ASSERT_TRUE(task.Finish().ok());
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(2, 2, 2));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Host(y[i].view()), alone[i]) << i;
}

TEST_F(GroupingBackendTest, OneTaskAloneWaitsForNobody) {
  DeviceMatrix x = Matrix(4, 4, 1);
  Backend::Task task(*backend_);
  EXPECT_GT(backend_->Dot(x.view(), x.view()).value(), 0);
  ASSERT_TRUE(backend_->Axpby(2.0, x.view(), 0.0, x.view()).ok());
  EXPECT_TRUE(task.Finish().ok());
}

// Keeps the one fiber of a test, which waits to be run to its end.
class Home final : public FiberScheduler {
 public:
  void Resume(Fiber& fiber) override {
    fiber_ = &fiber;
    came_.count_down();
  }
  Fiber& Await() {
    came_.wait();
    return *fiber_;
  }

 private:
  Fiber* fiber_ = nullptr;
  std::latch came_{1};
};

// Two rounds that wait for nothing but the tasks that have come, whatever these do.
TEST_F(GroupingBackendTest, ATaskThatComesLateJoinsTheNextRound) {
  DeviceMatrix x = Matrix(4, 4, 1), y = Matrix(4, 4, 2);
  Home home;
  const std::unique_ptr<Fiber> late = Fiber::Make(home);
  late->Set(
      [&] {
        Backend::Task task(*backend_);
        EXPECT_GT(backend_->Dot(y.view(), y.view()).value(), 0);
      },
      1);
  recorder_->TakeSizes();
  InTasks(1, [&](int) {
    EXPECT_GT(backend_->Dot(x.view(), x.view()).value(), 0);
    // On another thread, as this one runs a fiber already.
    std::thread([&] { EXPECT_EQ(late->Run(), Fiber::Outcome::kTaken); }).join();
    EXPECT_GT(backend_->Dot(x.view(), x.view()).value(), 0);
  });
  EXPECT_EQ(home.Await().Run(), Fiber::Outcome::kEnded);
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(1, 2));
}

// The order within a round is that of the fibers' numbers, whatever the order in which they come.
TEST_F(GroupingBackendTest, ARoundHasTheOrderOfTheFibersNumbers) {
  std::vector<DeviceMatrix> x;
  for (int i = 0; i < 3; ++i) x.push_back(Matrix(2 + i, 2, static_cast<uint64_t>(i)));
  Home homes[3];
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (int i = 0; i < 3; ++i) {
    fibers.push_back(Fiber::Make(homes[i]));
    fibers[i]->Set(
        [&, i] {
          Backend::Task task(*backend_);
          EXPECT_GT(backend_->Dot(x[i].view(), x[i].view()).value(), 0);
        },
        static_cast<uint64_t>(i) + 1);
  }
  InTasks(1, [&](int) {  // keeps the backend's thread until all have come
    std::thread([&] {
      for (const int i : {1, 2, 0}) EXPECT_EQ(fibers[i]->Run(), Fiber::Outcome::kTaken);
    }).join();
  });
  for (Home& home : homes) EXPECT_EQ(home.Await().Run(), Fiber::Outcome::kEnded);
  EXPECT_THAT(recorder_->TakeRows(), ElementsAre(2, 3, 4));
}

// Tasks on threads' own stacks and tasks on fibers: neither waits for the other.
TEST_F(GroupingBackendTest, ATaskOnAThreadWaitsForNoOther) {
  DeviceMatrix x = Matrix(4, 4, 1);
  InTasks(1, [&](int) {
    std::thread other([&] {
      Backend::Task task(*backend_);
      EXPECT_GT(backend_->Dot(x.view(), x.view()).value(), 0);
    });
    other.join();  // keeps the backend's thread
    EXPECT_GT(backend_->Dot(x.view(), x.view()).value(), 0);
  });
}

// A task that waits for another thread leaves the backend's thread to the others, and comes back to it.
TEST_F(GroupingBackendTest, AWaitAtHomeHoldsNoOtherTaskUp) {
  DeviceMatrix x = Matrix(4, 4, 1), y = Matrix(4, 4, 2);
  std::latch other_has_run(1);
  std::vector<double> dots(3);
  recorder_->TakeSizes();
  InTasks(2, [&](int i) {
    if (i == 0) {
      RunBlocking([&] { other_has_run.wait(); });
      dots[0] = backend_->Dot(x.view(), x.view()).value();
    } else {
      dots[1] = backend_->Dot(y.view(), y.view()).value();
      other_has_run.count_down();
      dots[2] = backend_->Dot(x.view(), x.view()).value();
    }
  });
  EXPECT_EQ(dots[0], dots[2]);
  EXPECT_GT(dots[1], 0);
}

TEST_F(GroupingBackendTest, KeepsFreedMemoryUntilWhatUsesItHasRun) {
  DeviceMatrix sum = Matrix(2, 3, 1);
  const std::vector<float> before = Host(sum.view());
  {
    Backend::Task task(*backend_);
    for (int i = 0; i < 3; ++i) {
      DeviceMatrix scratch = backend_->Allocate(2, 3).value();
      ASSERT_TRUE(backend_->Axpby(1.0, sum.view(), 0.0, scratch.view()).ok());
      ASSERT_TRUE(backend_->Axpby(1.0, scratch.view(), 1.0, sum.view()).ok());
    }
  }
  const std::vector<float> after = Host(sum.view());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(after[i], 8 * before[i]);
}

TEST_F(GroupingBackendTest, GivesZerosWithinTasks) {
  { const DeviceMatrix spoilt = Matrix(8, 8, 1); }
  Backend::Task task(*backend_);
  const DeviceMatrix fresh = backend_->Allocate(8, 8).value();
  EXPECT_THAT(Host(fresh.view()), Each(0.0f));
}

TEST_F(GroupingBackendTest, TellsOfAFailureThoseAloneWhoWaitForIt) {
  DeviceMatrix good = Matrix(3, 3, 1), bad = Matrix(3, 3, 2);
  ASSERT_TRUE(backend_->Axpby(0.0, bad.view(), 0.0, bad.view()).ok());
  std::vector<absl::Status> statuses(2);
  InTasks(2, [&](int i) {
    DeviceMatrix spd = backend_->Allocate(3, 3).value();
    const ConstMatrixView x = i == 0 ? good.view() : bad.view();
    ASSERT_TRUE(backend_->Gemm(1.0, x, Transpose::kNo, x, Transpose::kYes, 0.0, spd.view()).ok());
    statuses[i] = backend_->SpdInverse(spd.view(), spd.view());
  });
  EXPECT_TRUE(statuses[0].ok()) << statuses[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(statuses[1])) << statuses[1];
  EXPECT_TRUE(backend_->Dot(good.view(), good.view()).ok());
}

TEST_F(GroupingBackendTest, AsksForWhatABatchHoldsTogether) {
  DeviceMatrix x = Matrix(3, 4, 1), y = Matrix(2, 5, 2), spd = backend_->Allocate(3, 3).value();
  std::vector<double> of_x(3, -1), of_y(2, -1), expected_x(3), expected_y(2);
  ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(expected_x)).ok());
  ASSERT_TRUE(backend_->RowSquaredNorms(y.view(), absl::MakeSpan(expected_y)).ok());
  Backend::Task task(*backend_);
  recorder_->TakeSizes();
  {
    Backend::Batch batch(*backend_);
    ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(of_x)).ok());
    ASSERT_TRUE(backend_->RowSquaredNorms(y.view(), absl::MakeSpan(of_y)).ok());
    EXPECT_THAT(recorder_->TakeSizes(), ElementsAre());
    ASSERT_TRUE(batch.Finish().ok());
    EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(2));
    EXPECT_EQ(of_x, expected_x);
    EXPECT_EQ(of_y, expected_y);
    EXPECT_TRUE(batch.Finish().ok());
  }
  {  // what a caller is given in its hand is there at once
    Backend::Batch batch(*backend_);
    EXPECT_NEAR(backend_->Dot(y.view(), y.view()).value(), expected_y[0] + expected_y[1], 1e-12);
  }
  {  // the first error, though others asked since
    Backend::Batch batch(*backend_);
    ASSERT_TRUE(backend_->Axpby(0.0, spd.view(), 0.0, spd.view()).ok());
    ASSERT_TRUE(backend_->SpdInverse(spd.view(), spd.view()).ok());
    ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(of_x)).ok());
    (void)backend_->Dot(y.view(), y.view());
    ASSERT_TRUE(backend_->RowSquaredNorms(y.view(), absl::MakeSpan(of_y)).ok());
    const absl::Status status = batch.Finish();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(of_x, expected_x);
  }
  recorder_->TakeSizes();
  ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(of_x)).ok());
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(1)) << "a batch ends";
  EXPECT_TRUE(task.Finish().ok());
}

TEST_F(GroupingBackendTest, ABatchWithoutATaskWaitsForNothing) {
  DeviceMatrix x = Matrix(3, 4, 1);
  std::vector<double> squares(3);
  recorder_->TakeSizes();
  Backend::Batch batch(*backend_);
  ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(squares)).ok());
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(1));
  EXPECT_GT(squares[0], 0);
  EXPECT_TRUE(batch.Finish().ok());
}

TEST_F(GroupingBackendTest, IsLostWithAnOperationThatWasDeferred) {
  DeviceMatrix x = Matrix(3, 3, 1);
  recorder_->Fail(Operation{operation::Gemm{}}.kind());
  {
    Backend::Task task(*backend_);
    DeviceMatrix y = backend_->Allocate(3, 3).value();
    EXPECT_TRUE(backend_->Gemm(1.0, x.view(), Transpose::kNo, x.view(), Transpose::kNo, 0.0, y.view()).ok());
    const absl::Status end = task.Finish();
    EXPECT_TRUE(absl::IsInternal(end)) << end;
    EXPECT_THAT(std::string(end.message()), HasSubstr("injected fault"));
    EXPECT_TRUE(task.Finish().ok());
  }
  EXPECT_TRUE(absl::IsInternal(backend_->Dot(x.view(), x.view()).status()));
  EXPECT_TRUE(absl::IsInternal(backend_->Allocate(2, 2).status()));
  std::vector<float> host(9);
  EXPECT_TRUE(absl::IsInternal(backend_->Download(x.view(), MatrixView(host.data(), 3, 3))));
}

TEST_F(GroupingBackendTest, OutlivesAWantOfMemoryThatATrimEnds) {
  DeviceMatrix x = Matrix(3, 3, 1);
  const std::vector<float> before = Host(x.view());
  recorder_->LackMemory();
  Backend::Task task(*backend_);
  ASSERT_TRUE(backend_->Axpby(2.0, x.view(), 0.0, x.view()).ok());
  EXPECT_TRUE(task.Finish().ok());
  const std::vector<float> after = Host(x.view());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(after[i], 2 * before[i]);
}

TEST_F(GroupingBackendTest, RunsAGroupOneByOneWhereOnlyThatHasMemory) {
  std::vector<DeviceMatrix> x;
  for (int i = 0; i < 3; ++i) {
    x.push_back(backend_->Allocate(1, 1).value());
    ASSERT_TRUE(backend_->AddDiagonal(4.0, x.back().view()).ok());
  }
  recorder_->TakeSizes();
  recorder_->LackMemoryForGroups();
  std::vector<absl::Status> statuses(3);
  InTasks(3, [&](int i) { statuses[i] = backend_->SpdInverse(x[i].view(), x[i].view()); });
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(3, 3, 1, 1, 1)) << "together, after a trim, and alone";
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(statuses[i].ok()) << statuses[i];
    EXPECT_EQ(Host(x[i].view())[0], 0.25f);
  }
}

TEST_F(GroupingBackendTest, RunsNothingTwiceThatChangesItsOperand) {
  std::vector<DeviceMatrix> x;
  for (int i = 0; i < 3; ++i) {
    x.push_back(backend_->Allocate(1, 1).value());
    ASSERT_TRUE(backend_->AddDiagonal(4.0, x.back().view()).ok());
  }
  recorder_->TakeSizes();
  recorder_->LackMemoryAtEnds();
  std::vector<absl::Status> statuses(3);
  InTasks(3, [&](int i) { statuses[i] = backend_->SpdInverse(x[i].view(), x[i].view()); });
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(3, 2)) << "both that had no memory, once more";
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(statuses[i].ok()) << statuses[i];
    EXPECT_EQ(Host(x[i].view())[0], 0.25f) << "the inverse of the inverse would be 4";
  }
}

// A device without a kernel for so many rows, which runs out of memory when y has changed.
TEST_F(GroupingBackendTest, TermsThatADeviceMakesInSeveralOperationsAreNotMadeTwice) {
  constexpr int64_t kRows = 33, kCols = 5;
  backend_ = MakeGroupingBackend(std::make_unique<LacksMemoryForScales>(*device_), {});
  const DeviceMatrix rows = Matrix(kRows, kCols, 1), v = Matrix(1, kCols, 2);
  const std::vector<double> weights(kRows, 0.5);
  const SymmetricForm h(0.5, 1.0, weights, rows.view());
  const auto terms = [&](Backend& backend) {
    DeviceMatrix y = Matrix(1, kCols, 3), out = Matrix(1, kCols, 4);
    EXPECT_TRUE(backend.ShermanMorrisonTerms(h, 1.0, v.view(), y.view(), out.view(), {}).ok());
    return Host(out.view());
  };
  const std::vector<float> expected = terms(*device_);
  Backend::Task task(*backend_);
  EXPECT_EQ(terms(*backend_), expected);
}

TEST_F(GroupingBackendTest, LeavesNoMemoryBehindWhenItIsLost) {
  const int64_t before = backend_->allocated_bytes();
  DeviceMatrix x = Matrix(3, 3, 1);
  recorder_->Fail(Operation{operation::Gemm{}}.kind());
  InTasks(3, [&](int i) {
    DeviceMatrix y = backend_->Allocate(3, 3).value(), z = backend_->Allocate(3, 3).value();
    (void)backend_->Copy(x.view(), y.view());
    if (i == 0) (void)backend_->Gemm(1.0, x.view(), Transpose::kNo, x.view(), Transpose::kNo, 0.0, z.view());
    if (i == 1) (void)backend_->Dot(x.view(), y.view());  // the third ends without having waited
  });
  x = DeviceMatrix();
  EXPECT_EQ(backend_->allocated_bytes(), before);
  // Nor operations that the next task of this thread would run.
  const std::unique_ptr<Backend> other = MakeGroupingBackend(std::make_unique<Recorder>(*device_), {});
  Backend::Task task(*other);
  EXPECT_TRUE(task.Finish().ok());
}

TEST_F(GroupingBackendTest, HoldsLittleOfWhatATaskHasFreed) {
  constexpr int64_t kBlock = 64 * 64 * sizeof(float);
  backend_ = MakeGroupingBackend(std::make_unique<Recorder>(*device_), {.most_freed_bytes = 2 * kBlock});
  DeviceMatrix x = Matrix(64, 64, 1);
  const int64_t before = backend_->allocated_bytes();
  Backend::Task task(*backend_);
  for (int i = 0; i < 20; ++i) {
    DeviceMatrix scratch = backend_->AllocateScratch(64, 64).value();
    ASSERT_TRUE(backend_->Copy(x.view(), scratch.view()).ok());
    ASSERT_LE(backend_->allocated_bytes() - before, 4 * kBlock);
  }
}

TEST_F(GroupingBackendTest, GivesBackWhatATaskHasFreedBeforeItRunsOutOfMemory) {
  DeviceMatrix x = Matrix(64, 64, 1);
  recorder_->Limit(backend_->allocated_bytes() + 3 * 64 * 64 * static_cast<int64_t>(sizeof(float)) / 2);
  Backend::Task task(*backend_);
  for (int i = 0; i < 5; ++i) {
    absl::StatusOr<DeviceMatrix> scratch = backend_->Allocate(64, 64);
    ASSERT_TRUE(scratch.ok()) << scratch.status();
    ASSERT_TRUE(backend_->Copy(x.view(), scratch->view()).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(backend_->Allocate(128, 128).status()));
}

TEST_F(GroupingBackendTest, TasksWithinATaskArePartOfIt) {
  DeviceMatrix x = Matrix(3, 3, 1);
  recorder_->TakeSizes();
  Backend::Task outer(*backend_);
  {
    Backend::Task inner(*backend_);
    ASSERT_TRUE(backend_->Axpby(2.0, x.view(), 0.0, x.view()).ok());
  }
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre());
  EXPECT_TRUE(outer.Finish().ok());
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(1));
}

TEST_F(GroupingBackendTest, AnotherBackendsTaskIsNotOurs) {
  const std::unique_ptr<Backend> other = MakeGroupingBackend(MakeTestBackend(), {});
  DeviceMatrix x = Matrix(3, 3, 1);
  recorder_->TakeSizes();
  Backend::Task task(*other), ours(*backend_);
  ASSERT_TRUE(backend_->Axpby(2.0, x.view(), 0.0, x.view()).ok());
  EXPECT_THAT(recorder_->TakeSizes(), ElementsAre(1));
}

// Any operations on any fibers of any threads, now and then without a task: nothing hangs, and sums come out.
TEST_F(GroupingBackendTest, ManyThreadsInAndOutOfTasks) {
  constexpr int kThreads = 3, kFibers = 20, kRuns = 30;
  backend_ = MakeGroupingBackend(MakeTestBackend(), {.threads = 3});
  const auto work = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    DeviceMatrix x = Matrix(3, 5, seed);
    const double square = backend_->Dot(x.view(), x.view()).value();
    for (int run = 0; run < kRuns; ++run) {
      std::optional<Backend::Task> task;
      if (random() % 4 != 0) task.emplace(*backend_);
      const int64_t copies = 1 + static_cast<int64_t>(random() % 5);
      double sum = 0;
      for (int64_t i = 0; i < copies; ++i) {
        DeviceMatrix y = backend_->Allocate(3, 5).value();
        ASSERT_TRUE(backend_->Copy(x.view(), y.view()).ok());
        if (random() % 2 == 0) {
          ASSERT_TRUE(backend_->Axpby(2.0, y.view(), 0.0, y.view()).ok());
        }
        sum += backend_->Dot(x.view(), y.view()).value() / square;
      }
      ASSERT_THAT(sum, AllOf(Ge(0.999 * static_cast<double>(copies)), Le(2.001 * static_cast<double>(copies))));
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      if (thread == 0) return work(1000);  // on its own stack
      TaskGroup group(*backend_);
      group.RunWithoutTasks(kFibers, [&](int fiber) { work(100 * thread + static_cast<uint64_t>(fiber)); });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace precondor
