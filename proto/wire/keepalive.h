// SPDX-License-Identifier: Apache-2.0
// How both ends of a connection notice that the other is lost without closing it: its machine has lost power, or the
// network between them fails. TCP alone tells after a quarter of an hour, and a connection that outlives the gap goes
// on only with TCP's next repetition, up to as long again as the gap. docs/operations.md has the times that follow.
#pragma once

#include "absl/time/time.h"

namespace grpc {
class ChannelArguments;
class ServerBuilder;
}  // namespace grpc

namespace precondor::wire {

// An end that has read nothing for so long asks the other for a sign of life.
inline constexpr absl::Duration kKeepaliveTime = absl::Seconds(10);
// The connection is given up when that has not come after so long, or when what was sent stays unacknowledged by the
// other's machine for so long.
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);
// An attempt to connect is given up after so long, and the next one begins.
inline constexpr absl::Duration kConnectAttempt = absl::Seconds(3);

void SetKeepalive(grpc::ChannelArguments& arguments);
void SetKeepalive(grpc::ServerBuilder& builder);

}  // namespace precondor::wire
