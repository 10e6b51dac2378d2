// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/shared_memory_limit.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::rpc {
namespace {

// Whether `host` is the text of an address of this host. In the network namespace of this process, that is.
bool IsOwnAddress(const std::string& host) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> frees(list, &freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    const void* address = nullptr;
    if (family == AF_INET) address = &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    if (family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
    char text[INET6_ADDRSTRLEN];
    if (address != nullptr && inet_ntop(family, address, text, sizeof(text)) != nullptr && host == text) return true;
  }
  return false;
}

}  // namespace

// Peers are fd:NUMBER for Unix sockets, which the server accepts itself, ipv4:A.B.C.D:PORT and ipv6:%5BADDRESS%5D:PORT.
bool SharedMemoryLimit::MayOffer(const std::string& peer) const {
  if (most_bytes_ < kBytes || wire::HostIdentity().empty()) return false;
  if (absl::StartsWith(peer, "fd:") || absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "ipv4:127.")) {
    return true;
  }
  std::string host = peer.substr(peer.find(':') + 1);
  host = host.substr(0, host.rfind(':'));
  if (absl::StartsWith(host, "%5B")) host = host.substr(3, host.rfind("%5D") - 3);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.rfind(']') - 1);
  return IsOwnAddress(host);
}

absl::StatusOr<SharedMemoryLimit::Hold> SharedMemoryLimit::Take() {
  Hold hold(this);
  const int64_t bytes = bytes_.fetch_add(kBytes) + kBytes;
  if (bytes <= most_bytes_) return hold;
  return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                        absl::StrCat("shared memory: expected at most ", most_bytes_,
                                     " bytes for all streams (shared_memory_bytes), got ", bytes));
}

}  // namespace precondor::rpc
