// SPDX-License-Identifier: Apache-2.0
// Snapshots of a shard's sessions: the images that their layers give as of one step, in one file a layer, written by a
// thread of its own. A step never waits for it: what it cannot take is given up, and the next snapshot comes.
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
#include "server/core/shard/shard_journal.h"
#include "server/core/shard/store_observer.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {

// All layers of one session that this shard owns, as of one step.
struct SnapshotImages {
  InstallRecord install;
  uint64_t step = 0;
  uint64_t sequence = 0;  // of the log's records, those from here on may be newer than some image
  uint64_t number = 0;    // the coordinator's, of the session's snapshot that this is a part of; 0: none
  std::map<uint32_t, LayerImage> images;
};

// The file of a layer.
std::string LayerKey(uint32_t layer);
// Removes all of a store with its directory. Errors: the disk's.
absl::Status RemoveStore(store::FileSystem& fs, std::unique_ptr<store::SnapshotStore> store, const std::string& dir);
// What a snapshot's manifest says of it, without the images. DataLoss, or FailedPrecondition for a newer format.
absl::StatusOr<SnapshotImages> DecodeMetadata(absl::string_view bytes);

struct SnapshotSummary {
  uint64_t id = 0;
  uint64_t session_id = 0;
  std::string session;
  uint64_t step = 0;
  uint64_t bytes = 0;
  int64_t layers = 0;
  uint64_t number = 0;  // the coordinator's; 0: none
};

// Thread-safe. One directory a session, `<dir>/<session_id>`, with its two newest snapshots and those that the
// coordinator wants kept.
class ShardSnapshots {
 public:
  // A snapshot is durable. `sequence` is that of the one before it, or 0: the log is needed from there on in case that
  // the newest is damaged. On the writer's thread.
  using Durable = std::function<void(const SnapshotImages& snapshot, uint64_t sequence)>;
  // Why a snapshot must not be written; OK: it may. On the writer's thread.
  using Check = std::function<absl::Status(const SnapshotImages& snapshot)>;

  // References outlive it. Without `background` nothing is written but by Work.
  ShardSnapshots(store::FileSystem& fs, std::string dir, const Clock& clock, Logger& logger, StoreObserver& observer,
                 bool background = true);
  // Finishes what is being written.
  ~ShardSnapshots();

  // Before anything else: hands over the newest snapshot of each session that is whole, and begins to take images.
  // Of those that `skip` names the files stay as they are.
  using Restore = std::function<void(const SnapshotImages&)>;
  absl::Status Open(const Restore& restore, Durable durable, Check check = nullptr,
                    const std::function<bool(uint64_t session_id)>& skip = nullptr);
  // Hands over the newest one of this session; none: it has none.
  absl::Status Load(uint64_t session_id, const Restore& restore);

  // One layer's image; `install` and `sequence` as of now, the first image's count.
  void Keep(LayerImage image, const InstallRecord& install, uint64_t sequence);
  // The session takes none any more; those that it has stay.
  void Forget(uint64_t session_id);
  // The session is gone, and so are its snapshots.
  void Remove(uint64_t session_id);
  // See ShardJournal.
  void Expect(const SnapshotOrder& order);
  absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) const;

  // Of all sessions, newest last. Errors: the disk's.
  absl::StatusOr<std::vector<SnapshotSummary>> List() const;
  // Reads all of a snapshot, with one layer in memory at a time. Errors: those of SnapshotStore::Read, of damaged
  // images, NotFound: no such session.
  absl::StatusOr<SnapshotSummary> Verify(uint64_t session_id, uint64_t id) const;

  // Has the writer's thread run this, in its turn.
  void Post(std::function<void()> job) ABSL_LOCKS_EXCLUDED(mu_);
  // What was handed over so far is written, or given up.
  void WaitIdle();
  // Writes or removes one snapshot that was handed over; false when there is none. One caller at a time.
  bool Work();

 private:
  struct Gathering {
    SnapshotImages snapshot;
    uint64_t rollback_epoch = 0;
  };
  // The coordinator's last order of a session, since this process began.
  struct Ordered {
    SnapshotOrder order;
    SnapshotProgress progress;
    absl::Status given_up;
  };
  using Job = std::function<void()>;

  absl::StatusOr<store::SnapshotStore*> StoreOf(uint64_t session_id) const;
  absl::StatusOr<std::vector<SnapshotSummary>> ListOf(uint64_t session_id) const;
  static SnapshotSummary Summarize(const SnapshotImages& snapshot, const store::SnapshotManifest& manifest);
  // Reads and checks every layer, one in memory at a time, and gives it to `take`. Returns what the snapshot is of,
  // without images.
  absl::StatusOr<SnapshotImages> ReadLayers(const store::SnapshotStore& store, const store::SnapshotManifest& manifest,
                                            absl::FunctionRef<void(LayerImage)> take) const;
  void GiveUp(const SnapshotImages& snapshot, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The order that the snapshot carries out; null: none.
  Ordered* OrderOf(const SnapshotImages& snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether the image has no place in what is being gathered: the coordinator's snapshot goes before a regular one.
  static bool GivesWay(const Gathering& gathering, const LayerImage& image);
  // Removes what is neither among the newest nor wanted by the coordinator.
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
  Check check_;

  mutable Mutex mu_;
  CondVar changed_;
  absl::flat_hash_map<uint64_t, Gathering> gathering_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, Ordered> ordered_ ABSL_GUARDED_BY(mu_);         // by session
  absl::flat_hash_map<uint64_t, int> writing_ ABSL_GUARDED_BY(mu_);             // snapshots on their way, by session
  absl::flat_hash_map<uint64_t, uint64_t> last_sequence_ ABSL_GUARDED_BY(mu_);  // of the newest durable one
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread writer_;

  // Held while a directory is opened, hence apart from mu_, which steps take.
  mutable Mutex stores_mu_;
  mutable std::map<uint64_t, std::unique_ptr<store::SnapshotStore>> stores_ ABSL_GUARDED_BY(stores_mu_);
};

}  // namespace precondor::recovery
