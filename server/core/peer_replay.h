// SPDX-License-Identifier: Apache-2.0
// Builds the factors of a session's layers, aside, from what another shard has written down of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/layer_replay.h"
#include "server/core/layer_worker.h"
#include "server/core/peer_factors.h"
#include "server/core/session_context.h"
#include "server/core/shard_journal.h"

namespace precondor {

// One use, one thread. Holds a state for each layer; updates take scratch of the session as those of its layers do.
class PeerReplay {
 public:
  using ReadFactors = std::function<absl::StatusOr<std::string>(uint64_t release, uint32_t layer)>;
  // `wanted`: false once nobody has a use for the outcome.
  PeerReplay(std::shared_ptr<SessionContext> session, std::set<uint32_t> layers, ReadFactors read,
             std::function<bool()> wanted);

  uint64_t session_id() const { return session_->session_id; }
  const std::set<uint32_t>& layers() const { return layers_; }
  bool wanted() const { return wanted_(); }

  // A layer's image from a snapshot of the session as `install` says. Before any record.
  void Add(const SessionInstall& install, const LayerImage& image);
  // The same where none of its images is whole.
  void Damaged(uint32_t layer, absl::Status why) { damaged_[layer] = std::move(why); }
  // Records in their order, also those before the images; what is of other sessions or layers is passed over.
  void Add(ShardRecord record);

  // The layer's factors after the last record. NotFound: the shard did not have it in the end, or had no factors of it
  // yet; DataLoss: there is a gap, or what it kept cannot be read; those of Method::MakeState and LayerState::Load.
  absl::StatusOr<PeerFactorState> Finish(uint32_t layer);

 private:
  struct Heir {
    std::unique_ptr<LayerWorker> worker;
    std::unique_ptr<LayerReplay> replay;
    absl::Status status;
  };
  Heir& Begin(uint32_t layer, bool held);
  void Install(const SessionInstall& install);
  // Factors that the shard had let go of and kept.
  absl::Status LoadKept(uint32_t layer, LayerWorker& worker, LayerReplay::Outcome& outcome) const;

  const std::shared_ptr<SessionContext> session_;
  const std::set<uint32_t> layers_;
  const ReadFactors read_;
  const std::function<bool()> wanted_;
  uint64_t epoch_ = 0;      // of the last install
  uint64_t went_back_ = 0;  // as it says
  std::map<uint32_t, Heir> heirs_;
  std::map<uint32_t, absl::Status> damaged_;
};

}  // namespace precondor
