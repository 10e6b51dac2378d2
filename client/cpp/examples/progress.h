// SPDX-License-Identifier: Apache-2.0
// How far a long piece of work is, on stderr: a bar on a terminal, a plain line now and then elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor::digits {

// One thread at a time.
class Progress {
 public:
  explicit Progress(absl::string_view title);
  ~Progress();  // ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of `total`, what is at it now. Redraws at most ten times a second; elsewhere prints every tenth of the way.
  void Update(int64_t done, int64_t total, absl::string_view what);

 private:
  const std::string title_;
  const bool terminal_;
  const absl::Time begin_;
  absl::Time drawn_;
  int64_t tenths_ = -1;
};

}  // namespace precondor::digits
