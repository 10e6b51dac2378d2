// SPDX-License-Identifier: Apache-2.0
// Pages that can be read over HTTP, for Prometheus and browsers. The only user of civetweb.
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
  // Called on a thread of the server for each GET; `query` is what follows the question mark, still encoded. An error
  // is answered with a status of HTTP and its message: 404 for NotFound, 500 for others.
  std::function<absl::StatusOr<std::string>(absl::string_view query)> make;
};

// Answers GET and HEAD, and refuses every other method: nothing can be changed through it.
class HttpServer {
 public:
  // `address` is host:port, port 0 for a free one; `pages` by path. Unavailable: the address cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           std::map<std::string, Page> pages);
  virtual ~HttpServer() = default;  // ends the calls under way
  virtual int port() const = 0;
};

// The value of a parameter of a query, decoded; empty when it is missing.
std::string QueryParameter(absl::string_view query, const std::string& name);

}  // namespace precondor::metrics
