// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/journal_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace precondor {

JournalWriter::JournalWriter(CoordinatorJournal& journal, std::function<std::vector<CoordinatorRecord>()> all,
                             Logger& logger, Observer& observer)
    : all_(std::move(all)), logger_(logger), observer_(observer), journal_(journal) {}

absl::StatusOr<uint64_t> JournalWriter::BeginToLead(uint64_t last, absl::Time wall) {
  MutexLock lock(mu_);
  if (const uint64_t token = journal_.leadership(); token != 0) return token;
  // From the clock, so that the token of a coordinator that has lost its journal is greater than the journal's.
  const uint64_t token = std::max(last + 1, static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(wall), 1)));
  if (absl::Status written = journal_.Append(LeaderRecord{.token = token}); !written.ok()) {
    return absl::UnavailableError(absl::StrCat("the coordinator cannot write down that it leads: ", written.message()));
  }
  token_ = token;
  return token;
}

absl::Status JournalWriter::Write(const CoordinatorRecord& record, absl::FunctionRef<void()> adopt) {
  MutexLock lock(mu_);
  if (absl::Status written = journal_.Append(record); !written.ok()) {
    logger_.Log(Severity::kError, "journal not written", {{"reason", absl::string_view(written.message())}});
    observer_.OnJournal(false);
    return absl::UnavailableError(absl::StrCat("the coordinator cannot write its journal: ", written.message()));
  }
  observer_.OnJournal(true);
  adopt();
  Compact();
  return absl::OkStatus();
}

void JournalWriter::Compact() {
  if (!journal_.wants_compaction()) return;
  std::vector<CoordinatorRecord> records = all_();
  if (token_ != 0) records.insert(records.begin(), LeaderRecord{.token = token_});
  if (absl::Status status = journal_.Compact(records); !status.ok()) {
    logger_.Log(Severity::kWarning, "journal not compacted", {{"reason", absl::string_view(status.message())}});
  }
}

}  // namespace precondor
