// SPDX-License-Identifier: Apache-2.0
#include "kernels/device_group.h"

#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/fiber.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_name.h"

namespace precondor {
namespace {

// Whether all ranks find this error alike, before they send anything, so that no rank waits for the failed one.
bool IsSymmetricError(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status);
}

// Records the first error of one Run, and aborts the collective operations of the other ranks.
class Outcome {
 public:
  explicit Outcome(absl::Span<const std::unique_ptr<Collective>> collectives) : collectives_(collectives) {}

  void Note(int rank, const absl::Status& status) {
    if (status.ok()) return;
    {
      MutexLock lock(mu_);
      if (first_.ok()) first_ = status;
    }
    // A communicator's own error may have one of these codes, so check the communicator too.
    if (IsSymmetricError(status) && collectives_[rank]->status().ok()) return;
    for (const auto& collective : collectives_) {
      collective->Abort(absl::StrCat("rank ", rank, " failed: ", status.message()));
    }
  }
  absl::Status first() const {
    MutexLock lock(mu_);
    return first_;
  }

 private:
  const absl::Span<const std::unique_ptr<Collective>> collectives_;
  mutable Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

struct DeviceGroup::Helper {
  Helper() : thread_([this] { Loop(); }) {}
  ~Helper() {
    {
      MutexLock lock(mu_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Start(std::function<void()> next) {
    {
      MutexLock lock(mu_);
      work_ = std::move(next);
    }
    changed_.notify_all();
  }
  void Wait() {
    MutexLock lock(mu_);
    while (work_ != nullptr) changed_.wait(mu_);
  }

 private:
  void Loop() {
    NameThisThread("device-group");
    mu_.Lock();
    for (;;) {
      while (work_ == nullptr && !ends_) changed_.wait(mu_);
      if (work_ == nullptr) break;
      mu_.Unlock();
      work_();  // no other thread changes it until it is done
      mu_.Lock();
      work_ = nullptr;
      changed_.notify_all();
    }
    mu_.Unlock();
  }

  Mutex mu_;
  CondVar changed_;
  std::function<void()> work_;
  bool ends_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<DeviceGroup>> DeviceGroup::Make(std::vector<Backend*> backends, Connect connect,
                                                               absl::Duration timeout) {
  if (backends.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("group of devices: expected two backends or more, got ", backends.size()));
  }
  std::unique_ptr<DeviceGroup> group(new DeviceGroup(std::move(backends), std::move(connect), timeout));
  try {
    for (int rank = 0; rank < group->size(); ++rank) group->helpers_.push_back(std::make_unique<Helper>());
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("group of devices: threads: ", error.what()));
  }
  return group;
}

DeviceGroup::DeviceGroup(std::vector<Backend*> backends, Connect connect, absl::Duration timeout)
    : backends_(std::move(backends)), connect_(std::move(connect)), timeout_(timeout) {}

// Ends all communicators concurrently, because the ends of some wait for each other.
DeviceGroup::~DeviceGroup() {
  for (size_t rank = 0; rank < collectives_.size(); ++rank) {
    helpers_[rank]->Start([this, rank] { collectives_[rank].reset(); });
  }
  for (const auto& helper : helpers_) helper->Wait();
}

absl::Status DeviceGroup::Run(int mine, absl::FunctionRef<absl::Status(const Rank&)> work) {
  PRECONDOR_CHECK(mine >= 0 && mine < size());
  absl::Status status;
  // This waits for other devices and for its turn. Other layers of this device run meanwhile.
  RunBlocking([&] {
    TakeTurn();
    status = EnsureConnected();
    if (status.ok()) status = RunConnected(mine, work);
    PassTurn();
  });
  return status;
}

void DeviceGroup::TakeTurn() {
  MutexLock lock(mu_);
  const uint64_t turn = next_turn_++;
  while (turn_ != turn) turn_changed_.wait(mu_);
}

void DeviceGroup::PassTurn() {
  {
    MutexLock lock(mu_);
    ++turn_;
  }
  turn_changed_.notify_all();
}

absl::Status DeviceGroup::EnsureConnected() {
  if (!collectives_.empty()) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Collective>> made, connect_(backends_));
  PRECONDOR_CHECK(made.size() == backends_.size());
  collectives_ = std::move(made);
  return absl::OkStatus();
}

absl::Status DeviceGroup::RunConnected(int mine, absl::FunctionRef<absl::Status(const Rank&)> work) {
  Outcome outcome(collectives_);
  const auto run = [&](int rank) {
    outcome.Note(rank, work(Rank{rank, *backends_[rank], *collectives_[rank], timeout_}));
  };
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != mine) helpers_[rank]->Start([&run, rank] { run(rank); });
  }
  run(mine);
  for (const auto& helper : helpers_) helper->Wait();
  bool ended = false;
  for (const auto& collective : collectives_) ended = ended || !collective->status().ok();
  if (ended) {
    for (const auto& collective : collectives_) collective->Abort("another rank's communicator has ended");
    collectives_.clear();
  }
  return outcome.first();
}

absl::StatusOr<std::vector<std::unique_ptr<Collective>>> JoinTogether(
    int ranks,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Collective>>(int rank, const std::atomic<bool>* give_up)> make) {
  std::vector<std::unique_ptr<Collective>> joined(ranks);
  std::atomic<bool> give_up = false;
  Mutex mu;
  absl::Status first;  // guarded by mu
  const auto fail = [&](const absl::Status& why) {
    MutexLock lock(mu);
    first.Update(why);
    give_up = true;
  };
  const auto join = [&](int rank) {
    absl::StatusOr<std::unique_ptr<Collective>> made = make(rank, &give_up);
    made.ok() ? void(joined[rank] = *std::move(made)) : fail(made.status());
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(join, rank);
  } catch (const std::system_error& error) {
    fail(absl::ResourceExhaustedError(absl::StrCat("group of devices: threads: ", error.what())));
  }
  for (std::thread& thread : threads) thread.join();
  if (first.ok()) return joined;
  for (const auto& collective : joined) {
    if (collective != nullptr) collective->Abort("another rank has not come");
  }
  return first;
}

}  // namespace precondor
