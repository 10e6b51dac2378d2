// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_journal.h"

#include <optional>
#include <string>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace precondor::sim {
namespace {

// So small that runs compact, and need many segments.
constexpr uint64_t kCompactBytes = 1024;
constexpr uint64_t kSegmentBytes = 2048;
constexpr uint64_t kMostRoomBytes = 1024;

}  // namespace

SimJournal::SimJournal(Random& random, uint64_t seed) : random_(random), fs_(seed) {
  PRECONDOR_CHECK(store::MakeDirDurably(fs_, "data").ok());
  fs_.set_hook([this](FakeFileSystem::Operation operation, const std::string&, uint64_t) -> absl::Status {
    using Operation = FakeFileSystem::Operation;
    const bool writes = operation == Operation::kAppend || operation == Operation::kSync;
    if (writes && failure_ > 0 && random_.Chance(failure_)) return absl::UnavailableError("the disk failed");
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<CoordinatorRecord>> SimJournal::Reopen(bool machine) {
  machine ? fs_.Crash() : fs_.CrashProcess();
  log_.reset();
  const recovery::CoordinatorLogOptions options{.compact_bytes = kCompactBytes,
                                                .log = {.segment_bytes = kSegmentBytes}};
  PRECONDOR_ASSIGN_OR_RETURN(recovery::CoordinatorLog::Opened opened,
                             recovery::CoordinatorLog::Open(fs_, "data/coordinator", options));
  log_ = std::move(opened.journal);
  return std::move(opened.records);
}

void SimJournal::set_full(bool full) {
  full_ = full;
  fs_.set_capacity(std::nullopt);
  if (full) fs_.set_capacity(fs_.used_bytes() + random_.Below(kMostRoomBytes));
}

}  // namespace precondor::sim
