// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/local_rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// A rank sends secret, rank, size and port. It receives any number of messages {kind, length, payload}.
constexpr size_t kHelloBytes = kLocalSecretBytes + 12;
constexpr size_t kHeaderBytes = 8;
enum class Kind : uint32_t { kArrived = 1, kTable = 2, kFailed = 3 };

std::string Message(Kind kind, absl::string_view payload) {
  std::string out;
  PutU32(out, static_cast<uint32_t>(kind));
  PutU32(out, static_cast<uint32_t>(payload.size()));
  return out.append(payload.data(), payload.size());
}

std::string Failed(const absl::Status& status) {
  std::string payload;
  PutU32(payload, static_cast<uint32_t>(status.code()));
  absl::StrAppend(&payload, status.message());
  return Message(Kind::kFailed, payload);
}

std::string Arrived(int rank) {
  std::string payload;
  PutU32(payload, static_cast<uint32_t>(rank));
  return Message(Kind::kArrived, payload);
}

// The thread of a rendezvous. Messages are so short that the socket's buffer always takes them at once.
class RendezvousServer {
 public:
  RendezvousServer(LoopbackListener listener, std::string secret, int stop)
      : listener_(std::move(listener.fd)), secret_(std::move(secret)), stop_(stop) {}
  void Serve();

 private:
  struct Peer {
    Fd fd;
    std::string hello;  // bytes of the greeting received so far
    int rank = -1;      // set once the greeting is complete
    int port = 0;
  };
  bool Wait();
  // Returns false if the peer must be removed.
  bool ReadHello(Peer& peer);
  bool Admit(Peer& peer, int rank, int size, int port);
  std::vector<int> Missing() const;
  void SendToAll(absl::string_view message);
  void End(absl::Status how);

  const Fd listener_;
  const std::string secret_;
  const int stop_;
  std::vector<Peer> peers_;
  int size_ = 0;  // as the first rank has sent it
  bool ended_ = false;
  absl::Status how_;  // how it ended, for ranks that arrive later
};

void RendezvousServer::Serve() {
  while (Wait()) {
    while (true) {
      absl::StatusOr<Fd> fd = AcceptOne(listener_);
      if (!fd.ok()) return End(fd.status());
      if (!fd->open()) break;
      peers_.push_back({*std::move(fd), {}, -1, 0});
    }
    // Iterates by index, because ReadHello may end the rendezvous and clear the list.
    for (size_t i = 0; i < peers_.size();) {
      if (ReadHello(peers_[i])) {
        ++i;
      } else if (i < peers_.size()) {
        peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
  }
}

// Returns false when the rendezvous is over.
bool RendezvousServer::Wait() {
  std::vector<pollfd> ready = {{stop_, POLLIN, 0}, {listener_.number(), POLLIN, 0}};
  for (const Peer& peer : peers_) ready.push_back({peer.fd.number(), POLLIN, 0});
  while (poll(ready.data(), ready.size(), -1) < 0 && errno == EINTR) {
  }
  return ready[0].revents == 0;
}

bool RendezvousServer::ReadHello(Peer& peer) {
  char bytes[kHelloBytes];
  absl::Span<char> rest(bytes, peer.rank < 0 ? kHelloBytes - peer.hello.size() : 1);
  const size_t room = rest.size();
  const bool there = ReceiveSome(peer.fd, rest);
  if (peer.rank >= 0) {
    if (there) return true;
    End(absl::UnavailableError(absl::StrCat("joining: rank ", peer.rank, " left while ", size_,
                                            " ranks were to meet; missing: ", RanksText(Missing()))));
    return false;
  }
  peer.hello.append(bytes, room - rest.size());
  if (!there) return false;
  if (peer.hello.size() < kHelloBytes) return true;
  Decoder in(peer.hello);
  if (in.Take(kLocalSecretBytes) != secret_) return false;
  const auto rank = static_cast<int>(in.U32()), size = static_cast<int>(in.U32()), port = static_cast<int>(in.U32());
  return rank >= 0 && rank < size && size <= kMaxLocalRanks && Admit(peer, rank, size, port);
}

bool RendezvousServer::Admit(Peer& peer, int rank, int size, int port) {
  if (ended_) {
    const std::string message = Failed(how_);
    absl::string_view rest = message;
    SendSome(peer.fd, rest);
    return false;
  }
  const auto same = [rank](const Peer& other) { return other.rank == rank; };
  const auto twin = std::find_if(peers_.begin(), peers_.end(), same);
  if (size_ == 0) size_ = size;
  peer.rank = rank;
  if (twin != peers_.end() || size != size_) {
    End(absl::InvalidArgumentError(
        size == size_ ? absl::StrCat("joining: rank ", rank, " of ", size, " came twice")
                      : absl::StrCat("joining: rank ", rank, " expects ", size, " ranks, those before it ", size_)));
    return false;
  }
  peer.port = port;
  for (const Peer& other : peers_) {
    if (other.rank < 0 || other.rank == rank) continue;
    const std::string message = Arrived(other.rank);
    absl::string_view rest = message;
    SendSome(peer.fd, rest);
  }
  SendToAll(Arrived(rank));
  if (!Missing().empty()) return true;
  std::vector<int> ports(size_);
  for (const Peer& other : peers_) {
    if (other.rank >= 0) ports[other.rank] = other.port;
  }
  std::string table;
  for (const int each : ports) PutU32(table, static_cast<uint32_t>(each));
  SendToAll(Message(Kind::kTable, table));
  ended_ = true;
  how_ = absl::FailedPreconditionError(absl::StrCat("joining: all ", size_, " ranks have joined already"));
  peers_.clear();
  return false;
}

std::vector<int> RendezvousServer::Missing() const {
  std::vector<bool> here(size_, false);
  for (const Peer& peer : peers_) {
    if (peer.rank >= 0) here[peer.rank] = true;
  }
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!here[rank]) missing.push_back(rank);
  }
  return missing;
}

void RendezvousServer::SendToAll(absl::string_view message) {
  for (const Peer& peer : peers_) {
    absl::string_view rest = message;
    if (peer.rank >= 0) SendSome(peer.fd, rest);
  }
}

void RendezvousServer::End(absl::Status how) {
  SendToAll(Failed(how));
  ended_ = true;
  how_ = std::move(how);
  peers_.clear();
}

absl::Status DecodeFailure(Decoder& in, absl::string_view payload) {
  const auto code = static_cast<absl::StatusCode>(in.U32());
  return absl::Status(code, payload.substr(4));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalRendezvous>> LocalRendezvous::Start() {
  PRECONDOR_ASSIGN_OR_RETURN(LoopbackListener listener, ListenOnLoopback());
  Fd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  char bytes[kLocalSecretBytes / 2];
  if (!stop.open() || getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return absl::UnavailableError("rendezvous: expected an eventfd and random bytes, the system gave none");
  }
  std::string secret = absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
  return std::unique_ptr<LocalRendezvous>(new LocalRendezvous(std::move(listener), std::move(stop), std::move(secret)));
}

LocalRendezvous::LocalRendezvous(LoopbackListener listener, Fd stop, std::string secret)
    : unique_id_(absl::StrCat("local:1:", listener.port, ":", secret)), stop_(std::move(stop)) {
  thread_ = std::thread([server = std::make_unique<RendezvousServer>(std::move(listener), std::move(secret),
                                                                     stop_.number())] { server->Serve(); });
}

LocalRendezvous::~LocalRendezvous() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_.number(), &one, sizeof(one));
  thread_.join();
}

absl::StatusOr<LocalAddress> ParseLocalId(absl::string_view unique_id) {
  const std::vector<absl::string_view> parts = absl::StrSplit(unique_id, ':');
  LocalAddress address;
  if (parts.size() != 4 || parts[0] != "local" || parts[1] != "1" || !absl::SimpleAtoi(parts[2], &address.port) ||
      address.port <= 0 || address.port > 65535 || parts[3].size() != kLocalSecretBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("unique id: expected one of a LocalRendezvous, got ", unique_id.size(), " bytes that are none"));
  }
  address.secret = std::string(parts[3]);
  return address;
}

absl::StatusOr<std::vector<int>> MeetAt(const LocalAddress& address, int rank, int size, int port,
                                        const Deadline& deadline) {
  PRECONDOR_ASSIGN_OR_RETURN(const Fd fd, ConnectToLoopback(address.port));
  std::string hello = address.secret;
  for (const int number : {rank, size, port}) PutU32(hello, static_cast<uint32_t>(number));
  absl::string_view unsent = hello;
  std::vector<bool> here(size, false);
  std::string got;
  const auto gone = [] { return absl::UnavailableError("joining: the rendezvous is gone"); };
  if (!SendSome(fd, unsent) || !unsent.empty()) return gone();
  while (true) {
    Decoder in(got);
    const auto kind = static_cast<Kind>(in.U32());
    const absl::string_view payload = in.Take(in.U32());
    if (!in.ok()) {  // the message is incomplete
      if (!WaitToRead(fd, deadline)) {
        std::vector<int> missing;
        for (int other = 0; other < size; ++other) {
          if (!here[other]) missing.push_back(other);
        }
        return absl::DeadlineExceededError(
            absl::StrCat("joining: rank ", rank, " of ", size, " timed out waiting for ", RanksText(missing)));
      }
      char bytes[1024];
      absl::Span<char> room(bytes);
      if (!ReceiveSome(fd, room)) return gone();
      got.append(bytes, sizeof(bytes) - room.size());
      continue;
    }
    Decoder fields(payload);
    if (kind == Kind::kFailed) return DecodeFailure(fields, payload);
    if (kind == Kind::kTable) {
      std::vector<int> ports(size);
      for (int& each : ports) each = static_cast<int>(fields.U32());
      return ports;
    }
    if (const uint32_t other = fields.U32(); other < here.size()) here[other] = true;
    got.erase(0, kHeaderBytes + payload.size());
  }
}

std::string RanksText(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace precondor
