// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/server_security.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/channel_security.h"
#include "server/rpc/access_list.h"
#include "server/rpc/call_limits.h"

namespace precondor::rpc {
namespace {

constexpr char kAuthorization[] = "authorization";
constexpr char kScheme[] = "Bearer ";
constexpr char kHealthMethods[] = "/grpc.health.v1.Health/";  // open to all, and so without a limit

struct Deleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Deleter>;

Owned<BIO> Reader(const std::string& text) {
  return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// A password callback that gives none; by default OpenSSL asks for the passphrase of an encrypted key on the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

absl::StatusOr<AccessList> ReadAccess(const std::string& path, std::string& text) {
  PRECONDOR_ASSIGN_OR_RETURN(text, wire::ReadCredentialFile(path));
  return AccessList::Parse(text, path);
}

absl::Status CheckAuthorities(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string text, wire::ReadCredentialFile(path));
  const Owned<BIO> reader = Reader(text);
  int found = 0;
  ERR_clear_error();
  while (Owned<X509>(PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr)) != nullptr) ++found;
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (found > 0 && at_end) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tls_client_ca ", path,
                                                 ": expected certificates in PEM form alone, got ", found,
                                                 " of them before what is none"));
}

}  // namespace

// Checks each call against the access list. gRPC calls Process before it reads the call's messages or runs its handler.
class ServerSecurity::AccessControl final : public grpc::AuthMetadataProcessor {
 public:
  AccessControl(AccessList list, int64_t tenant_max_calls, RpcRecorder recorder)
      : recorder_(std::move(recorder)),
        call_limits_(tenant_max_calls),
        list_(std::make_shared<const AccessList>(std::move(list))) {}

  void Replace(AccessList list) {
    auto replacement = std::make_shared<const AccessList>(std::move(list));
    MutexLock lock(mu_);
    list_ = std::move(replacement);
  }

  std::shared_ptr<const AccessList> list() const {
    MutexLock lock(mu_);
    return list_;
  }

  static Caller CallerOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                         const grpc::AuthContext& context) {
    Caller caller;
    if (const auto found = metadata.find(kAuthorization); found != metadata.end()) {
      caller.token = std::string(absl::StripPrefix(View(found->second), kScheme));
    }
    std::vector<grpc::string_ref> names = context.FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME);
    if (names.empty()) names = context.FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME);
    for (const grpc::string_ref& name : names) caller.names.emplace_back(View(name));
    return caller;
  }

  bool IsBlocking() const override { return false; }
  // Does not consume the token in the metadata: ServerSecurity::CallerOf reads it again.
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const absl::string_view method = path == metadata.end() ? absl::string_view() : View(path->second);
    const absl::Status status = Admit(method, CallerOf(metadata, *context));
    if (status.ok()) return grpc::Status::OK;
    // The caller chooses the path: a method that the server does not have must not create a time series of its own.
    bool known = false;
    for (const MethodRoles& row : MethodTable()) known |= row.method == method;
    recorder_(known ? absl::StripPrefix(method, "/precondor.v1.") : "unknown", status.code(), absl::ZeroDuration());
    return wire::ToGrpcStatus(status);
  }

 private:
  absl::Status Admit(absl::string_view method, const Caller& caller) {
    const std::shared_ptr<const AccessList> list = this->list();
    PRECONDOR_RETURN_IF_ERROR(list->Check(method, caller));
    if (!call_limits_.any() || absl::StartsWith(method, kHealthMethods)) return absl::OkStatus();
    const AccessList::Rights rights = list->RightsOf(caller);
    if ((rights.roles & kCoordinator) != 0) return absl::OkStatus();  // it calls for its workers
    for (const std::string& tenant : rights.tenants) {
      PRECONDOR_RETURN_IF_ERROR(call_limits_.Admit(tenant, MonotonicNow()));
    }
    return absl::OkStatus();
  }

  const RpcRecorder recorder_;
  CallLimits call_limits_;
  mutable Mutex mu_;
  std::shared_ptr<const AccessList> list_ ABSL_GUARDED_BY(mu_);
};

ServerSecurity::ServerSecurity(ServerSecurityFiles files, Logger& logger) : files_(std::move(files)), logger_(logger) {}

// Returns the certificate chain if it and the key can be read and belong together.
absl::StatusOr<std::string> ServerSecurity::ReadCertificate() const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string chain, wire::ReadCredentialFile(files_.cert));
  PRECONDOR_ASSIGN_OR_RETURN(const std::string secret, wire::ReadCredentialFile(files_.key));
  const Owned<X509> certificate(PEM_read_bio_X509(Reader(chain).get(), nullptr, NoPassphrase, nullptr));
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("tls_cert ", files_.cert, ": expected a certificate in PEM form"));
  }
  const Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Reader(secret).get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls_key ", files_.key, ": expected a private key in PEM form without a passphrase"));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("tls_key ", files_.key, ": expected the key of the certificate ",
                                                   files_.cert, ", got another one"));
  }
  return chain;
}

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Make(const ServerSecurityFiles& files,
                                                                     int64_t tenant_max_calls, Logger& logger,
                                                                     RpcRecorder recorder) {
  std::unique_ptr<ServerSecurity> security(new ServerSecurity(files, logger));
  if (files.cert.empty()) {
    security->credentials_ = grpc::InsecureServerCredentials();
    return security;
  }
  // Everything that can fail precedes the provider: its thread does not end if its options are never used.
  PRECONDOR_ASSIGN_OR_RETURN(security->certificate_, security->ReadCertificate());
  if (!files.client_ca.empty()) PRECONDOR_RETURN_IF_ERROR(CheckAuthorities(files.client_ca));
  if (!files.access_file.empty()) {
    PRECONDOR_ASSIGN_OR_RETURN(AccessList list, ReadAccess(files.access_file, security->access_));
    security->access_control_ = std::make_shared<AccessControl>(std::move(list), tenant_max_calls, std::move(recorder));
  }
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.cert, files.client_ca,
                                                                           wire::kReloadSeconds));
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  security->credentials_ = grpc::experimental::TlsServerCredentials(options);
  if (security->access_control_ != nullptr) {
    security->credentials_->SetAuthMetadataProcessor(security->access_control_);
  }
  return security;
}

SessionCaller ServerSecurity::CallerOf(const grpc::ServerContextBase& context) const {
  SessionCaller caller{.outside = true};
  const std::string peer = context.peer();
  if (access_control_ == nullptr || absl::StartsWith(peer, "unix:")) return caller;
  AccessList::Rights rights =
      access_control_->list()->RightsOf(AccessControl::CallerOf(context.client_metadata(), *context.auth_context()));
  // The access file can have changed since the call was admitted. The caller then speaks for no tenant.
  if (rights.tenants.empty()) rights.tenants = {"none"};
  caller.tenants = std::move(rights.tenants);
  caller.is_worker = (rights.roles & kWorker) != 0;
  caller.is_operator = (rights.roles & kOperator) != 0;
  return caller;
}

void ServerSecurity::Reload() {
  if (files_.cert.empty()) return;
  const auto warn = [this](absl::string_view what, const absl::Status& status) {
    logger_.Log(Severity::kWarning, what, {{"reason", absl::string_view(status.message())}});
  };
  constexpr char kRefusing[] = "no new connection is taken until a file is repaired";
  if (!files_.client_ca.empty()) {
    const absl::Status authorities = CheckAuthorities(files_.client_ca);
    if (std::exchange(authorities_, authorities) != authorities && !authorities.ok()) warn(kRefusing, authorities);
  }
  const absl::StatusOr<std::string> certificate = ReadCertificate();
  const std::string seen = certificate.ok() ? *certificate : std::string(certificate.status().message());
  if (std::exchange(certificate_, seen) != seen) {
    if (certificate.ok()) {
      logger_.Log(Severity::kInfo, "certificate reloaded", {{"file", files_.cert}});
    } else {
      warn(kRefusing, certificate.status());
    }
  }
  if (access_control_ == nullptr) return;
  std::string text;
  absl::StatusOr<AccessList> list = ReadAccess(files_.access_file, text);
  if (text.empty() && !list.ok()) text = std::string(list.status().message());
  if (std::exchange(access_, text) == text) return;
  if (!list.ok()) return warn("access file not reloaded", list.status());
  access_control_->Replace(*std::move(list));
  logger_.Log(Severity::kInfo, "access file reloaded", {{"file", files_.access_file}});
}

}  // namespace precondor::rpc
