// SPDX-License-Identifier: Apache-2.0
// Runs, traces, records and finishes the unary calls of all services.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/trace_context.h"
#include "proto/wire/status_codec.h"
#include "server/core/api/executor.h"
#include "server/rpc/request_budget.h"
#include "server/trace/tracer.h"

namespace precondor::rpc {

// Called for every finished call with the method's name without its package, the call's code and its duration.
using RpcRecorder = std::function<void(absl::string_view method, absl::StatusCode code, absl::Duration took)>;

// Returns the trace context in the call's traceparent, or nullopt if there is none or it is not valid.
inline std::optional<TraceContext> CallerTrace(const grpc::CallbackServerContext& context) {
  const auto found = context.client_metadata().find(kTraceparentKey);
  if (found == context.client_metadata().end()) return std::nullopt;
  return ParseTraceparent({found->second.data(), found->second.size()});
}

// Returns the name of a call's span. `method` has no package.
inline std::string SpanName(absl::string_view method) { return absl::StrCat("precondor.v1.", method); }

// Runs the handlers of control calls. A handler that can block runs on an executor and not on a gRPC thread.
// Thread-safe. Lifetime: outlives the services.
class ControlRunner {
 public:
  // `tracer` gets a span for each call whose caller keeps its own span, and for each call that changes state; of those,
  // ReportStep only if its caller's trace is kept. A null `tracer` records no spans.
  ControlRunner(Executor& executor, const Clock& clock, RpcRecorder recorder, trace::Tracer* tracer)
      : executor_(executor), clock_(clock), recorder_(std::move(recorder)), tracer_(tracer) {}

  // Runs `work` on the calling gRPC thread. Precondition: `work` does not wait for a shard, a journal or a disk.
  grpc::ServerUnaryReactor* RunNow(grpc::CallbackServerContext* context, absl::string_view method,
                                   const std::function<absl::Status()>& work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    RunTraced(*context, *reactor, method, start, work);
    return reactor;
  }

  // Runs `work` on the executor and finishes the call with its status. Does not run `work` if the client has cancelled
  // the call or disconnected by then.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, absl::string_view method,
                                std::function<absl::Status()> work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Time start = clock_.Now();
    executor_.Post(executor_.NewStrand(), [this, context, reactor, method, start, work = std::move(work)] {
      RunUnlessCancelled(*context, *reactor, method, start, work);
    });
    return reactor;
  }

  // Like Run, but runs calls with equal keys one after another. So the calls of one session occupy at most one thread
  // of the executor, however many of them wait for a shard or for the journal.
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
  trace::Tracer* tracer() const { return tracer_; }
  // The budget of the requests of all services.
  RequestBudget& request_budget() { return request_budget_; }

 private:
  struct KeyedCalls {
    uint64_t strand = 0;
    int calls = 0;  // waiting or running
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

  // Skips calls whose clients have disconnected: otherwise a long queue of them would delay later calls and shutdown.
  void RunUnlessCancelled(const grpc::CallbackServerContext& context, grpc::ServerUnaryReactor& reactor,
                          absl::string_view method, absl::Time start, const std::function<absl::Status()>& work) const {
    if (context.IsCancelled()) return Finish(reactor, method, start, absl::CancelledError("the client is gone"));
    RunTraced(context, reactor, method, start, work);
  }

  // Returns whether a call has a span; see the constructor.
  bool KeepsSpan(absl::string_view method, const std::optional<TraceContext>& caller) const {
    if (tracer_ == nullptr) return false;
    if (caller.has_value() && caller->sampled) return true;
    const absl::string_view name = method.substr(method.find('/') + 1);
    if (name == "ReportStep") return caller.has_value() && tracer_->Keeps(*caller);
    return !absl::StartsWith(name, "Get") && !absl::StartsWith(name, "List") && !absl::StartsWith(name, "Describe");
  }

  void RunTraced(const grpc::CallbackServerContext& context, grpc::ServerUnaryReactor& reactor,
                 absl::string_view method, absl::Time start, const std::function<absl::Status()>& work) const {
    const std::optional<TraceContext> caller = CallerTrace(context);
    absl::Status status;
    {
      trace::Operation operation(tracer_, SpanName(method), trace::SpanKind::kServer, start, caller,
                                 KeepsSpan(method, caller));
      status = work();
      operation.set_status(status);
    }
    Finish(reactor, method, start, status);
  }

  void Finish(grpc::ServerUnaryReactor& reactor, absl::string_view method, absl::Time start,
              const absl::Status& status) const {
    recorder_(method, status.code(), clock_.Now() - start);
    reactor.Finish(wire::ToGrpcStatus(status));
  }

  Executor& executor_;
  const Clock& clock_;
  const RpcRecorder recorder_;
  trace::Tracer* const tracer_;
  RequestBudget request_budget_;
  Mutex mu_;
  absl::flat_hash_map<std::string, KeyedCalls> keyed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::rpc
