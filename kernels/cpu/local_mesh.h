// SPDX-License-Identifier: Apache-2.0
// One rank's connections to all the others, and how bytes and bad news travel over them.
//   Two connections a pair: one carries payload, of lengths that both ends know; the other stays silent until an end
//   fails, and then says why. A rank whose payload connection is closed reads the other to its end first, so that all
//   ranks hear of the first cause and not of its consequences.
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

// Threads: one at a time, but Interrupt from any.
class LocalMesh {
 public:
  // What to send to one peer and to receive from it. Exchange takes what was moved off the front.
  struct Transfer {
    absl::string_view send;
    absl::Span<char> receive;
    bool done() const { return send.empty() && receive.empty(); }
  };

  // What begins the messages of errors, and its place among the operations of this rank: 1, 2 ...
  struct Operation {
    std::string text;
    uint64_t number = 0;
  };

  // Connects to all others. Errors as Collective says; ranks that do not come are named.
  static absl::StatusOr<std::unique_ptr<LocalMesh>> Join(const LocalAddress& address, int rank, int size,
                                                         const Deadline& deadline);

  // Moves all bytes of `transfers`, one a rank (the own one is empty), in both directions at once. Errors:
  // DeadlineExceeded and Unavailable with the ranks that were waited for, Aborted when interrupted, or what a peer says
  // about its failure, but for one in a later operation: the peer is done with this one then.
  absl::Status Exchange(const Operation& operation, absl::Span<Transfer> transfers, const Deadline& deadline);
  // Tells all peers why operation `number` and those after it will not be, and closes.
  void Fail(const absl::Status& why, uint64_t number);
  void Interrupt();

 private:
  struct Peer {
    Fd payload;
    Fd news;
    std::string notice;        // what has come of it over `news`
    bool news_closed = false;  // and nothing more will
    absl::Status failure;      // as the notice says, once it is complete
    uint64_t failed_in = 0;    // operation
  };
  LocalMesh(int rank, int size, Fd interrupt);
  absl::Status Connect(const LocalAddress& address, const std::vector<int>& ports);
  absl::Status AcceptHigherRanks(const LocalAddress& address, const Fd& listener, const Deadline& deadline);
  absl::Status Wait(const Operation& operation, absl::Span<const Transfer> transfers, const Deadline& deadline);
  // Why the payload connection to `peer` is gone.
  absl::Status Lost(const Operation& operation, int peer, const Deadline& deadline);
  static void HearNews(Peer& peer);

  const int rank_;
  const Fd interrupt_;
  std::vector<Peer> peers_;  // the own one has no connections
};

}  // namespace precondor
