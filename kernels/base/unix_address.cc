// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/unix_address.h"

#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace precondor {
namespace {

constexpr absl::string_view kScheme = "unix:";

}  // namespace

std::optional<std::string> UnixPath(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, kScheme)) return std::nullopt;
  if (absl::StartsWith(address, "///")) address.remove_prefix(2);
  return std::string(address);
}

absl::Status CheckUnixAddress(absl::string_view address) {
  const std::optional<std::string> path = UnixPath(address);
  const size_t zero = path.value_or("").find('\0');
  if (!path.has_value() || (!path->empty() && path->size() <= kMaxUnixPathBytes && zero == std::string::npos)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("expected unix:PATH with a path of 1 ... ", kMaxUnixPathBytes,
                                                 " bytes, got ", path->size(), " bytes in \"", address.substr(0, 128),
                                                 "\""));
}

absl::Status CheckServerAddress(absl::string_view address) {
  if (UnixPath(address).has_value()) return CheckUnixAddress(address);
  for (const absl::string_view scheme : {"dns:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(address, scheme)) return absl::OkStatus();  // gRPC's own names, of several addresses too
  }
  const size_t colon = address.rfind(':');
  int port = 0;
  const bool has_port = colon != absl::string_view::npos && absl::SimpleAtoi(address.substr(colon + 1), &port) &&
                        port > 0 && port <= 65535;
  const absl::string_view host = address.substr(0, has_port ? colon : 0);
  // Colons in an address of IPv6 stand between brackets.
  const bool bracketed = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  if (!host.empty() && (bracketed || host.find_first_of(":/ []") == absl::string_view::npos)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected host:port or unix:/path/to/socket, got \"", address.substr(0, 128), "\""));
}

std::string AbsoluteUnixAddress(absl::string_view address) {
  const std::optional<std::string> path = UnixPath(address);
  if (!path.has_value()) return std::string(address);
  std::error_code ignored;  // without a working directory the path stays as it is
  const std::filesystem::path absolute = std::filesystem::absolute(*path, ignored);
  return absl::StrCat(kScheme, absolute.empty() ? *path : absolute.string());
}

std::string DialTarget(absl::string_view address) {
  const std::optional<std::string> path = UnixPath(address);
  if (!path.has_value()) return std::string(address);
  std::string target(kScheme);
  for (const char c : *path) {
    const bool plain = absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("/._-~", c);
    absl::StrAppend(&target, plain ? std::string(1, c) : absl::StrFormat("%%%02X", static_cast<unsigned char>(c)));
  }
  return target;
}

}  // namespace precondor
