// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/launcher.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/examples/shared_reducer.h"
#include "client/cpp/examples/worker_role.h"
#include "kernels/base/status_macros.h"

extern char** environ;

namespace precondor::digits {
namespace {

constexpr int kReducerFd = 3;  // in the children
constexpr int kFirstFreeFd = 10;

absl::Status SystemError(absl::string_view call, int error) {
  return absl::InternalError(absl::StrCat("starting workers: ", call, ": ", std::strerror(error)));
}

// An owned file descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { Close(); }
  int get() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

// Ends of a pipe, away from the numbers that the children use and closed in them.
struct Pipe {
  Fd read, write;
};

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> ends = {-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return SystemError("pipe2", errno);
  Pipe pipe;
  for (auto [from, to] : {std::pair<int, Fd*>{ends[0], &pipe.read}, {ends[1], &pipe.write}}) {
    *to = Fd(fcntl(from, F_DUPFD_CLOEXEC, kFirstFreeFd));
    close(from);
  }
  if (pipe.read.get() < 0 || pipe.write.get() < 0) return SystemError("fcntl", errno);
  return pipe;
}

// A running worker process. Destroyed while it runs, it is stopped and waited for.
class Child {
 public:
  Child(pid_t pid, Fd output) : pid_(pid), output_(std::move(output)) {}
  Child(Child&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), output_(std::move(other.output_)), buffer_(std::move(other.buffer_)) {}
  // Takes the place of one that has ended.
  Child& operator=(Child&& other) noexcept {
    pid_ = std::exchange(other.pid_, -1);
    output_ = std::move(other.output_);
    buffer_ = std::move(other.buffer_);
    return *this;
  }
  ~Child() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  int fd() const { return output_.get(); }
  bool running() const { return pid_ >= 0; }
  // Reads the available output; returns the complete lines. Empty at the end of the output, and then output() is
  // closed.
  std::vector<std::string> ReadLines() {
    std::array<char, 65536> chunk;
    const ssize_t n = read(output_.get(), chunk.data(), chunk.size());
    if (n <= 0) {
      output_.Close();
      return {};
    }
    buffer_.append(chunk.data(), static_cast<size_t>(n));
    std::vector<std::string> lines;
    for (size_t end = buffer_.find('\n'); end != std::string::npos; end = buffer_.find('\n')) {
      lines.push_back(buffer_.substr(0, end));
      buffer_.erase(0, end + 1);
    }
    return lines;
  }
  // Waits for the end of the process; its wait status.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_;
  Fd output_;
  std::string buffer_;
};

absl::StatusOr<Child> StartWorker(int32_t rank, int reducer_fd, const std::string& job) {
  PRECONDOR_ASSIGN_OR_RETURN(Pipe input, MakePipe());
  PRECONDOR_ASSIGN_OR_RETURN(Pipe output, MakePipe());
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input.read.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output.write.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, reducer_fd, kReducerFd);
  std::string program = "precondor-digits";
  std::string rank_flag = absl::StrCat("--worker-rank=", rank);
  std::string fd_flag = absl::StrCat("--reducer-fd=", kReducerFd);
  std::array<char*, 4> arguments = {program.data(), rank_flag.data(), fd_flag.data(), nullptr};
  pid_t pid = -1;
  const int error = posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return SystemError("posix_spawn", error);
  Child child(pid, std::move(output.read));
  input.read.Close();
  for (size_t sent = 0; sent < job.size();) {
    const ssize_t n = write(input.write.get(), job.data() + sent, job.size() - sent);
    if (n < 0) return SystemError("write", errno);
    sent += static_cast<size_t>(n);
  }
  return child;
}

// Adds one rank's account of a run to the job's.
// All workers have to have had the same mode at every step.
absl::Status MergeStretches(const WorkerReport& report, int32_t rank, std::vector<Stretch>& total) {
  const std::vector<Stretch>& other = report.result.stretches;
  // A worker that was started again knows nothing of the steps before.
  if (!other.empty() && other.front().first_step > 0) return absl::OkStatus();
  if (!total.empty() && total.front().first_step > 0) total = other;
  bool same = other.size() == total.size();
  for (size_t i = 0; same && i < total.size(); ++i) {
    same = other[i].first_step == total[i].first_step && other[i].mode == total[i].mode;
    total[i].seconds = std::max(total[i].seconds, other[i].seconds);
    total[i].statistics_bytes += other[i].statistics_bytes;
    total[i].gradient_bytes += other[i].gradient_bytes;
  }
  if (same) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("run ", report.run, ": the modes differ: worker ", rank, " had others than the first to end"));
}

absl::Status Merge(const WorkerReport& report, int32_t rank, std::vector<int32_t>& finished,
                   std::vector<RunResult>& results) {
  if (report.run < 0 || report.run >= static_cast<int64_t>(results.size())) {
    return absl::InternalError(absl::StrCat("worker ", rank, " reports run ", report.run, " of ", results.size()));
  }
  const auto index = static_cast<size_t>(report.run);
  RunResult& total = results[index];
  if (finished[index]++ == 0) {
    total = report.result;
    return absl::OkStatus();
  }
  if (report.result.weights_hash != total.weights_hash) {
    return absl::InternalError(absl::StrCat("run ", report.run, ": the replicas differ: worker ", rank,
                                            " ended with other weights than the first to end"));
  }
  if (!report.result.curve.empty()) total.curve = report.result.curve;
  total.seconds = std::max(total.seconds, report.result.seconds);
  total.statistics_bytes += report.result.statistics_bytes;
  total.gradient_bytes += report.result.gradient_bytes;
  return MergeStretches(report, rank, total.stretches);
}

// Takes in what the worker says; the signal that ended it, or 0.
absl::StatusOr<int> HandleOutput(Child& child, int32_t rank, const std::function<void(const WorkerReport&)>& progress,
                                 std::vector<int32_t>& finished, std::vector<RunResult>& results) {
  const std::vector<std::string> lines = child.ReadLines();
  for (const std::string& line : lines) {
    PRECONDOR_ASSIGN_OR_RETURN(const WorkerReport report, DecodeReport(line));
    if (report.done) {
      PRECONDOR_RETURN_IF_ERROR(Merge(report, rank, finished, results));
    } else if (progress) {
      progress(report);
    }
  }
  if (child.fd() >= 0) return 0;
  const int status = child.Wait();
  if (WIFSIGNALED(status)) return WTERMSIG(status);
  if (WEXITSTATUS(status) == 0) return 0;
  return absl::InternalError(absl::StrCat("worker ", rank, " failed with exit status ", WEXITSTATUS(status)));
}

}  // namespace

absl::StatusOr<std::vector<RunResult>> LaunchWorkers(const Job& job,
                                                     const std::function<void(const WorkerReport&)>& progress) {
  PRECONDOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<SharedReducer> reducer,
      SharedReducer::Create(SharedReducer::Shape{job.workers, job.reducer_elements}, kReducerTimeout));
  const Fd reducer_fd(fcntl(reducer->fd(), F_DUPFD_CLOEXEC, kFirstFreeFd));
  if (reducer_fd.get() < 0) return SystemError("fcntl", errno);
  signal(SIGPIPE, SIG_IGN);  // a worker that died at once shows in its exit status
  const std::string text = EncodeJob(job);
  std::vector<Child> children;
  for (int32_t rank = 0; rank < job.workers; ++rank) {
    PRECONDOR_ASSIGN_OR_RETURN(Child child, StartWorker(rank, reducer_fd.get(), text));
    children.push_back(std::move(child));
  }
  std::vector<int32_t> finished(job.runs.size());
  std::vector<RunResult> results(job.runs.size());
  int32_t restarts = job.worker_restarts;
  while (std::any_of(children.begin(), children.end(), [](const Child& child) { return child.running(); })) {
    std::vector<pollfd> waiting;
    waiting.reserve(children.size());
    for (const Child& child : children) waiting.push_back(pollfd{child.fd(), POLLIN, 0});  // -1 is passed over
    if (poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return SystemError("poll", errno);
    for (size_t rank = 0; rank < children.size(); ++rank) {
      if (waiting[rank].revents == 0) continue;
      const auto number = static_cast<int32_t>(rank);
      PRECONDOR_ASSIGN_OR_RETURN(const int killed_by,
                                 HandleOutput(children[rank], number, progress, finished, results));
      if (killed_by == 0) continue;
      if (restarts-- == 0)
        return absl::InternalError(absl::StrCat("worker ", rank, " was ended by signal ", killed_by));
      PRECONDOR_ASSIGN_OR_RETURN(children[rank], StartWorker(number, reducer_fd.get(), text));
    }
  }
  for (size_t run = 0; run < finished.size(); ++run) {
    if (finished[run] != job.workers) {
      return absl::InternalError(
          absl::StrCat("run ", run, ": ", finished[run], " of ", job.workers, " workers reported its end"));
    }
  }
  return results;
}

}  // namespace precondor::digits
