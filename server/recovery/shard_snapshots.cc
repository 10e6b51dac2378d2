// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_snapshots.h"

#include <algorithm>
#include <unistd.h>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"

namespace precondor::recovery {
namespace {

constexpr uint32_t kMetadataFormat = 2;
constexpr size_t kKept = 2;       // newest snapshots that each session keeps
constexpr int kNiceness = 10;     // about a tenth of a core if steps need the core too
constexpr uint64_t kSpread = 64;  // in steps; the layers of a job are never this far apart

absl::StatusOr<std::string> EncodeMetadata(const SnapshotImages& snapshot) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string install, EncodeInstall(snapshot.install));
  std::string out;
  PutU32(out, kMetadataFormat);
  PutU64(out, snapshot.step);
  PutU64(out, snapshot.sequence);
  PutBytes(out, install);
  PutU64(out, snapshot.number);
  return out;
}

int64_t StateBytes(const SnapshotImages& snapshot) {
  int64_t bytes = 0;
  for (const auto& [layer, image] : snapshot.images) bytes += static_cast<int64_t>(image.state.size());
  return bytes;
}

}  // namespace

std::string LayerKey(uint32_t layer) { return absl::StrCat("layer-", absl::Dec(layer, absl::kZeroPad6)); }

absl::Status RemoveStore(store::FileSystem& fs, store::SnapshotStore& store, const std::string& dir) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, store.List());
  for (const uint64_t id : ids) PRECONDOR_RETURN_IF_ERROR(store.Remove(id));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> left, fs.List(dir));
  for (const std::string& name : left) PRECONDOR_RETURN_IF_ERROR(fs.RemoveFile(store::JoinPath(dir, name)));
  return fs.RemoveDir(dir);
}

absl::StatusOr<SnapshotImages> DecodeMetadata(absl::string_view bytes) {
  Decoder in(bytes);
  const uint32_t format = in.U32();
  if (in.ok() && format != kMetadataFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("snapshot metadata: format: expected ", kMetadataFormat, ", got ", format));
  }
  SnapshotImages snapshot;
  snapshot.step = in.U64();
  snapshot.sequence = in.U64();
  const absl::string_view install = in.Bytes();
  snapshot.number = in.U64();
  if (!in.done()) return absl::DataLossError("snapshot metadata: the bytes are not what was written");
  PRECONDOR_ASSIGN_OR_RETURN(ShardRecord record, DecodeRecord(static_cast<uint8_t>(RecordType::kInstall), install));
  snapshot.install = std::get<InstallRecord>(std::move(record));
  return snapshot;
}

ShardSnapshots::ShardSnapshots(store::FileSystem& fs, std::string dir, const Clock& clock, Logger& logger,
                               StoreObserver& observer, bool background)
    : fs_(fs), dir_(std::move(dir)), clock_(clock), logger_(logger), observer_(observer), background_(background) {}

ShardSnapshots::~ShardSnapshots() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
}

absl::Status ShardSnapshots::Open(const Restore& restore, Durable durable,
                                  const std::function<bool(uint64_t session_id)>& skip) {
  durable_ = std::move(durable);
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  for (const std::string& name : names) {
    uint64_t session_id = 0;
    if (!absl::SimpleAtoi(name, &session_id)) continue;
    PRECONDOR_RETURN_IF_ERROR(FindOrOpenStore(session_id).status());
    if (skip == nullptr || !skip(session_id)) PRECONDOR_RETURN_IF_ERROR(Load(session_id, restore));
  }
  if (background_) writer_ = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

absl::Status ShardSnapshots::Load(uint64_t session_id, const Restore& restore) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<const store::SnapshotStore> store, FindOrOpenStore(session_id));
  const absl::StatusOr<store::FoundSnapshot> found = store->LatestValid();
  if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
  if (!found.ok()) {
    logger_.Log(Severity::kWarning, "no undamaged snapshot",
                {{"session_id", session_id}, {"reason", absl::string_view(found.status().message())}});
    return absl::OkStatus();
  }
  for (const absl::Status& skipped : found->skipped) {
    logger_.Log(Severity::kError, "snapshot is damaged; the shard uses an older one",
                {{"session_id", session_id}, {"reason", absl::string_view(skipped.message())}});
  }
  std::map<uint32_t, LayerImage> images;
  PRECONDOR_ASSIGN_OR_RETURN(SnapshotImages snapshot, ReadLayers(*store, found->manifest, [&images](LayerImage image) {
                               const uint32_t layer = image.at.layer;
                               images.emplace(layer, std::move(image));
                             }));
  snapshot.images = std::move(images);
  {
    MutexLock lock(mu_);
    last_sequence_[session_id] = snapshot.sequence;
  }
  restore(snapshot);
  return absl::OkStatus();
}

std::shared_ptr<const store::SnapshotStore> ShardSnapshots::FindStore(uint64_t session_id) const {
  MutexLock lock(stores_mu_);
  const auto found = stores_.find(session_id);
  return found == stores_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<store::SnapshotStore>> ShardSnapshots::FindOrOpenStore(uint64_t session_id) {
  MutexLock lock(stores_mu_);
  const auto found = stores_.find(session_id);
  if (found != stores_.end()) return found->second;
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<store::SnapshotStore> store,
                             store::SnapshotStore::Open(fs_, store::JoinPath(dir_, absl::StrCat(session_id))));
  return stores_.emplace(session_id, std::move(store)).first->second;
}

absl::StatusOr<SnapshotImages> ShardSnapshots::ReadLayers(const store::SnapshotStore& store,
                                                          const store::SnapshotManifest& manifest,
                                                          absl::FunctionRef<void(LayerImage)> take) const {
  PRECONDOR_ASSIGN_OR_RETURN(SnapshotImages snapshot, DecodeMetadata(manifest.metadata));
  for (const auto& [key, file] : manifest.files) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, store.Read(manifest, key));
    absl::StatusOr<LayerImage> image = DecodeImage(bytes);
    if (!image.ok()) {
      return absl::Status(image.status().code(),
                          absl::StrCat("session \"", snapshot.install.install.spec.name, "\" snapshot ", manifest.id,
                                       " ", key, ": ", image.status().message()));
    }
    take(*std::move(image));
  }
  return snapshot;
}

ShardSnapshots::Ordered* ShardSnapshots::OrderOf(const SnapshotImages& snapshot) {
  const auto found = ordered_.find(snapshot.install.install.session_id);
  const bool same = found != ordered_.end() && snapshot.number != 0 && found->second.order.number == snapshot.number;
  return same ? &found->second : nullptr;
}

void ShardSnapshots::GiveUp(const SnapshotImages& snapshot, const absl::Status& why) {
  const std::string& name = snapshot.install.install.spec.name;
  if (Ordered* const ordered = OrderOf(snapshot); ordered != nullptr) ordered->given_up = why;
  observer_.OnSnapshot(name, false);
  logger_.Log(Severity::kWarning, "snapshot given up",
              {{"session", name}, {"step", snapshot.step}, {"reason", absl::string_view(why.message())}});
}

void ShardSnapshots::Expect(const SnapshotOrder& order) {
  MutexLock lock(mu_);
  ordered_.insert_or_assign(order.session_id, Ordered{.order = order, .progress = {}, .given_up = absl::OkStatus()});
}

absl::StatusOr<std::optional<SnapshotProgress>> ShardSnapshots::ProgressOf(const SnapshotOrder& order) const {
  {
    MutexLock lock(mu_);
    const auto found = ordered_.find(order.session_id);
    if (found != ordered_.end() && found->second.order.number == order.number) {
      if (!found->second.given_up.ok()) return absl::AbortedError(found->second.given_up.message());
      return found->second.progress;
    }
  }
  // The order may be from before this process started.
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<SnapshotSummary> found, ListOf(order.session_id));
  for (const SnapshotSummary& summary : found) {
    if (summary.number != order.number || summary.step != order.step) continue;
    return SnapshotProgress{.begun = true, .durable = true, .snapshot_id = summary.id};
  }
  return std::nullopt;
}

bool ShardSnapshots::IsDisplacedByOrder(const Gathering& gathering, const LayerImage& image) {
  if (gathering.snapshot.number == 0 || gathering.rollback_epoch != image.at.rollback_epoch) return false;
  return image.at.step != gathering.snapshot.step && image.at.step < gathering.snapshot.step + kSpread;
}

void ShardSnapshots::Keep(LayerImage image, const InstallRecord& install, uint64_t sequence,
                          const GradientLog::Mark& gradients) {
  MutexLock lock(mu_);
  const uint64_t session_id = image.at.session_id;
  auto [it, begins] = gathering_.try_emplace(session_id);
  Gathering& gathering = it->second;
  if (!begins && IsDisplacedByOrder(gathering, image)) return;
  if (!begins && (gathering.snapshot.step != image.at.step || gathering.rollback_epoch != image.at.rollback_epoch)) {
    GiveUp(gathering.snapshot, absl::AbortedError("a later snapshot began before every layer had given its image"));
    gathering = Gathering();
    begins = true;
  }
  if (begins) {
    gathering.rollback_epoch = image.at.rollback_epoch;
    gathering.snapshot.step = image.at.step;
    gathering.snapshot.sequence = sequence;
    gathering.snapshot.gradients = gradients;
    gathering.snapshot.install = install;
    const auto ordered = ordered_.find(session_id);
    const bool awaited =
        ordered != ordered_.end() && ordered->second.given_up.ok() && !ordered->second.progress.durable;
    if (awaited && ordered->second.order.step == image.at.step) {
      gathering.snapshot.number = ordered->second.order.number;
      ordered->second.progress.begun = true;
    }
  }
  const uint32_t layer = image.at.layer;
  gathering.snapshot.images.insert_or_assign(layer, std::move(image));
  if (gathering.snapshot.images.size() < gathering.snapshot.install.install.layers.size()) return;
  auto whole = std::make_shared<const SnapshotImages>(std::move(gathering.snapshot));
  gathering_.erase(it);
  // A second queued snapshot keeps the session's state in memory twice. Accepts that only for a snapshot that the
  // coordinator ordered, not for a regular one, which only bounds the log.
  if (writing_[session_id] > 0 && whole->number == 0) {
    return GiveUp(*whole, absl::AbortedError("the one before it is still being written"));
  }
  ++writing_[session_id];
  PostLocked([this, whole = std::move(whole)] { Write(*whole); });
}

void ShardSnapshots::GiveUpIncomplete() {
  MutexLock lock(mu_);
  for (const auto& [session_id, gathering] : gathering_) {
    GiveUp(gathering.snapshot, absl::AbortedError("the server drains"));
  }
  gathering_.clear();
}

void ShardSnapshots::Forget(uint64_t session_id) {
  MutexLock lock(mu_);
  gathering_.erase(session_id);
  ordered_.erase(session_id);
}

void ShardSnapshots::Remove(uint64_t session_id) {
  MutexLock lock(mu_);
  gathering_.erase(session_id);
  ordered_.erase(session_id);
  PostLocked([this, session_id] { Erase(session_id); });
}

void ShardSnapshots::PostLocked(Job job) {
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

bool ShardSnapshots::Work() {
  Job job;
  {
    MutexLock lock(mu_);
    if (jobs_.empty()) return false;
    job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
  }
  job();
  MutexLock lock(mu_);
  busy_ = false;
  changed_.notify_all();
  return true;
}

void ShardSnapshots::Loop() {
  NameThisThread("snapshots");
  // On Linux this applies to the calling thread alone. The writer mostly waits for the disk; steps take precedence.
  (void)!nice(kNiceness);
  for (;;) {
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
    }
    Work();
  }
}

bool ShardSnapshots::WaitIdle(absl::Time deadline) {
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return jobs_.empty() && !busy_; };
  MutexLock lock(mu_);
  if (deadline == absl::InfiniteFuture()) {
    changed_.wait(mu_, idle);
    return true;
  }
  return changed_.wait_for(mu_, absl::ToChronoNanoseconds(std::max(deadline - clock_.Now(), absl::ZeroDuration())),
                           idle);
}

void ShardSnapshots::Write(const SnapshotImages& snapshot) {
  const uint64_t session_id = snapshot.install.install.session_id;
  const absl::StatusOr<std::shared_ptr<store::SnapshotStore>> store = FindOrOpenStore(session_id);
  const absl::Time start = clock_.Now();
  const absl::StatusOr<uint64_t> written = store.ok() ? WriteFiles(snapshot, **store) : store.status();
  uint64_t before = 0;
  {
    MutexLock lock(mu_);
    --writing_[session_id];
    if (!written.ok()) return GiveUp(snapshot, written.status());
    before = std::exchange(last_sequence_[session_id], snapshot.sequence);
    if (Ordered* const ordered = OrderOf(snapshot); ordered != nullptr) {
      ordered->progress = {.begun = true, .durable = true, .snapshot_id = *written};
    }
  }
  const std::string& name = snapshot.install.install.spec.name;
  observer_.OnSnapshotWritten(name, clock_.Now() - start, StateBytes(snapshot));
  observer_.OnSnapshot(name, true);
  durable_(snapshot, before);
}

absl::StatusOr<uint64_t> ShardSnapshots::WriteFiles(const SnapshotImages& snapshot, store::SnapshotStore& store) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string metadata, EncodeMetadata(snapshot));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, store.List());
  const uint64_t id = ids.empty() ? 1 : ids.back() + 1;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<store::SnapshotWriter> writer, store.Begin(id));
  for (const auto& [layer, image] : snapshot.images) {
    const std::string head = EncodeImageHead(image);
    PRECONDOR_RETURN_IF_ERROR(writer->AddPieces(LayerKey(layer), {head, image.state}));
  }
  PRECONDOR_RETURN_IF_ERROR(writer->Commit(metadata));
  PRECONDOR_RETURN_IF_ERROR(Prune(store, snapshot.install.install.session_id));
  return id;
}

absl::Status ShardSnapshots::Prune(store::SnapshotStore& store, uint64_t session_id) {
  std::optional<SnapshotOrder> order;
  {
    MutexLock lock(mu_);
    if (const auto found = ordered_.find(session_id); found != ordered_.end()) order = found->second.order;
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, store.List());
  for (size_t i = 0; i + kKept < ids.size(); ++i) {
    const absl::StatusOr<store::SnapshotManifest> manifest = store.ReadManifest(ids[i]);
    const absl::StatusOr<SnapshotImages> old =
        manifest.ok() ? DecodeMetadata(manifest->metadata) : absl::StatusOr<SnapshotImages>(manifest.status());
    const uint64_t number = old.ok() ? old->number : 0;
    // Without an order since this process started, it is not known which ones the coordinator wants: keeps all that
    // have a number.
    const bool wanted = number != 0 && (!order.has_value() || number == order->number ||
                                        std::find(order->keep.begin(), order->keep.end(), number) != order->keep.end());
    if (!wanted) PRECONDOR_RETURN_IF_ERROR(store.Remove(ids[i]));
  }
  return absl::OkStatus();
}

void ShardSnapshots::Erase(uint64_t session_id) {
  std::shared_ptr<store::SnapshotStore> store;
  {
    MutexLock lock(mu_);
    last_sequence_.erase(session_id);
    writing_.erase(session_id);
  }
  {
    MutexLock lock(stores_mu_);
    const auto found = stores_.find(session_id);
    if (found == stores_.end()) return;
    store = std::move(found->second);
    stores_.erase(found);
  }
  const absl::Status status = RemoveStore(fs_, *store, store::JoinPath(dir_, absl::StrCat(session_id)));
  if (status.ok()) return;
  logger_.Log(Severity::kWarning, "snapshots of a closed session stay",
              {{"session_id", session_id}, {"reason", absl::string_view(status.message())}});
}

SnapshotSummary ShardSnapshots::Summarize(const SnapshotImages& snapshot, const store::SnapshotManifest& manifest) {
  SnapshotSummary summary{.id = manifest.id,
                          .session_id = snapshot.install.install.session_id,
                          .session = snapshot.install.install.spec.name,
                          .step = snapshot.step,
                          .layers = static_cast<int64_t>(manifest.files.size()),
                          .number = snapshot.number};
  for (const auto& [key, file] : manifest.files) summary.bytes += file.file_bytes;
  return summary;
}

absl::StatusOr<std::vector<SnapshotSummary>> ShardSnapshots::List() const {
  std::vector<uint64_t> sessions;
  {
    MutexLock lock(stores_mu_);
    for (const auto& [session_id, store] : stores_) sessions.push_back(session_id);
  }
  std::vector<SnapshotSummary> summaries;
  for (const uint64_t session_id : sessions) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<SnapshotSummary> found, ListOf(session_id));
    summaries.insert(summaries.end(), found.begin(), found.end());
  }
  return summaries;
}

absl::StatusOr<std::vector<SnapshotSummary>> ShardSnapshots::ListOf(uint64_t session_id) const {
  std::vector<SnapshotSummary> summaries;
  const std::shared_ptr<const store::SnapshotStore> store = FindStore(session_id);
  if (store == nullptr) return summaries;
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, store->List());
  for (const uint64_t id : ids) {
    const absl::StatusOr<store::SnapshotManifest> manifest = store->ReadManifest(id);
    if (!manifest.ok()) continue;  // removed meanwhile, or damaged; Verify reports damage
    const absl::StatusOr<SnapshotImages> snapshot = DecodeMetadata(manifest->metadata);
    if (snapshot.ok()) summaries.push_back(Summarize(*snapshot, *manifest));
  }
  return summaries;
}

absl::StatusOr<SnapshotSummary> ShardSnapshots::Verify(uint64_t session_id, uint64_t id) const {
  const std::shared_ptr<const store::SnapshotStore> store = FindStore(session_id);
  if (store == nullptr) {
    return absl::NotFoundError(absl::StrCat("session_id ", session_id, ": no snapshots on this shard"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotManifest manifest, store->ReadManifest(id));
  PRECONDOR_ASSIGN_OR_RETURN(const SnapshotImages snapshot, ReadLayers(*store, manifest, [](const LayerImage&) {}));
  return Summarize(snapshot, manifest);
}

}  // namespace precondor::recovery
