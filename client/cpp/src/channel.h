// SPDX-License-Identifier: Apache-2.0
// How the client dials a server.
#pragma once

#include <grpcpp/channel.h>
#include <memory>
#include <string>

#include "proto/wire/channel_security.h"

namespace precondor {

// A channel of its own connection, quick to try again and to notice that the server is gone, without limits on
// message sizes that tensors would meet.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security);

}  // namespace precondor
