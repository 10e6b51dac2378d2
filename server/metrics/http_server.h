// SPDX-License-Identifier: Apache-2.0
// Serves pages over HTTP for Prometheus and browsers. The only user of civetweb.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor::metrics {

struct Page {
  std::string content_type;
  // Called on a server thread for each request. `query` is the part after the question mark, still encoded. An error is
  // answered with its message and the HTTP status 404 for NotFound, 500 otherwise.
  std::function<absl::StatusOr<std::string>(absl::string_view query)> make;
};

// An HTTP server that answers GET and HEAD and refuses other methods, so that a client cannot change anything.
class HttpServer {
 public:
  // Starts a server on `address`, host:port; port 0 selects a free one. `pages` are by path. Returns Unavailable if the
  // address cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           std::map<std::string, Page> pages);
  virtual ~HttpServer() = default;  // ends running calls
  virtual int port() const = 0;
};

// Returns the decoded value of a parameter of a query, or an empty string if it is missing.
std::string QueryParameter(absl::string_view query, const std::string& name);

}  // namespace precondor::metrics
