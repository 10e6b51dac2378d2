// SPDX-License-Identifier: Apache-2.0
#include "server/store/record_log_format.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kMagic = "PCONDLOG";
constexpr uint32_t kSegmentVersion = 2;

}  // namespace

std::string EncodeSegmentHeader(uint64_t first_sequence) {
  std::string header(kMagic);
  PutU32(header, kSegmentVersion);
  PutU64(header, first_sequence);
  PutU32(header, Crc32c(header));
  return header;
}

absl::Status CheckSegmentHeader(absl::string_view segment, uint64_t first_sequence) {
  Decoder decoder(segment);
  const absl::string_view magic = decoder.Take(kMagic.size());
  const uint32_t version = decoder.U32();
  const uint64_t found = decoder.U64();
  const uint32_t checksum = decoder.U32();
  if (!decoder.ok()) {
    return absl::DataLossError(
        absl::StrCat("segment header has ", segment.size(), " bytes, expected ", kSegmentHeaderBytes));
  }
  if (magic != kMagic || checksum != Crc32c(segment.substr(0, kSegmentHeaderBytes - 4))) {
    return absl::DataLossError("segment header is damaged");
  }
  if (version != kSegmentVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("log segment: format: expected ", kSegmentVersion, ", got ", version,
                     ", of another version: docs/operate/operations.md#upgrade says how to go on"));
  }
  if (found != first_sequence) {
    return absl::DataLossError(
        absl::StrCat("segment header names first sequence ", found, ", its file ", first_sequence));
  }
  return absl::OkStatus();
}

std::string EncodeRecordHeader(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload) {
  uint32_t length = 0;
  for (const absl::string_view piece : payload) length += static_cast<uint32_t>(piece.size());
  std::string checked;
  PutU32(checked, length);
  PutU64(checked, sequence);
  PutFixed(checked, type, 1);
  uint32_t checksum = Crc32c(checked);
  for (const absl::string_view piece : payload) checksum = ExtendCrc32c(checksum, piece);
  std::string header;
  PutU32(header, checksum);
  return header + checked;
}

std::optional<ParsedRecord> ParseRecord(absl::string_view bytes) {
  Decoder decoder(bytes);
  const uint32_t checksum = decoder.U32();
  const uint32_t length = decoder.U32();
  ParsedRecord record;
  record.sequence = decoder.U64();
  record.type = decoder.U8();
  record.payload = decoder.Take(length);
  if (!decoder.ok()) return std::nullopt;
  if (checksum != Crc32c(bytes.substr(4, kRecordHeaderBytes - 4 + length))) return std::nullopt;
  return record;
}

bool HasSyncMark(absl::string_view bytes, uint64_t sequence) {
  for (; bytes.size() >= kRecordHeaderBytes; bytes.remove_prefix(1)) {
    const absl::string_view candidate = bytes.substr(0, kRecordHeaderBytes);
    if (candidate.back() != static_cast<char>(kSyncMark)) continue;
    const std::optional<ParsedRecord> mark = ParseRecord(candidate);  // nullopt when it has a payload
    if (mark.has_value() && mark->sequence >= sequence) return true;
  }
  return false;
}

}  // namespace precondor::store
