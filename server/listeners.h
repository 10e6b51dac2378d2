// SPDX-License-Identifier: Apache-2.0
// The addresses that a server listens on, by TCP and in the file system.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/acceptor.h"
#include "server/unix_listener.h"

namespace precondor {

// Bind, Start and Stop by one thread.
class Listeners {
 public:
  // Binds all `addresses`, host:port or unix:path. Connections wait for Start. Those by TCP are `builder`'s server's,
  // with `credentials`; those in the file system are plaintext, and only this process' user and root may connect.
  // Errors: those of ListenTcp and UnixListener::Bind; nothing is bound then.
  static absl::StatusOr<std::unique_ptr<Listeners>> Bind(const std::vector<std::string>& addresses,
                                                         std::shared_ptr<grpc::ServerCredentials> credentials,
                                                         grpc::ServerBuilder& builder);
  ~Listeners() { Stop(); }

  struct Options {
    // Asked about each connection to a socket in the file system; where the answer is an error the connection is closed
    // and `refused` called. May be empty.
    std::function<absl::Status(int fd)> check_unix_peer;
    std::function<void(const absl::Status& why)> refused;
    // A connection could not be accepted, with errno's text; the next attempt is made 100 ms later.
    std::function<void(const std::string& why)> failed;
  };
  // `server` is the one that the builder has made, and outlives the calls of Start's functions, which end with Stop.
  void Start(grpc::Server& server, Options options);
  // No more connections. Idempotent.
  void Stop();

  const std::vector<std::string>& addresses() const {
    return addresses_;
  }                                   // with the ports that they turned out to have
  int port() const { return port_; }  // of the first by TCP; 0: none

 private:
  Listeners() = default;

  std::vector<std::unique_ptr<UnixListener>> unix_;
  std::vector<std::unique_ptr<Acceptor>> tcp_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to_server_;  // of connections by TCP
  std::vector<std::string> addresses_;
  int port_ = 0;
};

}  // namespace precondor
