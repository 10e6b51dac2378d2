// SPDX-License-Identifier: Apache-2.0
// libprecondor: a worker's side of the service. Open or join a session, send statistics as they are produced and
// gradients layer by layer during the backward pass, receive preconditioned gradients as futures, report the loss.
//
// No gRPC type appears here. Every call has a deadline; a lost connection is made again and whatever was not
// acknowledged is sent again under the same key, so that nothing is counted twice. Errors are absl::Status with an
// ErrorReason (kernels/base/error_reason.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/client_security.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"

namespace precondor {

class Worker;

struct ClientOptions {
  std::string coordinator;                             // host:port, or unix:/path/to/socket on its host
  absl::Duration connect_timeout = absl::Seconds(10);  // for the first answer of a server
  absl::Duration rpc_timeout = absl::Seconds(30);      // of one control call
  absl::Duration result_timeout = absl::Seconds(120);  // from a gradient's submission to its result
  absl::Duration join_timeout = absl::Seconds(120);    // until all ranks are in
  absl::Duration lease_timeout = absl::Minutes(10);    // that a step waits at the end of the lease; see ReportStep
  // The CUDA device of its own that this worker has in communicators of NCCL (docs/collective.md).
  int plane_device = 0;
  ClientSecurity security = {};  // of the connections to the coordinator and to the shards
  // W3C Trace Context of what this client works for, sent with its calls and streams: "00-TRACE-SPAN-FLAGS". Empty, or
  // what is none: the client begins a trace of its own.
  std::string traceparent = {};
  int factor_threads = 1;  // of a worker that has factors itself (REPLAY, PULL_FACTORS), for its arithmetic
};

struct WorkerOptions {
  uint32_t rank = 0;
  uint64_t incarnation = 0;  // 0: the current time in nanoseconds
  uint64_t first_step = 0;   // that this worker begins with, or goes on from after a checkpoint
};

// Control calls of one process. Thread-safe.
class Client {
 public:
  // Make and WaitForServer.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  // One that has not connected to a server yet.
  static std::unique_ptr<Client> Make(ClientOptions options);
  virtual ~Client() = default;

  // Unavailable, naming the address, when no server answers within connect_timeout. FailedPrecondition: a release that
  // does not go with this one (the same major version does, before 1.0 the same minor), or no coordinator.
  virtual absl::Status WaitForServer() = 0;

  // True when this call created the session, false when it was there with the same description. PermissionDenied, here
  // and below: it is another job's (docs/security.md).
  virtual absl::StatusOr<bool> OpenSession(const SessionSpec& spec) = 0;
  // Takes the rank's place and waits until every rank has joined. The worker may outlive the client. Aborted when
  // the job has just gone back to a step before `first_step`: all have to begin with that one.
  virtual absl::StatusOr<std::unique_ptr<Worker>> Join(absl::string_view session, WorkerOptions options) = 0;
  // False when there was no such session.
  virtual absl::StatusOr<bool> CloseSession(absl::string_view session) = 0;
  // Ends the calls that wait, on whatever threads, and all later ones with Cancelled. Workers go on.
  virtual void Cancel() = 0;
};

// What became of one gradient. For kSkip the output was not written: skip the optimizer step, as every replica does.
struct Preconditioned {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;  // <D, U>; see KlClipScale in statistics.h
  std::string reason;
};

// An f32 matrix in the memory of a CUDA device, row-major.
struct DeviceTensor {
  // First, so that {data, rows, cols} always means a matrix in the host's memory.
  int device = 0;  // as CUDA counts in this process
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;      // elements from row to row, at least cols
  void* stream = nullptr;  // the cudaStream_t whose work makes it, or still uses it; null: the default stream
};

// How gradients in device memory have gone so far.
struct DevicePlaneUse {
  int64_t in_ring = 0;      // handed over in the device's memory
  int64_t over_socket = 0;  // copied to the host and sent
  std::string reason;       // why the last of these
};

// The answer to one gradient. Copyable handle; thread-safe.
class PreconditionFuture {
 public:
  class State;
  PreconditionFuture() = default;
  explicit PreconditionFuture(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool ready() const;
  // Waits until it is ready, at most `timeout`; ready().
  bool WaitFor(absl::Duration timeout) const;
  // Waits for the answer, at most until the result_timeout of its submission: DeadlineExceeded names session, step and
  // layer. Repeated calls return the same.
  absl::StatusOr<Preconditioned> Wait() const;

 private:
  std::shared_ptr<State> state_;
};

struct StepDirective {
  uint64_t lease_through_step = 0;      // start no step beyond this one
  Mode next_mode = Mode::kSecondOrder;  // of the step after the reported one
  // The service's last snapshot holds the updates of all steps before `snapshot_at`: a trainer that wants a checkpoint
  // to go with it saves when that is the step it begins next. Announced before any rank may begin it. 0: none.
  uint64_t snapshot_at = 0;
  uint64_t snapshot_id = 0;  // its number among the session's
};

// Payload and frame bytes since the worker joined, both directions.
struct Traffic {
  int64_t statistics_bytes = 0;  // payload out
  int64_t gradient_bytes = 0;    // payload out
  int64_t result_bytes = 0;      // payload in
  int64_t overhead_bytes = 0;    // headers, acknowledgements, control
  int64_t reconnects = 0;
  int64_t plane_bytes = 0;  // of gradient_bytes and result_bytes, what went over communicators
};

// One rank of one session. Thread-safe; steps may overlap as far as the lease and the server's window allow.
class Worker {
 public:
  virtual ~Worker() = default;

  virtual const SessionSpec& spec() const = 0;
  virtual uint32_t rank() const = 0;
  virtual uint64_t epoch() const = 0;
  // The step that the job had gone back to when this worker joined: factors stayed as they were, with updates of later
  // steps. Absent: it never has.
  virtual std::optional<uint64_t> rollback_step() const = 0;
  // Of a step up to the lease's end. A session may fall back to first order (spec().fallback): from then on nothing is
  // preconditioned, no statistics are sent, and in DELEGATE no gradients either.
  virtual Mode ModeOf(uint64_t step) const = 0;
  bool NeedsStatistics(uint64_t step) const {
    return ModeOf(step) == Mode::kSecondOrder && IsStatisticStep(spec(), step);
  }
  // And the layer's method takes statistics.
  bool NeedsStatistics(uint64_t step, int64_t layer) const;
  // Whether this rank calls Precondition for the layer. DELEGATE: when it sends the layer. Otherwise always.
  bool SendsGradient(int64_t layer) const {
    return spec().exchange != ExchangeMode::kDelegate || DelegateRank(spec(), layer) == static_cast<int32_t>(rank());
  }

  // Sends this rank's statistics of one layer at a statistic step: a [k, d_in] and g [k, d_out] with k =
  // VectorsPerWorker(spec, layer); of COVARIANCE each of ShapeOfStatistics (statistics.h), whatever its rows. Returns
  // once they are copied; a refusal surfaces in Flush.
  virtual absl::Status SendStatistics(uint64_t step, int64_t layer, ConstMatrixView a, ConstMatrixView g,
                                      uint64_t samples) = 0;
  // Takes part in the statistic step without vectors (skipped AMP step, unused layer).
  virtual absl::Status AbstainStatistics(uint64_t step, int64_t layer) = 0;

  // Sends gradient [d_out, d_in] and has the preconditioned one written to `out`, which may be the gradient's own
  // memory. Both must stay valid and unread until the future is ready or the worker destroyed: an f32 gradient without
  // gaps is sent from where it lies. `samples` weighs the gradient in DIRECT. A non-finite gradient is answered kSkip.
  // With data_plane COLLECTIVE gradients go in an order of their own: send those of all layers of a step before waiting
  // for the first answer. A rank that does not holds the others up until they go over gRPC.
  // In first order the answer is kIdentity and the averaged gradient: in DIRECT from the shard, in DELEGATE the
  // gradient itself, at once and without a byte sent.
  //
  // In REPLAY and PULL_FACTORS the worker preconditions the job's averaged gradient itself, on the CPU, with factors of
  // its own: the same on every rank, bitwise where all ranks run the same library on the same kind of processor. The
  // shard is needed at statistic steps alone. A layer's calls come in order of steps, and at a statistic step after its
  // statistics or abstention: FailedPrecondition otherwise.
  virtual PreconditionFuture Precondition(uint64_t step, int64_t layer, ConstMatrixView gradient, MatrixView out,
                                          uint64_t samples) = 0;
  // Precondition for matrices in device memory, both on one device; libprecondor-cuda.so has to be found
  // (docs/cuda.md). Waits for nothing: what `stream` has been given so far makes the gradient, and has done with `out`.
  // Once the future is ready `out` can be read on any stream, after result_timeout at the latest, whatever
  // `stream` does. The answer of a step has to be ready before anything of a later one is sent for the layer: gradients
  // wait in a queue for their streams, which statistics do not. To a shard on the same host and device, dialled at a
  // unix: address, the gradient does not leave the device where one rank sends it in F32; otherwise it goes through the
  // host. FailedPrecondition in REPLAY and PULL_FACTORS; Unavailable without the library or the device.
  virtual PreconditionFuture Precondition(uint64_t step, int64_t layer, const DeviceTensor& gradient,
                                          const DeviceTensor& out, uint64_t samples) = 0;
  virtual DevicePlaneUse device_plane() const = 0;
  // OK while the layer's gradients in this device's memory may stay there, or until that is known; otherwise why they
  // go through the host for as long as the shard's stream lasts. Waits for nothing; the first call for a device loads
  // the library.
  virtual absl::Status DevicePlaneStatus(int64_t layer, int device) = 0;
  // This rank has no gradient: the answer of every rank is kSkip. In REPLAY and PULL_FACTORS, where all ranks have the
  // same gradient, this rank's.
  virtual PreconditionFuture AbstainGradient(uint64_t step, int64_t layer) = 0;

  // In REPLAY and PULL_FACTORS, of the layer's factors with the updates of every statistic step that this rank has sent
  // something for: the same number on all ranks whose factors are the same, bit for bit. A job whose replicas must not
  // part compares them now and then, at the same step on all ranks; the library does not. Takes about as long as an
  // update. FailedPrecondition in the other modes, DeadlineExceeded after result_timeout.
  virtual absl::StatusOr<uint64_t> FactorsChecksum(int64_t layer) = 0;

  // Waits until everything sent so far is acknowledged; the first refusal of statistics since the last Flush, if any.
  // Call it before destroying the worker, and before writing a checkpoint of the next step: what is not acknowledged by
  // then is given up, or by a process that begins with the checkpoint never sent again.
  virtual absl::Status Flush() = 0;

  // Reports a finished step, in order of steps, and waits until the next one may be started: all ranks are told the
  // same mode for it. While the coordinator cannot be reached the report is kept and sent later: steps of the lease go
  // on without it (the first report of such a stretch takes two seconds), and at the lease's end this call, and
  // anything sent for a later step, waits up to lease_timeout: DeadlineExceeded names the coordinator and the step. A
  // report that is refused later fails the next call. Aborted, here and from then on everywhere: another rank began
  // again at a step before the current one, and the job rolled back to it; the message names the step.
  virtual absl::StatusOr<StepDirective> ReportStep(uint64_t step, double loss, uint64_t samples, bool finite,
                                                   double learning_rate) = 0;
  virtual Traffic traffic() const = 0;
  // OK while gradients go the way of spec().data_plane, or wait for it. Otherwise, with COLLECTIVE, why those of some
  // shard go over gRPC until the next epoch.
  virtual absl::Status DataPlaneStatus() const = 0;
  // Ends the calls that wait, on whatever threads, all unanswered futures and all later calls with Cancelled. The rank
  // is not given back: who joins with it again takes its place.
  virtual void Cancel() = 0;
  // Gives the rank back. The destructor closes connections and does not leave.
  virtual absl::Status Leave() = 0;
};

}  // namespace precondor
