// SPDX-License-Identifier: Apache-2.0
// Manages the addresses that a server listens on: TCP ports and unix sockets.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/net/acceptor.h"
#include "server/net/connection_watch.h"
#include "server/net/unix_listener.h"

namespace precondor {

// Owns the listening sockets and passes their connections to the gRPC server. Call Bind, Start and Stop from one
// thread.
class Listeners {
 public:
  // Binds all `addresses`, host:port or unix:path. Connections wait until Start. TCP connections use `credentials` and
  // go to the server of `builder`. Connections over unix sockets are plaintext, and only this process' user and root
  // may connect. Errors: those of ListenTcp and UnixListener::Bind; then nothing is bound.
  static absl::StatusOr<std::unique_ptr<Listeners>> Bind(const std::vector<std::string>& addresses,
                                                         std::shared_ptr<grpc::ServerCredentials> credentials,
                                                         grpc::ServerBuilder& builder);
  ~Listeners() { Stop(); }

  struct Options {
    // Checks each connection to a unix socket. If it returns an error, the connection is closed and `refused` is
    // called. May be empty.
    std::function<absl::Status(int fd)> check_unix_peer;
    // Called for each connection that is closed because of this check or ConnectionWatch's limits.
    std::function<void(const absl::Status& why)> refused;
    // Called with errno's text if a connection could not be accepted. The next attempt follows 100 ms later.
    std::function<void(const std::string& why)> failed;
  };
  // Starts accepting. `server` must be the one that `builder` has made, and no other may have been built since. It must
  // outlive the calls of the functions in `options`, which end with Stop.
  void Start(grpc::Server& server, Options options);
  // Ends TCP connections that exceed ConnectionWatch's limits. Call it often, after Start.
  void CheckConnections(absl::Time now);
  // Stops accepting connections. Idempotent.
  void Stop();

  const std::vector<std::string>& addresses() const { return addresses_; }  // with the actual ports
  int port() const { return port_; }  // port of the first TCP address; 0 means none

 private:
  Listeners() = default;

  ConnectionWatch watch_;
  std::function<void(const absl::Status& why)> refused_;  // set by Start
  std::vector<std::unique_ptr<UnixListener>> unix_;
  std::vector<std::unique_ptr<Acceptor>> tcp_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to_server_;  // receives TCP connections
  std::vector<std::string> addresses_;
  int port_ = 0;
};

}  // namespace precondor
