// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/grouping_backend.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/fiber.h"
#include "kernels/base/first_error.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouping/deferred_task.h"
#include "kernels/grouping/device_driver.h"
#include "kernels/grouping/forwarding_backend.h"
#include "kernels/operation.h"

namespace precondor {
namespace {

// Number of a task's next operations that are searched for one that can overtake others. The cost of the search grows
// with its square.
constexpr int64_t kLookahead = 16;

// Returns the caller's task. A fiber may run on one thread now and on another later, so the address of a thread_local
// must not outlive the call.
__attribute__((noinline)) DeferredTask& OwnTask() {
  if (Fiber* const fiber = Fiber::Current()) {
    if (fiber->local() == nullptr) fiber->local() = std::make_shared<DeferredTask>();
    return *static_cast<DeferredTask*>(fiber->local().get());
  }
  asm volatile("");  // keeps the compiler from assuming that the result never changes
  thread_local DeferredTask task;
  return task;
}

class GroupingBackend final : public ForwardingBackend {
 public:
  GroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options)
      : ForwardingBackend(*device),
        options_(options),
        device_(std::move(device)),
        driver_([this](absl::Span<DeferredTask* const> tasks) { RunRound(tasks); },
                {.threads = options.threads,
                 .fibers_at_start = static_cast<size_t>(options.tasks_at_start),
                 .patience = options.patience,
                 .most_fibers = static_cast<size_t>(options.most_tasks)}) {}

  bool runs_tasks_together() const override { return true; }
  absl::Status fault() const override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    return device_->fault();
  }

 private:
  bool InTask() const { return OwnTask().backend == this; }

  // A task on a fiber moves to the driver's threads, and back when it ends. A task on a thread's own stack stays there,
  // and that thread runs its deferred operations.
  void DoBeginTask() override {
    DeferredTask& task = OwnTask();
    if (task.backend == nullptr) {
      task.backend = this;
      if (Fiber::Current() != nullptr) Fiber::MoveTo(driver_);
    }
    if (InTask()) ++task.depth;
  }

  absl::Status DoEndTask() override {
    DeferredTask& task = OwnTask();
    if (!InTask() || --task.depth > 0) return absl::OkStatus();
    absl::Status status = Before();
    Clear(task);  // a lost backend has not run them
    task.backend = nullptr;
    if (driver_.RunsCaller()) Fiber::Return();
    return status;
  }

  void DoExpectTask() override { driver_.Expect(1); }
  absl::Status DoEndExpectation() override {
    driver_.Expect(-1);
    return absl::OkStatus();
  }

  // Runs everything that the task has deferred.
  absl::Status Before() override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    return InTask() && !OwnTask().operations.empty() ? Wait(OwnTask()) : absl::OkStatus();
  }

  // Defers the operation until its task waits. It waits at once if the caller needs the outcome, unless a batch will
  // request more.
  absl::Status Defer(const Operation& operation) {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    if (!InTask()) {
      const Operation* const alone = &operation;
      absl::Status status;
      device_->Run({&alone, 1}, {&status, 1});
      return status;
    }
    const bool in_batch = OwnTask().in_batch;
    if (const auto* const make = operation.As<operation::ShermanMorrisonTerms>()) {
      // More vectors or rows than a device takes in one operation: run the primitives instead. They can be grouped with
      // those of other tasks, and each can be run again if memory is lacking; as a whole the operation cannot, because
      // it changes y on the way.
      const bool in_several = make->v.rows > make->kMostVectors || make->h.rows.rows > make->kMostRows;
      if (in_several && !in_batch) return RunByPrimitives(*make);
    }
    OwnTask().Defer(operation);
    const Awaited awaited = operation.awaited();
    const bool waits = awaited == Awaited::kReturn || (awaited == Awaited::kOutcome && !in_batch);
    return waits ? Wait(OwnTask()) : absl::OkStatus();
  }
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    for (size_t i = 0; i < operations.size(); ++i) statuses[i] = Defer(*operations[i]);
  }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    return Defer({operation::Elementwise{.alpha = 1, .x = from, .y = to}});
  }

  void DoBeginBatch() override {
    if (InTask()) OwnTask().in_batch = true;
  }
  absl::Status DoEndBatch() override {
    if (!InTask()) return absl::OkStatus();
    DeferredTask& task = OwnTask();
    const absl::Status ran = Before();
    task.in_batch = false;
    absl::Status first = std::exchange(task.batch_status, absl::OkStatus());
    first.Update(ran);
    return first;
  }

  // --- Rounds -------------------------------------------------------------------------------------------------------

  // Runs the task's operations and returns when they have run: together with those of other tasks of the driver, or at
  // once.
  absl::Status Wait(DeferredTask& task) {
    task.status = absl::OkStatus();
    if (driver_.RunsCaller()) {
      driver_.Await(task);
    } else {
      DeferredTask* const alone = &task;
      RunRound({&alone, 1});
    }
    if (task.in_batch) task.batch_status.Update(task.status);
    return task.status;
  }

  void RunRound(absl::Span<DeferredTask* const> round) {
    for (DeferredTask* const task : round) {
      task->open.clear();
      for (const Operation& operation : task->operations) task->open.push_back(&operation);
    }
    for (;;) {
      const DeferredTask& longest = **std::max_element(
          round.begin(), round.end(),
          [](const DeferredTask* one, const DeferredTask* other) { return one->open.size() < other->open.size(); });
      if (longest.open.empty() || !Lost().ok()) break;
      RunNext(longest.open.front()->kind(), round);
    }
    const absl::Status lost = Lost();
    for (DeferredTask* const task : round) {
      task->status.Update(lost);
      Clear(*task);
    }
  }

  // Drops the deferred operations, which have run or never will, and frees the memory that they used.
  void Clear(DeferredTask& task) {
    task.open.clear();
    task.operations.clear();
    task.kept.clear();
    for (const auto& [data, elements] : task.freed) FreeOn(*device_, data, elements);
    task.freed.clear();
    freed_bytes_ -= std::exchange(task.freed_bytes, 0);
  }

  // Runs, together, all operations of this kind among the tasks' next ones that do not depend on an operation that has
  // not run.
  void RunNext(size_t kind, absl::Span<DeferredTask* const> round) {
    std::vector<DeferredTask*> tasks;  // the tasks of `operations`
    std::vector<const Operation*> operations;
    for (DeferredTask* const task : round) {
      const std::vector<const Operation*> open = std::exchange(task->open, {});
      for (auto next = open.begin(); next != open.end(); ++next) {
        const auto independent = [&](const Operation* before) { return AreIndependent(*before, **next); };
        const bool joins =
            (*next)->kind() == kind && next - open.begin() < kLookahead && std::all_of(open.begin(), next, independent);
        if (joins) {
          tasks.push_back(task);
          operations.push_back(*next);
        } else {
          task->open.push_back(*next);
        }
      }
    }
    const std::vector<absl::Status> statuses = RunWithMemoryRetries(operations);
    for (size_t i = 0; i < tasks.size(); ++i) {
      // A caller that waits gets the error. A caller that has continued relies on a result that does not exist, so the
      // backend is lost.
      if (operations[i]->awaited() != Awaited::kNothing) {
        tasks[i]->status.Update(statuses[i]);
      } else if (!statuses[i].ok()) {
        Lose(statuses[i]);
      }
    }
  }

  // Runs operations and returns the status of each. A group needs memory that single operations may not need, such as a
  // table of them, so operations that lacked memory run again, after Trim and then one by one.
  std::vector<absl::Status> RunWithMemoryRetries(const std::vector<const Operation*>& operations) {
    std::vector<absl::Status> statuses(operations.size());
    device_->Run(operations, absl::MakeSpan(statuses));
    for (const bool one_by_one : {false, true}) {
      // An operation that lacked memory has not run. Any other may have changed its operands, so it must not run again.
      std::vector<size_t> again;
      for (size_t i = 0; i < statuses.size(); ++i) {
        if (absl::IsResourceExhausted(statuses[i])) again.push_back(i);
      }
      if (again.empty()) break;
      if (!one_by_one) device_->Trim();
      RunAgain(operations, again, one_by_one ? 1 : again.size(), statuses);
    }
    return statuses;
  }
  // Runs again the operations with indices `places`, in groups of `group`.
  void RunAgain(const std::vector<const Operation*>& operations, absl::Span<const size_t> places, size_t group,
                std::vector<absl::Status>& statuses) {
    for (; !places.empty(); places.remove_prefix(group)) {
      std::vector<const Operation*> some;
      for (const size_t place : places.first(group)) some.push_back(operations[place]);
      std::vector<absl::Status> of_some(group);
      device_->Run(some, absl::MakeSpan(of_some));
      for (size_t i = 0; i < group; ++i) statuses[places[i]] = of_some[i];
    }
  }

  absl::Status Lost() const { return lost_.Get(); }
  void Lose(const absl::Status& status) {
    lost_.Set(absl::InternalError(absl::StrCat(
        name(), " backend: ended by the failure of a deferred operation: ", std::string(status.message()))));
  }

  // --- Memory -------------------------------------------------------------------------------------------------------

  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    if (!InTask()) return AllocateOn(*device_, elements);
    PRECONDOR_ASSIGN_OR_RETURN(float* const data, DoAllocateScratch(elements));
    const MatrixView all(data, 1, elements);
    OwnTask().Defer({operation::Elementwise{.x = all, .y = all}});  // zeros
    return data;
  }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    absl::StatusOr<float*> data = AllocateScratchOn(*device_, elements);
    if (!absl::IsResourceExhausted(data.status()) || !InTask() || OwnTask().freed.empty()) return data;
    PRECONDOR_RETURN_IF_ERROR(Before());  // frees memory
    return AllocateScratchOn(*device_, elements);
  }
  void DoFree(float* data, int64_t elements) override {
    if (!InTask() || OwnTask().operations.empty()) return FreeOn(*device_, data, elements);
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
    OwnTask().freed.emplace_back(data, elements);
    OwnTask().freed_bytes += bytes;
    const int64_t in_all = freed_bytes_ += bytes;
    // An error is returned by the task's next operation or by its end, because the backend is lost then.
    if (OwnTask().freed_bytes > options_.most_freed_bytes || in_all > options_.most_freed_bytes_in_all) (void)Before();
  }

  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());  // deferred operations do not use it either
    return device_->UploadToIdle(host, device);
  }
  bool DoSupportsPrecision(ProductPrecision precision) const override { return device_->SupportsPrecision(precision); }

  const GroupingOptions options_;
  const std::unique_ptr<Backend> device_;

  std::atomic<int64_t> freed_bytes_ = 0;  // sum over all tasks

  FirstError lost_;

  DeviceDriver driver_;  // destroyed first
};

}  // namespace

std::unique_ptr<Backend> MakeGroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options) {
  return std::make_unique<GroupingBackend>(std::move(device), options);
}

}  // namespace precondor
