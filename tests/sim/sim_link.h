// SPDX-License-Identifier: Apache-2.0
// A rank's connection to one shard: the client's Outbox, and streams over which what arrives comes in order, made again
// when they fall silent. What client/cpp/src/shard_link.cc is, without gRPC and threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/cpp/src/outbox.h"
#include "server/core/api/contribution.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_shard.h"

namespace precondor::sim {

class World;

class SimLink {
 public:
  struct Options {
    uint64_t session_id = 0;
    uint64_t epoch = 0;
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    bool keep_gradients = false;  // see ShardLink::Options
  };
  struct Hooks {
    std::function<void(uint32_t layer, const GradientResult& result)> answered;  // a gradient
    std::function<void()> handed;  // a pull or a fetch has its answer, or never gets one
    std::function<uint64_t()> last_first_order;
    std::function<void(uint64_t epoch)> stale_epoch;
    std::function<void(const absl::Status&)> failed;  // an error that the rank's trainer gets
  };
  SimLink(World& world, Process& process, SimShard& shard, Options options, Hooks hooks);
  ~SimLink();
  SimLink(const SimLink&) = delete;
  SimLink& operator=(const SimLink&) = delete;

  void Submit(Outbox::Item item);
  // Connects when due; to be called now and then.
  void Tick();
  void ChangeEpoch(uint64_t epoch);
  void BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version);
  std::optional<uint64_t> answered_through() const { return outbox_.answered_through(); }
  size_t unacknowledged() const { return outbox_.unacknowledged(); }
  std::string Describe() const;  // for messages

 private:
  class Stream;

  absl::Time Now() const;
  void Connect();
  void Disconnect();
  void Pump();
  void Write(const Outbox::Frame& frame);
  ContributionHeader HeaderOf(const Contribution& item) const;
  void OnCredit(uint64_t shard_generation);
  void OnAck(uint64_t epoch, const ContributionId& id, const absl::StatusOr<bool>& ack);
  void OnResult(uint64_t epoch, const ContributionId& id, const absl::StatusOr<GradientResult>& result);
  void OnRefused(const ContributionId& id, const absl::Status& status);

  World& world_;
  Process& process_;
  SimShard& shard_;
  const Options options_;
  const Hooks hooks_;
  uint64_t epoch_;
  Outbox outbox_;
  std::shared_ptr<Stream> stream_;
  bool open_ = false;         // the stream's first frame has come
  int64_t last_read_us_ = 0;  // when something last came over the stream, or it was begun
};

}  // namespace precondor::sim
