// SPDX-License-Identifier: Apache-2.0
// The port of metrics and status pages, in this process: an input is the bytes of one connection. A byte 0xFF ends what
// is sent at once; the next part follows when the server has had time to read. After each input another client has its
// page, and nothing is left unread.
#include <arpa/inet.h>
#include <memory>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/check.h"
#include "server/http/http_server.h"
#include "server/net/acceptor.h"
#include "tests/fuzz/fuzz.h"

namespace precondor::fuzz {
namespace {

int Port() {
  static const std::pair<int, std::unique_ptr<metrics::HttpServer>> server = [] {
    const absl::StatusOr<TcpSocket> socket = ListenTcp("127.0.0.1:0");
    PRECONDOR_CHECK(socket.ok());
    const metrics::Page page = {.content_type = "text/plain", .make = [] { return "page"; }};
    auto started = metrics::HttpServer::Start(socket->fd, {{"/", page}, {"/metrics", page}});
    PRECONDOR_CHECK(started.ok());
    return std::pair(socket->port, *std::move(started));
  }();
  return server.first;
}

// Sends the parts on one connection and returns what the server answers until it closes. libFuzzer's timer interrupts
// system calls.
std::string Talk(const std::vector<absl::string_view>& parts) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(Port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  PRECONDOR_CHECK(TEMP_FAILURE_RETRY(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address))) == 0);
  for (const absl::string_view part : parts) {
    if (TEMP_FAILURE_RETRY(send(fd, part.data(), part.size(), MSG_NOSIGNAL)) < 0) break;
    std::this_thread::yield();
  }
  shutdown(fd, SHUT_WR);
  std::string answer(1 << 16, '\0');
  size_t size = 0;
  for (ssize_t n = 0; (n = TEMP_FAILURE_RETRY(recv(fd, answer.data() + size, answer.size() - size, 0))) > 0;) size += n;
  close(fd);
  answer.resize(size);
  return answer;
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string host = " HTTP/1.1\r\nHost: a\r\n";
  return {
      absl::StrCat("GET /metrics?session=a%20b&x", host, "\r\n"),
      absl::StrCat("HEAD /", host, "Connection: keep-alive\r\n\r\nGET /metrics", host, "\r\n"),
      absl::StrCat("GET /", host, "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
                   "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n\xFF\x81\x85mask"),
      absl::StrCat("POST /metrics", host, "Transfer-Encoding: chunked\r\n\r\nffff\r\n\xFFxyz\r\n0\r\nT: 1\r\n\r\n"),
      absl::StrCat("PUT /a", host,
                   "Content-Length: 4\r\nExpect: 100-continue\r\n\r\n\xFF"
                   "body"),
      absl::StrCat("GET /metrics", host,
                   "Range: bytes=0-1,-5\r\nCookie: a=b; c=\"d\"\r\nAuthorization: Basic YTpi\r\n\r\n"),
      absl::StrCat("POST /", host,
                   "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9\r\n\r\n--b\r\n\r\n--b--"),
      "GET /metr\xFFics HTTP/1.0\r\n fol\tded: x\r\n\r\n",
  };
}

void Run(absl::string_view input) {
  Talk(absl::StrSplit(input, '\xFF'));
  const std::string answer = Talk({"GET /metrics HTTP/1.0\r\n\r\n"});
  PRECONDOR_CHECK(absl::StartsWith(answer, "HTTP/1.1 200 ") && absl::EndsWith(answer, "page"));
}

}  // namespace precondor::fuzz
