// SPDX-License-Identifier: Apache-2.0
// Sends one HTTP request to a server that the operator has configured, for example a collector of spans.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor::metrics {

// POSTs `body` as application/json to http://`address``path`, where `address` is host:port. Returns OK if the server
// answers with 2xx within `timeout`, and otherwise Unavailable with the reason. Blocks; opens a new connection for each
// call.
absl::Status PostJson(const std::string& address, absl::string_view path, const std::string& body,
                      absl::Duration timeout);

}  // namespace precondor::metrics
