// SPDX-License-Identifier: Apache-2.0
// Writes snapshots of a shard's sessions: the images of all layers as of one step, one file for each layer. A
// background thread writes them, and no step waits for it: a snapshot that cannot be completed is given up.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/api/observer.h"
#include "server/core/api/shard_journal.h"
#include "server/recovery/gradient_log.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {

// The images of all layers of a session that this shard owns, as of one step.
struct SnapshotImages {
  InstallRecord install;
  uint64_t step = 0;
  uint64_t sequence = 0;             // log records from this sequence on may be newer than some image
  GradientLog::Mark gradients = {};  // place in the log of gradients; not written
  uint64_t number = 0;  // the coordinator's number of the session's snapshot that this is a part of; 0 means none
  std::map<uint32_t, LayerImage> images;  // by layer
};

// Returns the key of a layer's file in a snapshot.
std::string LayerKey(uint32_t layer);
// Removes all snapshots of a store and its directory. Returns the disk's errors.
absl::Status RemoveStore(store::FileSystem& fs, std::unique_ptr<store::SnapshotStore> store, const std::string& dir);
// Decodes a manifest's metadata; the result has no images. Returns DATA_LOSS if it is damaged, FAILED_PRECONDITION if
// it has a newer format, or the errors of rpc::DecodeInstall.
absl::StatusOr<SnapshotImages> DecodeMetadata(absl::string_view bytes);

struct SnapshotSummary {
  uint64_t id = 0;
  uint64_t session_id = 0;
  std::string session;
  uint64_t step = 0;
  uint64_t bytes = 0;
  int64_t layers = 0;
  uint64_t number = 0;  // the coordinator's number; 0 means none
};

// Gathers the images of each session's layers and writes them as snapshots. Each session has a directory
// `<dir>/<session_id>` with its two newest snapshots and those that the coordinator wants to keep. Thread-safe.
class ShardSnapshots {
 public:
  // Called on the writer when a snapshot is durable. `sequence` is that of the previous snapshot, or 0 if there is
  // none: the log stays necessary from there on, because the newest snapshot may turn out to be damaged.
  using Durable = std::function<void(const SnapshotImages& snapshot, uint64_t sequence)>;

  // If `background` is false, there is no writer thread, and only Work writes. Lifetime: the references outlive this
  // object.
  ShardSnapshots(store::FileSystem& fs, std::string dir, const Clock& clock, Logger& logger, StoreObserver& observer,
                 bool background = true);
  // Runs the queued jobs if there is a writer thread, and ends it.
  ~ShardSnapshots();

  // Passes each session's newest undamaged snapshot to `restore`, and starts the writer. Leaves the sessions for which
  // `skip` returns true on the disk. Call it before all others. Returns the errors of SnapshotStore and of damaged
  // images.
  using Restore = std::function<void(const SnapshotImages&)>;
  absl::Status Open(const Restore& restore, Durable durable,
                    const std::function<bool(uint64_t session_id)>& skip = nullptr);
  // Passes the session's newest undamaged snapshot to `restore`, if there is one.
  absl::Status Load(uint64_t session_id, const Restore& restore);

  // Adds one layer's image to the session's current snapshot, and queues the snapshot when it is complete. `install`
  // and the places in both logs are the current ones; a snapshot keeps those of its first image.
  void Keep(LayerImage image, const InstallRecord& install, uint64_t sequence, const GradientLog::Mark& gradients = {});
  // Gives up the snapshots of which not all layers have given their images.
  void GiveUpIncomplete();
  // Drops the session's incomplete snapshot and its order; snapshots on the disk stay.
  void Forget(uint64_t session_id);
  // Removes all snapshots of a session that has ended.
  void Remove(uint64_t session_id);
  // See ShardJournal.
  void Expect(const SnapshotOrder& order);
  absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) const;

  // Lists the snapshots of all sessions, those of one session together and the newest last. Omits damaged manifests.
  // Returns the disk's errors.
  absl::StatusOr<std::vector<SnapshotSummary>> List() const;
  // Reads and checks a whole snapshot, with one layer in memory at a time. Returns NOT_FOUND if the session has no
  // snapshots here, or the errors of SnapshotStore::ReadManifest, SnapshotStore::Read and DecodeImage.
  absl::StatusOr<SnapshotSummary> Verify(uint64_t session_id, uint64_t id) const;

  // Waits until all queued jobs are done, or until `deadline` on the monotonic clock. Returns false if it passed.
  bool WaitIdle(absl::Time deadline = absl::InfiniteFuture());
  // Runs one queued job. Returns false if there is none. Calls must not overlap.
  bool Work();

 private:
  // A snapshot of which not all layers have given their images.
  struct Gathering {
    SnapshotImages snapshot;
    uint64_t rollback_epoch = 0;
  };
  // The coordinator's last order for a session since this process started.
  struct Ordered {
    SnapshotOrder order;
    SnapshotProgress progress;
    absl::Status given_up;
  };
  using Job = std::function<void()>;

  // Returns null if the session has no snapshots.
  std::shared_ptr<const store::SnapshotStore> FindStore(uint64_t session_id) const;
  absl::StatusOr<std::shared_ptr<store::SnapshotStore>> FindOrOpenStore(uint64_t session_id);
  absl::StatusOr<std::vector<SnapshotSummary>> ListOf(uint64_t session_id) const;
  static SnapshotSummary Summarize(const SnapshotImages& snapshot, const store::SnapshotManifest& manifest);
  // Reads and checks every layer, one in memory at a time, and passes it to `take`. Returns the snapshot without
  // images.
  absl::StatusOr<SnapshotImages> ReadLayers(const store::SnapshotStore& store, const store::SnapshotManifest& manifest,
                                            absl::FunctionRef<void(LayerImage)> take) const;
  // Records and logs that a snapshot will not be written.
  void GiveUp(const SnapshotImages& snapshot, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the order that the snapshot carries out, or null if there is none.
  Ordered* OrderOf(const SnapshotImages& snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns whether to drop the image because it belongs to a regular snapshot while one that the coordinator ordered
  // is incomplete.
  static bool IsDisplacedByOrder(const Gathering& gathering, const LayerImage& image);
  // Removes the snapshots that are neither among the newest nor wanted by the coordinator.
  absl::Status Prune(store::SnapshotStore& store, uint64_t session_id);
  void Write(const SnapshotImages& snapshot);
  absl::StatusOr<uint64_t> WriteFiles(const SnapshotImages& snapshot, store::SnapshotStore& store);
  void Erase(uint64_t session_id);
  void PostLocked(Job job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Loop();

  store::FileSystem& fs_;
  const std::string dir_;
  const Clock& clock_;
  Logger& logger_;
  StoreObserver& observer_;
  const bool background_;
  Durable durable_;

  mutable Mutex mu_;
  CondVar changed_;
  absl::flat_hash_map<uint64_t, Gathering> gathering_ ABSL_GUARDED_BY(mu_);     // by session
  absl::flat_hash_map<uint64_t, Ordered> ordered_ ABSL_GUARDED_BY(mu_);         // by session
  absl::flat_hash_map<uint64_t, int> writing_ ABSL_GUARDED_BY(mu_);             // by session: snapshots to be written
  absl::flat_hash_map<uint64_t, uint64_t> last_sequence_ ABSL_GUARDED_BY(mu_);  // by session: of the newest durable one
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread writer_;

  // Separate from mu_, which steps take, because it is held while a directory is opened.
  mutable Mutex stores_mu_;
  // Shared with readers: the session may be removed meanwhile.
  std::map<uint64_t, std::shared_ptr<store::SnapshotStore>> stores_ ABSL_GUARDED_BY(stores_mu_);
};

}  // namespace precondor::recovery
