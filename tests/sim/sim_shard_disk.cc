// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_shard_disk.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"
#include "server/store/log_reader.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

constexpr uint64_t kSegmentBytes = 2048;  // many small ones
constexpr uint64_t kGradientSegmentBytes = 512;
constexpr absl::string_view kGradients = "data/shard/gradients/";

}  // namespace

SimShardDisk::SimShardDisk(World& world, Process& process, const Clock& clock, uint64_t seed)
    : world_(world), process_(process), clock_(clock), seed_(seed) {
  Replace();
}

SimShardDisk::~SimShardDisk() = default;

void SimShardDisk::Replace() {
  store_.reset();
  damaged_ = false;
  fs_ = std::make_unique<FakeFileSystem>(seed_++);
  PRECONDOR_CHECK(fs_->MakeDir("data").ok());
  fs_->set_hook([this](FakeFileSystem::Operation operation, const std::string& path, uint64_t) {
    return Before(operation, path);
  });
}

absl::Status SimShardDisk::Before(FakeFileSystem::Operation operation, const std::string& path) {
  using Operation = FakeFileSystem::Operation;
  // Without gradients their log is an empty one. Runs of before there was one stay what they were.
  if (!world_.scenario().learns && absl::StartsWith(path, kGradients)) return absl::OkStatus();
  if (dead_) return absl::UnavailableError("the process has died");
  if (operation == Operation::kAppend && writes_left_ > 0 && --writes_left_ == 0) {
    dead_ = true;
    const bool unlogged = world_.scenario().learns && world_.scenario().gradient_journal.snapshot_bytes == 0;
    std::exchange(died_, nullptr)(gaps_.log || gaps_.gradients || unlogged);
    return absl::OkStatus();
  }
  const bool writes = operation == Operation::kAppend || operation == Operation::kSync;
  if (writes && failure_ > 0 && world_.random().Chance(failure_)) return absl::UnavailableError("the disk failed");
  if (operation != Operation::kAppend || delay_us_ == 0 || !process_.running()) return absl::OkStatus();
  // The process that appends stands still until the system has the bytes.
  process_.Pause();
  world_.queue().After(world_.random().Between(0, delay_us_), [this, life = process_.life()] {
    if (process_.life() == life) process_.Resume();
  });
  return absl::OkStatus();
}

void SimShardDisk::Fill(uint64_t room_bytes) {
  fs_->set_capacity(fs_->used_bytes() + room_bytes);
  failing_ = failed_ = true;
}

void SimShardDisk::Fail(double chance) {
  failure_ = chance;
  failing_ = failed_ = true;
}

void SimShardDisk::Mend() {
  writes_left_ = 0;
  failing_ = false;
  fs_->set_capacity(std::nullopt);
  failure_ = 0;
  delay_us_ = 0;
}

void SimShardDisk::FlipABit() {
  std::vector<std::string> segments;
  for (const std::string& path : fs_->files()) {
    const bool gradients = world_.scenario().learns && absl::StartsWith(path, kGradients);
    if ((gradients || absl::StartsWith(path, "data/shard/log/")) && fs_->FileSize(path).value_or(0) > 0) {
      segments.push_back(path);
    }
  }
  if (segments.empty()) return;
  const std::string& path = segments[world_.random().Below(segments.size())];
  damaged_ = true;
  if (world_.scenario().bug == PlantedBug::kChecksum) return FlipABitUnnoticed(path);
  PRECONDOR_CHECK(fs_->FlipBit(path, world_.random().Below(8 * *fs_->FileSize(path))));
}

void SimShardDisk::FlipABitUnnoticed(const std::string& segment) {
  const std::string bytes = fs_->ReadFile(segment).value();
  std::vector<size_t> updates;
  for (size_t offset = store::kSegmentHeaderBytes; offset < bytes.size();) {
    const std::optional<store::ParsedRecord> record = store::ParseRecord(absl::string_view(bytes).substr(offset));
    if (!record.has_value()) break;
    if (record->type == static_cast<uint8_t>(recovery::RecordType::kUpdate)) updates.push_back(offset);
    offset += record->bytes();
  }
  if (updates.empty()) return;
  const size_t at = updates[world_.random().Below(updates.size())];
  const store::ParsedRecord record = *store::ParseRecord(absl::string_view(bytes).substr(at));
  std::string payload(record.payload);
  // Its last byte is a rank's statistics.
  payload.back() = static_cast<char>(payload.back() ^ (1 << world_.random().Below(8)));
  const std::string becomes = store::EncodeRecordHeader(record.sequence, record.type, {payload}) + payload;
  for (size_t bit = 0; bit < 8 * becomes.size(); ++bit) {
    const int differs = (bytes[at + bit / 8] ^ becomes[bit / 8]) >> bit % 8 & 1;
    if (differs != 0) PRECONDOR_CHECK(fs_->FlipBit(segment, 8 * at + bit));
  }
}

void SimShardDisk::Lose(Loss loss) {
  loss == Loss::kProcess ? fs_->CrashProcess() : fs_->Crash();
  store_.reset();
  dead_ = false;
  writes_left_ = 0;
  died_ = nullptr;
  if (loss == Loss::kMachineAndBit) FlipABit();
}

ShardJournal* SimShardDisk::Open() {
  recovery::ShardLogOptions options;
  options.log = {.segment_bytes = kSegmentBytes};
  options.sync_interval = absl::Milliseconds(7);
  options.reopen_interval = absl::Milliseconds(20);
  options.background = false;
  recovery::GradientLogOptions gradients = world_.scenario().gradient_journal;
  gradients.segment_bytes = kGradientSegmentBytes;
  gradients.sync_interval = options.sync_interval;
  gradients.reopen_interval = options.reopen_interval;
  gradients.background = false;
  gaps_ = {};
  failed_ = failing_;
  store_ = std::make_unique<recovery::ShardStore>(*fs_, "data", options, clock_, world_.logger(), gaps_, gradients);
  return store_.get();
}

absl::Status SimShardDisk::Restore(Shard& shard) {
  PRECONDOR_RETURN_IF_ERROR(store_->Restore(shard));
  Work();
  if (world_.scenario().learns) WorkOnGradients();
  return absl::OkStatus();
}

void SimShardDisk::Work() {
  const int64_t pause_us = absl::ToInt64Microseconds(store_->log().Work());
  // A snapshot may come soon after its last image, or late.
  if (world_.random().Chance(0.5)) store_->snapshots().Work();
  process_.After(pause_us + world_.random().Between(0, delay_us_), [this] { Work(); });
}

void SimShardDisk::WorkOnGradients() {
  const int64_t pause_us = absl::ToInt64Microseconds(store_->gradients().Work());
  process_.After(pause_us + world_.random().Between(0, delay_us_), [this] { WorkOnGradients(); });
}

void SimShardDisk::WriteSnapshots() {
  while (store_->snapshots().Work()) {
  }
}

void SimShardDisk::DieAfter(uint64_t count, std::function<void(bool lacks)> died) {
  writes_left_ = count;
  died_ = std::move(died);
}

}  // namespace precondor::sim
