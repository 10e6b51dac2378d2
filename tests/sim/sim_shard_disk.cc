// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_shard_disk.h"

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace precondor::sim {
namespace {

constexpr uint8_t kRecordType = 1;
constexpr uint64_t kSegmentBytes = 2048;  // many small ones

std::string NumberBytes(uint64_t number) {
  std::string bytes(sizeof(number), '\0');
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

std::optional<uint64_t> TakeNumber(absl::string_view& bytes) {
  uint64_t number = 0;
  if (bytes.size() < sizeof(number)) return std::nullopt;
  std::memcpy(&number, bytes.data(), sizeof(number));
  bytes.remove_prefix(sizeof(number));
  return number;
}

}  // namespace

SimShardDisk::SimShardDisk(Process& process, Random& random, uint64_t seed, bool verify)
    : process_(process), random_(random), verify_(verify), seed_(seed) {
  MakeDisk();
}

SimShardDisk::~SimShardDisk() = default;

void SimShardDisk::MakeDisk() {
  fs_ = std::make_unique<FakeFileSystem>(seed_++);
  PRECONDOR_CHECK(fs_->MakeDir("data").ok());
}

void SimShardDisk::FlipABit() {
  std::vector<std::string> segments;
  for (const std::string& path : fs_->files()) {
    if (absl::StartsWith(path, "data/log/") && fs_->FileSize(path).value_or(0) > 0) segments.push_back(path);
  }
  if (segments.empty()) return;
  const std::string& path = segments[random_.Below(segments.size())];
  damaged_ = true;
  PRECONDOR_CHECK(fs_->FlipBit(path, random_.Below(8 * *fs_->FileSize(path))));
}

void SimShardDisk::Lose(Loss loss) {
  loss == Loss::kProcess ? fs_->CrashProcess() : fs_->Crash();
  if (loss == Loss::kMachineAndBit) FlipABit();
  log_.reset();
  snapshots_.reset();
  gathering_.clear();
}

absl::Status SimShardDisk::OpenStores(const store::RecordLog::Replay& replay) {
  // A directory is made durably before anything is in it.
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(*fs_, "data"));
  PRECONDOR_ASSIGN_OR_RETURN(snapshots_, store::SnapshotStore::Open(*fs_, "data/snapshots"));
  const store::RecordLogOptions options{.segment_bytes = kSegmentBytes, .verify_checksums = verify_};
  PRECONDOR_ASSIGN_OR_RETURN(log_, store::RecordLog::Open(*fs_, "data/log", options, replay));
  return absl::OkStatus();
}

absl::Status SimShardDisk::Restore(Shard& shard) {
  install_.reset();
  std::vector<ShardRecord> found;
  absl::Status opened = OpenStores([&](const store::Record& record) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(ShardRecord decoded, Decode(record.payload));
    found.push_back(std::move(decoded));
    return absl::OkStatus();
  });
  if (damaged_ && absl::IsDataLoss(opened)) {
    // Whoever runs the shard gives it an empty disk.
    log_.reset();
    snapshots_.reset();
    found.clear();
    MakeDisk();
    opened = OpenStores([](const store::Record&) { return absl::OkStatus(); });
  }
  PRECONDOR_RETURN_IF_ERROR(opened);
  PRECONDOR_RETURN_IF_ERROR(RestoreSnapshot(shard));
  for (ShardRecord& record : found) Replay(shard, std::move(record));
  shard.FinishReplay();
  return absl::OkStatus();
}

void SimShardDisk::Replay(Shard& shard, ShardRecord record) {
  if (std::holds_alternative<InstallRecord>(record)) {
    install_ = records_.size();
    records_.push_back(record);
  } else if (std::holds_alternative<RemoveRecord>(record)) {
    install_.reset();
  }
  shard.Replay(std::move(record));
}

absl::Status SimShardDisk::RestoreSnapshot(Shard& shard) {
  const absl::StatusOr<store::FoundSnapshot> latest = snapshots_->LatestValid();
  if (absl::IsNotFound(latest.status())) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(latest.status());
  uint64_t install = 0;
  if (!absl::SimpleAtoi(latest->manifest.metadata, &install)) return absl::DataLossError("metadata");
  shard.Replay(records_[install]);
  install_ = install;
  for (const auto& [key, file] : latest->manifest.files) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, snapshots_->Read(latest->manifest, key));
    absl::string_view rest = bytes;
    const std::optional<uint64_t> number = TakeNumber(rest);
    if (!number.has_value() || *number >= images_.size()) return absl::DataLossError(key);
    LayerImage image = images_[*number];
    image.state = std::string(rest);
    shard.Replay(image);
  }
  return absl::OkStatus();
}

std::string SimShardDisk::Encode(const ShardRecord& record) {
  std::string bytes = NumberBytes(records_.size());
  records_.push_back(record);
  if (const auto* update = std::get_if<UpdateRecord>(&record)) {
    for (const Vote& vote : update->votes) bytes.append(vote.bytes.begin(), vote.bytes.end());
  }
  return bytes;
}

absl::StatusOr<ShardRecord> SimShardDisk::Decode(absl::string_view payload) const {
  const std::optional<uint64_t> number = TakeNumber(payload);
  if (!number.has_value() || *number >= records_.size()) return absl::DataLossError("no such record");
  ShardRecord record = records_[*number];
  if (auto* update = std::get_if<UpdateRecord>(&record)) {
    for (Vote& vote : update->votes) {
      if (payload.size() < vote.bytes.size()) return absl::DataLossError("too few bytes");
      std::memcpy(vote.bytes.data(), payload.data(), vote.bytes.size());
      payload.remove_prefix(vote.bytes.size());
    }
  }
  return record;
}

void SimShardDisk::Append(const ShardRecord& record) {
  if (std::holds_alternative<InstallRecord>(record)) install_ = records_.size();
  PRECONDOR_CHECK(log_->Append(kRecordType, Encode(record)).ok());
  const auto* removal = std::get_if<RemoveRecord>(&record);
  if (removal == nullptr || !install_.has_value()) return;
  if (std::get<InstallRecord>(records_[*install_]).install.session_id != removal->session_id) return;
  install_.reset();
  gathering_.clear();
  const absl::StatusOr<std::vector<uint64_t>> ids = snapshots_->List();
  PRECONDOR_CHECK(ids.ok());
  for (const uint64_t id : *ids) PRECONDOR_CHECK(snapshots_->Remove(id).ok());
}

void SimShardDisk::Sync() { PRECONDOR_CHECK(log_->Sync().ok()); }

void SimShardDisk::Keep(LayerImage image) {
  const auto [found, first] = gathering_.try_emplace(image.at.step);
  Gathering& gathering = found->second;
  if (first) gathering = {.install = *install_, .sequence = log_->next_sequence(), .images = {}};
  gathering.images[image.at.layer] = images_.size();
  images_.push_back(std::move(image));
  const auto& install = std::get<InstallRecord>(records_[gathering.install]).install;
  if (gathering.images.size() < install.layers.size()) return;
  const Gathering complete = gathering;
  // Older ones will not be completed any more.
  gathering_.erase(gathering_.begin(), std::next(found));
  process_.After(random_.Between(0, 5000), [this, complete] { Write(complete); });
}

void SimShardDisk::Write(const Gathering& gathering) {
  // Of a session that has gone meanwhile, or older than what is there.
  if (!install_.has_value() || gathering.sequence < last_sequence_) return;
  const uint64_t id = last_snapshot_ + 1;
  absl::StatusOr<std::unique_ptr<store::SnapshotWriter>> writer = snapshots_->Begin(id);
  PRECONDOR_CHECK(writer.ok());
  for (const auto& [layer, number] : gathering.images) {
    PRECONDOR_CHECK((*writer)->Add(absl::StrCat("layer", layer), NumberBytes(number) + images_[number].state).ok());
  }
  PRECONDOR_CHECK((*writer)->Commit(absl::StrCat(gathering.install)).ok());
  last_snapshot_ = id;
  PRECONDOR_CHECK(snapshots_->Keep(2).ok());
  // Should the newest turn out to be damaged, the log is needed from the one before.
  if (last_sequence_ > 0) PRECONDOR_CHECK(log_->DropBefore(last_sequence_).ok());
  last_sequence_ = gathering.sequence;
}

}  // namespace precondor::sim
