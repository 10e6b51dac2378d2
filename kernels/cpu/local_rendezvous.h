// SPDX-License-Identifier: Apache-2.0
// The rendezvous of the ranks of one local communicator: one process listens, and the unique id holds its address.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/cpu/socket.h"

namespace precondor {

// A rendezvous for one communicator. The process that makes it sends unique_id() to all ranks, and keeps it until they
// have joined; it need not be a rank. Its thread tells waiting ranks which ranks have arrived and, once all have, at
// which port each one listens. If ranks disagree on the size, or a rank arrives twice or leaves early, the rendezvous
// ends for all.
class LocalRendezvous {
 public:
  static absl::StatusOr<std::unique_ptr<LocalRendezvous>> Start();
  ~LocalRendezvous();
  LocalRendezvous(const LocalRendezvous&) = delete;
  LocalRendezvous& operator=(const LocalRendezvous&) = delete;
  // "local:1:PORT:SECRET". Only a process that has it can join. Valid for one communicator on this host.
  const std::string& unique_id() const { return unique_id_; }

 private:
  LocalRendezvous(LoopbackListener listener, Fd stop, std::string secret);

  const std::string unique_id_;
  const Fd stop_;
  std::thread thread_;
};

// The limit exists because every rank has two connections to every other.
inline constexpr int kMaxLocalRanks = 256;

// The contents of a unique id.
struct LocalAddress {
  int port = 0;
  std::string secret;  // kLocalSecretBytes of hexadecimal digits
};
inline constexpr size_t kLocalSecretBytes = 32;
// Parses a unique id. Returns InvalidArgument, without the secret in the message, if the text is not an id of
// LocalRendezvous.
absl::StatusOr<LocalAddress> ParseLocalId(absl::string_view unique_id);

// Joins the rendezvous as `rank`, which listens at `port`, and returns the ports of all ranks once they have joined.
// Returns DeadlineExceeded with the ranks that have not.
absl::StatusOr<std::vector<int>> MeetAt(const LocalAddress& address, int rank, int size, int port,
                                        const Deadline& deadline);

// Returns a text such as "rank 3" or "ranks 1, 2".
std::string RanksText(const std::vector<int>& ranks);

}  // namespace precondor
