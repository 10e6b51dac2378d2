// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/python_call.h"

#include <atomic>
#include <chrono>
#include <pybind11/pybind11.h>
#include <thread>
#include <unistd.h>

#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"

namespace precondor::python {
namespace {

namespace py = pybind11;

// How soon Ctrl-C and the end of a server are noticed.
constexpr std::chrono::milliseconds kLookInterval(50);

py::module_ Errors() { return py::module_::import("precondor._errors"); }

[[noreturn]] void RaiseObject(const py::object& error) {
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

[[noreturn]] void RaiseForked(pid_t owner) { RaiseObject(Errors().attr("fork_error")(owner, getpid())); }

// What gRPC's own state in this process belongs to; 0 before any.
std::atomic<pid_t>& FirstUser() {
  static std::atomic<pid_t> pid{0};
  return pid;
}

}  // namespace

void Raise(const absl::Status& status) {
  const auto text = [](absl::string_view s) { return py::str(s.data(), s.size()); };
  RaiseObject(Errors().attr("from_status")(text(absl::StatusCodeToString(status.code())),
                                           text(ErrorReasonName(GetErrorReason(status))), text(status.message())));
}

void RaiseUnlessOk(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

bool ServerCalls::Raised() const {
  if (PyErr_CheckSignals() != 0) return true;
  if (watch_.is_none()) return false;
  try {
    watch_();
  } catch (py::error_already_set& error) {
    error.restore();
    return true;
  }
  return false;
}

void ServerCalls::RaiseUnlessOk(const absl::Status& status) const {
  if (status.ok()) return;
  if (!watch_.is_none()) watch_();
  Raise(status);
}

void ServerCalls::Run(const std::function<void()>& call, const std::function<void()>& cancel) const {
  bool raised = false;
  {
    py::gil_scoped_release released;
    Mutex mu;
    CondVar changed;
    bool done = false;
    std::thread runner([&] {
      call();
      MutexLock lock(mu);
      done = true;
      changed.notify_all();
    });
    while (!raised) {
      {
        MutexLock lock(mu);
        if (changed.wait_for(mu, kLookInterval, [&done] { return done; })) break;
      }
      py::gil_scoped_acquire acquired;
      raised = Raised();
    }
    if (raised) cancel();
    runner.join();
  }
  if (raised) throw py::error_already_set();
}

void ServerCalls::Until(const std::function<bool()>& done) const {
  while (true) {
    {
      py::gil_scoped_release released;
      if (done()) return;
    }
    if (Raised()) throw py::error_already_set();
  }
}

OwnProcess::OwnProcess() : pid_(getpid()) {}

bool OwnProcess::IsCurrent() const { return pid_ == getpid(); }

void OwnProcess::Check() const {
  if (!IsCurrent()) RaiseForked(pid_);
}

void OwnProcess::CheckNotForked() {
  pid_t first = 0;
  if (!FirstUser().compare_exchange_strong(first, getpid()) && first != getpid()) RaiseForked(first);
}

}  // namespace precondor::python
