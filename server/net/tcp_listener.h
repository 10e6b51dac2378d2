// SPDX-License-Identifier: Apache-2.0
// Opens a TCP port for listening.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor {

struct TcpSocket {
  int fd = -1;  // bound and listening; owned by the caller
  int port = 0;
};

// Binds `address`, host:port or [host]:port, to the first of the host's addresses that can be bound. Port 0 selects a
// free one. 0.0.0.0 means all addresses of the machine, including IPv6 if it is available. Connections wait until they
// are accepted. They send without delay (TCP_NODELAY), and end if sent data are not acknowledged within
// wire::kKeepaliveTimeout. Returns Unavailable, with the address and the system's reason, if the address cannot be
// bound, for example because another process has the port. `option` is what the error names.
absl::StatusOr<TcpSocket> ListenTcp(const std::string& address, absl::string_view option = "listen");

}  // namespace precondor
