// SPDX-License-Identifier: Apache-2.0
// How a process secures the connections that it makes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/client_security.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace precondor::wire {

// How often files of certificates and tokens are read again, in seconds.
inline constexpr unsigned kReloadSeconds = 1;

// The text of a file of at most 1 MiB. NotFound names the path and the system's reason.
absl::StatusOr<std::string> ReadCredentialFile(const std::string& path);

// Credentials for the channels of one client, TLS 1.2 or 1.3. Thread-safe. With TLS it has a thread that reads the
// files again.
class ChannelSecurity {
 public:
  // Plaintext for an empty `files`.
  explicit ChannelSecurity(const ClientSecurity& files = {});

  // InvalidArgument: fields that do not go together; NotFound: a file that could not be read.
  const absl::Status& status() const { return status_; }
  bool has_tls() const { return secure_ != nullptr; }
  // For a channel to `address`: of a unix: address always plaintext. Null unless status() is OK, and gRPC then makes a
  // channel that fails each call.
  std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(absl::string_view address) const;

 private:
  const absl::Status status_;
  const std::shared_ptr<grpc::ChannelCredentials> insecure_;
  const std::shared_ptr<grpc::ChannelCredentials> secure_;  // null for plaintext
};

}  // namespace precondor::wire
