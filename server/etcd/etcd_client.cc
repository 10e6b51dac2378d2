// SPDX-License-Identifier: Apache-2.0
#include "server/etcd/etcd_client.h"

#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/channel.h"
#include "proto/wire/status_codec.h"

namespace precondor::etcd {

EtcdClient::EtcdClient(const EtcdOptions& options) : request_timeout_(options.request_timeout) {
  PRECONDOR_CHECK(!options.endpoints.empty());
  const auto credentials = options.credentials == nullptr ? grpc::InsecureChannelCredentials() : options.credentials;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // no limit: an answer holds a page of records, and a session's can be large
  // Reconnects quickly: a leader must renew its lease as soon as etcd is reachable again.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // gRPC resolves the name before it reconnects, and by default waits 30 s between two resolutions.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 100);
  for (const std::string& endpoint : options.endpoints) {
    const auto channel = wire::MakeDirectChannel(endpoint, credentials, arguments);
    members_.push_back({endpoint, etcdserverpb::KV::NewStub(channel), etcdserverpb::Lease::NewStub(channel)});
  }
}

absl::Status EtcdClient::Call(absl::string_view what,
                              const std::function<grpc::Status(const Member&, grpc::ClientContext&)>& call) {
  size_t first;
  {
    MutexLock lock(mu_);
    first = preferred_;
  }
  absl::Status last;
  for (size_t i = 0; i < members_.size(); ++i) {
    const size_t index = (first + i) % members_.size();
    grpc::ClientContext context;
    context.set_deadline(wire::GrpcDeadline(request_timeout_));
    const absl::Status status = wire::FromGrpcStatus(call(members_[index], context));
    if (status.ok()) {
      MutexLock lock(mu_);
      preferred_ = index;
      return status;
    }
    last = absl::Status(status.code(),
                        absl::StrCat("etcd ", members_[index].endpoint, ": ", what, ": ", status.message()));
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) break;
  }
  return last;
}

absl::StatusOr<etcdserverpb::TxnResponse> EtcdClient::Txn(const etcdserverpb::TxnRequest& request) {
  etcdserverpb::TxnResponse response;
  PRECONDOR_RETURN_IF_ERROR(Call("Txn", [&](const Member& member, grpc::ClientContext& context) {
    return member.kv->Txn(&context, request, &response);
  }));
  return response;
}

absl::StatusOr<etcdserverpb::RangeResponse> EtcdClient::Range(const etcdserverpb::RangeRequest& request) {
  etcdserverpb::RangeResponse response;
  PRECONDOR_RETURN_IF_ERROR(Call("Range", [&](const Member& member, grpc::ClientContext& context) {
    return member.kv->Range(&context, request, &response);
  }));
  return response;
}

absl::StatusOr<int64_t> EtcdClient::GrantLease(absl::Duration ttl) {
  etcdserverpb::LeaseGrantRequest request;
  request.set_ttl(absl::ToInt64Seconds(absl::Ceil(ttl, absl::Seconds(1))));
  etcdserverpb::LeaseGrantResponse response;
  PRECONDOR_RETURN_IF_ERROR(Call("LeaseGrant", [&](const Member& member, grpc::ClientContext& context) {
    return member.lease->LeaseGrant(&context, request, &response);
  }));
  if (!response.error().empty()) return absl::UnavailableError(absl::StrCat("etcd: LeaseGrant: ", response.error()));
  return response.id();
}

absl::Status EtcdClient::RevokeLease(int64_t lease) {
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(lease);
  etcdserverpb::LeaseRevokeResponse response;
  return Call("LeaseRevoke", [&](const Member& member, grpc::ClientContext& context) {
    return member.lease->LeaseRevoke(&context, request, &response);
  });
}

absl::Status EtcdClient::KeepLeaseAlive(int64_t lease) {
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(lease);
  etcdserverpb::LeaseKeepAliveResponse response;
  // Uses a new stream for each renewal, so that a broken stream needs no handling.
  PRECONDOR_RETURN_IF_ERROR(Call("LeaseKeepAlive", [&](const Member& member, grpc::ClientContext& context) {
    const auto stream = member.lease->LeaseKeepAlive(&context);
    const bool answered = stream->Write(request) && stream->Read(&response);
    stream->WritesDone();
    if (answered) context.TryCancel();  // etcd would be slow to end the stream
    const grpc::Status status = stream->Finish();
    if (answered) return grpc::Status::OK;
    return status.ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "ended without an answer") : status;
  }));
  if (response.ttl() <= 0) return absl::NotFoundError(absl::StrCat("etcd: lease ", lease, " has expired"));
  return absl::OkStatus();
}

std::string EndOfPrefix(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xFF') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // as a range_end, this means all following keys
  prefix.back() = static_cast<char>(static_cast<uint8_t>(prefix.back()) + 1);
  return prefix;
}

etcdserverpb::Compare CreatedAt(const std::string& key, int64_t revision) {
  etcdserverpb::Compare compare;
  compare.set_result(etcdserverpb::Compare::EQUAL);
  compare.set_target(etcdserverpb::Compare::CREATE);
  compare.set_key(key);
  compare.set_create_revision(revision);
  return compare;
}

etcdserverpb::Compare ModifiedAt(const std::string& key, int64_t revision) {
  etcdserverpb::Compare compare;
  compare.set_result(etcdserverpb::Compare::EQUAL);
  compare.set_target(etcdserverpb::Compare::MOD);
  compare.set_key(key);
  compare.set_mod_revision(revision);
  return compare;
}

}  // namespace precondor::etcd
