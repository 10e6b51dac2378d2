// SPDX-License-Identifier: Apache-2.0
// Addresses of servers: unix:PATH, for servers and clients of one host, or host:port.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

inline constexpr size_t kMaxUnixPathBytes = 107;  // sockaddr_un has 108 bytes, the terminating 0 included

// Returns the socket's path, or nullopt if `address` has another form. "unix:///run/a" is "unix:/run/a".
std::optional<std::string> UnixPath(absl::string_view address);

// Returns InvalidArgument for unix:PATH without a path, with a path that is too long, or with a zero byte in it. The
// path may be relative to the working directory. Addresses of other forms are OK.
absl::Status CheckUnixAddress(absl::string_view address);

// Returns InvalidArgument unless a client can dial the address: host:port with a port of 1 ... 65535, what
// CheckUnixAddress accepts, or a name of gRPC's that begins with dns:, ipv4: or ipv6:.
absl::Status CheckServerAddress(absl::string_view address);

// Returns the address that processes with other working directories on this host can dial.
std::string AbsoluteUnixAddress(absl::string_view address);

// Returns the target that gRPC dials for `address`: gRPC takes unix:PATH as a URI, so special characters are escaped.
std::string DialTarget(absl::string_view address);

}  // namespace precondor
