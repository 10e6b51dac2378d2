// SPDX-License-Identifier: Apache-2.0
// A worker's part in the communicator of its session and one shard: sends the gradients of that shard's layers, in an
// order that all ranks share, and receives their answers. docs/collective.md has the order of operations.
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

// Decoded answer of JoinPlane: how to join the communicator of an epoch.
struct PlaneRendezvous {
  std::string transport;
  std::string unique_id;
  absl::Duration timeout;
  std::vector<std::vector<uint32_t>> buckets;  // layers that are sent together, in order
};

// Carries a worker's gradients over one communicator for each epoch. Thread-safe. Holds an epoch's gradients until all
// ranks have joined, so that equal steps travel over the communicator in every run. Gradients of steps that some rank
// has sent over gRPC go over gRPC. When the communicator ends, its unanswered gradients go over gRPC, and so do all
// later ones until the next epoch. Hooks are called on its one thread and without its lock. Offer and BeginEpoch may be
// called under locks that the hooks take.
class WorkerCollectiveSession {
 public:
  using Item = std::shared_ptr<const Contribution>;
  struct Options {
    std::string what;  // for messages
    int rank = 0;
    int world_size = 1;
    int device = 0;                 // ClientOptions::plane_device
    std::vector<LayerSpec> layers;  // all layers of the session
    absl::Duration longest;         // upper limit for the time-out of the rendezvous
  };
  struct Hooks {
    // Asks the shard how to join. Returns early after Leave.
    std::function<absl::StatusOr<PlaneRendezvous>(uint64_t epoch)> ask;
    // Tells the shard that this rank does not join the communicator, or ends it.
    std::function<void(uint64_t epoch, const absl::Status& why)> decline;
    // One gradient's answer; `values` is empty for SKIP.
    std::function<void(Item item, const wire::PlaneAnswer& answer, const wire::ReceivedBytes& values)> answered;
    // These gradients go over gRPC.
    std::function<void(const std::vector<ContributionId>&)> give_back;
  };

  WorkerCollectiveSession(Options options, Hooks hooks);
  ~WorkerCollectiveSession();

  // Begins an epoch with its own communicator. Returns the unanswered gradients of the previous one, which go over
  // gRPC.
  std::vector<ContributionId> BeginEpoch(uint64_t epoch);
  // Takes a gradient, or an abstention from one. Returns false if it goes over gRPC.
  bool Offer(const Item& item);
  // Ends the session permanently and drops all gradients that it holds. Does not wait.
  void Leave();
  // Returns OK while gradients travel over the communicator or wait for it; otherwise the reason why they do not.
  absl::Status status() const;

 private:
  // kHolding: until all ranks have joined. kOff: until the next epoch.
  enum class Phase : uint8_t { kHolding, kOn, kOff };
  using Step = std::map<uint32_t, Item>;  // by layer
  struct Bucket {
    std::vector<uint32_t> layers;
    int64_t elements = 0;
    // Answers of the last step. A result that waits for the gradient's memory may still hold the buffer.
    std::shared_ptr<std::vector<float>> answers;
  };

  void Run();
  absl::Status Serve(uint64_t epoch);
  absl::Status Join(uint64_t epoch);
  absl::StatusOr<std::shared_ptr<Collective>> MakeCollective(const PlaneRendezvous& rendezvous);
  absl::Status AgreeOnFirstStep();
  absl::Status ServeStep();
  // Waits for this rank's gradients of one bucket. `step` is that of the first bucket, and holds for the others.
  absl::StatusOr<std::vector<Item>> AwaitBucket(const Bucket& bucket, std::optional<uint64_t>& step);
  absl::Status Reduce(uint32_t index, const std::vector<Item>& items);
  absl::StatusOr<std::vector<uint64_t>> ExchangeOffers(const wire::PlaneOffer& offer);
  absl::Status Receive(uint32_t index, uint64_t step);
  absl::Status CheckRendezvous(const PlaneRendezvous& rendezvous) const;
  void Finish(uint64_t epoch, const absl::Status& why);
  // Removes all gradients of steps before `end` and returns their ids.
  std::vector<ContributionId> TakePending(uint64_t end, std::vector<Item>& freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t ElementsOf(uint32_t layer) const;

  const Options options_;
  const Hooks hooks_;

  // Used only by the thread.
  absl::Duration timeout_;
  std::vector<Bucket> buckets_;
  std::vector<float> staging_;
  std::shared_ptr<Collective> group_;  // the communicator that the thread uses

  std::atomic<bool> give_up_ = false;  // ends the rendezvous
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kOff;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Collective> collective_ ABSL_GUARDED_BY(mu_);  // null until this rank has joined
  uint64_t first_ ABSL_GUARDED_BY(mu_) = 0;                      // no earlier step goes over the communicator
  uint64_t next_grpc_ ABSL_GUARDED_BY(mu_) = 0;  // no gradient of this or a later step has gone over gRPC
  // Step after the last one answered over communicators. A rank that repeats an earlier step gets the kept answer over
  // gRPC.
  uint64_t after_answered_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Step> pending_ ABSL_GUARDED_BY(mu_);  // offered and unanswered, by step
  absl::Time last_offer_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last, because it uses all members above
};

}  // namespace precondor
