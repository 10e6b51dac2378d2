// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_client.h"

#include <array>
#include <civetweb.h>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace precondor::metrics {

absl::Status PostJson(const std::string& address, absl::string_view path, const std::string& body,
                      absl::Duration timeout) {
  const auto failed = [&](absl::string_view why) {
    return absl::UnavailableError(absl::StrCat("http://", address, path, ": ", why));
  };
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port)) return failed("no port");
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  std::array<char, 256> reason = {};
  const std::unique_ptr<mg_connection, decltype(&mg_close_connection)> connection(
      mg_connect_client(host.c_str(), port, /*use_ssl=*/0, reason.data(), reason.size()), &mg_close_connection);
  if (connection == nullptr) return failed(reason.data());
  const std::string request = absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: ", address,
                                           "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                                           "\r\nConnection: close\r\n\r\n", body);
  if (mg_write(connection.get(), request.data(), request.size()) != static_cast<int>(request.size())) {
    return failed("the request was not taken");
  }
  const int timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(timeout));
  if (mg_get_response(connection.get(), reason.data(), reason.size(), timeout_ms) < 0) return failed(reason.data());
  const int status = mg_get_response_info(connection.get())->status_code;
  if (status < 200 || status >= 300) return failed(absl::StrCat("answered with ", status));
  return absl::OkStatus();
}

}  // namespace precondor::metrics
