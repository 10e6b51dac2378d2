// SPDX-License-Identifier: Apache-2.0
// Factors that a worker keeps itself (REPLAY and PULL_FACTORS). Applies the updates that the shards send at statistic
// steps, and preconditions gradients with the factors. Does no I/O; the computation has its own threads.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/contribution.h"
#include "client/cpp/src/result_state.h"
#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "precondor/client.h"

namespace precondor {

// Content of the answer: the vectors of one update, or whole factors.
struct FactorUpdate {
  Decision decision = Decision::kIdentity;  // kIdentity: the step changed nothing
  uint64_t factor_version = 0;              // version of the factors after the update
  std::string reason;
  std::array<int64_t, 2> rows = {0, 0};  // rows of a and of g; 0: `bytes` are from LayerState::Save
  std::string bytes;                     // a [rows, d_in], then g [rows, d_out], in f32 as on the wire; or the factors
};

// Receives one answer. Thread-safe; calls `done` once, without holding its lock.
class FactorUpdateSink final : public AnswerSink {
 public:
  struct Limits {
    std::array<int64_t, 2> dims = {0, 0};  // d_in, d_out
    int64_t most_rows = 0;                 // limit for vectors; 0: no vectors are expected
    int64_t most_bytes = 0;                // limit for factors
  };
  using Done = std::function<void(absl::StatusOr<FactorUpdate> update)>;

  // `what` begins the messages of errors.
  FactorUpdateSink(std::string what, const Limits& limits, Done done);

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override;

 private:
  // Returns the rows of a and g according to `tensors`; {0, 0} for factors.
  absl::StatusOr<std::array<int64_t, 2>> RowsOf(absl::Span<const wire::TensorFormat> tensors,
                                                uint64_t payload_bytes) const;

  const std::string what_;
  const Limits limits_;
  const Done done_;

  mutable Mutex mu_;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t expected_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  FactorUpdate update_ ABSL_GUARDED_BY(mu_);
};

// Keeps the factors of all layers of one worker. Thread-safe. Invariants:
// - A layer's factors of version v are those that its shard had after the updates of equal statistic steps: an update
//   to version v + 1 is applied only to version v. A rank with another or an unknown version fetches the factors.
// - A gradient of step t is preconditioned once the layer's statistic steps up to t are complete, and not before.
// - At most one thread works on a layer. Lock order: mu_ is a leaf; hooks and computation run without it.
class LocalFactors {
 public:
  // Requests the layer's current factors. `sink` receives the answer or the error.
  using Fetch = std::function<void(int64_t layer, const std::shared_ptr<AnswerSink>& sink)>;

  // Makes factors on the CPU (kernels/cpu). `what` begins the messages of errors. Returns the errors of
  // MethodSet::Make.
  static absl::StatusOr<std::unique_ptr<LocalFactors>> Make(const SessionSpec& spec, int threads, std::string what,
                                                            Fetch fetch);
  // Makes factors on the given backend. With `threads` 0 all work is done by callers of Work.
  static std::unique_ptr<LocalFactors> MakeWith(const SessionSpec& spec, MethodSet methods,
                                                std::unique_ptr<Backend> backend, int threads, std::string what,
                                                Fetch fetch);
  ~LocalFactors();
  // Ends the threads and answers the remaining requests with CANCELLED. `fetch` is not called afterwards.
  void Stop();

  // Fetches the layer's factors if it has none. First order changes them neither here nor in the shard.
  void Need(int64_t layer);
  // Fetches the layer's factors although it has some: the shard has lost updates, and counts their versions anew. Only
  // queues that, since streams call this.
  void Refetch(int64_t layer);
  // Returns the sink for the answer to the layer's PULL of `step`; null if that answer is expected already. Call in
  // order of steps.
  std::shared_ptr<AnswerSink> ExpectUpdate(int64_t layer, uint64_t step);
  // Undoes ExpectUpdate for a PULL that was not sent.
  void CancelUpdate(int64_t layer, uint64_t step);
  // Preconditions `gradient` into `out`. Both are the caller's memory and must stay valid until `answer` is ready.
  // Fails with FAILED_PRECONDITION at a statistic step without a call of ExpectUpdate, and if the gradient's step is
  // earlier than the last expected step.
  void Precondition(uint64_t step, int64_t layer, ConstMatrixView gradient, MatrixView out,
                    const std::shared_ptr<PreconditionFuture::State>& answer);
  // Does all available work on one layer, on this thread. Returns false if no layer has work.
  bool Work();
  // Answers all current and later requests with `status`.
  void Fail(const absl::Status& status);

  // Waits for all expected updates of the layer and returns a checksum of its factors; 0 if it has none. Returns
  // DEADLINE_EXCEEDED after `deadline`.
  absl::StatusOr<uint64_t> Checksum(int64_t layer, absl::Time deadline);

 private:
  enum class SyncState : uint8_t { kUnknown, kFetching, kKnown };
  struct Request {
    uint64_t step = 0;
    ConstMatrixView gradient;
    MatrixView out;
    std::shared_ptr<PreconditionFuture::State> answer;
  };
  struct ReceivedUpdate {
    absl::StatusOr<FactorUpdate> factors;
    bool fetched_since = false;  // factors were fetched because of this update
  };
  struct Layer {
    SyncState sync_state = SyncState::kUnknown;
    std::optional<uint64_t> last_expected;
    std::set<uint64_t> open;                      // steps whose PULL is not complete
    std::map<uint64_t, ReceivedUpdate> received;  // answers to open steps
    std::optional<absl::StatusOr<FactorUpdate>> fetched;
    std::deque<Request> requests;
    // A statistic step whose update failed, and the error. The gradient of that step gets the error.
    std::optional<std::pair<uint64_t, absl::Status>> failure;
    bool outdated = false;  // the factors are to be fetched again
    bool busy = false;      // a thread works on it or reads it
    bool queued = false;    // in ready_
  };
  // Result of applying an update: the step is complete, the factors must be fetched first, or the step has failed.
  enum class Verdict : uint8_t { kOver, kFetch, kFailed };

  LocalFactors(SessionSpec spec, std::string what, Fetch fetch, MethodSet methods, std::unique_ptr<Backend> backend);
  std::string Describe(int64_t layer) const;
  std::shared_ptr<AnswerSink> MakeSink(int64_t layer, const std::string& what, FactorUpdateSink::Done done) const;
  void StartFetch(int64_t layer);
  absl::Status CheckStep(const Layer& layer, int64_t index, uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake(int64_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Loop();
  // Does one piece of work on the layer. Returns false if none is possible now.
  bool WorkOn(int64_t index);
  void TakeFetched(int64_t index, absl::StatusOr<FactorUpdate> fetched);
  void TakeUpdate(int64_t index, uint64_t step, ReceivedUpdate received);
  Verdict Apply(int64_t index, const ReceivedUpdate& received, absl::Status& why);
  absl::Status LoadState(int64_t index, const std::string& bytes);
  absl::Status Replay(int64_t index, const FactorUpdate& received);
  // Answers the layer's requests from `from_step` on with `why`. The layer has to fetch factors before it goes on.
  void GiveUp(int64_t index, uint64_t from_step, const absl::Status& why);
  absl::StatusOr<Preconditioned> Compute(int64_t index, const Request& request);

  // Const after construction.
  const SessionSpec spec_;
  const std::string what_;
  const Fetch fetch_;
  const MethodSet methods_;
  const std::unique_ptr<Backend> backend_;

  mutable Mutex mu_;
  CondVar changed_;  // signals the threads
  CondVar at_rest_;  // signals that a layer may have no work left
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mu_);
  std::deque<int64_t> ready_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  // By layer; null: not fetched. Used only by the thread that works on the layer.
  std::vector<std::unique_ptr<LayerState>> states_;
  std::vector<std::thread> threads_;
};

}  // namespace precondor
