// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/grouping_backend.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouping/forwarding_backend.h"
#include "kernels/grouping/operands.h"
#include "kernels/operation.h"

namespace precondor {
namespace {

// Operations of a task among which one may be passed over: what looking for them costs grows with their square.
constexpr int64_t kLookahead = 16;

// A thread's task and what it has put off: its thread's alone, but the leader's of a round while it waits.
struct ThreadTask {
  const Backend* backend = nullptr;  // null: the thread is in none
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<std::pair<float*, int64_t>> freed;  // memory that the operations may still use
  int64_t freed_bytes = 0;
  // Of a round: what has not run yet, in its order.
  std::vector<const Operation*> open;
  absl::Status status;  // of the operation that it waits for
  bool waits = false;
  bool in_batch = false;
  absl::Status batch_status;  // the first error of what the batch has asked for
  CondVar changed;
};

ThreadTask& OwnTask() {
  thread_local ThreadTask task;
  return task;
}

class GroupingBackend final : public ForwardingBackend {
 public:
  GroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options)
      : ForwardingBackend(*device), options_(options), device_(std::move(device)) {}

  bool runs_tasks_together() const override { return true; }
  absl::Status fault() const override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    return device_->fault();
  }

 private:
  bool InTask() const { return OwnTask().backend == this; }

  void DoBeginTask() override {
    ThreadTask& task = OwnTask();
    if (task.backend == nullptr) {
      task.backend = this;
      MutexLock lock(mu_);
      ++tasks_;
    }
    if (InTask()) ++task.depth;
  }

  absl::Status DoEndTask() override {
    ThreadTask& task = OwnTask();
    if (!InTask() || --task.depth > 0) return absl::OkStatus();
    absl::Status status = Before();
    Clear(task);  // which a lost backend has left
    task.backend = nullptr;
    MutexLock lock(mu_);
    --tasks_;
    WakeLeader();
    return status;
  }

  // Everything that the thread has put off runs first.
  absl::Status Before() override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    return InTask() && !OwnTask().operations.empty() ? Wait(OwnTask()) : absl::OkStatus();
  }

  // Until somebody waits: its caller when it is to know something of it, unless a batch asks for more.
  absl::Status PutOff(Operation operation) {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    if (InTask()) {
      const bool waits = operation.tells_host() && !OwnTask().in_batch;
      OwnTask().operations.push_back(std::move(operation));
      return waits ? Wait(OwnTask()) : absl::OkStatus();
    }
    const Operation* const alone = &operation;
    absl::Status status;
    device_->RunTogether({&alone, 1}, {&status, 1});
    return status;
  }
  // The same, with what it tells there on return.
  absl::Status RunNow(Operation operation) {
    PRECONDOR_RETURN_IF_ERROR(PutOff(std::move(operation)));
    return Before();
  }

  void DoBeginBatch() override {
    if (InTask()) OwnTask().in_batch = true;
  }
  absl::Status DoEndBatch() override {
    if (!InTask()) return absl::OkStatus();
    ThreadTask& task = OwnTask();
    const absl::Status ran = Before();
    task.in_batch = false;
    absl::Status first = std::exchange(task.batch_status, absl::OkStatus());
    first.Update(ran);
    return first;
  }

  // --- rounds -------------------------------------------------------------------------------------------------------

  absl::Status Wait(ThreadTask& task) ABSL_LOCKS_EXCLUDED(mu_) {
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.patience);
    MutexLock lock(mu_);
    task.status = absl::OkStatus();
    task.waits = true;
    waiting_.push_back(&task);
    while (task.waits) {
      if (running_) {
        task.changed.wait(mu_);
      } else if (AllWait() || std::chrono::steady_clock::now() >= deadline) {
        Lead();
      } else {
        task.changed.wait_until(mu_, deadline);
      }
    }
    if (task.in_batch) task.batch_status.Update(task.status);
    return task.status;
  }

  bool AllWait() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return waiting_.size() == tasks_; }

  // For whoever waits, to look again whether to lead.
  void WakeLeader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!waiting_.empty() && AllWait()) waiting_.front()->changed.notify_one();
  }

  // Runs what all that wait have put off.
  void Lead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    running_ = true;
    const std::vector<ThreadTask*> round = std::exchange(waiting_, {});
    mu_.Unlock();
    RunRound(round);
    mu_.Lock();
    running_ = false;
    for (ThreadTask* const task : round) {
      task->waits = false;
      task->changed.notify_one();
    }
    for (ThreadTask* const task : waiting_) task->changed.notify_one();
  }

  void RunRound(const std::vector<ThreadTask*>& round) {
    for (ThreadTask* const task : round) {
      task->open.clear();
      for (const Operation& operation : task->operations) task->open.push_back(&operation);
    }
    for (;;) {
      const ThreadTask& longest = **std::max_element(
          round.begin(), round.end(),
          [](const ThreadTask* one, const ThreadTask* other) { return one->open.size() < other->open.size(); });
      if (longest.open.empty() || !Lost().ok()) break;
      RunNext(longest.open.front()->kind(), round);
    }
    const absl::Status lost = Lost();
    for (ThreadTask* const task : round) {
      task->status.Update(lost);
      Clear(*task);
    }
  }

  // Forgets what it has put off, which has run or never will.
  void Clear(ThreadTask& task) {
    task.open.clear();
    task.operations.clear();
    for (const auto& [data, elements] : task.freed) FreeOn(*device_, data, elements);
    task.freed.clear();
    task.freed_bytes = 0;
  }

  // What every task has of this kind, of what comes next, that depends on nothing which has not run.
  void RunNext(size_t kind, const std::vector<ThreadTask*>& round) {
    std::vector<ThreadTask*> tasks;  // of the operations
    std::vector<const Operation*> operations;
    for (ThreadTask* const task : round) {
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
    std::vector<absl::Status> statuses(operations.size());
    device_->RunTogether(operations, absl::MakeSpan(statuses));
    const bool none_has_run = std::all_of(statuses.begin(), statuses.end(),
                                          [](const absl::Status& status) { return absl::IsResourceExhausted(status); });
    if (none_has_run) {  // what has run may have changed its own operands, and must not run again
      device_->Trim();
      std::fill(statuses.begin(), statuses.end(), absl::OkStatus());
      device_->RunTogether(operations, absl::MakeSpan(statuses));
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      // Who waits for it hears of it; whoever has gone on takes what is not there for granted.
      if (operations[i]->tells_host()) {
        tasks[i]->status.Update(statuses[i]);
      } else if (!statuses[i].ok()) {
        Lose(statuses[i]);
      }
    }
  }

  absl::Status Lost() const ABSL_LOCKS_EXCLUDED(lost_mu_) {
    MutexLock lock(lost_mu_);
    return lost_;
  }
  void Lose(const absl::Status& status) ABSL_LOCKS_EXCLUDED(lost_mu_) {
    MutexLock lock(lost_mu_);
    if (!lost_.ok()) return;
    lost_ = absl::InternalError(absl::StrCat(
        name(),
        " backend: ended by the failure of an operation that had been put off: ", std::string(status.message())));
  }

  // --- memory -------------------------------------------------------------------------------------------------------

  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    if (!InTask()) return AllocateOn(*device_, elements);
    PRECONDOR_ASSIGN_OR_RETURN(float* const data, DoAllocateScratch(elements));
    const MatrixView all(data, 1, elements);
    OwnTask().operations.push_back({Operation::Elementwise{.x = all, .y = all}});  // 0 x + 0 y
    return data;
  }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());
    absl::StatusOr<float*> data = AllocateScratchOn(*device_, elements);
    if (!absl::IsResourceExhausted(data.status()) || !InTask() || OwnTask().freed.empty()) return data;
    PRECONDOR_RETURN_IF_ERROR(Before());  // which frees
    return AllocateScratchOn(*device_, elements);
  }
  void DoFree(float* data, int64_t elements) override {
    if (!InTask() || OwnTask().operations.empty()) return FreeOn(*device_, data, elements);
    OwnTask().freed.emplace_back(data, elements);
    OwnTask().freed_bytes += elements * static_cast<int64_t>(sizeof(float));
    // An error is that of the task's next operation, or of its end: the backend is lost then.
    if (OwnTask().freed_bytes > options_.most_freed_bytes) (void)Before();
  }

  // --- operations that wait for company -----------------------------------------------------------------------------

  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    return PutOff({Operation::Elementwise{.alpha = 1, .x = from, .y = to}});
  }
  absl::Status DoAxpby(double alpha, ConstMatrixView x, double beta, MatrixView y) override {
    return PutOff({Operation::Elementwise{.alpha = alpha, .beta = beta, .x = x, .y = y}});
  }
  absl::Status DoScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleRows, scales, x, y);
  }
  absl::Status DoScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleColumns, scales, x, y);
  }
  absl::Status DoScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleBothSides, scales, x, y);
  }
  absl::Status Scale(ElementwiseKind kind, absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
    return PutOff({Operation::Elementwise{
        .kind = kind, .scales = Operation::Numbers(scales.begin(), scales.end()), .x = x, .y = y}});
  }
  absl::Status DoAddDiagonal(double value, MatrixView a) override {
    return PutOff({Operation::Elementwise{.kind = ElementwiseKind::kAddDiagonal, .alpha = value, .x = a, .y = a}});
  }
  absl::Status DoSymmetrize(MatrixView a) override {
    return PutOff({Operation::Elementwise{.kind = ElementwiseKind::kSymmetrize, .x = a, .y = a}});
  }
  absl::Status DoPackLower(ConstMatrixView x, MatrixView packed) override {
    return PutOff({Operation::Elementwise{.kind = ElementwiseKind::kPackLower, .x = x, .y = packed}});
  }
  absl::Status DoUnpackLower(ConstMatrixView packed, MatrixView x) override {
    return PutOff({Operation::Elementwise{.kind = ElementwiseKind::kUnpackLower, .x = packed, .y = x}});
  }
  absl::Status DoPackRow(ConstMatrixView x, int64_t i, MatrixView packed) override {
    return PutOff({Operation::Elementwise{.kind = ElementwiseKind::kPackRow, .row = i, .x = x, .y = packed}});
  }
  absl::Status DoGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                      double beta, MatrixView c) override {
    return PutOff({Operation::Gemm{alpha, a, transpose_a, b, transpose_b, beta, c}});
  }
  absl::Status DoSymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                         ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v,
                                         MatrixView y) override {
    return PutOff({Operation::SymmetricUpdateMultiply{scale, shift, Operation::Numbers(weights.begin(), weights.end()),
                                                      rows, m.raw(), m.n(), m.storage(), v, y}});
  }
  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return PutOff({Operation::RowSquaredNorms{x, out}});
  }
  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return PutOff({Operation::ColumnSquaredNorms{x, out}});
  }
  absl::StatusOr<double> DoDot(ConstMatrixView x, ConstMatrixView y) override {
    double out = 0;
    PRECONDOR_RETURN_IF_ERROR(RunNow({Operation::Dot{x, y, &out}}));
    return out;
  }
  absl::Status DoLowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core,
                             MatrixView packed) override {
    return PutOff({Operation::LowRankCore{Operation::Numbers(roots.begin(), roots.end()), gram, core, packed}});
  }
  absl::Status DoLowRankAppend(absl::Span<const double> scales, ConstMatrixView rows, absl::Span<const int64_t> slots,
                               MatrixView vectors, MatrixView gram) override {
    return PutOff({Operation::LowRankAppend{
        Operation::Numbers(scales.begin(), scales.end()), rows, {slots.begin(), slots.end()}, vectors, gram}});
  }
  absl::Status DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                     ProductPrecision precision, absl::Span<double> squares, MatrixView u) override {
    const Operation product = {Operation::LowRankPrecondition{out_side, in_side, d, u, precision, squares}};
    return squares.empty() ? PutOff(product) : RunNow(product);
  }
  absl::Status DoDensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d,
                                   ProductPrecision precision, absl::Span<double> squares, MatrixView u) override {
    const Operation product = {Operation::DensePrecondition{
        l, r, {l.weights.begin(), l.weights.end()}, {r.weights.begin(), r.weights.end()}, d, u, precision, squares}};
    return squares.empty() ? PutOff(product) : RunNow(product);
  }
  absl::Status DoShermanMorrisonTerms(const SymmetricForm& h, double factor, ConstMatrixView v, MatrixView y,
                                      MatrixView terms, absl::Span<double> squares) override {
    // Of more than a device takes in one, the primitives have company, and each may be run again that lacks memory: all
    // of them together change y on the way.
    using Terms = Operation::ShermanMorrisonTerms;
    const bool in_several = v.rows > Terms::kMostVectors || h.rows.rows > Terms::kMostRows;
    if (in_several && !(InTask() && OwnTask().in_batch)) {
      return Backend::DoShermanMorrisonTerms(h, factor, v, y, terms, squares);
    }
    return PutOff(
        {Operation::ShermanMorrisonTerms{h, {h.weights.begin(), h.weights.end()}, factor, v, y, terms, squares}});
  }
  absl::Status DoSpdInverse(ConstMatrixView a, MatrixView x) override { return PutOff({Operation::SpdInverse{a, x}}); }
  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
    return PutOff({Operation::SymmetricEigen{a, values, q}});
  }

  // --- and that do not, beside those of ForwardingBackend -----------------------------------------------------------

  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    PRECONDOR_RETURN_IF_ERROR(Lost());  // what has been put off does not use it either
    return device_->UploadToIdle(host, device);
  }
  bool DoKnowsProducts(ProductPrecision precision) const override { return device_->KnowsProducts(precision); }
  bool DoKnowsSymmetric(SymmetricStorage storage) const override { return KnowsSymmetricOn(*device_, storage); }
  absl::Status DoSymmetricExpand(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                                 const SymmetricMatrix& m, MatrixView x) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return device_->SymmetricExpand(scale, shift, weights, rows, m, x);
  }
  absl::Status DoSymmetricCompress(ConstMatrixView x, SymmetricMatrix& m) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return device_->SymmetricCompress(x, m);
  }
  absl::Status DoFillNormal(const CounterRandom& random, MatrixView x) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return device_->FillNormal(random, x);
  }

  const GroupingOptions options_;
  const std::unique_ptr<Backend> device_;

  Mutex mu_;
  size_t tasks_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<ThreadTask*> waiting_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;

  mutable Mutex lost_mu_;
  absl::Status lost_ ABSL_GUARDED_BY(lost_mu_);
};

}  // namespace

std::unique_ptr<Backend> MakeGroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options) {
  return std::make_unique<GroupingBackend>(std::move(device), options);
}

}  // namespace precondor
