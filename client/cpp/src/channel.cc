// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/channel.h"

#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/match.h"

#include "kernels/base/unix_address.h"
#include "proto/wire/channel.h"

namespace precondor {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Gives each channel its own connection, so that closing the channel closes the connection. That releases borrowed
  // memory when a peer does not respond.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);  // the default of 30 s is longer than a restart
  arguments.SetInt(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, wire::kWriteBufferBytes);
  wire::SetKeepalive(arguments);
  return wire::MakeDirectChannel(DialTarget(address), security.CredentialsFor(address), arguments);
}

absl::string_view TlsHint(absl::string_view reason, bool tls) {
  if (absl::StrContains(reason, "wrong version number")) return "; the server may expect plaintext";
  if (!absl::StrContains(reason, "Socket closed")) return "";
  return tls ? "; the server may refuse this client's certificate, or require one" : "; the server may expect TLS";
}

}  // namespace precondor
