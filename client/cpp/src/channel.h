// SPDX-License-Identifier: Apache-2.0
// Makes the client's gRPC channels.
#pragma once

#include <grpcpp/channel.h>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

#include "proto/wire/channel_security.h"

namespace precondor {

// Returns a channel that has its own connection, reconnects quickly, detects a dead server by keepalive, and does not
// limit message sizes.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security);

// Suggests a cause for a connection that ended with this reason, to be appended to a message; empty if there is none to
// suggest. In a TLS handshake a peer gives no reason.
absl::string_view TlsHint(absl::string_view reason, bool tls);

}  // namespace precondor
