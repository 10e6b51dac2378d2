// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one local communicator find each other: one process listens, the unique id says where.
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

// For one communicator. The process that makes it sends unique_id() to all ranks, and keeps it until they have joined;
// it need not be a rank. Its thread tells waiting ranks who has come and, once all have, where each one listens. Ranks
// that disagree on the size, a rank that comes twice, and one that leaves meanwhile end the rendezvous for all.
class LocalRendezvous {
 public:
  static absl::StatusOr<std::unique_ptr<LocalRendezvous>> Start();
  ~LocalRendezvous();
  LocalRendezvous(const LocalRendezvous&) = delete;
  LocalRendezvous& operator=(const LocalRendezvous&) = delete;
  // Text, "local:1:PORT:SECRET"; only who has it can join. Good for one communicator on this host.
  const std::string& unique_id() const { return unique_id_; }

 private:
  LocalRendezvous(LoopbackListener listener, Fd stop, std::string secret);

  const std::string unique_id_;
  const Fd stop_;
  std::thread thread_;
};

// Every rank has two connections to every other.
inline constexpr int kMaxLocalRanks = 256;

// What a unique id says.
struct LocalAddress {
  int port = 0;
  std::string secret;  // kLocalSecretBytes of hexadecimal digits
};
inline constexpr size_t kLocalSecretBytes = 32;
// InvalidArgument, without the secret in it, when the text is none of LocalRendezvous'.
absl::StatusOr<LocalAddress> ParseLocalId(absl::string_view unique_id);

// Goes to the rendezvous as `rank` that listens at `port`; the ports of all ranks once they have come.
// DeadlineExceeded names the ranks that have not.
absl::StatusOr<std::vector<int>> MeetAt(const LocalAddress& address, int rank, int size, int port,
                                        const Deadline& deadline);

// "rank 3", "ranks 1, 2".
std::string RanksText(const std::vector<int>& ranks);

}  // namespace precondor
