// SPDX-License-Identifier: Apache-2.0
// Bytes of what a shard writes down (docs/storage.md): records of its log and files of its snapshots. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/shard/shard_journal.h"

namespace precondor::recovery {

// Types in the log. A number is never used again for something else.
enum class RecordType : uint8_t {
  kInstall = 1,
  kRemove = 2,
  kUpdate = 3,
  kFailedUpdate = 4,
  kPlan = 5,
  kFactors = 6,
  kKeptFactors = 7,  // the same with an eviction
  // 8 was written by development versions, for factors from another shard's disk.
  kQuarantine = 9,
};

// The contributions' bytes stay where they are, in the record: it outlives this.
struct EncodedRecord {
  RecordType type = RecordType::kInstall;
  std::string own;  // all but the contributions' bytes
  std::vector<std::pair<size_t, absl::string_view>>
      contributions;  // each comes in `own` before the byte of that number
  // The payload, one piece after the other; they live as long as this and the record.
  std::vector<absl::string_view> Pieces() const;
};

// InvalidArgument: an install whose method has no message.
absl::StatusOr<EncodedRecord> EncodeRecord(const ShardRecord& record);
absl::StatusOr<EncodedRecord> EncodeRecord(ShardRecord&& record) = delete;  // its contributions would be gone
absl::StatusOr<std::string> EncodeInstall(const InstallRecord& record);     // the payload
// DataLoss: not what EncodeRecord gives; FailedPrecondition: a type of another version.
absl::StatusOr<ShardRecord> DecodeRecord(uint8_t type, absl::string_view payload);

// The session that a record is about.
uint64_t SessionOf(const ShardRecord& record);

// All but the state, whose bytes follow it.
std::string EncodeImageHead(const LayerImage& image);
absl::StatusOr<LayerImage> DecodeImage(absl::string_view bytes);

}  // namespace precondor::recovery
