// SPDX-License-Identifier: Apache-2.0
// HTML of the metrics port's status page: one page without external assets. It reads /status and /metrics of its server
// every two seconds, and changes nothing. The plots' history is in the browser, 124,800 bytes a job.
#pragma once

namespace precondor {

extern const char kStatusHtml[];

}  // namespace precondor
