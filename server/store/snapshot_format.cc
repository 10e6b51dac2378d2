// SPDX-License-Identifier: Apache-2.0
#include "server/store/snapshot_format.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kFileMagic = "PCONDSNP";
constexpr absl::string_view kManifestMagic = "PCONDMAN";
constexpr uint32_t kSnapshotVersion = 1;
constexpr size_t kChecksumBytes = 4;

absl::Status OtherFormat(uint32_t version) {
  return absl::FailedPreconditionError(absl::StrCat("has format ", version,
                                                    version > kSnapshotVersion ? ", of a newer version" : "",
                                                    "; this program reads format ", kSnapshotVersion));
}

}  // namespace

std::string EncodeSnapshotFileHeader(uint64_t id, absl::string_view key) {
  std::string header(kFileMagic);
  PutU32(header, kSnapshotVersion);
  PutU64(header, id);
  PutBytes(header, key);
  return header;
}

absl::Status CheckSnapshotFile(absl::string_view file, uint64_t id, absl::string_view key,
                               const SnapshotFile& expected) {
  if (file.size() != expected.file_bytes) {
    return absl::DataLossError(absl::StrCat("has ", file.size(), " bytes, the manifest says ", expected.file_bytes));
  }
  const uint32_t checksum = Crc32c(file);
  if (checksum != expected.checksum) {
    return absl::DataLossError(absl::StrCat("has checksum ", absl::Hex(checksum, absl::kZeroPad8),
                                            ", the manifest says ", absl::Hex(expected.checksum, absl::kZeroPad8)));
  }
  Decoder decoder(file);
  const absl::string_view magic = decoder.Take(kFileMagic.size());
  if (const uint32_t version = decoder.U32(); decoder.ok() && magic == kFileMagic && version != kSnapshotVersion) {
    return OtherFormat(version);
  }
  const uint64_t found_id = decoder.U64();
  const absl::string_view found_key = decoder.Bytes();
  if (!decoder.ok() || magic != kFileMagic || found_id != id || found_key != key) {
    return absl::DataLossError(absl::StrCat("is not the file \"", key, "\" of snapshot ", id));
  }
  return absl::OkStatus();
}

std::string EncodeManifest(const SnapshotManifest& manifest) {
  std::string bytes(kManifestMagic);
  PutU32(bytes, kSnapshotVersion);
  PutU64(bytes, manifest.id);
  PutBytes(bytes, manifest.metadata);
  PutU64(bytes, manifest.files.size());
  for (const auto& [key, file] : manifest.files) {
    PutBytes(bytes, key);
    PutU64(bytes, file.file_bytes);
    PutU32(bytes, file.checksum);
  }
  PutU32(bytes, Crc32c(bytes));
  return bytes;
}

absl::StatusOr<SnapshotManifest> DecodeManifest(absl::string_view bytes, uint64_t id) {
  if (bytes.size() < kManifestMagic.size() + kChecksumBytes) {
    return absl::DataLossError(absl::StrCat("has ", bytes.size(), " bytes, too few for a manifest"));
  }
  const absl::string_view checked = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (Decoder(bytes.substr(checked.size())).U32() != Crc32c(checked)) return absl::DataLossError("is damaged");
  Decoder decoder(checked);
  const absl::string_view magic = decoder.Take(kManifestMagic.size());
  const uint32_t version = decoder.U32();
  if (magic != kManifestMagic) return absl::DataLossError("is no manifest");
  if (version != kSnapshotVersion) return OtherFormat(version);
  SnapshotManifest manifest;
  manifest.id = decoder.U64();
  manifest.metadata = std::string(decoder.Bytes());
  for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) {
    std::string key(decoder.Bytes());
    SnapshotFile file;
    file.file_bytes = decoder.U64();
    file.checksum = decoder.U32();
    manifest.files.emplace(std::move(key), file);
  }
  if (!decoder.done()) return absl::DataLossError("does not parse as a manifest");
  if (manifest.id != id) {
    return absl::DataLossError(absl::StrCat("is that of snapshot ", manifest.id, ", expected ", id));
  }
  return manifest;
}

}  // namespace precondor::store
