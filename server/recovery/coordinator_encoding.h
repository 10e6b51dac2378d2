// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes the coordinator's records. The bytes are equal on a disk and in etcd (docs/operate/storage.md).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/api/coordinator_journal.h"

namespace precondor::recovery {

// Stable numbers of the record kinds: 1 + the index in CoordinatorRecord.
inline constexpr uint8_t kSessionRecord = 1;
inline constexpr uint8_t kMembershipRecord = 2;
inline constexpr uint8_t kLeaseRecord = 3;
inline constexpr uint8_t kCloseRecord = 4;
inline constexpr uint8_t kSnapshotsRecord = 5;
inline constexpr uint8_t kClosingRecord = 6;
inline constexpr uint8_t kLeaderRecord = 7;

uint8_t KindOf(const CoordinatorRecord& record);
uint64_t SessionIdOf(const CoordinatorRecord& record);  // 0 if the record belongs to no session

// Returns a version byte followed by the record's fields, a session's description as its message. Returns
// INVALID_ARGUMENT if that has a method without a message.
absl::StatusOr<std::string> EncodeCoordinatorRecord(const CoordinatorRecord& record);
// Returns DATA_LOSS if the bytes are not a record of that kind, FAILED_PRECONDITION if they are of another version.
absl::StatusOr<CoordinatorRecord> DecodeCoordinatorRecord(uint8_t kind, absl::string_view bytes);

}  // namespace precondor::recovery
