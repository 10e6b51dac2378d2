// SPDX-License-Identifier: Apache-2.0
// One rank's connections to all other ranks, which carry payloads and notices of failures.
//   Each pair of ranks has two connections. One carries payload, of lengths that both ends know. The other stays silent
//   until an end fails, and then carries the reason. A rank whose payload connection is closed first reads the other
//   one to its end, so that all ranks learn the first cause and not its consequences.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/cpu/local_rendezvous.h"
#include "kernels/cpu/socket.h"

namespace precondor {

// A rank's connections. One thread at a time, except that any thread may call Interrupt.
class LocalMesh {
 public:
  // Bytes to send to one peer and to receive from it. Exchange removes what it has moved from the front.
  struct Transfer {
    absl::string_view send;
    absl::Span<char> receive;
    bool done() const { return send.empty() && receive.empty(); }
  };

  // An operation: the text that its error messages begin with, and its number among this rank's operations, from 1.
  struct Operation {
    std::string text;
    uint64_t number = 0;
  };

  // Connects to all other ranks. Errors: those of Collective; they name ranks that do not join.
  static absl::StatusOr<std::unique_ptr<LocalMesh>> Join(const LocalAddress& address, int rank, int size,
                                                         const Deadline& deadline);

  // Moves all bytes of `transfers`, one for each rank (this rank's own is empty), in both directions at once. Returns
  // DeadlineExceeded or Unavailable with the ranks that it waited for, Aborted if interrupted, or the failure that a
  // peer reports. A failure in a later operation is ignored, because the peer has completed this one.
  absl::Status Exchange(const Operation& operation, absl::Span<Transfer> transfers, const Deadline& deadline);
  // Tells all peers why operation `number` and later ones will not take place, and closes all connections.
  void Fail(const absl::Status& why, uint64_t number);
  void Interrupt();

 private:
  struct Peer {
    Fd payload;
    Fd news;
    std::string notice;        // bytes of the notice received over `news`
    bool news_closed = false;  // no more bytes will arrive
    absl::Status failure;      // failure in the notice, once the notice is complete
    uint64_t failed_in = 0;    // number of the operation that failed
  };
  LocalMesh(int rank, int size, Fd interrupt);
  absl::Status Connect(const LocalAddress& address, const std::vector<int>& ports);
  absl::Status AcceptHigherRanks(const LocalAddress& address, const Fd& listener, const Deadline& deadline);
  absl::Status Wait(const Operation& operation, absl::Span<const Transfer> transfers, const Deadline& deadline);
  // Returns why the payload connection to `peer` is closed.
  absl::Status Lost(const Operation& operation, int peer, const Deadline& deadline);
  static void HearNews(Peer& peer);

  const int rank_;
  const Fd interrupt_;
  std::vector<Peer> peers_;  // this rank's own entry has no connections
};

}  // namespace precondor
