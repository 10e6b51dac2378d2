// SPDX-License-Identifier: Apache-2.0
// Calls from Python into the client: a Status becomes an exception, the interpreter stays free while a call waits,
// Ctrl-C ends the wait, and a forked child is refused before it touches what belongs to its parent's threads.
#pragma once

#include <functional>
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

// Runs `call`, which may wait, on a thread of its own and without the GIL. When a Python signal handler raises
// meanwhile (Ctrl-C), `cancel` has to make `call` return; the handler's exception goes on from here. Call with the GIL.
void RunInterruptibly(const std::function<void()>& call, const std::function<void()>& cancel);
// Waits until `done`, which waits a short while and says whether it is over. A handler's exception leaves all as it is.
void WaitInterruptibly(const std::function<bool()>& done);

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
