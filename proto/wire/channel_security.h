// SPDX-License-Identifier: Apache-2.0
// Credentials for the connections that a process opens.
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

// Interval in seconds at which files of certificates and tokens are read again.
inline constexpr unsigned kReloadSeconds = 1;

// Makes credentials for the channels of one client, with TLS 1.2 or 1.3. Thread-safe. With TLS, a thread reads the
// files again at intervals.
class ChannelSecurity {
 public:
  // Plaintext if `files` is empty.
  explicit ChannelSecurity(const ClientSecurity& files = {});

  // Returns InvalidArgument if the fields contradict each other or a file has something else, and NotFound if a file
  // cannot be read.
  const absl::Status& status() const { return status_; }
  bool has_tls() const { return secure_ != nullptr; }
  // Returns the credentials for a channel to `address`. They are plaintext for a unix: address. Null unless status() is
  // OK; gRPC then makes a channel on which each call fails.
  std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(absl::string_view address) const;

 private:
  const absl::Status status_;
  const std::shared_ptr<grpc::ChannelCredentials> insecure_;
  const std::shared_ptr<grpc::ChannelCredentials> secure_;  // null if connections are plaintext
};

}  // namespace precondor::wire
