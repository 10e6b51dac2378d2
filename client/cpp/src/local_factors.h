// SPDX-License-Identifier: Apache-2.0
// The factors that a worker has itself (REPLAY and PULL_FACTORS): brings each layer's forward with what its shard hands
// out at statistic steps, and preconditions with them. Without I/O; its arithmetic has threads of its own.
#pragma once

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

#include "client/cpp/src/answer_sink.h"
#include "client/cpp/src/factor_update.h"
#include "client/cpp/src/result_state.h"
#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"

namespace precondor {

// Thread-safe. Invariants:
// - A layer's factors are of version v exactly when its shard's were after the same statistic steps: what is received
// out
//   for version v + 1 is applied to v alone. A rank that is at another version, or does not know its version, fetches.
// - A gradient of step t is preconditioned when the layer's statistic steps up to t are over, and not before.
// - A layer is worked on by one thread at a time. Lock order: mu_ is a leaf; hooks and arithmetic happen without it.
class LocalFactors {
 public:
  // Asks for the layer's factors as they are; the answer, or why there is none, goes to `sink`.
  using Fetch = std::function<void(int64_t layer, const std::shared_ptr<AnswerSink>& sink)>;

  // Factors on the CPU (kernels/cpu). `what`: for messages. Errors: those of MethodSet::Make.
  static absl::StatusOr<std::unique_ptr<LocalFactors>> Make(const SessionSpec& spec, int threads, std::string what,
                                                            Fetch fetch);
  // With this arithmetic. `threads` 0: there is none but that of who calls Work.
  static std::unique_ptr<LocalFactors> MakeWith(const SessionSpec& spec, MethodSet methods,
                                                std::unique_ptr<Backend> backend, int threads, std::string what,
                                                Fetch fetch);
  ~LocalFactors();
  // Ends the threads and answers what is left with Cancelled. Nothing calls `fetch` afterwards.
  void Stop();

  // The layer's factors will be of use at second-order steps from `since`, which comes after first order or is 0:
  // fetches them unless they are there. Those from before first order are gone: the shards have let go of them.
  void Need(int64_t layer, uint64_t since);
  // Where the answer to the layer's PULL of `step` goes; null when it is waited for already. In order of steps.
  std::shared_ptr<AnswerSink> Expect(int64_t layer, uint64_t step);
  // Gives up on an Expect whose PULL was not sent.
  void Forget(int64_t layer, uint64_t step);
  // `answer` is that of the gradient, whose memory and `out` are the caller's until it is there. FailedPrecondition at
  // a statistic step that has not been expected. `since` as in Need.
  void Precondition(uint64_t step, uint64_t since, int64_t layer, ConstMatrixView gradient, MatrixView out,
                    const std::shared_ptr<PreconditionFuture::State>& answer);
  // In first order the layer's factors are of no use: frees them, once nothing waits for them.
  void Release(int64_t layer);
  // Does all that there is to do about one layer, on this thread; false when there is nothing.
  bool Work();
  // Answers everything with `status`, now and from now on.
  void Fail(const absl::Status& status);

  // Of the layer's factors, with every update in them that has been expected; 0 while there are none. Waits for those.
  // DeadlineExceeded after `deadline`.
  absl::StatusOr<uint64_t> Checksum(int64_t layer, absl::Time deadline);

  // Of a layer's factors, for tests; 0 while there are none.
  uint64_t VersionOf(int64_t layer) const;

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
    bool fetched_since = false;  // because of it
  };
  struct Layer {
    SyncState sync_state = SyncState::kUnknown;
    std::optional<uint64_t> last_expected;
    std::set<uint64_t> open;                      // steps whose PULL is not over
    std::map<uint64_t, ReceivedUpdate> received;  // of those, what has come
    std::optional<absl::StatusOr<FactorUpdate>> fetched;
    std::deque<Request> requests;
    uint64_t since = 0;  // of the last Need
    bool release = false;
    // Steps from here on come after first order: once the earlier ones are over, factors are fetched anew for them.
    std::optional<uint64_t> renew_from;
    // A statistic step that could not be learnt from, and why: its gradient is not preconditioned.
    std::optional<std::pair<uint64_t, absl::Status>> failure;
    uint64_t version = 0;
    bool busy = false;    // a thread works on it, or reads it
    bool queued = false;  // in ready_
  };
  // What comes of something handed out.
  enum class Verdict : uint8_t { kOver, kFetch, kFailed };

  LocalFactors(SessionSpec spec, std::string what, Fetch fetch, MethodSet methods, std::unique_ptr<Backend> backend);
  std::string Describe(int64_t layer) const;
  std::shared_ptr<AnswerSink> MakeSink(int64_t layer, const std::string& what, FactorUpdateSink::Done done) const;
  void StartFetch(int64_t layer);
  absl::Status CheckStep(const Layer& layer, int64_t index, uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake(int64_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Loop();
  // One piece of work on the layer; false when there is none now.
  bool WorkOn(int64_t index);
  void TakeFetched(int64_t index, absl::StatusOr<FactorUpdate> fetched);
  void TakeUpdate(int64_t index, uint64_t step, ReceivedUpdate received);
  Verdict Apply(int64_t index, const ReceivedUpdate& received, absl::Status& why);
  absl::Status LoadState(int64_t index, const std::string& bytes);
  absl::Status Replay(int64_t index, const FactorUpdate& received);
  static bool WaitsForRenewal(const Layer& layer, uint64_t step) {
    return layer.renew_from.has_value() && step >= *layer.renew_from;
  }
  // The layer's requests from that step on get `why`, and it has to fetch before it goes on.
  void GiveUp(int64_t index, uint64_t from_step, const absl::Status& why);
  absl::StatusOr<Preconditioned> Compute(int64_t index, const Request& request);

  // Const after construction.
  const SessionSpec spec_;
  const std::string what_;
  const Fetch fetch_;
  const MethodSet methods_;
  const std::unique_ptr<Backend> backend_;

  mutable Mutex mu_;
  CondVar changed_;  // of the threads
  CondVar at_rest_;  // a layer may be at rest
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mu_);
  std::deque<int64_t> ready_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  // By layer, of the thread that works on it; null: no factors.
  std::vector<std::unique_ptr<LayerState>> states_;
  std::vector<std::thread> threads_;
};

}  // namespace precondor
