// SPDX-License-Identifier: Apache-2.0
// A worker's part in the communicator of its session and one shard: its gradients of that shard's layers, in the one
// order that all ranks have, and their answers. docs/collective.md has the order of operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/contribution.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/collective.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/plane_codec.h"

namespace precondor {

// What JoinPlane answers.
struct PlaneRendezvous {
  std::string transport;
  std::string unique_id;
  absl::Duration timeout;
  std::vector<std::vector<uint32_t>> buckets;  // layers
};

// Thread-safe. It holds the gradients of an epoch until all have come to the rendezvous, so that the same steps go the
// same way on every run; those of steps that some rank has sent over gRPC go there too. When the communicator ends, so
// does everything that it has not answered, and all that follows until another epoch. Hooks are called on its one
// thread and without its lock; Offer and BeginEpoch may be called under locks that the hooks take.
class WorkerCollectiveSession {
 public:
  using Item = std::shared_ptr<const Contribution>;
  struct Options {
    std::string what;  // for messages
    int rank = 0;
    int world_size = 1;
    int device = 0;                 // ClientOptions::plane_device
    std::vector<LayerSpec> layers;  // of the session
    absl::Duration longest;         // that it waits for others, whatever the rendezvous says
  };
  struct Hooks {
    // Asks the shard where to meet. Ends early after Leave.
    std::function<absl::StatusOr<PlaneRendezvous>(uint64_t epoch)> ask;
    // Tells the shard that this rank does not come to the rendezvous, or gives the communicator up.
    std::function<void(uint64_t epoch, const absl::Status& why)> decline;
    // One gradient's answer; no values for SKIP.
    std::function<void(Item item, const wire::PlaneAnswer& answer, const wire::ReceivedBytes& values)> answered;
    // These go over gRPC.
    std::function<void(const std::vector<ContributionId>&)> give_back;
  };

  WorkerCollectiveSession(Options options, Hooks hooks);
  ~WorkerCollectiveSession();

  // Another communicator, for this epoch. Returns what the former has not answered, which goes over gRPC.
  std::vector<ContributionId> BeginEpoch(uint64_t epoch);
  // Takes a gradient, or an abstention from one; false: it goes over gRPC.
  bool Offer(const Item& item);
  // Ends the session permanently, with all that it holds; does not wait.
  void Leave();
  // OK while gradients go over the communicator, or wait for it; otherwise why they do not.
  absl::Status status() const;

 private:
  // kHolding: until all have come. kOff: until another epoch.
  enum class Phase : uint8_t { kHolding, kOn, kOff };
  using Step = std::map<uint32_t, Item>;  // by layer
  struct Bucket {
    std::vector<uint32_t> layers;
    int64_t elements = 0;
    std::shared_ptr<std::vector<float>> answers;  // of the last step, perhaps still read by those who wait for memory
  };

  void Run();
  absl::Status Serve(uint64_t epoch);
  absl::Status Join(uint64_t epoch);
  absl::StatusOr<std::shared_ptr<Collective>> Meet(const PlaneRendezvous& rendezvous);
  absl::Status AgreeOnFirstStep();
  absl::Status ServeStep();
  // Waits for this rank's gradients of one bucket; `step` is that of the first, for those that follow.
  absl::StatusOr<std::vector<Item>> AwaitBucket(const Bucket& bucket, std::optional<uint64_t>& step);
  absl::Status Reduce(uint32_t index, const std::vector<Item>& items);
  absl::StatusOr<std::vector<uint64_t>> ExchangeOffers(const wire::PlaneOffer& offer);
  absl::Status Receive(uint32_t index, uint64_t step);
  absl::Status CheckRendezvous(const PlaneRendezvous& rendezvous) const;
  void Finish(uint64_t epoch, const absl::Status& why);
  // Gives up all that is held of steps before `end`.
  std::vector<ContributionId> TakePending(uint64_t end, std::vector<Item>& freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t ElementsOf(uint32_t layer) const;

  const Options options_;
  const Hooks hooks_;

  // The thread's.
  absl::Duration timeout_;
  std::vector<Bucket> buckets_;
  std::vector<float> staging_;
  std::shared_ptr<Collective> group_;  // collective_, until it is given up

  std::atomic<bool> give_up_ = false;  // on the rendezvous
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kOff;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Collective> collective_ ABSL_GUARDED_BY(mu_);  // null until all have come
  uint64_t first_ ABSL_GUARDED_BY(mu_) = 0;                      // no step below it goes over the communicator
  uint64_t next_grpc_ ABSL_GUARDED_BY(mu_) = 0;                  // no step from it on has gone over gRPC
  // Who comes back to a step before it gets the kept answer over gRPC.
  uint64_t after_answered_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Step> pending_ ABSL_GUARDED_BY(mu_);  // offered and not answered
  absl::Time last_offer_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace precondor
