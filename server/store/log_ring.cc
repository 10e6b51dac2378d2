// SPDX-License-Identifier: Apache-2.0
#include "server/store/log_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kMagic = "PCONRING";
constexpr uint32_t kRingVersion = 1;
constexpr size_t kHeaderBytes = 8 + 4 + 8 + 4;
// Two floors are written alternately, so that one is intact at any time. Each is in a sector of its own.
constexpr size_t kFloorPlaces[] = {1024, 2048};
constexpr size_t kFloorBytes = 8 + 8 + 8 + 4;

std::string WithChecksum(std::string bytes) {
  PutU32(bytes, Crc32c(bytes));
  return bytes;
}

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

LogRing::LogRing(FileSystem& fs, std::string dir, std::unique_ptr<MappedFile> file)
    : fs_(fs),
      dir_(std::move(dir)),
      file_(std::move(file)),
      bytes_(file_->memory().size() - kBlockBytes),
      data_(file_->memory().data() + kBlockBytes) {}

absl::StatusOr<std::unique_ptr<LogRing>> LogRing::Make(FileSystem& fs, const std::string& dir, uint64_t bytes) {
  if (bytes < kLeastBytes || bytes % kBlockBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(dir, ": ring of ", bytes, " bytes, expected a multiple of ",
                                                   kBlockBytes, ", at least ", kLeastBytes));
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file,
                             fs.CreateMapped(JoinPath(dir, absl::StrCat(kName, ".tmp")), kBlockBytes + bytes));
  return std::unique_ptr<LogRing>(new LogRing(fs, dir, std::move(file)));
}

absl::Status LogRing::Begin(uint64_t position, uint64_t sequence, absl::string_view rest) {
  std::string header(kMagic);
  PutU32(header, kRingVersion);
  PutU64(header, bytes_);
  header = WithChecksum(std::move(header));
  std::memcpy(file_->memory().data(), header.data(), header.size());
  Skip(position, sequence, rest);
  // The header and a floor are on the disk before the final name, so that they are never torn.
  PRECONDOR_RETURN_IF_ERROR(file_->Sync());
  PRECONDOR_RETURN_IF_ERROR(fs_.Rename(JoinPath(dir_, absl::StrCat(kName, ".tmp")), JoinPath(dir_, kName)));
  return fs_.SyncDir(dir_);
}

uint64_t LogRing::room() const { return WholeBlocks(floor_) + bytes_ - end_; }

void LogRing::Put(absl::string_view bytes) {
  PRECONDOR_CHECK(bytes.size() <= room());
  while (!bytes.empty()) {
    const uint64_t place = end_ % bytes_;
    const size_t count = std::min<uint64_t>(bytes.size(), bytes_ - place);
    std::memcpy(data_ + place, bytes.data(), count);
    bytes.remove_prefix(count);
    end_ += count;
  }
}

void LogRing::PutZeros(uint64_t count) { Put(std::string(count, '\0')); }

absl::string_view LogRing::At(uint64_t position, uint64_t end) const {
  const uint64_t place = position % bytes_;
  return {data_ + place, std::min(end - position, bytes_ - place)};
}

void LogRing::SetFloor(uint64_t position, uint64_t sequence) {
  WriteFloor(position, sequence);
  floor_ = position;
}

void LogRing::Skip(uint64_t position, uint64_t sequence, absl::string_view rest) {
  std::memcpy(data_ + WholeBlocks(position) % bytes_, rest.data(), rest.size());
  end_ = position;
  SetFloor(position, sequence);
}

void LogRing::WriteFloor(uint64_t position, uint64_t sequence) {
  std::string floor;
  PutU64(floor, ++floors_);
  PutU64(floor, position);
  PutU64(floor, sequence);
  floor = WithChecksum(std::move(floor));
  std::memcpy(file_->memory().data() + kFloorPlaces[floors_ % 2], floor.data(), floor.size());
}

absl::StatusOr<std::optional<LogRingContents>> ReadLogRing(FileSystem& fs, const std::string& dir) {
  const std::string path = JoinPath(dir, LogRing::kName);
  absl::StatusOr<std::string> read = fs.ReadFile(path);
  if (absl::IsNotFound(read.status())) return std::nullopt;
  if (!read.ok()) return read.status();
  const absl::string_view file = *read;
  Decoder decoder(file);
  const absl::string_view magic = decoder.Take(kMagic.size());
  const uint32_t version = decoder.U32();
  const uint64_t bytes = decoder.U64();
  const uint32_t checksum = decoder.U32();
  if (!decoder.ok() || magic != kMagic || checksum != Crc32c(file.substr(0, kHeaderBytes - 4))) {
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
  LogRingContents contents{.position = newest->position, .sequence = newest->sequence, .bytes = {}};
  contents.bytes = absl::StrCat(data.substr(place), data.substr(0, place));
  return contents;
}

}  // namespace precondor::store
