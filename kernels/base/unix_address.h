// SPDX-License-Identifier: Apache-2.0
// Addresses of the form unix:PATH, for servers and clients of one host. All others are host:port.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

inline constexpr size_t kMaxUnixPathBytes = 107;  // of sockaddr_un, with the 0 behind it 108

// The socket's path; nullopt: `address` is of another form. "unix:///run/a" is "unix:/run/a".
std::optional<std::string> UnixPath(absl::string_view address);

// InvalidArgument for unix:PATH that no socket can have: no path, or one that is too long. The path may be relative to
// the working directory. Other forms are not looked at.
absl::Status CheckUnixAddress(absl::string_view address);

// The address as others on this host, in other working directories, dial it.
std::string AbsoluteUnixAddress(absl::string_view address);

// What gRPC dials for `address`: to it unix:PATH is a URI.
std::string DialTarget(absl::string_view address);

}  // namespace precondor
