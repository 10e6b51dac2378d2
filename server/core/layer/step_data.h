// SPDX-License-Identifier: Apache-2.0
// The data that LayerDriver keeps for one opening of a step: payloads, the requests that wait, and the answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"
#include "server/core/api/shard_journal.h"
#include "server/core/layer/gradient_parts.h"
#include "server/core/layer/layer_events.h"
#include "server/core/layer/reduction.h"
#include "server/core/resources/memory_pools.h"
#include "server/core/resources/reservation.h"

namespace precondor {

// The result of an update, for workers that have the factors too. In REPLAY it is the merged vectors of the update;
// otherwise `bytes` is null.
struct PublishedUpdate {
  std::vector<TensorDesc> tensors;  // a [k, d_in], g [k, d_out]
  std::shared_ptr<const Payload> bytes;
};

// The payloads of one kind from the ranks first_rank ... first_rank + count - 1.
class StepPayloads {
 public:
  StepPayloads(uint32_t first_rank, uint32_t count) : first_rank_(first_rank), count_(count) {}
  void Put(uint32_t rank, StagedContribution contribution) {
    if (of_.empty()) of_.resize(count_);
    of_[rank - first_rank_] = std::move(contribution);
  }
  // Removes and returns the payload of `rank`, or those of `ranks`, in that order. The entry of a rank without a
  // payload (a pull) is empty.
  StagedContribution Take(uint32_t rank) {
    return of_.empty() ? StagedContribution() : std::move(of_[rank - first_rank_]);
  }
  std::vector<StagedContribution> Take(const std::vector<uint32_t>& ranks) {
    std::vector<StagedContribution> taken;
    taken.reserve(ranks.size());
    for (const uint32_t rank : ranks) taken.push_back(Take(rank));
    return taken;
  }
  void Clear() { of_.clear(); }

 private:
  const uint32_t first_rank_;
  const uint32_t count_;
  std::vector<StagedContribution> of_;  // empty if no payload is kept
};

// A rank that waits for an answer.
struct AnswerRequest {
  ContributionKey key;
  ResultFn result;
  std::vector<GradientPart> parts = {};  // SHARDED: what the rank gets of the answer
};

struct StepData {
  StepData(StepPayloads of_statistics, StepPayloads of_gradients)
      : statistics(std::move(of_statistics)), gradients(std::move(of_gradients)) {}

  // Adds a request. `ranks` is the number of ranks that can wait. A rank that asks without end does not fill the
  // memory: if kMostRequests of it wait, the oldest is removed and returned, and the caller ends it.
  std::optional<AnswerRequest> AddRequest(AnswerRequest request, size_t ranks) {
    const auto of_rank = [&](const AnswerRequest& other) { return other.key.rank == request.key.rank; };
    std::optional<AnswerRequest> oldest;
    // With fewer requests no rank has more than all ranks may.
    if (requests.size() >= ranks && std::count_if(requests.begin(), requests.end(), of_rank) >= kMostRequests) {
      const auto found = std::find_if(requests.begin(), requests.end(), of_rank);
      oldest = std::move(*found);
      requests.erase(found);
    }
    requests.push_back(std::move(request));
    return oldest;
  }
  static constexpr int kMostRequests = 4;  // a rank asks again when a stream has broken, before the server notices

  StepPayloads& payloads(ContributionKind kind) {
    return kind == ContributionKind::kStatistics ? statistics : gradients;
  }

  // Guarded by the layer's lock.
  StepPayloads statistics;
  StepPayloads gradients;
  std::vector<AnswerRequest> requests;
  std::optional<GradientResult> answer;
  AnswerParts answer_parts;  // SHARDED; guards itself

  // Used by the layer's worker alone.
  Mode mode = Mode::kSecondOrder;
  std::vector<StagedContribution> due;    // contributions of the update that is next, or that replay has restored
  std::optional<Plan> plan;               // plan that a rank may have been answered with before the shard came back
  std::optional<PublishedUpdate> update;  // set once the update is made, if workers have factors
  bool restored_update = false;           // the update was made before the shard came back, and has not been published
  std::optional<WeightedSum> sum;
  std::vector<StagedContribution> parts;  // SHARDED: what the ranks have sent of the gradient
  absl::Status lost;                      // why the average cannot be made; OK if it can
  // The average in the session's gradient type, or before that the first gradient. The result reuses the buffer, since
  // its size is equal.
  Payload result_buffer;
  float result_scale = 1.0f;
  HostBuffer<float> decoded;  // the average, if the gradient type is not f32; otherwise it is in `result_buffer`
  std::shared_ptr<const DevicePayload> on_device;  // the only gradient, if it is in device memory
  absl::Duration update_took;                      // zero if the factors were not updated
};

// The data of a layer's steps. Not thread-safe.
class StepTable {
 public:
  StepTable(const SessionSpec& spec, uint32_t layer)
      : ranks_(static_cast<uint32_t>(spec.world_size)),
        gradient_ranks_(static_cast<uint32_t>(GradientContributors(spec))),
        first_gradient_rank_(spec.exchange == ExchangeMode::kDelegate ? static_cast<uint32_t>(DelegateRank(spec, layer))
                                                                      : 0) {}

  // Returns the step's data, new if there is none.
  const std::shared_ptr<StepData>& Of(StepId id) {
    std::shared_ptr<StepData>& data = steps_[id];
    if (data == nullptr) {
      data = std::make_shared<StepData>(StepPayloads(0, ranks_), StepPayloads(first_gradient_rank_, gradient_ranks_));
    }
    return data;
  }
  // Returns null if there is none.
  StepData* Find(StepId id) const {
    const auto found = steps_.find(id);
    return found == steps_.end() ? nullptr : found->second.get();
  }
  // Removes and returns the step's data; null if there is none.
  std::shared_ptr<StepData> Remove(StepId id) {
    const auto node = steps_.extract(id);
    return node.empty() ? nullptr : node.mapped();
  }

 private:
  const uint32_t ranks_;
  const uint32_t gradient_ranks_;
  const uint32_t first_gradient_rank_;
  std::map<StepId, std::shared_ptr<StepData>> steps_;
};

}  // namespace precondor
