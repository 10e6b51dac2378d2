// SPDX-License-Identifier: Apache-2.0
// A shard's part in the communicator of one session and epoch: gradients that the ranks add up here go to core, and its
// answers back to all. docs/collective.md has the order of operations.
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

// Where the ranks meet, and what goes in which order.
struct RendezvousInfo {
  std::string transport;
  std::string unique_id;
  absl::Duration timeout;
  std::vector<std::vector<uint32_t>> buckets;
};

// The layers in the order in which a backward pass makes their gradients, the last first, in buckets of up to
// kPlaneBucketElements elements or of one layer.
inline constexpr int64_t kPlaneBucketElements = int64_t{1} << 22;
std::vector<std::vector<uint32_t>> PlaneBuckets(const SessionSpec& spec, const std::vector<uint32_t>& layers);

// Thread-safe. One thread takes part in the communicator, from the construction to its end: a failure, End, or the end
// of the epoch or session.
class ShardCollectiveSession {
 public:
  // The references outlive it. `part` is that of `session_id` in `epoch`.
  ShardCollectiveSession(ShardDataPlane& shard, Logger& logger, TransferObserver& observer,
                         const PlaneTransport& transport, PlaneTransport::Rendezvous rendezvous, uint64_t session_id,
                         uint64_t epoch, ShardDataPlane::SessionPart part, absl::Duration timeout);
  // Ends it and waits for the thread.
  ~ShardCollectiveSession();

  uint64_t epoch() const { return epoch_; }
  const RendezvousInfo& rendezvous_info() const { return rendezvous_info_; }
  // OK until it has ended.
  absl::Status status() const;
  // A step's gradients have begun to come, and its answers have not all gone.
  bool busy() const { return busy_; }
  // `in_order`: nothing has gone wrong.
  void End(absl::string_view reason, bool in_order = true);

 private:
  // A step's answers as core gives them, which may be later than the plane lives.
  struct Answers {
    Mutex mu;
    CondVar changed;
    std::vector<absl::StatusOr<GradientResult>> results ABSL_GUARDED_BY(mu);  // by bucket and layer
    std::vector<bool> there ABSL_GUARDED_BY(mu);
    bool given_up ABSL_GUARDED_BY(mu) = false;
  };

  void Run();
  absl::Status Serve();
  absl::Status Join();
  absl::Status Step();
  // Reduces one bucket and hands it to core, whose answers come to `answers` from place `first` on.
  absl::Status Take(uint32_t bucket, size_t first, const std::shared_ptr<Answers>& answers);
  absl::StatusOr<std::vector<wire::PlaneOffer>> GatherOffers(uint32_t bucket);
  // Waits for one bucket's answers and sends them.
  absl::Status Give(uint32_t bucket, size_t first, Answers& answers);
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
  const int ranks_;  // of the session; the shard's own comes after them
  const RendezvousInfo rendezvous_info_;
  std::atomic<bool> give_up_ = false;
  std::atomic<bool> busy_ = false;

  // The thread's.
  std::shared_ptr<void> place_;
  Collective* group_ = nullptr;  // collective_
  std::vector<float> zeros_;     // what the shard adds, and sends where there is nothing

  mutable Mutex mu_;
  std::shared_ptr<Collective> collective_ ABSL_GUARDED_BY(mu_);  // null until all have come
  std::shared_ptr<Answers> awaited_ ABSL_GUARDED_BY(mu_);        // those of the step under way
  std::string end_reason_ ABSL_GUARDED_BY(mu_);                  // not empty once it has been ended
  bool ended_in_order_ ABSL_GUARDED_BY(mu_) = true;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace precondor
