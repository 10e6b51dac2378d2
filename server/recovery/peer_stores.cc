// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/peer_stores.h"

#include <algorithm>
#include <filesystem>
#include <fnmatch.h>
#include <map>
#include <optional>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"
#include "server/core/peer_replay.h"
#include "server/recovery/record_codec.h"
#include "server/recovery/shard_snapshots.h"
#include "server/store/log_reader.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {
namespace {

constexpr char kShardDir[] = "shard";
constexpr int kNiceness = 10;
constexpr int kAttempts = 5;  // the owner may remove what is old while it is read

bool Exists(store::FileSystem& fs, const std::string& dir) { return fs.List(dir).ok(); }

bool HasAny(const SessionInstall& install, const std::set<uint32_t>& layers) {
  return std::any_of(install.layers.begin(), install.layers.end(),
                     [&](uint32_t layer) { return layers.contains(layer); });
}

// One shard's part of one session.
class StoredJournal final : public PeerJournal {
 public:
  StoredJournal(store::FileSystem& fs, std::string data_dir, uint64_t session_id)
      : fs_(fs),
        data_dir_(std::move(data_dir)),
        dir_(store::JoinPath(data_dir_, kShardDir)),
        session_id_(session_id),
        snapshots_(store::SnapshotStore::OpenForReading(fs_, PartOf("snapshots"))) {}

  const std::string& name() const override { return data_dir_; }

  // The last epoch in which the shard had one of the layers; nullopt: none, or the session was removed.
  absl::StatusOr<std::optional<uint64_t>> LastEpoch(const std::set<uint32_t>& layers) {
    return Attempt<std::optional<uint64_t>>([&] { return LastEpochOnce(layers); });
  }

  absl::Status Read(PeerReplay& into) override {
    AddImages(into);
    uint64_t records = 0;
    const auto add = [&](const store::Record& record) -> absl::Status {
      if (++records % kLook == 0 && !into.wanted()) return absl::CancelledError("");
      PRECONDOR_ASSIGN_OR_RETURN(ShardRecord decoded, DecodeRecord(record.type, record.payload));
      if (SessionOf(decoded) == session_id_) into.Add(std::move(decoded));
      return absl::OkStatus();
    };
    return store::ReadLog(fs_, LogDir(), /*verify_checksums=*/true, add).status();
  }

  absl::StatusOr<std::string> ReadFactors(uint64_t release, uint32_t layer) override {
    const auto kept = store::SnapshotStore::OpenForReading(fs_, PartOf("factors"));
    PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotManifest manifest, kept->ReadManifest(release));
    return kept->Read(manifest, LayerKey(layer));
  }

 private:
  static constexpr uint64_t kLook = 64;  // records between two looks whether anybody still wants them

  std::string LogDir() const { return store::JoinPath(dir_, "log"); }
  std::string PartOf(const std::string& what) const {
    return store::JoinPath(store::JoinPath(dir_, what), absl::StrCat(session_id_));
  }

  template <typename T, typename Once>
  static absl::StatusOr<T> Attempt(const Once& once) {
    absl::StatusOr<T> got = once();
    for (int i = 1; i < kAttempts && absl::IsAborted(got.status()); ++i) got = once();
    return got;
  }

  // Newest first; those that cannot be read are passed over.
  std::vector<std::pair<store::SnapshotManifest, SessionSnapshot>> Snapshots() const {
    std::vector<std::pair<store::SnapshotManifest, SessionSnapshot>> found;
    absl::StatusOr<std::vector<uint64_t>> ids = snapshots_->List();
    if (!ids.ok()) return found;
    for (auto id = ids->rbegin(); id != ids->rend(); ++id) {
      absl::StatusOr<store::SnapshotManifest> manifest = snapshots_->ReadManifest(*id);
      if (!manifest.ok()) continue;
      absl::StatusOr<SessionSnapshot> snapshot = DecodeMetadata(manifest->metadata);
      if (snapshot.ok()) found.emplace_back(*std::move(manifest), *std::move(snapshot));
    }
    return found;
  }

  // A damaged image leaves an older one to begin with, which the log reaches back to.
  void AddImages(PeerReplay& into) const {
    std::set<uint32_t> left = into.layers();
    std::map<uint32_t, absl::Status> damaged;
    for (const auto& [manifest, snapshot] : Snapshots()) {
      for (auto layer = left.begin(); layer != left.end();) {
        const bool there = manifest.files.contains(LayerKey(*layer));
        const absl::StatusOr<std::string> bytes =
            there ? snapshots_->Read(manifest, LayerKey(*layer)) : absl::NotFoundError("");
        const absl::StatusOr<LayerImage> image = bytes.ok() ? DecodeImage(*bytes) : bytes.status();
        if (image.ok()) into.Add(snapshot.install.install, *image);
        if (there && !image.ok()) damaged.try_emplace(*layer, image.status());
        layer = image.ok() ? left.erase(layer) : std::next(layer);
      }
    }
    for (const uint32_t layer : left) {
      if (const auto why = damaged.find(layer); why != damaged.end()) into.Damaged(layer, why->second);
    }
  }

  absl::StatusOr<std::optional<uint64_t>> LastEpochOnce(const std::set<uint32_t>& layers) const {
    std::optional<uint64_t> last;
    const auto note = [&](const SessionInstall& install) {
      if (install.session_id == session_id_ && HasAny(install, layers))
        last = std::max(last.value_or(0), install.epoch);
    };
    for (const auto& [manifest, snapshot] : Snapshots()) note(snapshot.install.install);
    const auto look = [&](const store::Record& record) -> absl::Status {
      const auto type = static_cast<RecordType>(record.type);
      if (type != RecordType::kInstall && type != RecordType::kRemove) return absl::OkStatus();
      PRECONDOR_ASSIGN_OR_RETURN(const ShardRecord decoded, DecodeRecord(record.type, record.payload));
      if (const auto* install = std::get_if<InstallRecord>(&decoded)) note(install->install);
      if (type == RecordType::kRemove && SessionOf(decoded) == session_id_) last.reset();
      return absl::OkStatus();
    };
    PRECONDOR_RETURN_IF_ERROR(store::ReadLog(fs_, LogDir(), /*verify_checksums=*/true, look).status());
    return last;
  }

  store::FileSystem& fs_;
  const std::string data_dir_;
  const std::string dir_;  // what is the shard's in it
  const uint64_t session_id_;
  const std::unique_ptr<store::SnapshotStore> snapshots_;
};

// Without links and dots, as far as it exists.
std::string Canonical(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path canonical = std::filesystem::weakly_canonical(path, ignored);
  std::string text = (ignored ? std::filesystem::path(path) : canonical).lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

}  // namespace

std::vector<std::string> ExpandDataDirs(store::FileSystem& fs, const std::string& pattern) {
  std::vector<std::string> paths = {pattern.starts_with('/') ? "/" : "."};
  const std::vector<std::string> components = absl::StrSplit(pattern, '/', absl::SkipEmpty());
  for (const std::string& component : components) {
    std::vector<std::string> next;
    for (const std::string& path : paths) {
      if (component.find_first_of("*?[") == std::string::npos) {
        next.push_back(path == "." ? component : store::JoinPath(path, component));
        continue;
      }
      const absl::StatusOr<std::vector<std::string>> names = fs.List(path);
      if (!names.ok()) continue;
      for (const std::string& name : *names) {
        if (fnmatch(component.c_str(), name.c_str(), FNM_PERIOD) != 0) continue;
        next.push_back(path == "." ? name : store::JoinPath(path, name));
      }
    }
    paths = std::move(next);
  }
  std::set<std::string> dirs;
  for (const std::string& path : paths) {
    if (Exists(fs, store::JoinPath(path, kShardDir))) {
      dirs.insert(path);
      continue;
    }
    const absl::StatusOr<std::vector<std::string>> names = fs.List(path);
    if (!names.ok()) continue;
    for (const std::string& name : *names) {
      const std::string inside = store::JoinPath(path, name);
      if (Exists(fs, store::JoinPath(inside, kShardDir))) dirs.insert(inside);
    }
  }
  return {dirs.begin(), dirs.end()};
}

PeerStores::PeerStores(store::FileSystem& fs, PeerStoresOptions options, Logger& logger)
    : fs_(fs), options_(std::move(options)), logger_(logger) {
  if (options_.background) thread_ = std::thread([this] { Loop(); });
}

std::vector<std::string> PeerStores::DataDirs() const {
  const std::string own = options_.own_data_dir.empty() ? "" : Canonical(options_.own_data_dir);
  std::set<std::string> dirs;
  for (const std::string& pattern : options_.patterns) {
    for (const std::string& dir : ExpandDataDirs(fs_, pattern)) {
      if (std::string canonical = Canonical(dir); canonical != own) dirs.insert(std::move(canonical));
    }
  }
  return {dirs.begin(), dirs.end()};
}

std::vector<std::unique_ptr<PeerJournal>> PeerStores::Find(uint64_t session_id, const std::set<uint32_t>& layers) {
  std::vector<std::pair<uint64_t, std::unique_ptr<PeerJournal>>> found;
  for (const std::string& dir : DataDirs()) {
    auto journal = std::make_unique<StoredJournal>(fs_, dir, session_id);
    const absl::StatusOr<std::optional<uint64_t>> epoch = journal->LastEpoch(layers);
    if (!epoch.ok()) {
      logger_.Log(Severity::kWarning, "data directory of another shard cannot be read",
                  {{"data_dir", dir}, {"reason", absl::string_view(epoch.status().message())}});
      // Whatever was in it is said to be damaged, should no other have it.
      if (absl::IsDataLoss(epoch.status())) found.emplace_back(0, std::move(journal));
    } else if (epoch->has_value()) {
      found.emplace_back(**epoch, std::move(journal));
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.first > y.first; });
  std::vector<std::unique_ptr<PeerJournal>> journals;
  for (auto& [epoch, journal] : found) journals.push_back(std::move(journal));
  return journals;
}

void PeerStores::Post(std::function<void()> job) {
  MutexLock lock(mu_);
  if (stopping_) return;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

bool PeerStores::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

void PeerStores::Stop() {
  std::deque<std::function<void()>> dropped;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    dropped.swap(jobs_);
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool PeerStores::Work() {
  std::function<void()> job;
  {
    MutexLock lock(mu_);
    if (jobs_.empty()) return false;
    job = std::move(jobs_.front());
    jobs_.pop_front();
  }
  job();
  return true;
}

void PeerStores::Loop() {
  // Of this thread alone, as Linux has it: the steps go first.
  (void)!nice(kNiceness);
  for (;;) {
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
    }
    Work();
  }
}

}  // namespace precondor::recovery
