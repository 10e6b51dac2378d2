// SPDX-License-Identifier: Apache-2.0
// A shard's part in the communicator of one session and epoch: it passes the reduced gradients to core and broadcasts
// core's answers. docs/collective.md has the order of operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/collective.h"
#include "proto/wire/plane_codec.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/plane/plane_transport.h"

namespace precondor {

// What a rank must know to join a communicator and to reduce gradients in the common order.
struct RendezvousInfo {
  std::string transport;
  std::string unique_id;
  absl::Duration timeout;
  std::vector<std::vector<uint32_t>> buckets;  // layers that are reduced together, in order
};

// Returns the layers in buckets of up to kPlaneBucketElements elements, or of one larger layer. The last layer is
// first, because a backward pass computes its gradient first.
inline constexpr int64_t kPlaneBucketElements = int64_t{1} << 22;
std::vector<std::vector<uint32_t>> PlaneBuckets(const SessionSpec& spec, const std::vector<uint32_t>& layers);

// Takes part in the communicator on a thread of its own, from construction until a failure, End, or the end of the
// epoch or session. Thread-safe.
class ShardCollectiveSession {
 public:
  // `part` describes `session_id` in `epoch`. Lifetime: the references outlive this object.
  ShardCollectiveSession(ShardDataPlane& shard, Logger& logger, TransferObserver& observer,
                         const PlaneTransport& transport, PlaneTransport::Rendezvous rendezvous, uint64_t session_id,
                         uint64_t epoch, ShardDataPlane::SessionPart part, absl::Duration timeout);
  // Calls End and waits for the thread.
  ~ShardCollectiveSession();

  uint64_t epoch() const { return epoch_; }
  const RendezvousInfo& rendezvous_info() const { return rendezvous_info_; }
  // Returns OK, or why this session has ended.
  absl::Status status() const;
  // Returns whether a step is in progress: its gradients have begun to arrive, and its answers are not all sent.
  bool busy() const { return busy_; }
  // Ends the communicator for all ranks. `in_order` is false if the reason is a failure, which is counted and logged.
  void End(absl::string_view reason, bool in_order = true);

 private:
  // Core's answers to the gradients of one step. Core's callbacks share ownership: they can run after this object ends.
  struct Answers {
    Mutex mu;
    CondVar changed;
    std::vector<absl::StatusOr<GradientResult>> results ABSL_GUARDED_BY(mu);  // in the order of the buckets' layers
    std::vector<bool> there ABSL_GUARDED_BY(mu);                              // whether the result of that index is set
    bool given_up ABSL_GUARDED_BY(mu) = false;
  };

  void Run();
  absl::Status Serve();
  absl::Status Join();
  absl::Status Step();
  // Reduces one bucket and submits its gradients to core. The answers go to `answers`, from index `first` on.
  absl::Status Take(uint32_t bucket, size_t first, const std::shared_ptr<Answers>& answers);
  // Gathers every rank's offer for a bucket. Returns INVALID_ARGUMENT if they differ in bucket, step or mode.
  absl::StatusOr<std::vector<wire::PlaneOffer>> GatherOffers(uint32_t bucket);
  // Waits for one bucket's answers and broadcasts them.
  absl::Status Give(uint32_t bucket, size_t first, Answers& answers);
  // Waits for the answers [first, first + count). Returns ABORTED after End, DEADLINE_EXCEEDED after the timeout, or
  // the first answer's error.
  absl::StatusOr<std::vector<GradientResult>> Await(Answers& answers, size_t first, size_t count);
  int64_t ElementsOf(uint32_t layer) const;
  void Finish(const absl::Status& why);

  ShardDataPlane& shard_;
  Logger& logger_;
  TransferObserver& observer_;
  const PlaneTransport& transport_;
  const uint64_t session_id_;
  const uint64_t epoch_;
  const SessionSpec spec_;
  const int ranks_;  // number of the session's ranks; the shard is the rank after them
  const RendezvousInfo rendezvous_info_;
  std::atomic<bool> give_up_ = false;
  std::atomic<bool> busy_ = false;

  // Used by thread_ alone.
  std::shared_ptr<void> place_;  // Rendezvous::place
  Collective* group_ = nullptr;  // collective_, without its lock
  std::vector<float> zeros_;     // what the shard adds to each sum, and broadcasts for a layer without an answer

  mutable Mutex mu_;
  std::shared_ptr<Collective> collective_ ABSL_GUARDED_BY(mu_);  // null until all ranks have joined, and after the end
  std::shared_ptr<Answers> awaited_ ABSL_GUARDED_BY(mu_);        // the answers of the current step
  std::string end_reason_ ABSL_GUARDED_BY(mu_);                  // empty until End is called
  bool ended_in_order_ ABSL_GUARDED_BY(mu_) = true;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses the members above
};

}  // namespace precondor
