// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/direct_channel.h"

#include <grpcpp/create_channel.h>

namespace precondor::wire {

std::shared_ptr<grpc::Channel> MakeDirectChannel(const std::string& target,
                                                 const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                                 grpc::ChannelArguments arguments) {
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

}  // namespace precondor::wire
