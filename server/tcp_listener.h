// SPDX-License-Identifier: Apache-2.0
// A TCP port that a server listens on.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace precondor {

struct TcpSocket {
  int fd = -1;  // bound and listening; the caller's
  int port = 0;
};

// Binds `address`, host:port or [host]:port, to the first of the host's addresses that can be bound; port 0 for a free
// one. 0.0.0.0 is every address of the machine, by IPv6 too where it has that. Connections wait until they are
// accepted; they send without delay, and end when what was sent stays unacknowledged for wire::kKeepaliveTimeout.
// Errors: Unavailable with the address and the system's reason; a port that another process has is one.
absl::StatusOr<TcpSocket> ListenTcp(const std::string& address);

}  // namespace precondor
