// SPDX-License-Identifier: Apache-2.0
// How server and clients make gRPC channels, and what both ends of a connection agree on: keepalive, deadlines,
// buffers.
#pragma once

#include <algorithm>
#include <chrono>
#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace precondor::wire {

// Returns a channel that dials `target` itself. By default gRPC dials the proxy that http_proxy, https_proxy or
// grpc_proxy in the environment name, also for 127.0.0.1, and a failed call then names the proxy alone.
std::shared_ptr<grpc::Channel> MakeDirectChannel(const std::string& target,
                                                 const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                                 grpc::ChannelArguments arguments);

// --- keepalive
// By it each end of a connection notices that the other is lost without having closed it: its machine has lost power,
// or the network between them fails. TCP alone notices after a quarter of an hour. A connection that survives the
// failure continues only with TCP's next retransmission, up to the failure's duration later. docs/operate/failures.md
// has the resulting times.

// An end that has received nothing for this long sends a PING.
inline constexpr absl::Duration kKeepaliveTime = absl::Seconds(10);
// The connection ends if no reply to the PING arrives within this time, or if the other machine does not acknowledge
// sent data for this long.
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);
// Time limit of one attempt to connect. Then the next attempt begins.
inline constexpr absl::Duration kConnectAttempt = absl::Seconds(3);

void SetKeepalive(grpc::ChannelArguments& arguments);
void SetKeepalive(grpc::ServerBuilder& builder);

// Returns the deadline for a call that starts now. Pass it to gRPC immediately: gRPC converts it to its monotonic
// clock, after which a change of the wall clock has no effect.
inline std::chrono::system_clock::time_point GrpcDeadline(absl::Duration timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(
             absl::ToChronoNanoseconds(std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365))));
}

// A write with a buffer hint ends when gRPC has so many bytes or fewer still to send, so that the next message is there
// when the connection takes more. It is below kChunkBytes: a chunk never waits for the next message.
inline constexpr int kWriteBufferBytes = 512 << 10;

}  // namespace precondor::wire
