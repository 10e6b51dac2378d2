// SPDX-License-Identifier: Apache-2.0
// Serves pages over HTTP for Prometheus and browsers. The only user of libmicrohttpd.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace precondor::metrics {

struct Page {
  std::string content_type;
  std::function<std::string()> make;  // called on a connection's thread, for one request at a time
};

// An HTTP server that answers GET and HEAD and refuses other methods, so that a client cannot change anything. Clients
// cannot take much of the process either: there are limits for connections, in all and of an address, for the bytes of
// a request, for silence, and for a page's answers that clients have not read. Beyond the last one the answer is 503.
class HttpServer {
 public:
  // Serves `pages`, by path, on `listening_socket`, which it owns from now on. Returns Unavailable with the system's
  // reason if no thread can be started.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(int listening_socket, std::map<std::string, Page> pages);
  virtual ~HttpServer() = default;  // ends connections and running calls
};

}  // namespace precondor::metrics
