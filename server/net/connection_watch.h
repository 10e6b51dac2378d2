// SPDX-License-Identifier: Apache-2.0
// Limits what the peers of TCP connections can take of the gRPC server. gRPC 1.51 has no limits of its own that a
// hostile peer must keep: it forgets a stream that is reset while its call still takes memory, and it trusts a client
// to acknowledge the greatest number of streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace precondor {

// Knows the open connections and looks at their counters. Thread-safe.
class ConnectionWatch {
 public:
  static constexpr size_t kMostConnectionsOfPeer = 512;  // a peer is an IP address
  static constexpr int kMostStreams = 1024;              // of a connection, open at a time; what clients are told
  static constexpr int64_t kMostStreamsOfPeer = 2048;    // of all its connections, open at a time
  static constexpr int64_t kMostResetsOfPeer = 1000;     // calls in a second that it ends before they are answered
  // A connection that has received more than kMostPartialBytes since its last whole message completes the next one
  // within kMessageTime and a second for each MiB.
  static constexpr int64_t kMostPartialBytes = 256 << 10;
  static constexpr absl::Duration kMessageTime = absl::Seconds(30);
  // gRPC has counted what a peer has sent after this time.
  static constexpr absl::Duration kActiveTime = absl::Seconds(2);
  // A peer of which a connection was ended gets no new one for this time.
  static constexpr absl::Duration kRefusalTime = absl::Seconds(5);

  // Sets gRPC's own limits: kMostStreams, and no compressed messages, because gRPC decompresses 1 MB to 1 GB before it
  // looks at the size.
  static void SetLimits(grpc::ServerBuilder& builder);

  // Takes the newest gRPC server of this process as the one whose connections are watched. Call it once, before another
  // server is built: gRPC lists a server that is still under construction, and to read the list then ends the process.
  void WatchNewestServer();
  // Takes note of a connection, whose descriptor stays the caller's. Returns ResourceExhausted if its peer has too many
  // or is refused for a time; the caller then closes it.
  absl::Status Add(int fd, absl::Time now);
  // Ends the connections that exceed a limit; returns why, for each. Call it often. It takes about 0.02 ms for a
  // connection, and less if no peer has sent anything for kActiveTime. It does nothing if it was called so recently
  // that it would use more than some 2 % of a core.
  std::vector<absl::Status> Check(absl::Time now);

 private:
  struct Connection {
    int fd = -1;
    uint64_t cookie = 0;  // the kernel's number of the socket; tells whether `fd` is still this connection's
    std::string peer;
    bool ended = false;
    int64_t bytes = 0;                                   // received, as of the last check
    int64_t resets = 0;                                  // as of window_
    int64_t messages = 0;                                // as of the last check
    int64_t bytes_at_message = 0;                        // bytes received when `messages` grew
    absl::Time complete_until = absl::InfiniteFuture();  // while more than kMostPartialBytes make no message
  };
  struct ConnectionCounts;

  static absl::Status CheckMessage(Connection& connection, int64_t messages, absl::Time now);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // the connections that have closed
  // Takes note of what peers have sent. Returns false if their counters cannot have changed.
  bool IsActive(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<absl::Status> EndThoseOverLimits(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(Connection& connection, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  int64_t server_id_ ABSL_GUARDED_BY(mu_) = 0;                            // gRPC's number of the server
  std::map<std::string, Connection> connections_ ABSL_GUARDED_BY(mu_);    // by both ends' addresses
  std::map<std::string, size_t> of_peer_ ABSL_GUARDED_BY(mu_);            // number of connections
  std::map<std::string, absl::Time> refused_until_ ABSL_GUARDED_BY(mu_);  // by peer
  absl::Time next_check_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Time active_until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Time window_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // begin of the second in which resets are counted
};

}  // namespace precondor
