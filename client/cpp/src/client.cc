// SPDX-License-Identifier: Apache-2.0
#include "precondor/client.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "client/cpp/src/control.h"
#include "client/cpp/src/worker.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_module.h"
#include "kernels/methods/registry.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

class ClientImpl final : public Client {
 public:
  ClientImpl(ClientOptions options, std::shared_ptr<ControlClient> control)
      : options_(std::move(options)), control_(std::move(control)) {}

  absl::Status WaitForServer() override {
    PRECONDOR_ASSIGN_OR_RETURN(const v1::GetServerInfoResponse info,
                               control_->WaitForServer(options_.connect_timeout, canceller_));
    PRECONDOR_RETURN_IF_ERROR(CheckVersions(PRECONDOR_VERSION, options_.coordinator, info.version()));
    if (info.role() != v1::ROLE_SHARD) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("server ", options_.coordinator, ": it is a shard; dial the coordinator"));
  }

  absl::StatusOr<Opened> OpenSession(const SessionSpec& spec) override {
    v1::OpenSessionRequest request;
    PRECONDOR_ASSIGN_OR_RETURN(*request.mutable_spec(), wire::EncodeSessionSpec(spec));
    for (const std::string& device : options_.rank_devices) request.add_rank_devices(device);
    PRECONDOR_ASSIGN_OR_RETURN(const auto response, control_->Call<v1::OpenSessionResponse>(request, canceller_));
    MutexLock lock(mu_);
    secrets_[spec.name] = response.secret();
    return Opened{.created = response.created(), .unused = response.created() || response.unused()};
  }

  absl::StatusOr<std::unique_ptr<Worker>> Join(absl::string_view session, WorkerOptions options) override {
    if (options.incarnation == 0) options.incarnation = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()));
    v1::JoinSessionRequest request;
    request.set_name(std::string(session));
    request.set_rank(options.rank);
    request.set_incarnation(options.incarnation);
    request.set_first_step(options.first_step);
    request.set_secret(SecretOf(session));
    auto joined = JoinUntilActive(*control_, request, options_.join_timeout, canceller_);
    if (absl::IsPermissionDenied(joined.status()) && !request.secret().empty()) {
      // Another process has replaced the session that this client opened (a restored snapshot does). The server says
      // whether this client may be given the secret of the new one.
      ForgetSecret(session);
      request.clear_secret();
      joined = JoinUntilActive(*control_, request, options_.join_timeout, canceller_);
    }
    PRECONDOR_RETURN_IF_ERROR(joined.status());
    return WorkerImpl::Make(options_, control_, std::string(session), options, *joined);
  }

  absl::Status RestoreSession(const SessionSpec& spec, uint64_t step, absl::Span<const std::string> factors) override {
    if (factors.size() != spec.layers.size()) {
      return absl::InvalidArgumentError(absl::StrCat("session ", spec.name, ": expected the factors of ",
                                                     spec.layers.size(), " layers, got ", factors.size()));
    }
    v1::RestoreSessionRequest request;
    PRECONDOR_ASSIGN_OR_RETURN(*request.mutable_spec(), wire::EncodeSessionSpec(spec));
    request.set_step(step);
    for (const std::string& device : options_.rank_devices) request.add_rank_devices(device);
    PRECONDOR_ASSIGN_OR_RETURN(const auto opened, control_->Call<v1::RestoreSessionResponse>(request, canceller_));
    {
      MutexLock lock(mu_);
      secrets_[spec.name] = opened.secret();
    }
    const absl::Status sent = SendFactors(opened, step, factors);
    if (!sent.ok()) {  // no rank could ever join it
      Canceller canceller;
      v1::CloseSessionRequest close;
      close.set_name(spec.name);
      close.set_secret(opened.secret());
      control_->Call<v1::CloseSessionResponse>(close, canceller).IgnoreError();
      ForgetSecret(spec.name);
    }
    return sent;
  }

  absl::StatusOr<bool> CloseSession(absl::string_view session) override {
    v1::CloseSessionRequest request;
    request.set_name(std::string(session));
    request.set_secret(SecretOf(session));
    PRECONDOR_ASSIGN_OR_RETURN(const auto response, control_->Call<v1::CloseSessionResponse>(request, canceller_));
    ForgetSecret(session);
    return response.existed();
  }

  void Cancel() override { canceller_.Cancel(); }

 private:
  absl::Status SendFactors(const v1::RestoreSessionResponse& opened, uint64_t step,
                           absl::Span<const std::string> factors) {
    v1::RestoreLayerRequest piece;
    piece.set_session_id(opened.session_id());
    piece.set_secret(opened.secret());
    piece.set_step(step);
    piece.set_fetched(true);
    for (const v1::ShardAssignment& assignment : opened.shard_map().assignments()) {
      ControlClient shard(assignment.address(), options_.rpc_timeout, control_->security(), control_->traceparent());
      for (const uint32_t layer : assignment.layers()) {
        if (layer >= factors.size()) {
          return absl::InternalError(
              absl::StrCat("server ", options_.coordinator, ": placed layer ", layer, " of ", factors.size()));
        }
        piece.set_layer(layer);
        PRECONDOR_RETURN_IF_ERROR(SendLayer(shard, piece, factors[layer], canceller_));
      }
    }
    return absl::OkStatus();
  }

  // Secret of a session that this client has opened. Empty for others: the server then decides whether this client may
  // have it.
  std::string SecretOf(absl::string_view session) const {
    MutexLock lock(mu_);
    const auto found = secrets_.find(session);
    return found == secrets_.end() ? "" : found->second;
  }

  void ForgetSecret(absl::string_view session) {
    MutexLock lock(mu_);
    secrets_.erase(std::string(session));
  }

  const ClientOptions options_;
  const std::shared_ptr<ControlClient> control_;
  Canceller canceller_;
  mutable Mutex mu_;
  std::map<std::string, std::string, std::less<>> secrets_ ABSL_GUARDED_BY(mu_);  // by session
};

}  // namespace

absl::StatusOr<std::string> CudaDeviceId(int device) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<DevicePlane> plane, LoadCudaPlane(device));
  return plane->device();
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  std::unique_ptr<Client> client = Make(std::move(options));
  PRECONDOR_RETURN_IF_ERROR(client->WaitForServer());
  return client;
}

std::unique_ptr<Client> Client::Make(ClientOptions options) {
  auto control =
      std::make_shared<ControlClient>(options.coordinator, options.rpc_timeout, options.security, options.traceparent);
  return std::make_unique<ClientImpl>(std::move(options), std::move(control));
}

std::vector<MethodTraits> KnownMethods() { return AllMethodTraits(); }

bool Worker::NeedsStatistics(uint64_t step, int64_t layer) const {
  const SessionSpec& spec = session().spec;
  return ModeOf(step) == Mode::kSecondOrder && IsStatisticStep(spec, step) && TakesStatistics(spec, layer);
}

bool Worker::SendsGradient(int64_t layer) const {
  const auto& [spec, rank, rollback_step] = session();
  if (layer < 0 || layer >= static_cast<int64_t>(spec.layers.size())) return false;
  return spec.exchange != ExchangeMode::kDelegate || DelegateRank(spec, layer) == static_cast<int32_t>(rank);
}

}  // namespace precondor
