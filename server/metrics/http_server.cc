// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_server.h"

#include <array>
#include <cerrno>
#include <civetweb.h>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace precondor::metrics {
namespace {

constexpr char kHeaders[] =
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:\r\n";

void Answer(mg_connection* connection, absl::string_view status, absl::string_view content_type, absl::string_view body,
            absl::string_view more_headers = "") {
  const bool head = absl::string_view(mg_get_request_info(connection)->request_method) == "HEAD";
  const std::string text =
      absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", content_type, "\r\nContent-Length: ", body.size(), "\r\n",
                   kHeaders, more_headers, "\r\n", head ? "" : body);
  mg_write(connection, text.data(), text.size());
}

class CivetwebServer final : public HttpServer {
 public:
  explicit CivetwebServer(std::map<std::string, Page> pages) : pages_(std::move(pages)) {}
  ~CivetwebServer() override {
    if (context_ != nullptr) mg_stop(context_);
  }

  absl::Status Listen(const std::string& address) {
    // A client that neither sends nor reads holds a thread until the timeout, for example a browser that opens
    // connections in advance.
    const std::array<const char*, 7> options = {"listening_ports",    address.c_str(), "num_threads", "8",
                                                "request_timeout_ms", "2000",          nullptr};
    mg_callbacks callbacks = {};
    errno = 0;
    context_ = mg_start(&callbacks, nullptr, const_cast<const char**>(options.data()));
    if (context_ == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("metrics_listen ", address, ": ", errno == 0 ? "cannot be used" : strerror(errno)));
    }
    mg_server_port port = {};
    if (mg_get_server_ports(context_, 1, &port) != 1) {
      return absl::UnavailableError(absl::StrCat("metrics_listen ", address, ": no port was opened"));
    }
    port_ = port.port;
    mg_set_request_handler(context_, "**", &CivetwebServer::Handle, this);
    return absl::OkStatus();
  }
  int port() const override { return port_; }

 private:
  static int Handle(mg_connection* connection, void* self) {
    static_cast<const CivetwebServer*>(self)->Respond(connection);
    return 1;  // the request has been answered
  }

  void Respond(mg_connection* connection) const {
    constexpr char kText[] = "text/plain; charset=utf-8";
    const mg_request_info& request = *mg_get_request_info(connection);
    const absl::string_view method = request.request_method;
    if (method != "GET" && method != "HEAD") {
      return Answer(connection, "405 Method Not Allowed", kText, "only GET and HEAD\n", "Allow: GET, HEAD\r\n");
    }
    const auto page = pages_.find(request.local_uri == nullptr ? "" : request.local_uri);
    if (page == pages_.end()) return Answer(connection, "404 Not Found", kText, "no such page\n");
    const absl::StatusOr<std::string> body =
        page->second.make(request.query_string == nullptr ? "" : request.query_string);
    if (body.ok()) return Answer(connection, "200 OK", page->second.content_type, *body);
    Answer(connection, absl::IsNotFound(body.status()) ? "404 Not Found" : "500 Internal Server Error", kText,
           absl::StrCat(body.status().message(), "\n"));
  }

  const std::map<std::string, Page> pages_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              std::map<std::string, Page> pages) {
  auto server = std::make_unique<CivetwebServer>(std::move(pages));
  if (absl::Status status = server->Listen(address); !status.ok()) return status;
  return server;
}

std::string QueryParameter(absl::string_view query, const std::string& name) {
  std::string value(query.size() + 1, '\0');
  const int length = mg_get_var(query.data(), query.size(), name.c_str(), value.data(), value.size());
  value.resize(length < 0 ? 0 : static_cast<size_t>(length));
  return value;
}

}  // namespace precondor::metrics
