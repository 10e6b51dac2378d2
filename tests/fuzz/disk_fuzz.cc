// SPDX-License-Identifier: Apache-2.0
// A server reads these from its disk and from etcd: records, logs, snapshots. Checksums are put right, since no change
// that libFuzzer makes would pass them.
#include <fuzzer/FuzzedDataProvider.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/check.h"
#include "server/recovery/record_codec.h"
#include "server/recovery/shard_snapshots.h"
#include "server/store/crc32c.h"
#include "server/store/log_reader.h"
#include "server/store/record_log.h"
#include "server/store/snapshot_store.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/fake_file_system.h"

namespace precondor::fuzz {
namespace {

constexpr char kDir[] = "log";

std::string Joined(const std::vector<absl::string_view>& pieces) {
  std::string out;
  for (const absl::string_view piece : pieces) absl::StrAppend(&out, piece);
  return out;
}

void ShardRecordOf(absl::string_view bytes) {
  if (bytes.empty()) return;
  const auto type = static_cast<uint8_t>(bytes.front());
  const auto record = recovery::DecodeRecord(type, bytes.substr(1));
  if (!record.ok()) return;
  recovery::SessionOf(*record);
  const auto encoded = recovery::EncodeRecord(*record);
  if (!encoded.ok()) return;
  PRECONDOR_CHECK(recovery::DecodeRecord(static_cast<uint8_t>(encoded->type), Joined(encoded->Pieces())).ok());
}

void Image(absl::string_view bytes) {
  const auto image = recovery::DecodeImage(bytes);
  if (image.ok()) PRECONDOR_CHECK(recovery::DecodeImage(recovery::EncodeImageHead(*image) + image->state).ok());
}

void CoordinatorRecordOf(absl::string_view bytes) {
  if (bytes.empty()) return;
  const auto kind = static_cast<uint8_t>(bytes.front());
  const auto record = recovery::DecodeCoordinatorRecord(kind, bytes.substr(1));
  if (!record.ok()) return;
  PRECONDOR_CHECK(recovery::KindOf(*record) == kind);
  recovery::SessionIdOf(*record);
  PRECONDOR_CHECK(recovery::DecodeCoordinatorRecord(kind, *recovery::EncodeCoordinatorRecord(*record)).ok());
}

void Manifest(absl::string_view bytes) {
  std::string whole(bytes);
  PutU32(whole, store::Crc32c(whole));
  const auto manifest = store::DecodeManifest(whole, 1);
  if (!manifest.ok()) return;
  recovery::DecodeMetadata(manifest->metadata).IgnoreError();
}

void Metadata(absl::string_view bytes) { recovery::DecodeMetadata(bytes).IgnoreError(); }

// A log of one or two segments: whole records, and others. What opens takes a record more, and reads it back.
void Log(absl::string_view bytes) {
  FuzzedDataProvider choices(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  FakeFileSystem fs(1);
  PRECONDOR_CHECK(fs.MakeDir(kDir).ok());
  uint64_t sequence = 1;
  for (int segment = choices.ConsumeIntegralInRange(1, 2); segment > 0; --segment) {
    std::string file = store::EncodeSegmentHeader(sequence);
    const std::string path = store::LogSegmentPath(kDir, sequence);
    while (choices.remaining_bytes() > 0 && choices.ConsumeBool()) {
      const std::string payload = choices.ConsumeRandomLengthString(64);
      const absl::string_view piece = payload;
      const bool whole = choices.ConsumeBool();
      if (whole) file += store::EncodeRecordHeader(sequence++, choices.ConsumeIntegral<uint8_t>(), {&piece, 1});
      file += payload;
    }
    if (segment == 1) file += choices.ConsumeRemainingBytesAsString();
    auto made = fs.Create(path);
    if (!made.ok()) return;  // two segments of one number
    PRECONDOR_CHECK((*made)->Append(file).ok() && (*made)->Sync().ok() && (*made)->Close().ok());
  }
  uint64_t last = 0, count = 0;
  const auto read = [&](const store::Record& record) {
    PRECONDOR_CHECK(last == 0 || record.sequence == last + 1);
    last = record.sequence;
    ++count;
    return absl::OkStatus();
  };
  {
    const auto log = store::RecordLog::Open(fs, kDir, {}, read);
    if (!log.ok()) return;
    const auto appended = (*log)->Append(9, "one more");
    PRECONDOR_CHECK(appended.ok() && (last == 0 || *appended == last + 1));
    PRECONDOR_CHECK((*log)->Sync().ok());
  }
  const uint64_t before = std::exchange(count, 0);
  last = 0;
  PRECONDOR_CHECK(store::RecordLog::Open(fs, kDir, {}, read).ok());
  PRECONDOR_CHECK(count == before + 1);
}

constexpr void (*kDecoders[])(absl::string_view) = {ShardRecordOf, Image, CoordinatorRecordOf, Manifest, Metadata, Log};

InstallRecord Install() {
  InstallRecord record;
  record.install.session_id = 7;
  record.install.epoch = 2;
  record.install.spec.name = "job";
  record.install.spec.world_size = 2;
  record.install.spec.layers = {{"a", 2, 3, false}};
  record.install.layers = {0};
  record.install.members = {{.rank = 0, .incarnation = 5}, {.rank = 1, .incarnation = 6}};
  return record;
}

std::string Of(size_t decoder, const std::string& bytes) { return std::string(1, static_cast<char>(decoder)) + bytes; }

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  StagedContribution contribution{.samples = 9, .bytes = Payload(12), .scales = {1.0f, 0.25f}};
  const LayerStep at{.session_id = 7, .layer = 0, .step = 10, .rollback_epoch = 1, .updates = 1};
  const std::vector<ShardRecord> records = {Install(), RemoveRecord{.session_id = 7},
                                            UpdateRecord{.at = at, .contributions = {contribution}},
                                            PlanRecord{.at = at}};
  for (const ShardRecord& record : records) {
    const auto encoded = recovery::EncodeRecord(record);
    seeds.push_back(Of(0, std::string(1, static_cast<char>(encoded->type)) + Joined(encoded->Pieces())));
  }
  seeds.push_back(Of(1, recovery::EncodeImageHead({.at = {.step = 10}, .state = "state"}) + "state"));
  SessionRecord session;
  session.spec = Install().install.spec;
  seeds.push_back(Of(2, std::string(1, recovery::kSessionRecord) + *recovery::EncodeCoordinatorRecord(session)));
  std::string manifest =
      store::EncodeManifest({.id = 1, .metadata = "m", .files = {{"layer-000000", {.file_bytes = 4}}}});
  manifest.resize(manifest.size() - sizeof(uint32_t));
  seeds.push_back(Of(3, manifest));
  seeds.push_back(Of(5, std::string("\1\1\1records\1\2")));
  return seeds;
}

void Run(absl::string_view input) { kDecoders[Choose(input, std::size(kDecoders))](input); }

}  // namespace precondor::fuzz
