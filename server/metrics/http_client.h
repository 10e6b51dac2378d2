// SPDX-License-Identifier: Apache-2.0
// One HTTP request to a server that the operator has named, as a collector of spans.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor::metrics {

// POSTs `body` as application/json to http://`address``path`; `address` is host:port. OK: answered with 2xx within
// `timeout`. Unavailable: anything else, with the reason. Blocks; connects anew each time.
absl::Status PostJson(const std::string& address, absl::string_view path, const std::string& body,
                      absl::Duration timeout);

}  // namespace precondor::metrics
