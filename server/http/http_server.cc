// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_server.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <microhttpd.h>
#include <sys/socket.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"

namespace precondor::metrics {
namespace {

constexpr unsigned kMostConnections = 128;
constexpr unsigned kMostConnectionsOfAddress = 32;
constexpr unsigned kSilentSeconds = 10;     // a client that neither sends nor reads for so long is cut off
constexpr size_t kRequestBytes = 32 << 10;  // request line and headers
constexpr int kSendBufferBytes = 64 << 10;  // of the kernel, for a connection; it would take some MiB of its own accord
constexpr size_t kStackBytes = 1 << 20;     // of a connection's thread
constexpr size_t kMostUnreadBytes = 16 << 20;  // of one page; a single answer may be longer

constexpr char kText[] = "text/plain; charset=utf-8";
constexpr std::array<std::pair<const char*, const char*>, 4> kHeaders = {{
    {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
    {MHD_HTTP_HEADER_CONNECTION, "close"},
    {MHD_HTTP_HEADER_CONTENT_SECURITY_POLICY,
     "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"},
    {"X-Content-Type-Options", "nosniff"},
}};

// A page, and what clients have yet to read of it. Thread-safe.
class PageState {
 public:
  explicit PageState(Page page) : page_(std::move(page)) {}

  const std::string& content_type() const { return page_.content_type; }
  // Makes the page when no other thread does. Returns ResourceExhausted if clients leave too much of it unread. The
  // caller gives Read the size of what it got.
  absl::StatusOr<std::string> Make() {
    {
      MutexLock lock(mu_);
      made_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !making_; });
      if (unread_bytes_ >= kMostUnreadBytes) {
        return absl::ResourceExhaustedError(
            absl::StrCat("clients have not read ", unread_bytes_, " bytes of this page, at most ", kMostUnreadBytes));
      }
      making_ = true;
    }
    std::string body = page_.make();
    MutexLock lock(mu_);
    making_ = false;
    unread_bytes_ += body.size();
    made_.notify_all();
    return body;
  }
  void Read(size_t bytes) {
    MutexLock lock(mu_);
    unread_bytes_ -= bytes;
  }

 private:
  const Page page_;
  Mutex mu_;
  CondVar made_;
  bool making_ ABSL_GUARDED_BY(mu_) = false;
  size_t unread_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

struct PendingAnswer {
  std::string text;
  PageState* page;  // null for an answer that is not a page
};

void Release(void* body) {
  const std::unique_ptr<PendingAnswer> owned(static_cast<PendingAnswer*>(body));
  if (owned->page != nullptr) owned->page->Read(owned->text.size());
}

MHD_Result Answer(MHD_Connection* connection, unsigned status, const std::string& content_type, std::string text,
                  PageState* page = nullptr) {
  auto body = std::make_unique<PendingAnswer>(PendingAnswer{std::move(text), page});
  const size_t size = body->text.size();
  char* const data = body->text.data();
  MHD_Response* const response =
      MHD_create_response_from_buffer_with_free_callback_cls(size, data, &Release, body.get());
  if (response == nullptr) {
    Release(body.release());
    return MHD_NO;  // closes the connection
  }
  static_cast<void>(body.release());  // Release deletes it
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type.c_str());
  if (status == MHD_HTTP_METHOD_NOT_ALLOWED) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
  const MHD_Result queued = MHD_queue_response(connection, status, response);
  MHD_destroy_response(response);
  return queued;
}

class MicrohttpdServer final : public HttpServer {
 public:
  explicit MicrohttpdServer(std::map<std::string, Page> pages) {
    for (auto& [path, page] : pages) pages_.try_emplace(path, std::move(page));
  }
  ~MicrohttpdServer() override {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  absl::Status Serve(int listening_socket) {
    setsockopt(listening_socket, SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));  // is inherited
    errno = 0;
    // A thread for each connection, so that a client that waits for a page or does not read delays no other.
    daemon_ = MHD_start_daemon(
        MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ITC, /*port=*/0,
        nullptr, nullptr, &MicrohttpdServer::Handle, this, MHD_OPTION_LISTEN_SOCKET, listening_socket,
        MHD_OPTION_CONNECTION_LIMIT, kMostConnections, MHD_OPTION_PER_IP_CONNECTION_LIMIT, kMostConnectionsOfAddress,
        MHD_OPTION_CONNECTION_TIMEOUT, kSilentSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kRequestBytes,
        MHD_OPTION_THREAD_STACK_SIZE, kStackBytes, MHD_OPTION_END);
    if (daemon_ != nullptr) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("metrics_listen: the HTTP server does not start: ",
                                               errno == 0 ? "no reason is known" : std::strerror(errno)));
  }

 private:
  // Called with a request's headers. An answer at this point means that no body is read.
  static MHD_Result Handle(void* self, MHD_Connection* connection, const char* path, const char* method, const char*,
                           const char*, size_t*, void**) {
    return static_cast<MicrohttpdServer*>(self)->Respond(connection, path, method);
  }

  MHD_Result Respond(MHD_Connection* connection, const std::string& path, const std::string& method) {
    if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
      return Answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, kText, "only GET and HEAD\n");
    }
    const char* const upgrade = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_UPGRADE);
    if (upgrade != nullptr && absl::EqualsIgnoreCase(upgrade, "websocket")) {
      return Answer(connection, MHD_HTTP_BAD_REQUEST, kText, "no WebSockets\n");
    }
    const auto found = pages_.find(path);
    if (found == pages_.end()) return Answer(connection, MHD_HTTP_NOT_FOUND, kText, "no such page\n");
    PageState& page = found->second;
    absl::StatusOr<std::string> body = page.Make();
    if (body.ok()) return Answer(connection, MHD_HTTP_OK, page.content_type(), *std::move(body), &page);
    return Answer(connection, MHD_HTTP_SERVICE_UNAVAILABLE, kText, absl::StrCat(body.status().message(), "\n"));
  }

  std::map<std::string, PageState> pages_;  // const after construction
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(int listening_socket, std::map<std::string, Page> pages) {
  auto server = std::make_unique<MicrohttpdServer>(std::move(pages));
  if (absl::Status status = server->Serve(listening_socket); !status.ok()) return status;
  return server;
}

}  // namespace precondor::metrics
