// SPDX-License-Identifier: Apache-2.0
// Implementation of Worker, with ShardLinks to the shards and a ControlClient to the coordinator.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "client/cpp/src/control.h"
#include "client/cpp/src/device_gradients.h"
#include "client/cpp/src/local_factors.h"
#include "client/cpp/src/result_state.h"
#include "client/cpp/src/shard_link.h"
#include "client/cpp/src/shard_routes.h"
#include "client/cpp/src/step_control.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"

namespace precondor {

// Counts gradients whose memory gRPC may still read. Thread-safe.
class Borrowed {
 public:
  void Add();
  void Release();
  // Waits until the count is 0, at most until `deadline`.
  void Wait(absl::Time deadline);

 private:
  Mutex mu_;
  CondVar changed_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

// Implements Worker. Threads: the timer makes connections and fails contributions past their deadlines; the refresher
// joins again when the epoch has changed; the step control's thread sends reports; all other work runs on callers' and
// gRPC's threads. Lock order: a link's lock, then mu_ (in hooks). No call is made under mu_.
class WorkerImpl final : public Worker {
 public:
  // Makes a worker from the coordinator's answer once all ranks have joined.
  static absl::StatusOr<std::unique_ptr<Worker>> Make(const ClientOptions& options,
                                                      std::shared_ptr<ControlClient> control, std::string session,
                                                      const WorkerOptions& as, const v1::JoinSessionResponse& joined);
  ~WorkerImpl() override;

  const WorkerSession& session() const override { return joined_; }
  WorkerStatus status() const override;
  Mode ModeOf(uint64_t step) const override { return steps_->ModeOf(step); }
  absl::Status SendStatistics(uint64_t step, int64_t layer, ConstMatrixView a, ConstMatrixView g,
                              uint64_t samples) override;
  absl::Status AbstainStatistics(uint64_t step, int64_t layer) override;
  PreconditionFuture Precondition(uint64_t step, int64_t layer, const GradientBuffers& buffers, uint64_t samples,
                                  bool more) override;
  PreconditionFuture AbstainGradient(uint64_t step, int64_t layer) override;
  absl::Status DevicePlaneStatus(int64_t layer, int device) override;
  absl::StatusOr<uint64_t> FactorsChecksum(int64_t layer) override;
  absl::StatusOr<std::string> ReadFactors(int64_t layer) override;
  absl::Status Flush() override;
  ReportFuture ReportStep(uint64_t step, double loss, uint64_t samples, bool finite, double learning_rate) override;
  void Cancel() override;
  absl::Status Leave() override;

 private:
  WorkerImpl(const ClientOptions& options, std::shared_ptr<ControlClient> control, std::string session,
             SessionSpec spec, uint32_t rank, uint64_t incarnation, const v1::JoinSessionResponse& joined);
  std::shared_ptr<ShardLink> MakeLink(const std::string& address, uint64_t epoch);
  void Start(uint64_t first_step, WorkerDirective directive);

  // Returns ABORTED if the job has rolled back in an epoch after `epoch` to a step before `next_step`, this worker's
  // lowest unfinished one.
  absl::Status CheckResume(const WorkerDirective& directive, uint64_t epoch, uint64_t next_step) const;
  // Waits for the lease of `step` and returns the step's mode, or the error for which nothing may be sent for it.
  absl::StatusOr<Mode> CheckStep(uint64_t step, int64_t layer) const;
  absl::Status CheckStatistics(uint64_t step, int64_t layer) const;
  absl::Status CheckGradient(int64_t layer) const;
  size_t CountSentGradients() const;                     // the gradients that this worker sends in a step
  absl::Status CheckWholeGradient(int64_t layer) const;  // also that the exchange is not SHARDED
  absl::Status CheckLayer(int64_t layer) const;
  std::string Describe(uint64_t step, int64_t layer) const;

  // Precondition, by the form of the gradient.
  PreconditionFuture PreconditionMatrix(uint64_t step, int64_t layer, const GradientBuffers::Matrix& matrix,
                                        uint64_t samples, bool more);
  PreconditionFuture PreconditionParts(uint64_t step, int64_t layer, const GradientBuffers::Parts& buffers);
  PreconditionFuture PreconditionOnDevice(uint64_t step, int64_t layer, const GradientBuffers::DeviceMatrix& matrix,
                                          uint64_t samples);
  // Sends a gradient in host memory, encoded or from the caller's memory.
  PreconditionFuture SubmitGradient(std::shared_ptr<Contribution> contribution, const std::string& what,
                                    ConstMatrixView gradient, MatrixView out);
  // Lets the future's error of a time-out name the ranks that the step waits for.
  void ExplainLate(PreconditionFuture::State& state, uint64_t step, int64_t layer) const;
  PreconditionFuture Submit(std::shared_ptr<Contribution> contribution,
                            const std::shared_ptr<PreconditionFuture::State>& state, int64_t layer);
  // True if a first-order step needs no shard: except in DIRECT, the caller has the average already.
  bool NeedsNoShard(Mode mode) const { return mode == Mode::kFirstOrder && spec_.exchange != ExchangeMode::kDirect; }
  // The following functions handle a gradient in device memory, on the send queue's thread once it is computed.
  struct DeviceGradient;
  using DeviceGradientPtr = std::shared_ptr<const DeviceGradient>;
  // Returns OK if the session's gradients can travel in a shared region, otherwise the reason why not.
  absl::Status CheckSlots() const;
  void Deliver(absl::Span<const DeviceSendQueue::Item> sends);
  static void AnswerOnDevice(absl::Span<const DeviceGradientPtr> gradients);
  void SendOnDevice(absl::Span<const DeviceGradientPtr> gradients);
  // Returns the gradient's contribution with a slot, to which the gradient is not copied yet.
  absl::StatusOr<std::shared_ptr<Contribution>> TakeSlot(const DeviceGradientPtr& gradient);
  absl::Status SendThroughHost(const DeviceGradient& gradient);
  static absl::StatusOr<std::shared_ptr<const Contribution>> ContributionOnHost(const DeviceGradient& gradient);
  // Sends a layer's statistics or abstention. If this worker has factors, also requests the step's update (PULL).
  absl::Status SubmitStatistics(std::shared_ptr<Contribution> statistics, int64_t layer);
  // Sends a request without payload. `sink` receives its answer.
  absl::Status SendRequest(v1::FrameKind kind, uint64_t step, int64_t layer, std::shared_ptr<AnswerSink> sink);
  void FetchFactors(int64_t layer, const std::shared_ptr<AnswerSink>& sink);
  std::shared_ptr<const void> Borrow(const std::shared_ptr<PreconditionFuture::State>& state);
  void CountControl(const google::protobuf::MessageLite& request, const google::protobuf::MessageLite& response);

  uint64_t epoch() const;

  // Hooks of the links.
  void Wake();
  // Makes the refresher ask the coordinator whether the session and the epoch have changed.
  void Ask();
  void OnStaleEpoch(uint64_t epoch);
  void OnRefusedStatistics(const absl::Status& status);
  void Fail(const absl::Status& status);

  // Makes one attempt to deliver a report, under the current epoch.
  absl::StatusOr<WorkerDirective> SendReports(absl::Span<const OwnReport> reports);
  void TimerLoop();
  void RefreshLoop();
  absl::Status Refresh();
  // Joins again, and waits for an unreachable coordinator at most for lease_timeout.
  absl::StatusOr<v1::JoinSessionResponse> JoinAgain();
  // Asks the coordinator whether the session still exists and has a new epoch.
  void AskForEpoch();
  v1::JoinSessionRequest JoinRequest() const;
  // Waits until the epoch differs from `stale`. Returns false after rpc_timeout or a failure.
  bool AwaitEpochAfter(uint64_t stale);

  const ClientOptions options_;
  const std::shared_ptr<ControlClient> control_;
  const std::string session_;
  WorkerSession joined_;  // constant after Make
  const SessionSpec& spec_ = joined_.spec;
  const uint32_t& rank_ = joined_.rank;
  const uint64_t incarnation_;
  const uint64_t session_id_;
  const std::string secret_;  // secret of the session
  const std::shared_ptr<MissingRanks> missing_ranks_;
  TrafficCounters traffic_;
  const std::shared_ptr<Borrowed> borrowed_ = std::make_shared<Borrowed>();
  Canceller canceller_;
  std::unique_ptr<LocalFactors> factors_;  // Constant after Make; null unless workers precondition. Outlives routes_.
  PlaneTable planes_;                      // outlives routes_
  ShardRoutes routes_;
  const std::shared_ptr<HeldSender> held_ = std::make_shared<HeldSender>([this] {
    for (const ShardRoutes::Link& link : routes_.links()) link->SendHeld();
  });

  DeviceSendQueue send_queue_;  // delivers to routes_

  mutable Mutex mu_;
  CondVar changed_;
  DevicePlaneUse device_plane_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool wake_ ABSL_GUARDED_BY(mu_) = false;
  bool refresh_ ABSL_GUARDED_BY(mu_) = false;
  bool ask_ ABSL_GUARDED_BY(mu_) = false;  // ask for a new epoch
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  absl::Status first_refusal_ ABSL_GUARDED_BY(mu_);
  std::map<int64_t, uint64_t> lost_updates_ ABSL_GUARDED_BY(mu_);  // by layer
  std::thread timer_;
  std::thread refresher_;
  std::shared_ptr<StepControl> steps_;  // Constant after Make. Its hooks use all members above.
};

}  // namespace precondor
