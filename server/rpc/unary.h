// SPDX-License-Identifier: Apache-2.0
// What all unary handlers share: where the work runs, how it ends, how it is recorded.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
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

  // Answers on gRPC's thread: for `work` that waits for no shard, journal or disk.
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
      RunUnlessCancelled(*context, *reactor, method, start, work);
    });
    return reactor;
  }

  // As Run, and calls with the same key run one after another. However many calls of
  // one session wait for a shard or for the journal, they hold one thread of the executor.
  grpc::ServerUnaryReactor* RunInOrder(grpc::CallbackServerContext* context, absl::string_view method, std::string key,
                                       std::function<absl::Status()> work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    const uint64_t strand = Enter(key);
    executor_.Post(strand, [this, context, reactor, method, start, key = std::move(key), work = std::move(work)] {
      RunUnlessCancelled(*context, *reactor, method, start, work);
      Leave(key);
    });
    return reactor;
  }

  const Clock& clock() const { return clock_; }
  const RpcRecorder& recorder() const { return recorder_; }

 private:
  struct KeyedCalls {
    uint64_t strand = 0;
    int calls = 0;  // that wait or run
  };

  uint64_t Enter(const std::string& key) {
    MutexLock lock(mu_);
    KeyedCalls& keyed = keyed_[key];
    if (keyed.calls++ == 0) keyed.strand = executor_.NewStrand();
    return keyed.strand;
  }
  void Leave(const std::string& key) {
    MutexLock lock(mu_);
    const auto found = keyed_.find(key);
    if (--found->second.calls == 0) keyed_.erase(found);
  }

  // A queue of calls whose clients have gone would keep the calls behind it, and the server, from ending.
  void RunUnlessCancelled(const grpc::CallbackServerContext& context, grpc::ServerUnaryReactor& reactor,
                          absl::string_view method, absl::Time start, const std::function<absl::Status()>& work) const {
    Finish(reactor, method, start, context.IsCancelled() ? absl::CancelledError("the client is gone") : work());
  }

  void Finish(grpc::ServerUnaryReactor& reactor, absl::string_view method, absl::Time start,
              const absl::Status& status) const {
    recorder_(method, status.code(), clock_.Now() - start);
    reactor.Finish(wire::ToGrpcStatus(status));
  }

  Executor& executor_;
  const Clock& clock_;
  const RpcRecorder recorder_;
  Mutex mu_;
  absl::flat_hash_map<std::string, KeyedCalls> keyed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::rpc
