// SPDX-License-Identifier: Apache-2.0
#include "tests/loopback/relay.h"

#include <arpa/inet.h>
#include <chrono>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"

namespace precondor {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Two small sends in turn otherwise wait for the peer's delayed acknowledgement, 40 ms.
void SendWithoutDelay(int socket) {
  const int on = 1;
  PRECONDOR_CHECK(setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
}

bool SendAll(int socket, const char* data, ssize_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, data, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= sent;
  }
  return true;
}

}  // namespace

Relay::Relay() {
  listener_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  PRECONDOR_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  PRECONDOR_CHECK(listen(listener_, 64) == 0);
  socklen_t size = sizeof(address);
  PRECONDOR_CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { AcceptLoop(); });
}

Relay::~Relay() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  std::vector<std::thread> pumps;
  {
    MutexLock lock(mu_);
    pumps = std::move(pumps_);
  }
  for (std::thread& pump : pumps) pump.join();
  close(listener_);
  MutexLock lock(mu_);
  for (const int socket : sockets_) close(socket);
}

std::string Relay::address() const { return absl::StrCat("127.0.0.1:", port_); }

void Relay::Target(int port) {
  MutexLock lock(mu_);
  target_ = port;
  changed_.notify_all();
}

void Relay::CutAfter(std::vector<int64_t> bytes) {
  MutexLock lock(mu_);
  places_ = std::move(bytes);
  passed_ = 0;
}

void Relay::Cut() {
  MutexLock lock(mu_);
  ++cuts_;
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
}

void Relay::Hold(bool hold) {
  MutexLock lock(mu_);
  hold_ = hold;
  changed_.notify_all();
}

bool Relay::WaitUntilHeld() {
  MutexLock lock(mu_);
  return changed_.wait_for(mu_, std::chrono::seconds(20),
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return held_ > 0; });
}

void Relay::WaitWhileHeld() {
  MutexLock lock(mu_);
  ++held_;
  changed_.notify_all();
  changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !hold_ || stopping_; });
  --held_;
}

int Relay::cuts() const {
  MutexLock lock(mu_);
  return cuts_;
}

void Relay::AcceptLoop() {
  while (true) {
    const int client = accept(listener_, nullptr, nullptr);
    if (client < 0) return;
    MutexLock lock(mu_);
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || target_ != 0; });
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    SendWithoutDelay(client);
    SendWithoutDelay(server);
    sockets_.push_back(client);
    sockets_.push_back(server);
    if (stopping_) return;
    const sockaddr_in address = Loopback(target_);
    if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      shutdown(client, SHUT_RDWR);
      continue;
    }
    pumps_.emplace_back([this, client, server] { Pump(client, server); });
    pumps_.emplace_back([this, client, server] { Pump(server, client); });
  }
}

void Relay::Pump(int from, int to) {
  char buffer[16384];
  while (true) {
    const ssize_t size = recv(from, buffer, sizeof(buffer), 0);
    if (size > 0) WaitWhileHeld();
    if (size <= 0 || !SendAll(to, buffer, size) || !Pass(size)) break;
  }
  shutdown(from, SHUT_RDWR);
  shutdown(to, SHUT_RDWR);
}

bool Relay::Pass(int64_t bytes) {
  MutexLock lock(mu_);
  passed_ += bytes;
  if (places_.empty() || passed_ < places_.front()) return true;
  places_.erase(places_.begin());
  passed_ = 0;
  ++cuts_;
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  return false;
}

}  // namespace precondor
