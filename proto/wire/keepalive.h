// SPDX-License-Identifier: Apache-2.0
// Keepalive settings by which each end of a connection notices that the other is lost without having closed it: its
// machine has lost power, or the network between them fails. TCP alone notices after a quarter of an hour. A connection
// that survives the failure continues only with TCP's next retransmission, up to the failure's duration later.
// docs/operate/failures.md has the resulting times.
#pragma once

#include "absl/time/time.h"

namespace grpc {
class ChannelArguments;
class ServerBuilder;
}  // namespace grpc

namespace precondor::wire {

// An end that has received nothing for this long sends a PING.
inline constexpr absl::Duration kKeepaliveTime = absl::Seconds(10);
// The connection ends if no reply to the PING arrives within this time, or if the other machine does not acknowledge
// sent data for this long.
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);
// Time limit of one attempt to connect. Then the next attempt begins.
inline constexpr absl::Duration kConnectAttempt = absl::Seconds(3);

void SetKeepalive(grpc::ChannelArguments& arguments);
void SetKeepalive(grpc::ServerBuilder& builder);

}  // namespace precondor::wire
