// SPDX-License-Identifier: Apache-2.0
// TLS and access control for a server's TCP ports. Unix sockets have neither: their mode admits only processes of root
// and of the server's user, which could also read the server's key and access file.
#pragma once

#include <atomic>
#include <cstdint>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/log.h"
#include "server/core/api/session_access.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Paths of files; see the options in server/app/config.cc.
struct ServerSecurityFiles {
  std::string cert;  // empty means plaintext; then the other paths are empty too
  std::string key;
  std::string client_ca;    // empty: clients need no certificate
  std::string access_file;  // empty: every client that can connect may call every method, as often as it likes
};

// Makes a server's credentials from files, and follows changes of these files. Thread-safe, except that calls of Reload
// must not overlap.
class ServerSecurity {
 public:
  // Reads the files. An error names the file: NOT_FOUND if it cannot be read; INVALID_ARGUMENT if it holds no
  // certificate, key or access list, or if the key does not belong to the certificate. `recorder` gets every refused
  // call. `tenant_max_calls` is CallLimits's, for workers and operators. Lifetime: `logger` outlives the server that
  // uses the credentials.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Make(const ServerSecurityFiles& files,
                                                              int64_t tenant_max_calls, Logger& logger,
                                                              RpcRecorder recorder);

  const std::shared_ptr<grpc::ServerCredentials>& credentials() const { return credentials_; }
  // Returns the call's tenants and operator role by the access file, without a session's secret. A caller on a Unix
  // socket, or without an access file, speaks for every tenant.
  SessionCaller CallerOf(const grpc::ServerContextBase& context) const;
  // Returns the Unix time, in seconds, at which the certificate in use expires; 0 means plaintext.
  int64_t certificate_expiry() const { return expiry_.load(); }
  // Reads the access file again; keeps the old list if the file no longer holds a valid one. Logs changes. Also warns
  // if the certificate, its key or the authorities, which gRPC itself reads again, are not usable, and if the
  // certificate has a day left or has expired. Call it at intervals.
  void Reload();

 private:
  class AccessControl;
  ServerSecurity(ServerSecurityFiles files, Logger& logger);
  void CheckExpiry();

  const ServerSecurityFiles files_;
  Logger& logger_;
  std::string certificate_;  // contents when last read, or why the read failed
  std::string access_;       // contents when last read, or why the read failed
  std::atomic<int64_t> expiry_ = 0;
  absl::string_view expiry_warning_;               // the last one; empty: none
  absl::Status authorities_;                       // result of the last check of client_ca
  std::shared_ptr<AccessControl> access_control_;  // null without an access file
  std::shared_ptr<grpc::ServerCredentials> credentials_;
};

}  // namespace precondor::rpc
