// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/server_security.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/certificates.h"
#include "proto/wire/channel_security.h"
#include "server/rpc/access_list.h"
#include "server/rpc/request_budget.h"

namespace precondor::rpc {
namespace {

constexpr char kAuthorization[] = "authorization";
constexpr char kScheme[] = "Bearer ";
constexpr absl::Duration kSoon = absl::Hours(24);             // as the alert in deploy/prometheus
constexpr char kHealthMethods[] = "/grpc.health.v1.Health/";  // open to all, and so without a limit

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

// Warns of a file with a secret that users besides its owner and group can read, or users besides its owner can write.
void CheckMode(absl::string_view option, const std::string& path, Logger& logger) {
  struct stat file = {};
  if (stat(path.c_str(), &file) != 0 || (file.st_mode & (S_IROTH | S_IWOTH | S_IWGRP)) == 0) return;
  logger.Log(Severity::kWarning, "other users can read or change a file with a secret",
             {{"option", option}, {"file", path}, {"mode", absl::StrFormat("%04o", file.st_mode & 07777)}});
}

absl::StatusOr<AccessList> ReadAccess(const std::string& path, std::string& text) {
  PRECONDOR_ASSIGN_OR_RETURN(text, wire::ReadCredentialFile("access_file", path));
  return AccessList::Parse(text, path);
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

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Make(const ServerSecurityFiles& files,
                                                                     int64_t tenant_max_calls, Logger& logger,
                                                                     RpcRecorder recorder) {
  std::unique_ptr<ServerSecurity> security(new ServerSecurity(files, logger));
  if (files.cert.empty()) {
    security->credentials_ = grpc::InsecureServerCredentials();
    return security;
  }
  // Everything that can fail precedes the provider: its thread does not end if its options are never used.
  PRECONDOR_ASSIGN_OR_RETURN(security->certificate_, wire::ReadCertificate(files.cert, files.key));
  security->CheckExpiry();
  CheckMode("tls_key", files.key, logger);
  if (!files.client_ca.empty()) PRECONDOR_RETURN_IF_ERROR(wire::CheckAuthorities("tls_client_ca", files.client_ca));
  if (!files.access_file.empty()) {
    PRECONDOR_ASSIGN_OR_RETURN(AccessList list, ReadAccess(files.access_file, security->access_));
    CheckMode("access_file", files.access_file, logger);
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

void ServerSecurity::CheckExpiry() {
  const absl::Time expiry = wire::ExpiryOf(certificate_);
  expiry_.store(absl::ToUnixSeconds(expiry));
  const absl::Duration left = expiry - absl::Now();
  absl::string_view warning;
  if (left <= absl::ZeroDuration()) {
    warning = "the certificate has expired: clients refuse it";
  } else if (left < kSoon) {
    warning = "the certificate expires soon";
  }
  if (std::exchange(expiry_warning_, warning) == warning || warning.empty()) return;
  logger_.Log(Severity::kWarning, warning,
              {{"file", files_.cert}, {"expires", absl::FormatTime(expiry, absl::UTCTimeZone())}});
}

void ServerSecurity::Reload() {
  if (files_.cert.empty()) return;
  const auto warn = [this](absl::string_view what, const absl::Status& status) {
    logger_.Log(Severity::kWarning, what, {{"reason", absl::string_view(status.message())}});
  };
  constexpr char kRefusing[] = "no new connection is taken until a file is repaired";
  if (!files_.client_ca.empty()) {
    const absl::Status authorities = wire::CheckAuthorities("tls_client_ca", files_.client_ca);
    if (std::exchange(authorities_, authorities) != authorities && !authorities.ok()) warn(kRefusing, authorities);
  }
  const absl::StatusOr<std::string> certificate = wire::ReadCertificate(files_.cert, files_.key);
  const std::string seen = certificate.ok() ? *certificate : std::string(certificate.status().message());
  if (std::exchange(certificate_, seen) != seen) {
    if (certificate.ok()) {
      logger_.Log(Severity::kInfo, "certificate reloaded", {{"file", files_.cert}});
    } else {
      warn(kRefusing, certificate.status());
    }
  }
  if (certificate.ok()) CheckExpiry();
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
