// SPDX-License-Identifier: Apache-2.0
// A shard: the layers that one process owns, of every session, and what happens to contributions to them.
// Knows nothing of gRPC, protobuf, devices or clocks but through the interfaces it is given.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/device_group.h"
#include "kernels/methods/method_set.h"
#include "server/core/admission.h"
#include "server/core/contribution.h"
#include "server/core/device_assignment.h"
#include "server/core/executor.h"
#include "server/core/fencing_gate.h"
#include "server/core/memory_account.h"
#include "server/core/observer.h"
#include "server/core/shard_control.h"
#include "server/core/shard_journal.h"
#include "server/core/shard_summary.h"

namespace precondor {

class LayerDriver;
class ShardSession;
struct LayerRoom;
struct SessionContext;
struct ShardContext;

struct ShardOptions {
  std::string advertise_address;
  // That sessions may reserve on each device: states, scratch and staging.
  int64_t capacity_bytes = int64_t{8} << 30;
  int window_steps = 2;                    // steps of one layer that may be open or kept for repetitions
  double max_norm_per_sqrt_element = 1e4;  // statistic vectors with |v| > this * sqrt(d) are OVER_NORM
  MethodFactory make_method = MakeMethod;
  // Statistics still missing this long after their step's gradient was complete are given up by SealOverdue: with
  // `quorum` of the ranks in, the update is made from those, otherwise it is skipped. The default waits.
  absl::Duration statistics_deadline = absl::InfiniteDuration();
  double quorum = 1.0;
  // Where the shard writes down what it needs to come back; borrowed, outlives the executor's last task. Null: nowhere.
  ShardJournal* journal = nullptr;
  uint64_t snapshot_interval_steps = 0;  // between two snapshots; 0: none but those asked for
  // All of the shard's devices, in their order, where there are several: they have the layers together for which
  // Method::Splits. Borrowed, outlives the executors' last task. Null: each layer is on one device.
  DeviceGroup* group = nullptr;
  // Gives freed memory back to the system; called when a session's factors are gone. May be empty.
  std::function<void()> trim_memory;
  absl::Duration quarantine_time = absl::InfiniteDuration();  // after which sessions there are deleted
  bool device_plane = false;                                  // gradients may come in memory of the backend's device
  // Workers that a step has been waiting for so long are named by ReportStragglers.
  absl::Duration slow_worker = absl::InfiniteDuration();
};

// What some of a shard's layers are computed on. Each has its own memory and threads; what is made on one is used on it
// alone, but for the parts of a layer that is split (ShardOptions::group).
struct ShardDevice {
  std::string name;  // for people: "cuda:0"
  Backend& backend;
  Executor& executor;
};

// Thread-safe. One mutex guards the table of sessions; each session and layer has its own. Callbacks run on the
// caller's thread or an executor thread, never under a lock.
class Shard final : public ShardControl {
 public:
  // All references outlive the shard, which has at least one device; they are alike, so that any gives a layer the same
  // bits. A layer is on one of them for as long as its session is here; one that is split is answered from there, and
  // has parts on all. Executors run the arithmetic; per layer the order is kept.
  Shard(const ShardOptions& options, std::vector<ShardDevice> devices, const Clock& clock, Logger& logger,
        Observer& observer);
  Shard(const ShardOptions& options, Backend& backend, Executor& executor, const Clock& clock, Logger& logger,
        Observer& observer);
  ~Shard() override;

  // --- ShardControl: what the coordinator asks; semantics and errors are in shard_control.h ----------------------
  absl::StatusOr<ShardDescription> Describe() override;
  absl::StatusOr<ShardDescription> Probe(const ShardLease& lease) override;
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override;
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override;
  absl::Status HoldFactors(const FactorHold& hold) override;
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override;
  absl::StatusOr<bool> Remove(uint64_t session_id) override;
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override;
  absl::StatusOr<std::vector<QuarantinedSession>> ListQuarantined() override;
  // Before each of these, with the token that the call carries; the call is made while the pass is there. Errors: those
  // of FencingGate::Enter.
  absl::StatusOr<FencingGate::Pass> Admit(uint64_t token);
  bool AdmitsAtOnce(uint64_t token) const { return gate_.IsCurrent(token); }
  // From now on a session that is not here yet is Unavailable (DRAINING); those that are here go on.
  void BeginDrain();

  // --- data plane ------------------------------------------------------------------------------------------------
  // Checks a contribution once, by its header, before memory is taken for its payload: session, epoch, rank,
  // incarnation, layer, mode, step window, samples, tensors and byte count. The result is what Submit takes. An error
  // carries an ErrorReason (kernels/base/error_reason.h); nothing has changed then, except that the refusal is counted.
  absl::StatusOr<AdmittedContribution> AdmitContribution(ContributionHeader header, uint64_t payload_bytes);
  // Counts one that was admitted and is not submitted, because its payload could not be had: `why`.
  void CountRefusal(const AdmittedContribution& contribution, const absl::Status& why);

  // How often a session that had been removed has been installed again since the process began, each time without its
  // factors. A client that knows one number has to hear of each later one of its session.
  uint64_t state_generation() const { return state_generation_.load(std::memory_order_acquire); }
  // Unavailable NOT_ACTIVE: of this session the shard has forgotten what it knew when `generation` was its number.
  absl::Status CheckGeneration(uint64_t session_id, uint64_t generation) const;

  // Takes in an admitted contribution, with a payload of payload_bytes(), none if it lies on the device. `ack` tells:
  // taken in, a repetition, or refused. When it is refused nothing has changed, except that a non-finite or over-norm
  // contribution counts as its rank's abstention, so that the step can seal. It is also refused for what may have
  // changed since the admission: the session is gone (NotFound), in quarantine, installed again or without a lease
  // (Unavailable), its layer has moved (FailedPrecondition), its epoch or step is over.
  // `result`, not for statistics: it follows an OK `ack`, once the plan is sealed and applied; a repetition gets the
  // same bytes. When the session ends or a new epoch drops the slot, `result` gets the status instead.
  void Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);

  // Takes in what a communicator has made of a step's gradients of one layer. OK: `result` gets the answer, like
  // Submit's. A rank that then sends its gradient over gRPC repeats it, and gets this answer. Otherwise nothing has
  // changed, and the step waits for gradients over gRPC: the errors of AdmitContribution; Aborted when some of these
  // have come already; InvalidArgument where the session's data plane is gRPC.
  absl::Status SubmitReduced(ReducedGradient gradient, ResultFn result);

  // What one of a session's ranks has to know to take part in that. Errors: those of CheckSender.
  struct SessionPart {
    SessionSpec spec;
    std::vector<uint32_t> layers;  // that this shard has, ascending
  };
  absl::StatusOr<SessionPart> PartOf(const ContributionKey& key) const;
  // Whether the session is here, and in this epoch.
  bool IsInEpoch(uint64_t session_id, uint64_t epoch) const;

  // A rank that was answered by a memory which may be lost (the one before this process, or another shard's) says what
  // it has: factors of `factor_version` in its last answer of `key.layer`, and the first step whose gradient it will
  // send or send again. What this memory cannot bring to an end any more holds nothing up from then on. DATA_LOSS
  // STATE_LOST: see ErrorReason; otherwise the errors of AdmitContribution that concern the key. Repetitions do no
  // harm.
  absl::Status Resume(const ContributionKey& key, uint64_t factor_version);

  // Gives `result` the layer's factors as they are, for a worker that keeps some and has just begun, or lost the
  // thread. Errors: those of AdmitContribution that concern the key, InvalidArgument where the session's workers keep
  // none, ABORTED like Submit's.
  void Fetch(const ContributionKey& key, ResultFn result);

  // Seals what statistics_deadline has passed for. A server calls it every now and then.
  void SealOverdue();
  // Gives the memory of released factors back that have become durable. The same.
  void FreeReleasedFactors();
  // Writes sessions down as quarantined whose work has ended, and deletes those whose time is over. The same.
  void CompleteQuarantine();
  // Logs and reports which workers hold the others up, when that has changed. The same.
  void ReportStragglers();
  // Devices that faults have ended the use of; of each, observer and log hear once. Layers on one are answered IDENTITY
  // or with errors. A server calls it every now and then.
  size_t CountLostDevices();

  // --- coming back: before anything else is called, on one thread; server/recovery has the records -----------------

  // From here to FinishReplay whatever else is asked is Unavailable.
  void AwaitReplay() { restoring_.store(true, std::memory_order_release); }
  absl::Status CheckServing() const;
  // The greatest fencing token that was remembered.
  void RestoreLeader(uint64_t token) { gate_.Restore(token); }
  // The session's membership and layers are those of `record`, as Install says; a removed one is gone. Records come in
  // the order in which they were written, those of sessions that are not here are passed over, and an older install
  // changes nothing. A session that cannot come back exactly is given up, logged and removed; one that
  // there is no room for is neither here nor removed.
  void Replay(ShardRecord record);
  // What a snapshot has of a session that Replay has installed, before any other record of it.
  void Replay(const LayerImage& image);
  // ResourceExhausted CAPACITY: there is no room for a session that has to come back. Its records have to stay as they
  // are: with more memory or devices it comes back from them.
  absl::Status replay_status() const;
  // What has become of the replay of a session that ShardJournal::Return brings back; a bad end is forgotten with it.
  absl::Status CheckReplayed(uint64_t session_id);
  // The session is in quarantine, or on its way there or back.
  bool IsAside(uint64_t session_id) const;
  // Steps may go on: not unless replay_status() is OK. Returns the sessions that were given up.
  std::vector<uint64_t> FinishReplay();

  // Has the session's layers give images for a snapshot as of `step`. NotFound; FailedPrecondition without a journal;
  // InvalidArgument: the step has been begun.
  absl::Status RequestSnapshot(absl::string_view session_name, uint64_t step);

  // Gives a layer of a session that no rank has joined the factors of an image, as of `step`; one without factors
  // leaves it fresh ones. With the last layer of those that an order of the coordinator waits for, the part is taken.
  // Errors, and nothing has changed: NotFound UNKNOWN_SESSION, FailedPrecondition when it is in use, holds no factors
  // or has not the layer here, those of LayerState::Load.
  absl::Status RestoreLayer(const LayerImage& image);
  // Upper bound of the state in an image that RestoreLayer can take for this layer. The errors of RestoreLayer but for
  // those of LayerState::Load.
  absl::StatusOr<uint64_t> RestorableBytes(uint64_t session_id, uint32_t layer) const;

  // --- inspection ------------------------------------------------------------------------------------------------
  std::vector<ShardSessionSummary> ListSessions() const;
  absl::StatusOr<std::vector<LayerStats>> GetLayerStats(absl::string_view session_name) const;
  int64_t reserved_bytes() const;
  std::vector<DeviceUse> devices() const;
  // For what is not a session's and takes of the same memory; may outlive the shard.
  std::shared_ptr<MemoryAccount> memory() const;
  int64_t in_flight() const;  // gradients taken in and not yet answered, plus updates under way

 private:
  using Sessions = absl::flat_hash_map<uint64_t, std::shared_ptr<ShardSession>>;
  // Not one that comes back from quarantine at the moment.
  absl::StatusOr<std::shared_ptr<ShardSession>> Find(uint64_t session_id) const;
  absl::StatusOr<std::shared_ptr<ShardSession>> FindAny(uint64_t session_id) const;
  // Of a session that no worker has joined, that holds factors and has the layer here; the errors of RestoreLayer.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindRestorable(uint64_t session_id, uint32_t layer) const;
  std::vector<std::shared_ptr<ShardSession>> AllSessions() const;
  // Tells `ack`, observer and counters that a contribution is refused.
  void Reject(const ContributionHeader& header, const absl::Status& why, const AckFn& ack);
  // The session and the layer that an admitted contribution goes to, as they are now. Errors: see Submit.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindFor(const AdmittedContribution& contribution) const;
  absl::StatusOr<int64_t> InstallRecorded(const SessionInstall& install, bool record);
  // Gives the install's layers devices and reserves there what the session has not reserved yet, `reserved` being what
  // it has. `known`: the session, null when it is new here. `held`: it has its factors. Errors: MemoryAccount's.
  absl::StatusOr<LayerRoom> MakeRoom(const SessionInstall& install, const MethodSet& methods,
                                     const SessionContext* known, bool held, const DeviceBytes& reserved);
  LayersOfDevices Assign(const SessionInstall& install, const MethodSet& methods, const SessionContext* known,
                         const DeviceBytes& taken) const;
  // A new session: admission, reservation, states.
  absl::StatusOr<int64_t> InstallNew(const SessionInstall& install, bool record);
  // What the session now reserves, to observer and log.
  void NoteLayers(const SessionInstall& install, const LayerRoom& room, absl::string_view event);
  // The session goes on with other layers, in a later epoch: those that stay keep their factors, those that come begin
  // with fresh ones.
  absl::StatusOr<int64_t> ChangeLayers(const std::shared_ptr<ShardSession>& session, const SessionInstall& install,
                                       bool record);
  absl::StatusOr<bool> RemoveRecorded(uint64_t session_id, bool record);
  // Takes the session out of the table and frees its memory; null: it is not there. It is `aside` from then on. With
  // `record`: Unavailable NOT_ACTIVE while it comes back from quarantine.
  absl::StatusOr<std::shared_ptr<ShardSession>> TakeOut(uint64_t session_id, bool aside, bool record);
  // See Quarantine. `whole`: not one that the disk lacks records of.
  absl::StatusOr<bool> PutAside(uint64_t session_id, bool whole);
  // Brings a session in quarantine back; true: it was there, and is hidden until Release.
  absl::StatusOr<bool> BringBack(uint64_t session_id);
  absl::Status ReturnClaimed(uint64_t session_id);
  // Deletes it there; false: it was not there.
  absl::StatusOr<bool> RemoveAside(uint64_t session_id);

  // A session in quarantine, or on its way there or back. But for kParting and kThere it is one thread's.
  struct Aside {
    enum class State { kParting, kWriting, kThere, kReturning, kDeleting };
    State state = State::kThere;
    uint64_t last_step = 0;
    std::weak_ptr<SessionContext> work;  // kParting: what is still at work on it
  };
  // From kThere to `to`, which the caller ends with Release. False: it is not aside. Unavailable NOT_ACTIVE.
  absl::StatusOr<bool> Claim(uint64_t session_id, Aside::State to);
  void Release(uint64_t session_id, bool gone);
  void SetAside(uint64_t session_id, Aside aside);
  // Unavailable NOT_ACTIVE: it is aside, and does not come back at the moment.
  absl::Status CheckNotAside(uint64_t session_id) const;
  static absl::Status NotYet(uint64_t session_id);
  uint64_t GenerationOfNew(uint64_t session_id);
  void Record(const ShardRecord& record);
  bool IsGivenUp(uint64_t session_id) const;
  void GiveUp(uint64_t session_id, const absl::Status& why);
  void LeaveAlone(uint64_t session_id, const absl::Status& why);
  void ReplayLayer(const LayerStep& at, absl::FunctionRef<absl::Status(LayerDriver&)> apply);
  absl::Status ReplaceSameNameSession(const SessionInstall& install);
  absl::Status CheckNotDraining(absl::string_view name) const;

  const std::shared_ptr<ShardContext> context_;

  std::atomic<bool> restoring_ = false;
  std::atomic<uint64_t> state_generation_ = 0;
  FencingGate gate_;

  mutable Mutex mu_;
  Sessions sessions_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_set<uint64_t> removed_ ABSL_GUARDED_BY(mu_);  // sessions, since the process began
  std::set<std::string> lost_devices_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<uint64_t> given_up_ ABSL_GUARDED_BY(mu_);    // while replaying
  std::map<uint64_t, absl::Status> no_room_ ABSL_GUARDED_BY(mu_);  // likewise, by session
  std::map<uint64_t, Aside> aside_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
