// SPDX-License-Identifier: Apache-2.0
// libprecondor, the worker's side of the service. A worker opens or joins a session, sends statistics as they are
// produced and gradients layer by layer during the backward pass, receives preconditioned gradients as futures, and
// reports the loss.
//
// No gRPC type appears in this header. Every call has a deadline. The library reconnects after a lost connection and
// repeats each unacknowledged contribution under its key, so that no contribution counts twice. Errors are absl::Status
// with an ErrorReason (kernels/base/error_reason.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/client_security.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/method_traits.h"
#include "kernels/base/session_spec.h"
#include "precondor/gradient_buffers.h"

namespace precondor {

class StepControl;

class Worker;

// Where the service is, how long its calls may take, and how this client identifies itself.
struct ClientOptions {
  std::string coordinator;                             // address: host:port, or unix:/path/to/socket on this host
  absl::Duration connect_timeout = absl::Seconds(10);  // until the first answer of a server
  absl::Duration rpc_timeout = absl::Seconds(30);      // deadline of one control call
  absl::Duration result_timeout = absl::Seconds(120);  // from the submission of a gradient to its result
  absl::Duration join_timeout = absl::Seconds(120);    // until all ranks have joined
  absl::Duration lease_timeout = absl::Minutes(10);    // how long a step waits at the lease's end; see ReportStep
  ClientSecurity security = {};                        // for the connections to the coordinator and to the shards
  // W3C Trace Context that this client sends with its calls and streams: "00-TRACE-SPAN-FLAGS". The client begins its
  // own trace if the value is empty or malformed.
  std::string traceparent = {};
  int factor_threads = 1;  // threads that compute with the worker's own factors (REPLAY, PULL_FACTORS)
  // CudaDeviceId of each rank's gradients, empty for a rank without one; or none. In DELEGATE a rank on the device of a
  // layer's shard then sends the layer's gradient, in sessions that this client creates: see SessionSpec::delegates.
  std::vector<std::string> rank_devices = {};
};

// Returns what identifies a CUDA device, by its number in this process, in every process of the host: its UUID, 16
// bytes. Returns UNAVAILABLE if there is no such device or no CUDA backend.
absl::StatusOr<std::string> CudaDeviceId(int device);

// The rank that a worker takes, and the step with which it begins.
struct WorkerOptions {
  uint32_t rank = 0;
  uint64_t incarnation = 0;  // 0 means the current time in nanoseconds
  uint64_t first_step = 0;   // first step of this worker: 0, or the step of its checkpoint
  // By layer, the factor_version of this rank's last answer before first_step; 0: unknown. WorkerStatus::lost_updates
  // then counts the updates that the shards have lost since. Empty: all are unknown.
  std::vector<uint64_t> factor_versions = {};
};

// Outcome of OpenSession.
struct Opened {
  bool created = false;  // by this call
  bool unused = false;   // new, or left by a job that ended before its first step: no worker has ever joined it
};

// Opens, joins and closes sessions for one process. Thread-safe.
class Client {
 public:
  // Calls Make and then WaitForServer.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  // Returns a client that has not connected to a server yet.
  static std::unique_ptr<Client> Make(ClientOptions options);
  virtual ~Client() = default;

  // Waits until the coordinator answers. Returns UNAVAILABLE, naming the address, if no server answers within
  // connect_timeout, and FAILED_PRECONDITION if the server is of an incompatible release (compatible: equal major
  // version, before 1.0 also equal minor version) or is a shard.
  virtual absl::Status WaitForServer() = 0;

  // Opens a session, or finds the one of that name, which must have an equal description. This call, Join and
  // CloseSession return PERMISSION_DENIED if the session belongs to another job (docs/operate/security.md).
  virtual absl::StatusOr<Opened> OpenSession(const SessionSpec& spec) = 0;
  // Takes the rank and waits until every rank has joined. The worker may outlive the client. Returns ABORTED if the job
  // has just rolled back to a step before `first_step`; all ranks then have to begin with that step.
  virtual absl::StatusOr<std::unique_ptr<Worker>> Join(absl::string_view session, WorkerOptions options) = 0;
  // Opens a session that begins with `step` and with the factors that Worker::ReadFactors returned for each layer. Its
  // world_size and its shards may differ from those of the session that was read. Join then waits until the servers
  // have the factors. Returns INVALID_ARGUMENT if `factors` does not have one entry per layer, and FAILED_PRECONDITION
  // if a session of that name exists or if a layer's factors are of another method, configuration or shape.
  virtual absl::Status RestoreSession(const SessionSpec& spec, uint64_t step,
                                      absl::Span<const std::string> factors) = 0;
  // Closes a session. Returns false if the session did not exist.
  virtual absl::StatusOr<bool> CloseSession(absl::string_view session) = 0;
  // Ends the waiting calls of all threads, and all later calls, with CANCELLED. Does not affect workers.
  virtual void Cancel() = 0;
};

// Outcome of one gradient. If the decision is kSkip, the output was not written: skip the optimizer step, as every
// replica does.
struct Preconditioned {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;  // <D, U>; see KlClipScale in statistics.h
  std::string reason;
};

// Says where the shards compute, and how gradients in device memory have travelled so far.
struct DevicePlaneUse {
  std::set<std::string> backends;  // of the shards that the worker has reached: "cpu", "cuda"
  int64_t in_ring = 0;             // handed over in the device's memory
  int64_t over_socket = 0;         // copied to the host and sent as bytes
  std::string reason;              // why the last of over_socket went through the host
};

// The answer to one gradient. A copyable handle. Thread-safe.
class PreconditionFuture {
 public:
  class State;
  PreconditionFuture() = default;
  explicit PreconditionFuture(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool ready() const;
  // Waits until the answer is ready, at most for `timeout`. Returns ready().
  bool WaitFor(absl::Duration timeout) const;
  // Waits for the answer, at most until result_timeout after the submission; then returns DEADLINE_EXCEEDED, which
  // names the session, step and layer, and the ranks that the step waits for, which it asks the shard (3 s at most).
  // Repeated calls return the first call's result.
  absl::StatusOr<Preconditioned> Wait() const;

 private:
  std::shared_ptr<State> state_;
};

// What the coordinator allows after a reported step.
struct StepDirective {
  uint64_t lease_through_step = 0;      // start no step beyond this one
  Mode next_mode = Mode::kSecondOrder;  // mode of the step after the reported one
  // Step of the service's last snapshot, which contains the updates of all steps before `snapshot_at`. To write a
  // checkpoint that matches the snapshot, save before this step begins. The coordinator announces the value before any
  // rank may begin the step. 0 means none.
  uint64_t snapshot_at = 0;
  uint64_t snapshot_id = 0;  // number of that snapshot within the session
};

// The coordinator's answer to one report, which arrives while the worker goes on. Thread-safe. If no call of Wait takes
// a refusal, a later report returns it.
class [[nodiscard]] ReportFuture {
 public:
  // Returns true once Wait need not wait, after `timeout` at the latest.
  bool WaitFor(absl::Duration timeout) const;
  // See Worker::ReportStep. Call it once. Returns CANCELLED after the worker's end.
  absl::StatusOr<StepDirective> Wait() const;

 private:
  friend class StepControl;
  struct Handle;
  explicit ReportFuture(std::shared_ptr<const Handle> handle) : handle_(std::move(handle)) {}
  std::shared_ptr<const Handle> handle_;
};

// Payload and frame bytes since the worker joined, in both directions.
struct Traffic {
  int64_t statistics_bytes = 0;  // payload sent
  int64_t gradient_bytes = 0;    // payload sent
  int64_t result_bytes = 0;      // payload received
  int64_t overhead_bytes = 0;    // headers, acknowledgements and control calls
  int64_t reconnects = 0;
};

// The session that a worker has joined. It is constant while the worker lives.
struct WorkerSession {
  SessionSpec spec;
  uint32_t rank = 0;
  // The step to which the job had rolled back when this worker joined; nullopt if the job has never rolled back. A
  // rollback leaves the factors as they are, with the updates of later steps.
  std::optional<uint64_t> rollback_step;
};

// Counts and states since a worker joined.
struct WorkerStatus {
  uint64_t epoch = 0;  // version of the session's membership
  Traffic traffic;
  DevicePlaneUse device_plane;
  // Numbers of updates that are lost, by layer: the layer's shard has come back with older factors, or none. The job
  // goes on; its results differ from those of a run without the loss.
  std::map<int64_t, uint64_t> lost_updates;
};

// One rank of one session. Thread-safe. Steps may overlap as far as the lease and the server's window allow.
class Worker {
 public:
  virtual ~Worker() = default;

  virtual const WorkerSession& session() const = 0;
  virtual WorkerStatus status() const = 0;
  // Returns the mode of a step up to the lease's end. A session may fall back to first order (spec.fallback): then no
  // gradient is preconditioned, no statistics are sent, and except in DIRECT no gradients either.
  virtual Mode ModeOf(uint64_t step) const = 0;
  // Whether the step takes statistics of the layer: in second order, at a statistic step, for a method that takes any.
  bool NeedsStatistics(uint64_t step, int64_t layer) const;
  // Whether this rank calls Precondition for the layer. In DELEGATE one rank does, otherwise all ranks do; for a layer
  // that the session does not have, none.
  bool SendsGradient(int64_t layer) const;

  // Sends this rank's statistics of one layer at a statistic step: a [k, d_in] and g [k, d_out] with k =
  // VectorsPerWorker(spec, layer); for COVARIANCE, a and g have the shapes of ShapeOfStatistics (statistics.h) for any
  // number of rows. Returns once the matrices are copied. Flush returns a later refusal by the shard.
  virtual absl::Status SendStatistics(uint64_t step, int64_t layer, ConstMatrixView a, ConstMatrixView g,
                                      uint64_t samples) = 0;
  // Takes part in the statistic step without vectors (skipped AMP step, unused layer).
  virtual absl::Status AbstainStatistics(uint64_t step, int64_t layer) = 0;

  // Sends a gradient and writes the preconditioned one to `out` of the buffers, which have to be valid, `gradient`
  // unchanged and `out` unread, until the future is ready or the worker is destroyed: the library sends an f32 gradient
  // without gaps from the caller's memory. Returns without waiting for the answer. `samples` weighs the gradient in
  // DIRECT. A gradient that is not finite is answered kSkip. In first order the answer is kIdentity with the averaged
  // gradient: in DIRECT the shard returns it; otherwise it is the gradient itself, available at once and without a byte
  // sent.
  //
  // In REPLAY and PULL_FACTORS the worker itself preconditions the job's averaged gradient on the CPU, with its own
  // factors. The result is equal on every rank, bitwise if all ranks run one build of the library on one kind of
  // processor. The worker needs the shard only at statistic steps. Calls for a layer must come in order of steps, and
  // at a statistic step after the layer's statistics or abstention; otherwise the future fails with
  // FAILED_PRECONDITION.
  //
  // With `more`, another gradient follows at once. A small matrix in host memory may then wait for it, to share its
  // message, until the caller asks for an answer of the worker that is missing, calls Flush or reports, and .2 s at
  // most.
  virtual PreconditionFuture Precondition(uint64_t step, int64_t layer, const GradientBuffers& buffers,
                                          uint64_t samples, bool more = false) = 0;
  // Abstains from the step's gradient, so that every rank's answer is kSkip. Where nothing is sent (REPLAY and
  // PULL_FACTORS, and in first order every exchange but DIRECT) only this rank's answer is kSkip. The future fails with
  // ABORTED if an earlier process of the rank has sent the step's gradient.
  virtual PreconditionFuture AbstainGradient(uint64_t step, int64_t layer) = 0;
  // Returns OK if the layer's gradients in this device's memory may stay there, or if that is not known yet; otherwise
  // the reason why they go through the host for as long as the shard's stream lasts. Does not wait for a server. The
  // first call for a device loads the library.
  virtual absl::Status DevicePlaneStatus(int64_t layer, int device) = 0;

  // Returns a checksum of the layer's factors in REPLAY and PULL_FACTORS, with the updates of every statistic step to
  // which this rank has contributed; 0 if it has none yet. Ranks get equal values if their factors are bitwise
  // equal. A job can compare the values of all ranks at one step; the library does not compare them. Takes about as
  // long as an update. Returns FAILED_PRECONDITION in the other modes, and DEADLINE_EXCEEDED after result_timeout.
  virtual absl::StatusOr<uint64_t> FactorsChecksum(int64_t layer) = 0;

  // Reads a layer's factors from its shard, for Client::RestoreSession. Returns the bytes of LayerState::Save. The
  // factors are exactly those after the last step if every rank has that step's answers and has called Flush, and if no
  // rank sends anything for the next step before the call returns. Returns DEADLINE_EXCEEDED after result_timeout.
  virtual absl::StatusOr<std::string> ReadFactors(int64_t layer) = 0;

  // Waits until all contributions sent so far are acknowledged. Returns the first refusal of statistics since the last
  // Flush, if any. Call it before you destroy the worker and before you write a checkpoint of the next step: the
  // destructor drops unacknowledged contributions, and a process that begins with the checkpoint never sends them
  // again.
  virtual absl::Status Flush() = 0;

  // Reports a finished step, in order of steps. The future waits until the next step may start; that step's work may
  // begin before. All ranks get equal modes for a step. While the coordinator is unreachable, the worker keeps the
  // report and sends it later: steps within the lease go on without it (the first report of an outage takes 2 s). At
  // the lease's end the future, and any submission for a later step, waits up to lease_timeout and then returns
  // DEADLINE_EXCEEDED, which names the coordinator and the step. If a kept report is refused later, the next report's
  // future returns that error. Returns ABORTED, as do all later calls, if another rank has begun again at a step before
  // the current one and the job has rolled back to it; the message names the step. Wait for the last report: Leave and
  // the destructor do not.
  virtual ReportFuture ReportStep(uint64_t step, double loss, uint64_t samples, bool finite, double learning_rate) = 0;
  // Ends the waiting calls of all threads, all unanswered futures and all later calls with CANCELLED. Does not give the
  // rank back: the next process that joins with the rank takes it over.
  virtual void Cancel() = 0;
  // Gives the rank back to the coordinator. The destructor closes the connections and does not give the rank back.
  virtual absl::Status Leave() = 0;
};

// Returns the methods of this version, in no particular order. Thread-safe.
std::vector<MethodTraits> KnownMethods();

}  // namespace precondor
