// SPDX-License-Identifier: Apache-2.0
// The status page of the metrics port: one page without external assets, which reads /status and /metrics of the server
// that it came from every two seconds, and can change nothing.
#pragma once

namespace precondor {

extern const char kStatusHtml[];

}  // namespace precondor
