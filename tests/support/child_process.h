// SPDX-License-Identifier: Apache-2.0
// A program that a test starts, talks to line by line, stops and ends.
#pragma once

#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "absl/time/time.h"

namespace precondor {

// Threads: one caller at a time.
class ChildProcess {
 public:
  // With pipes for its standard input and output; its errors go where the test's go, or nowhere when `quiet`.
  explicit ChildProcess(const std::vector<std::string>& arguments, bool quiet = false);
  ~ChildProcess();  // kills it when it still runs
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void WriteLine(const std::string& line);
  // The next line that it writes; nullopt when it ends or says nothing for so long.
  std::optional<std::string> ReadLine(absl::Duration timeout = absl::Seconds(60));
  // After SIGSTOP the process does nothing more.
  void Signal(int signal);
  bool running();

 private:
  pid_t pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  std::string buffered_;
};

// A port of 127.0.0.1 on which no process listened a moment ago; 0 when there is none.
int FreePort();

}  // namespace precondor
