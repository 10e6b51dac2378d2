// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/channel_security.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "proto/wire/certificates.h"

namespace precondor::wire {
namespace {

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string text, ReadCredentialFile("token_file", path));
  const absl::string_view token = absl::StripAsciiWhitespace(text);
  if (!token.empty()) return std::string(token);
  return absl::InvalidArgumentError(absl::StrCat("token_file ", path, ": expected a token, got nothing"));
}

// Reads the file for each call. Calls are rare, because gradients go through one long stream.
class TokenFile final : public grpc::MetadataCredentialsPlugin {
 public:
  explicit TokenFile(std::string path) : path_(std::move(path)) {}
  bool IsBlocking() const override { return false; }
  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<std::string, std::string>* metadata) override {
    const absl::StatusOr<std::string> token = ReadToken(path_);
    // A file that is being rewritten can be empty for a moment. Then the call fails and the caller retries.
    if (!token.ok()) return {grpc::StatusCode::UNAVAILABLE, std::string(token.status().message())};
    metadata->emplace("authorization", absl::StrCat("Bearer ", *token));
    return grpc::Status::OK;
  }

 private:
  const std::string path_;
};

absl::Status Check(const ClientSecurity& files) {
  if (files.tls_cert.empty() != files.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_cert, tls_key: expected both or neither, got one");
  }
  if (files.tls_ca.empty() && !(files.tls_cert.empty() && files.token_file.empty())) {
    return absl::InvalidArgumentError(
        "tls_ca: expected the authorities that sign servers' certificates beside tls_cert or token_file, got none");
  }
  if (!files.tls_ca.empty()) PRECONDOR_RETURN_IF_ERROR(CheckAuthorities("tls_ca", files.tls_ca));
  if (!files.tls_cert.empty()) PRECONDOR_RETURN_IF_ERROR(ReadCertificate(files.tls_cert, files.tls_key).status());
  return files.token_file.empty() ? absl::OkStatus() : ReadToken(files.token_file).status();
}

std::shared_ptr<grpc::ChannelCredentials> MakeSecure(const ClientSecurity& files) {
  if (files.tls_ca.empty()) return nullptr;
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      files.tls_key, files.tls_cert, files.tls_ca, kReloadSeconds));
  options.watch_root_certs();
  if (!files.tls_cert.empty()) options.watch_identity_key_cert_pairs();
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::experimental::TlsCredentials(options);
  if (files.token_file.empty()) return credentials;
  return grpc::CompositeChannelCredentials(
      credentials, grpc::MetadataCredentialsFromPlugin(std::make_unique<TokenFile>(files.token_file)));
}

}  // namespace

ChannelSecurity::ChannelSecurity(const ClientSecurity& files)
    : status_(Check(files)),
      insecure_(grpc::InsecureChannelCredentials()),
      secure_(status_.ok() ? MakeSecure(files) : nullptr) {}

std::shared_ptr<grpc::ChannelCredentials> ChannelSecurity::CredentialsFor(absl::string_view address) const {
  if (!status_.ok()) return nullptr;  // never fall back to plaintext because a file is missing
  return secure_ == nullptr || UnixPath(address).has_value() ? insecure_ : secure_;
}

}  // namespace precondor::wire
