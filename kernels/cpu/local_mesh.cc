// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/local_mesh.h"

#include <cstdint>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

enum class Channel : uint32_t { kPayload = 0, kNews = 1 };
constexpr size_t kGreetingBytes = kLocalSecretBytes + 8;

std::string Greeting(const LocalAddress& address, int rank, Channel channel) {
  std::string out = address.secret;
  PutU32(out, static_cast<uint32_t>(rank));
  PutU32(out, static_cast<uint32_t>(channel));
  return out;
}

// A notice: operation, code, length, message. It is short enough that an unused connection takes it in one send.
constexpr size_t kLongestMessage = 4096;

std::string Notice(const absl::Status& why, uint64_t number) {
  const absl::string_view message = why.message().substr(0, kLongestMessage);
  std::string out;
  PutU64(out, number);
  PutU32(out, static_cast<uint32_t>(why.code()));
  PutU32(out, static_cast<uint32_t>(message.size()));
  return out.append(message.data(), message.size());
}

// The secret excludes other processes: a peer that connects without it is dropped, and the wait continues.
absl::StatusOr<std::string> ReadGreeting(const Fd& fd, const Deadline& deadline) {
  std::string greeting(kGreetingBytes, '\0');
  absl::Span<char> rest(greeting.data(), greeting.size());
  while (!rest.empty()) {
    if (!WaitToRead(fd, deadline)) return absl::DeadlineExceededError("greeting");
    if (!ReceiveSome(fd, rest)) return absl::UnavailableError("greeting");
  }
  return greeting;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalMesh>> LocalMesh::Join(const LocalAddress& address, int rank, int size,
                                                           const Deadline& deadline) {
  Fd interrupt(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!interrupt.open()) return absl::UnavailableError("joining: the system gave no eventfd");
  PRECONDOR_ASSIGN_OR_RETURN(const LoopbackListener listener, ListenOnLoopback());
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<int> ports, MeetAt(address, rank, size, listener.port, deadline));
  std::unique_ptr<LocalMesh> mesh(new LocalMesh(rank, size, std::move(interrupt)));
  PRECONDOR_RETURN_IF_ERROR(mesh->Connect(address, ports));
  PRECONDOR_RETURN_IF_ERROR(mesh->AcceptHigherRanks(address, listener.fd, deadline));
  return mesh;
}

LocalMesh::LocalMesh(int rank, int size, Fd interrupt) : rank_(rank), interrupt_(std::move(interrupt)), peers_(size) {}

// Connects to lower ranks. Their listeners queue connections before they accept them, so this waits for no rank.
absl::Status LocalMesh::Connect(const LocalAddress& address, const std::vector<int>& ports) {
  for (int peer = 0; peer < rank_; ++peer) {
    for (const Channel channel : {Channel::kPayload, Channel::kNews}) {
      absl::StatusOr<Fd> fd = ConnectToLoopback(ports[peer]);
      const std::string greeting = Greeting(address, rank_, channel);
      absl::string_view rest = greeting;
      if (!fd.ok() || !SendSome(*fd, rest) || !rest.empty()) {
        return absl::UnavailableError(absl::StrCat("joining: rank ", peer, " is lost: it does not listen any more"));
      }
      (channel == Channel::kPayload ? peers_[peer].payload : peers_[peer].news) = *std::move(fd);
    }
  }
  return absl::OkStatus();
}

absl::Status LocalMesh::AcceptHigherRanks(const LocalAddress& address, const Fd& listener, const Deadline& deadline) {
  const auto missing = [this] {
    std::vector<int> out;
    for (int peer = rank_ + 1; peer < static_cast<int>(peers_.size()); ++peer) {
      if (!peers_[peer].payload.open() || !peers_[peer].news.open()) out.push_back(peer);
    }
    return out;
  };
  while (!missing().empty()) {
    if (deadline.passed() || !WaitToRead(listener, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("joining: rank ", rank_, " timed out waiting for a connection of ", RanksText(missing())));
    }
    PRECONDOR_ASSIGN_OR_RETURN(Fd fd, AcceptOne(listener));
    if (!fd.open()) continue;
    const absl::StatusOr<std::string> greeting = ReadGreeting(fd, deadline);
    if (!greeting.ok()) continue;
    Decoder in(*greeting);
    if (in.Take(kLocalSecretBytes) != address.secret) continue;
    const uint32_t peer = in.U32(), channel = in.U32();
    if (static_cast<int>(peer) <= rank_ || peer >= peers_.size()) continue;
    (channel == static_cast<uint32_t>(Channel::kPayload) ? peers_[peer].payload : peers_[peer].news) = std::move(fd);
  }
  return absl::OkStatus();
}

absl::Status LocalMesh::Exchange(const Operation& operation, absl::Span<Transfer> transfers, const Deadline& deadline) {
  while (true) {
    bool done = true;
    for (size_t peer = 0; peer < transfers.size(); ++peer) {
      Transfer& transfer = transfers[peer];
      if (!SendSome(peers_[peer].payload, transfer.send) || !ReceiveSome(peers_[peer].payload, transfer.receive)) {
        return Lost(operation, static_cast<int>(peer), deadline);
      }
      done = done && transfer.done();
    }
    if (done) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(Wait(operation, transfers, deadline));
  }
}

absl::Status LocalMesh::Wait(const Operation& operation, absl::Span<const Transfer> transfers,
                             const Deadline& deadline) {
  std::vector<pollfd> ready = {{interrupt_.number(), POLLIN, 0}};
  std::vector<Peer*> talkative;  // peers whose news sockets are ready[1], ready[2] ...
  std::vector<int> waited_for;
  for (Peer& peer : peers_) {
    if (!peer.news.open() || peer.news_closed) continue;
    talkative.push_back(&peer);
    ready.push_back({peer.news.number(), POLLIN, 0});
  }
  for (size_t peer = 0; peer < transfers.size(); ++peer) {
    if (transfers[peer].done()) continue;
    const int events = (transfers[peer].send.empty() ? 0 : POLLOUT) | (transfers[peer].receive.empty() ? 0 : POLLIN);
    ready.push_back({peers_[peer].payload.number(), static_cast<int16_t>(events), 0});
    waited_for.push_back(static_cast<int>(peer));
  }
  poll(ready.data(), ready.size(), deadline.poll_ms());
  if (ready[0].revents != 0) return absl::AbortedError(absl::StrCat(operation.text, ": interrupted"));
  for (size_t i = 0; i < talkative.size(); ++i) {
    if (ready[i + 1].revents != 0) HearNews(*talkative[i]);
  }
  for (const Peer& peer : peers_) {
    if (!peer.failure.ok() && peer.failed_in <= operation.number) return peer.failure;
  }
  if (!deadline.passed()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat(operation.text, ": rank ", rank_, " timed out waiting for ", RanksText(waited_for)));
}

absl::Status LocalMesh::Lost(const Operation& operation, int peer, const Deadline& deadline) {
  while (!peers_[peer].news_closed && WaitToRead(peers_[peer].news, deadline)) {
    HearNews(peers_[peer]);
  }
  if (!peers_[peer].failure.ok()) return peers_[peer].failure;
  return absl::UnavailableError(absl::StrCat(operation.text, ": rank ", peer, " is lost: it closed its connection"));
}

void LocalMesh::HearNews(Peer& peer) {
  char bytes[1024];
  absl::Span<char> room(bytes);
  peer.news_closed = !ReceiveSome(peer.news, room);
  peer.notice.append(bytes, sizeof(bytes) - room.size());
  Decoder in(peer.notice);
  const uint64_t number = in.U64();
  const auto code = static_cast<absl::StatusCode>(in.U32());
  const absl::string_view message = in.Take(in.U32());
  if (!in.ok()) return;
  peer.failed_in = number;
  peer.failure = absl::Status(code, message);
}

void LocalMesh::Fail(const absl::Status& why, uint64_t number) {
  const std::string notice = Notice(why, number);
  for (Peer& peer : peers_) {
    absl::string_view rest = notice;
    if (peer.news.open()) SendSome(peer.news, rest);
    peer.news.Close();
    peer.payload.Close();
  }
}

void LocalMesh::Interrupt() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interrupt_.number(), &one, sizeof(one));
}

}  // namespace precondor
