// SPDX-License-Identifier: Apache-2.0
// The one place in which server and clients make gRPC channels.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <memory>
#include <string>

namespace precondor::wire {

// Returns a channel that dials `target` itself. By default gRPC dials the proxy that http_proxy, https_proxy or
// grpc_proxy in the environment name, also for 127.0.0.1, and a failed call then names the proxy alone.
std::shared_ptr<grpc::Channel> MakeDirectChannel(const std::string& target,
                                                 const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                                 grpc::ChannelArguments arguments);

}  // namespace precondor::wire
