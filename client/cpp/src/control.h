// SPDX-License-Identifier: Apache-2.0
// How a client talks to servers apart from a stream: channels, unary control calls and what is made of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <google/protobuf/message.h>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/admin.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "proto/wire/channel_security.h"

namespace grpc {
class Channel;
class ClientContext;
}  // namespace grpc

namespace precondor {

// Cancels the running calls and pauses of one owner, for example when the owner is destroyed. Thread-safe.
class Canceller {
 public:
  void Cancel();
  bool cancelled() const;
  // Sleeps for `duration`. Returns false if cancelled before or during the pause.
  bool Pause(absl::Duration duration);
  // Runs `call` and lets Cancel cancel its `context`. Returns false, without running `call`, if cancelled already.
  bool Run(grpc::ClientContext& context, const std::function<void()>& call);

 private:
  mutable Mutex mu_;
  CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::set<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mu_);
};

// Client of one server's control services. Statuses name the address and the call and keep their ErrorReason. A call
// that reaches no server, or whose server ends, is repeated until its deadline. A call that a server has answered is
// not repeated. Thread-safe.
class ControlClient {
 public:
  // `traceparent` is that of ClientOptions.
  ControlClient(std::string address, absl::Duration rpc_timeout, const ClientSecurity& security,
                const std::string& traceparent = "")
      : ControlClient(std::move(address), rpc_timeout, std::make_shared<wire::ChannelSecurity>(security), traceparent) {
  }
  ControlClient(std::string address, absl::Duration rpc_timeout, std::shared_ptr<const wire::ChannelSecurity> security,
                const std::string& traceparent);

  const std::string& address() const { return address_; }
  // Security settings, which the owner's other channels share.
  const std::shared_ptr<const wire::ChannelSecurity>& security() const { return security_; }

  // Trace context of all calls except ReportStep, which carries that of its step (TraceOfStep).
  const std::string& traceparent() const { return traceparent_; }

  // Waits for a connection. Returns UNAVAILABLE after `timeout`.
  absl::StatusOr<v1::GetServerInfoResponse> WaitForServer(absl::Duration timeout, Canceller& canceller);
  // Makes the call whose method takes this type of request; Response is what the method returns.
  template <typename Response>
  absl::StatusOr<Response> Call(const google::protobuf::Message& request, Canceller& canceller) {
    Response response;
    absl::Status status = Invoke(request, response, rpc_timeout_, traceparent_, canceller);
    if (!status.ok()) return status;
    return response;
  }
  // Makes the call LeaveSession. It ends soon: a rank that does not leave costs the others nothing, and its process
  // wants to end.
  absl::Status LeaveSession(const v1::LeaveSessionRequest& request, Canceller& canceller);
  // Makes the call ReportStep. Each step has its own trace, which its ranks and shards share.
  absl::StatusOr<v1::ReportStepResponse> ReportStep(const v1::ReportStepRequest& request, Canceller& canceller);

 private:
  // Repeats the call until a server answers, the deadline passes or `canceller` is cancelled.
  absl::Status Invoke(const google::protobuf::Message& request, google::protobuf::Message& response,
                      absl::Duration timeout, const std::string& traceparent, Canceller& canceller);

  const std::string address_;
  const absl::Duration rpc_timeout_;
  const std::shared_ptr<const wire::ChannelSecurity> security_;
  const std::string traceparent_;
  const std::shared_ptr<grpc::Channel> channel_;
};

// Returns `begin` and the ranks, or "" if there are none.
std::string RanksText(absl::string_view begin, absl::Span<const uint32_t> ranks);

// Repeats JoinSession until every rank has joined. Returns DEADLINE_EXCEEDED after `timeout`.
absl::StatusOr<v1::JoinSessionResponse> JoinUntilActive(ControlClient& control, const v1::JoinSessionRequest& request,
                                                        absl::Duration timeout, Canceller& canceller);

// Returns a channel that has its own connection, reconnects quickly, detects a dead server by keepalive, and does not
// limit message sizes.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security);

// Suggests a cause for a connection that ended with this reason, to be appended to a message; empty if there is none to
// suggest. In a TLS handshake a peer gives no reason.
absl::string_view TlsHint(absl::string_view reason, bool tls);

// Compares two versions "major.minor.patch". They are compatible if their majors are equal and, for major 0, their
// minors too. Returns FAILED_PRECONDITION otherwise, and for text of another form. The message has the server's
// address, both versions and what to do.
absl::Status CheckVersions(absl::string_view client, absl::string_view address, absl::string_view server);

// Sends `bytes` in pieces. `piece` has every field except total_bytes, offset and data. While the shard has no room for
// the layer, tries again for at most two minutes. Returns the errors of RestoreLayer, or INTERNAL if the shard has
// every byte and still waits for more.
absl::Status SendLayer(ControlClient& shard, v1::RestoreLayerRequest piece, absl::string_view bytes,
                       Canceller& canceller);

// Asks a shard which ranks a step waits for. A worker and its futures share one, because a future may outlive its
// worker. Thread-safe.
class MissingRanks {
 public:
  // `sender` has the session, the rank, the incarnation, the secret and the epoch of the worker; `layers` are the
  // layers' names.
  MissingRanks(v1::FrameHeader sender, std::vector<std::string> layers,
               std::shared_ptr<const wire::ChannelSecurity> security);

  // Returns "; layer NAME waits for ranks 1, 3", or "" if the shard names none. Waits 3 s at most. After a call without
  // an answer, calls of the next 5 s return "" at once.
  std::string Describe(const std::string& shard, uint64_t step, uint32_t layer) const;
  // The worker has joined again.
  void BeginEpoch(uint64_t epoch) { epoch_ = epoch; }

 private:
  const v1::FrameHeader sender_;
  std::atomic<uint64_t> epoch_;
  const std::vector<std::string> layers_;
  const std::shared_ptr<const wire::ChannelSecurity> security_;
  mutable Mutex mu_;
  mutable absl::Time silent_until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace precondor
