// SPDX-License-Identifier: Apache-2.0
// Bytes of what a shard writes down (docs/storage.md): records of its log and files of its snapshots. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/shard_journal.h"

namespace precondor::recovery {

// Types in the log. A number is never used again for something else.
enum class RecordType : uint8_t { kInstall = 1, kRemove = 2, kUpdate = 3, kFailedUpdate = 4, kPlan = 5, kFactors = 6 };

struct EncodedRecord {
  RecordType type = RecordType::kInstall;
  std::string payload;
};

// InvalidArgument: an install whose method has no message.
absl::StatusOr<EncodedRecord> EncodeRecord(const ShardRecord& record);
// DataLoss: not what EncodeRecord gives; FailedPrecondition: a type of a later release.
absl::StatusOr<ShardRecord> DecodeRecord(uint8_t type, absl::string_view payload);

// The session that a record is about.
uint64_t SessionOf(const ShardRecord& record);

std::string EncodeImage(const LayerImage& image);
absl::StatusOr<LayerImage> DecodeImage(absl::string_view bytes);

}  // namespace precondor::recovery
