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

// Runs control calls, which may block, off gRPC's threads. Thread-safe; outlives the services.
class ControlRunner {
 public:
  ControlRunner(Executor& executor, const Clock& clock, RpcRecorder recorder)
      : executor_(executor), clock_(clock), recorder_(std::move(recorder)) {}

  // Runs `work` on the executor, then finishes the call with its status.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, absl::string_view method,
                                std::function<absl::Status()> work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    executor_.Post(executor_.NewStrand(), [this, reactor, method, start, work = std::move(work)] {
      const absl::Status status = work();
      recorder_(method, status.code(), clock_.Now() - start);
      reactor->Finish(wire::ToGrpcStatus(status));
    });
    return reactor;
  }

  const Clock& clock() const { return clock_; }
  const RpcRecorder& recorder() const { return recorder_; }

 private:
  Executor& executor_;
  const Clock& clock_;
  const RpcRecorder recorder_;
};

}  // namespace precondor::rpc
