// SPDX-License-Identifier: Apache-2.0
// The services of control calls. Each call has a handler, a function that fills its response.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>
#include <list>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "proto/wire/method_path.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Returns the key of calls about a session of this name, which run one after another.
inline std::string SessionKey(absl::string_view name) { return absl::StrCat("name ", name); }

// Base of a service, whose constructor serves each method by its handler. A request's type says which method it is. A
// handler takes the request, the response, the service's subject and, if it asks who calls, gRPC's context. Lifetime:
// `runner` and all subjects outlive the service.
class ControlService : public grpc::Service {
 protected:
  explicit ControlService(ControlRunner& runner) : runner_(runner) {}

  template <typename Request, typename Response, typename Subject, typename... Context>
  using Handler = absl::Status (*)(const Request&, Response&, Subject&, Context...);

  // `handler` waits for no shard, journal or disk: ControlRunner::RunNow.
  template <typename Request, typename Response, typename Subject, typename... Context>
  void ServeNow(Handler<Request, Response, Subject, Context...> handler, Subject& subject) {
    ServeBy([this](auto* context, absl::string_view method, const Request&,
                   std::function<absl::Status()> work) { return runner_.RunNow(context, method, work); },
            handler, subject);
  }
  // ControlRunner::Run.
  template <typename Request, typename Response, typename Subject, typename... Context>
  void Serve(Handler<Request, Response, Subject, Context...> handler, Subject& subject) {
    ServeBy([this](auto* context, absl::string_view method, const Request&,
                   std::function<absl::Status()> work) { return runner_.Run(context, method, std::move(work)); },
            handler, subject);
  }
  // ControlRunner::RunInOrder by the key that `key` returns for a request.
  template <typename Request, typename Response, typename Subject, typename... Context>
  void ServeInOrder(std::string (*key)(const Request&), Handler<Request, Response, Subject, Context...> handler,
                    Subject& subject) {
    ServeBy(
        [this, key](auto* context, absl::string_view method, const Request& request,
                    std::function<absl::Status()> work) {
          return runner_.RunInOrder(context, method, key(request), std::move(work));
        },
        handler, subject);
  }
  // `run` takes gRPC's context, the method's name, the request and the work, and returns the call's reactor.
  template <typename Run, typename Request, typename Response, typename Subject, typename... Context>
  void ServeBy(Run run, Handler<Request, Response, Subject, Context...> handler, Subject& subject) {
    const std::string& path = paths_.emplace_back(wire::MethodPath(*Request::descriptor()));
    const absl::string_view method = absl::StripPrefix(path, "/precondor.v1.");
    AddMethod(new grpc::internal::RpcServiceMethod(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, nullptr));
    MarkMethodCallback(
        static_cast<int>(paths_.size()) - 1,
        BoundedHandler<Request, Response>(
            runner_, method,
            [run, method, handler, &subject](grpc::CallbackServerContext* context, const Request* request,
                                             Response* response) -> grpc::ServerUnaryReactor* {
              return run(context, method, *request, [=, &subject] {
                if constexpr (sizeof...(Context) == 0) return handler(*request, *response, subject);
                if constexpr (sizeof...(Context) == 1) return handler(*request, *response, subject, *context);
              });
            }));
  }

  ControlRunner& runner_;

 private:
  std::list<std::string> paths_;  // gRPC keeps pointers to them
};

}  // namespace precondor::rpc
