// SPDX-License-Identifier: Apache-2.0
#include "server/net/connection_watch.h"

#include <algorithm>
#include <arpa/inet.h>
#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpc/support/alloc.h>
#include <grpcpp/server_builder.h>
#include <linux/tcp.h>
#include <memory>
#include <netinet/in.h>
#include <optional>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include <nlohmann/json.hpp>

#include "kernels/base/clock.h"

namespace precondor {
namespace {

using Json = nlohmann::json;

// Between two checks: for each connection, of which a check takes about 0.02 ms. On a slow machine in times of what the
// last one took, but not so long that peers could slow down their own watch.
constexpr absl::Duration kPerConnection = absl::Milliseconds(1);
constexpr int64_t kTimesOfCheck = 50;
constexpr absl::Duration kLongestOfCheck = absl::Milliseconds(100);

// gRPC's counters of a connection.
struct Counts {
  int64_t open_streams = 0, resets = 0, messages = 0;
};

struct Endpoint {
  std::string ip;  // 4 or 16 bytes
  int port = 0;
};
std::string KeyOf(const Endpoint& local, const Endpoint& remote) {
  return absl::StrCat(local.ip, ":", local.port, ":", remote.ip, ":", remote.port);
}

std::optional<Endpoint> Address(decltype(getpeername)* get, int fd) {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);
  if (get(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return std::nullopt;
  const auto bytes = [](const void* address, size_t count) {
    return std::string(static_cast<const char*>(address), count);
  };
  if (storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    return Endpoint{bytes(&v4.sin_addr, 4), ntohs(v4.sin_port)};
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
  const char* const address = reinterpret_cast<const char*>(&v6.sin6_addr);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return Endpoint{bytes(address + 12, 4), ntohs(v6.sin6_port)};
  return Endpoint{bytes(address, 16), ntohs(v6.sin6_port)};
}

std::string Text(const std::string& ip) {
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(ip.size() == 4 ? AF_INET : AF_INET6, ip.data(), text, sizeof(text));
  return text;
}

uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

int64_t BytesReceived(int fd) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? static_cast<int64_t>(info.tcpi_bytes_received) : 0;
}

Json Take(char* text) {
  const std::unique_ptr<char, decltype(&gpr_free)> owned(text, &gpr_free);
  return text == nullptr ? Json() : Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// Returns a number of channelz, which leaves zeros out and writes 64 bits as text.
int64_t Number(const Json& object, const char* name) {
  int64_t number = 0;
  if (object.is_object() && object.contains(name)) {
    const Json& value = object[name];
    if (!value.is_string() || !absl::SimpleAtoi(value.get<std::string>(), &number)) return 0;
  }
  return number;
}

std::optional<Endpoint> EndpointOf(const Json& socket, const char* name) {
  if (!socket.contains(name) || !socket[name].contains("tcpip_address")) return std::nullopt;
  const Json& address = socket[name]["tcpip_address"];
  Endpoint endpoint = {.ip = "", .port = address.value("port", 0)};
  if (!absl::Base64Unescape(address.value("ip_address", std::string()), &endpoint.ip)) return std::nullopt;
  return endpoint;
}

void AddCounts(int64_t socket_id, std::map<std::string, Counts>& counts) {
  const Json answer = Take(grpc_channelz_get_socket(socket_id));
  if (!answer.is_object() || !answer.contains("socket")) return;  // it has ended
  const Json& socket = answer["socket"];
  const std::optional<Endpoint> local = EndpointOf(socket, "local"), remote = EndpointOf(socket, "remote");
  if (!local.has_value() || !remote.has_value()) return;
  const Json data = socket.value("data", Json::object());
  const int64_t resets = Number(data, "streamsFailed");
  counts[KeyOf(*local, *remote)] = {
      .open_streams = Number(data, "streamsStarted") - Number(data, "streamsSucceeded") - resets,
      .resets = resets,
      .messages = Number(data, "messagesReceived")};
}

// Returns what a gRPC server has counted (channelz), by both ends' addresses.
std::map<std::string, Counts> ReadCounts(int64_t server_id) {
  std::map<std::string, Counts> counts;
  int64_t next = 0;
  for (bool more = true; more;) {
    const Json page = Take(grpc_channelz_get_server_sockets(server_id, next, 0));
    const Json sockets = page.is_object() ? page.value("socketRef", Json::array()) : Json::array();
    for (const Json& socket : sockets) {
      next = Number(socket, "socketId") + 1;
      AddCounts(next - 1, counts);
    }
    more = !sockets.empty() && !page.contains("end");
  }
  return counts;
}

}  // namespace

struct ConnectionWatch::ConnectionCounts {
  Connection* connection;
  int64_t streams, resets;
};

void ConnectionWatch::SetLimits(grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostStreams);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Without this, gRPC decompresses a message before it refuses its algorithm.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 1);
}

absl::Status ConnectionWatch::Add(int fd, absl::Time now) {
  const std::optional<Endpoint> local = Address(getsockname, fd), remote = Address(getpeername, fd);
  const uint64_t cookie = CookieOf(fd);
  // It has ended, or the kernel has no cookies, and nothing would tell when it ends.
  if (!local.has_value() || !remote.has_value() || cookie == 0) return absl::OkStatus();
  const std::string peer = Text(remote->ip);
  MutexLock lock(mu_);
  if (const auto refused = refused_until_.find(peer); refused != refused_until_.end() && now < refused->second) {
    return absl::ResourceExhaustedError(absl::StrCat(peer, ": refused, a connection of it was ended less than ",
                                                     absl::FormatDuration(kRefusalTime), " ago"));
  }
  if (of_peer_[peer] >= kMostConnectionsOfPeer) Forget();
  if (of_peer_[peer] >= kMostConnectionsOfPeer) {
    return absl::ResourceExhaustedError(
        absl::StrCat(peer, ": expected at most ", kMostConnectionsOfPeer, " connections, got one more"));
  }
  const auto [place, is_new] = connections_.try_emplace(KeyOf(*local, *remote));
  if (is_new) ++of_peer_[peer];
  place->second = {.fd = fd, .cookie = cookie, .peer = peer};
  return absl::OkStatus();
}

void ConnectionWatch::End(Connection& connection, absl::Time now) {
  connection.ended = true;
  refused_until_[connection.peer] = now + kRefusalTime;
  // gRPC owns the descriptor and may close it at any time, so that the number may belong to another connection. A copy
  // cannot change meanwhile.
  const int copy = fcntl(connection.fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return;
  const absl::Cleanup closing = [copy] { close(copy); };
  if (CookieOf(copy) != connection.cookie) return;
  // Drops what the peer has sent as well, which gRPC would still read after a shutdown.
  const sockaddr nowhere = {.sa_family = AF_UNSPEC, .sa_data = {}};
  connect(copy, &nowhere, sizeof(nowhere));
  shutdown(copy, SHUT_RDWR);
}

void ConnectionWatch::Forget() {
  of_peer_.clear();
  for (auto entry = connections_.begin(); entry != connections_.end();) {
    const Connection& connection = entry->second;
    if (CookieOf(connection.fd) == connection.cookie) {
      ++of_peer_[connection.peer];
      ++entry;
    } else {
      entry = connections_.erase(entry);
    }
  }
}

bool ConnectionWatch::IsActive(absl::Time now) {
  for (auto& [key, connection] : connections_) {
    const int64_t bytes = BytesReceived(connection.fd);
    const bool sends = std::exchange(connection.bytes, bytes) != bytes;
    if (!sends && connection.complete_until == absl::InfiniteFuture()) continue;
    active_until_ = now + std::max(kActiveTime, 2 * kPerConnection * static_cast<double>(connections_.size()));
  }
  return now < active_until_;
}

absl::Status ConnectionWatch::CheckMessage(Connection& connection, int64_t messages, absl::Time now) {
  const int64_t bytes = BytesReceived(connection.fd);  // later than gRPC's number
  if (std::exchange(connection.messages, messages) != messages) connection.bytes_at_message = bytes;
  const int64_t incomplete = bytes - connection.bytes_at_message;
  if (incomplete <= kMostPartialBytes) {
    connection.complete_until = absl::InfiniteFuture();
    return absl::OkStatus();
  }
  if (connection.complete_until == absl::InfiniteFuture()) connection.complete_until = now + kMessageTime;
  if (now < connection.complete_until + absl::Seconds(static_cast<double>(incomplete) / (1 << 20))) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(connection.peer, ": connection ended, ", incomplete,
                                                  " bytes have made no whole message in ",
                                                  absl::FormatDuration(kMessageTime), " and a second for each MiB"));
}

void ConnectionWatch::WatchNewestServer() {
  MutexLock lock(mu_);
  for (bool more = true; more;) {
    const Json page = Take(grpc_channelz_get_servers(server_id_ + 1));
    const Json servers = page.is_object() ? page.value("server", Json::array()) : Json::array();
    for (const Json& server : servers) server_id_ = std::max(server_id_, Number(server["ref"], "serverId"));
    more = !servers.empty() && !page.contains("end");
  }
}

std::vector<absl::Status> ConnectionWatch::Check(absl::Time now) {
  MutexLock lock(mu_);
  if (now < next_check_) return {};
  const absl::Time began = MonotonicNow();
  std::vector<absl::Status> ended = EndThoseOverLimits(now);
  next_check_ = now + std::max(kPerConnection * static_cast<double>(connections_.size()),
                               std::min(kTimesOfCheck * (MonotonicNow() - began), kLongestOfCheck));
  return ended;
}

std::vector<absl::Status> ConnectionWatch::EndThoseOverLimits(absl::Time now) {
  std::vector<absl::Status> ended;
  Forget();
  if (connections_.empty()) return ended;
  std::erase_if(refused_until_, [now](const auto& refused) { return refused.second <= now; });
  if (!IsActive(now)) return ended;
  const std::map<std::string, Counts> all_counts = ReadCounts(server_id_);
  const bool next_window = now - window_ >= absl::Seconds(1);
  if (next_window) window_ = now;
  std::map<std::string, std::vector<ConnectionCounts>> peers;
  for (auto& [key, connection] : connections_) {
    if (connection.ended) continue;
    const auto found = all_counts.find(key);
    const Counts counts = found == all_counts.end() ? Counts() : found->second;
    if (absl::Status status = CheckMessage(connection, counts.messages, now); !status.ok()) {
      End(connection, now);
      ended.push_back(std::move(status));
      continue;
    }
    peers[connection.peer].push_back({&connection, counts.open_streams, counts.resets - connection.resets});
    if (next_window) connection.resets = counts.resets;
  }
  // Ends the connections that use most, until the peer's others are within the limit.
  const auto limit = [&](std::vector<ConnectionCounts>& connections, int64_t ConnectionCounts::*value, int64_t most,
                         absl::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    int64_t sum = 0;
    for (const ConnectionCounts& used : connections) sum += used.*value;
    if (sum <= most) return;
    std::sort(connections.begin(), connections.end(),
              [value](const ConnectionCounts& a, const ConnectionCounts& b) { return a.*value > b.*value; });
    for (const ConnectionCounts& used : connections) {
      if (sum <= most) break;
      End(*used.connection, now);
      ended.push_back(absl::ResourceExhaustedError(
          absl::StrCat(used.connection->peer, ": connection ended, ", sum, " ", what, ", expected at most ", most)));
      sum -= used.*value;
    }
  };
  for (auto& [peer, connections] : peers) {
    limit(connections, &ConnectionCounts::streams, kMostStreamsOfPeer, "open streams");
    limit(connections, &ConnectionCounts::resets, kMostResetsOfPeer,
          "calls in a second that end before they are answered");
  }
  return ended;
}

}  // namespace precondor
