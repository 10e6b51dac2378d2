// SPDX-License-Identifier: Apache-2.0
// What all unary handlers share: where the work runs, how it ends, how it is recorded.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "proto/wire/status_codec.h"
#include "server/core/executor.h"

namespace precondor::rpc {

// Told of every finished call: the method's name without its package, the code it ended with, and how long it took.
using RpcRecorder = std::function<void(absl::string_view method, absl::StatusCode code, absl::Duration took)>;

// Runs control calls: those that may block off gRPC's threads. Thread-safe; outlives the services.
class ControlRunner {
 public:
  ControlRunner(Executor& executor, const Clock& clock, RpcRecorder recorder)
      : executor_(executor), clock_(clock), recorder_(std::move(recorder)) {}

  // Answers at once: for `work` that does not wait, so that it is done while others' calls wait.
  grpc::ServerUnaryReactor* RunNow(grpc::CallbackServerContext* context, absl::string_view method,
                                   const std::function<absl::Status()>& work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    const absl::Status status = work();
    Finish(*reactor, method, start, status);
    return reactor;
  }

  // Runs `work` on the executor, unless its client has gone, and finishes the call with its status.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, absl::string_view method,
                                std::function<absl::Status()> work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    executor_.Post(executor_.NewStrand(), [this, context, reactor, method, start, work = std::move(work)] {
      // A queue of calls that no client waits for any more would keep those behind it, and the server, from ending.
      const absl::Status status = context->IsCancelled() ? absl::CancelledError("the client is gone") : work();
      Finish(*reactor, method, start, status);
    });
    return reactor;
  }

  const Clock& clock() const { return clock_; }
  const RpcRecorder& recorder() const { return recorder_; }

 private:
  void Finish(grpc::ServerUnaryReactor& reactor, absl::string_view method, absl::Time start,
              const absl::Status& status) const {
    recorder_(method, status.code(), clock_.Now() - start);
    reactor.Finish(wire::ToGrpcStatus(status));
  }

  Executor& executor_;
  const Clock& clock_;
  const RpcRecorder recorder_;
};

}  // namespace precondor::rpc
