// SPDX-License-Identifier: Apache-2.0
// A port of 127.0.0.1 at which no process listens, and none can meanwhile. A port that was only free a moment ago
// may be another test's by now.
#pragma once

#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"

namespace precondor {

class DeadPort {
 public:
  DeadPort() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    PRECONDOR_CHECK(bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    PRECONDOR_CHECK(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    number_ = ntohs(address.sin_port);
  }
  ~DeadPort() { close(fd_); }
  DeadPort(const DeadPort&) = delete;
  DeadPort& operator=(const DeadPort&) = delete;
  int number() const { return number_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", number_); }

 private:
  const int fd_ = socket(AF_INET, SOCK_STREAM, 0);
  int number_ = 0;
};

}  // namespace precondor
