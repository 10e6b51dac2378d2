// SPDX-License-Identifier: Apache-2.0
// Makes the client's gRPC channels.
#pragma once

#include <grpcpp/channel.h>
#include <memory>
#include <string>

#include "proto/wire/channel_security.h"

namespace precondor {

// Returns a channel that has its own connection, reconnects quickly, detects a dead server by keepalive, and does not
// limit message sizes.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security);

}  // namespace precondor
