// SPDX-License-Identifier: Apache-2.0
// Calls from Python into the client: a Status becomes an exception, the interpreter stays free while a call calls,
// Ctrl-C and the end of the server end the wait, and a forked child is refused before it touches what belongs to its
// parent's threads.
#pragma once

#include <functional>
#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace precondor::python {

// Raises precondor.PrecondorError, or the one of its subclasses that stands for the code. Needs the GIL.
[[noreturn]] void Raise(const absl::Status& status);

// Needs the GIL.
void RaiseUnlessOk(const absl::Status& status);
template <typename T>
T ValueOrRaise(absl::StatusOr<T> value) {
  RaiseUnlessOk(value.status());
  return *std::move(value);
}

// Calls that wait for a server. Its functions need the GIL and let other threads have it while they wait.
class ServerCalls {
 public:
  // `watch` raises if the server has ended permanently; None: this is not known of the server.
  explicit ServerCalls(pybind11::object watch) : watch_(std::move(watch)) {}

  // Runs `call`, which may wait, on a thread of its own. When a Python signal handler (Ctrl-C) or the watch raises
  // meanwhile, `cancel` has to make `call` return; the exception goes on from here.
  void Run(const std::function<void()>& call, const std::function<void()>& cancel) const;
  // Waits until `done`, which waits a short while and says whether it is over. An exception of a signal handler
  // or the watch leaves all as it is.
  void Until(const std::function<bool()>& done) const;

  // As above; an error after the server's end is the watch's.
  void RaiseUnlessOk(const absl::Status& status) const;
  template <typename T>
  T ValueOrRaise(absl::StatusOr<T> value) const {
    RaiseUnlessOk(value.status());
    return *std::move(value);
  }

 private:
  // Whether a handler or the watch has raised; Python's error is set then.
  bool Raised() const;

  const pybind11::object watch_;
};

// The process that an object was made in: the only one that has the threads behind it. const after construction.
class OwnProcess {
 public:
  OwnProcess();
  bool IsCurrent() const;
  // Raises precondor.ForkError in a forked child. Needs the GIL.
  void Check() const;
  // The same in a child of a process that has called this: gRPC, once used, is not usable there.
  static void CheckNotForked();

 private:
  pid_t pid_;
};

}  // namespace precondor::python
