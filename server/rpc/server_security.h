// SPDX-License-Identifier: Apache-2.0
// TLS of the TCP ports of a server, and who may call what there. Sockets in the file system have neither: their mode
// lets in processes of the server's user and of root alone, which could read its key and its access file as well.
#pragma once

#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/log.h"
#include "server/core/session_access.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Paths; see the options of server/config.cc.
struct ServerSecurityFiles {
  std::string cert;  // empty: plaintext, and the others are empty
  std::string key;
  std::string client_ca;    // empty: clients need no certificate
  std::string access_file;  // empty: who may connect may call everything
};

// Thread-safe, but that Reload has one caller at a time.
class ServerSecurity {
 public:
  // Errors name the file: NotFound when it cannot be read; InvalidArgument when it holds no certificate, key or access
  // list, or when key and certificate do not go together. `logger` outlives the server that has the credentials.
  // `recorder` is told of every refused call.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Make(const ServerSecurityFiles& files, Logger& logger,
                                                              RpcRecorder recorder);

  const std::shared_ptr<grpc::ServerCredentials>& credentials() const { return credentials_; }
  // Who makes the call, by the access file; without a secret. On a socket, and without an access file: for every
  // tenant.
  SessionCaller CallerOf(const grpc::ServerContextBase& context) const;
  // Takes up what the access file says now, and keeps what it said before when that is no access list. Says in the log
  // what has changed, and warns of a certificate or authorities that gRPC, which reads them by itself, cannot use. To
  // be called again and again.
  void Reload();

 private:
  class AccessControl;
  ServerSecurity(ServerSecurityFiles files, Logger& logger);
  absl::StatusOr<std::string> ReadCertificate() const;

  const ServerSecurityFiles files_;
  Logger& logger_;
  std::string certificate_;                        // as last read
  std::string access_;                             // as last read; of both, why when that failed
  absl::Status authorities_;                       // of client_ca, as last read
  std::shared_ptr<AccessControl> access_control_;  // null without an access file
  std::shared_ptr<grpc::ServerCredentials> credentials_;
};

}  // namespace precondor::rpc
