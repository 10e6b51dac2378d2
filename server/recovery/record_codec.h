// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes the records of shards' and coordinators' logs and the files of snapshots
// (docs/operate/storage.md). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/api/coordinator_journal.h"
#include "server/core/api/shard_journal.h"

namespace precondor::recovery {

// Record types in the log. Numbers are never reused.
enum class RecordType : uint8_t {
  kInstall = 1,
  kRemove = 2,
  kUpdate = 3,
  kFailedUpdate = 4,
  kPlan = 5,
  // 6, 7 and 8 are reserved: development versions wrote them for factors that a session did not hold.
  kQuarantine = 9,
  kGradient = 10,  // in the log of gradients alone
};

// An encoded record that refers to the contributions' bytes in the record instead of copying them. Lifetime: the record
// outlives this object.
struct EncodedRecord {
  RecordType type = RecordType::kInstall;
  std::string own;  // the payload without the contributions' bytes
  // Each contribution's offset in `own`, before which it is inserted, and its bytes.
  std::vector<std::pair<size_t, absl::string_view>> contributions;
  // Returns the payload as consecutive pieces, which are valid as long as this object and the record.
  std::vector<absl::string_view> Pieces() const;
};

// Returns INVALID_ARGUMENT if an install has a method without a message.
absl::StatusOr<EncodedRecord> EncodeRecord(const ShardRecord& record);
absl::StatusOr<EncodedRecord> EncodeRecord(ShardRecord&& record) = delete;  // the result refers to the record
// Returns the payload of an install record.
absl::StatusOr<std::string> EncodeInstall(const InstallRecord& record);
// Returns DATA_LOSS if EncodeRecord cannot have written `payload`, FAILED_PRECONDITION if the type is unknown, or the
// errors of rpc::DecodeInstall.
absl::StatusOr<ShardRecord> DecodeRecord(uint8_t type, absl::string_view payload);

// A record of the log of gradients. `log_sequence` is that of the next record of the shard's log when it was written.
struct StoredGradient {
  GradientRecord record;
  uint64_t log_sequence = 0;
};
EncodedRecord EncodeGradient(const GradientRecord& record, uint64_t log_sequence);
EncodedRecord EncodeGradient(GradientRecord&& record, uint64_t log_sequence) = delete;
// Returns DATA_LOSS if EncodeGradient cannot have written `payload`, FAILED_PRECONDITION for another type.
absl::StatusOr<StoredGradient> DecodeGradient(uint8_t type, absl::string_view payload);

// Returns the id of the session to which a record belongs.
uint64_t SessionOf(const ShardRecord& record);

// Most bytes of a layer's snapshot file that precede its state: the plans of the last steps. A wrong count there cannot
// claim more memory.
constexpr uint64_t kMostImageHeadBytes = 64 << 10;
// Returns the bytes of a layer's snapshot file that precede its state.
std::string EncodeImageHead(const LayerImage& image);
// Decodes a whole file. Returns DATA_LOSS if it is damaged, FAILED_PRECONDITION if it has another format.
absl::StatusOr<LayerImage> DecodeImage(absl::string_view bytes);

// --- a coordinator's records. The bytes are equal on a disk and in etcd.

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
