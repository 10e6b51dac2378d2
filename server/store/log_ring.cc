// SPDX-License-Identifier: Apache-2.0
#include "server/store/log_ring.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kRingMagic = "PCONRING";
constexpr uint32_t kRingVersion = 1;
constexpr size_t kRingHeaderBytes = 8 + 4 + 8 + 4;
// Two floors were written alternately, so that one is intact at any time. Each is in a sector of its own.
constexpr size_t kFloorPlaces[] = {1024, 2048};
constexpr size_t kFloorBytes = 8 + 8 + 8 + 4;

struct Floor {
  uint64_t number = 0, position = 0, sequence = 0;
};

std::optional<Floor> ParseFloor(absl::string_view bytes) {
  Decoder decoder(bytes);
  Floor floor;
  floor.number = decoder.U64();
  floor.position = decoder.U64();
  floor.sequence = decoder.U64();
  const uint32_t checksum = decoder.U32();
  if (!decoder.ok() || floor.number == 0 || checksum != Crc32c(bytes.substr(0, kFloorBytes - 4))) return std::nullopt;
  return floor;
}

}  // namespace

absl::StatusOr<std::optional<LogRing>> ReadLogRing(FileSystem& fs, const std::string& dir) {
  const std::string path = JoinPath(dir, kLogRing);
  absl::StatusOr<std::string> read = fs.ReadFile(path);
  if (absl::IsNotFound(read.status())) return std::nullopt;
  if (!read.ok()) return read.status();
  const absl::string_view file = *read;
  Decoder decoder(file);
  const absl::string_view magic = decoder.Take(kRingMagic.size());
  const uint32_t version = decoder.U32();
  const uint64_t bytes = decoder.U64();
  const uint32_t checksum = decoder.U32();
  if (!decoder.ok() || magic != kRingMagic || checksum != Crc32c(file.substr(0, kRingHeaderBytes - 4))) {
    return absl::DataLossError(absl::StrCat(path, " at offset 0: the header is damaged"));
  }
  if (version != kRingVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": ring has format ", version, ", this program reads ", kRingVersion));
  }
  if (file.size() != kBlockBytes + bytes || bytes == 0) {
    return absl::DataLossError(
        absl::StrCat(path, ": has ", file.size(), " bytes, expected ", kBlockBytes, " and the ring's ", bytes));
  }
  std::optional<Floor> newest;
  for (const size_t place : kFloorPlaces) {
    const std::optional<Floor> floor = ParseFloor(file.substr(place, kFloorBytes));
    if (floor.has_value() && (!newest.has_value() || floor->number > newest->number)) newest = floor;
  }
  if (!newest.has_value()) return absl::DataLossError(absl::StrCat(path, ": no floor of it is whole"));
  const absl::string_view data = file.substr(kBlockBytes);
  const uint64_t place = newest->position % bytes;
  LogRing contents{.position = newest->position, .sequence = newest->sequence, .bytes = {}};
  contents.bytes = absl::StrCat(data.substr(place), data.substr(0, place));
  return contents;
}

}  // namespace precondor::store
