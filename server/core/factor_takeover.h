// SPDX-License-Identifier: Apache-2.0
// Fetches the factors of layers whose shard was lost from what that shard has written down. Nobody waits for it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "server/core/layer_pipeline.h"
#include "server/core/observer.h"
#include "server/core/peer_factors.h"
#include "server/core/session_context.h"

namespace precondor {

// Some layers of one session, once. All of it runs on the thread of PeerFactors, one job after the other: reading,
// which builds the states of all layers that a journal knows in one pass; then for each layer making its factors
// durable here, so that the shard's own journal can refer to them, and handing them to the layer. Layers that are left
// get fresh ones. It ends by itself when layers have no use for it any more. Memory: the states take the place of those
// that the layers do not have. What comes besides is reserved on top, on each device that has such layers, or
// parts of them, while it runs: scratch of one more operation, the bytes of one state, and what the layers put aside.
class FactorTakeover : public std::enable_shared_from_this<FactorTakeover> {
 public:
  struct Heir {
    std::shared_ptr<LayerPipeline> layer;
    uint64_t ticket = 0;  // see LayerPipeline::BeginTakeover
  };
  // Without peers, or memory for it, the layers get fresh factors at once.
  static void Start(std::shared_ptr<SessionContext> session, std::vector<Heir> heirs);
  ~FactorTakeover();

 private:
  FactorTakeover(std::shared_ptr<SessionContext> session, std::vector<Heir> heirs);
  DeviceBytes ExtraBytes() const;
  bool wanted() const;
  void Find();
  // Reads the next journal, until no layer is left or no journal.
  void ReadNext();
  // Makes the next of the states durable, until there is none.
  void KeepNext();
  void Adopt(uint32_t layer, PeerFactorState factors, uint64_t release);
  void NoteAdopted();
  // The layers that are left get fresh ones.
  void GiveUp(const std::set<uint32_t>& layers, TakeoverOutcome outcome, const absl::Status& why);
  std::set<uint32_t> left() const;

  const std::shared_ptr<SessionContext> session_;
  PeerFactors* const peers_;
  const absl::Time began_;
  DeviceBytes extra_bytes_;

  // Used by one job at a time.
  std::map<uint32_t, Heir> heirs_;  // that have got nothing yet
  std::map<uint32_t, absl::Status> damaged_;
  std::vector<std::unique_ptr<PeerJournal>> journals_;
  size_t next_journal_ = 0;
  int attempts_ = 0;
  std::vector<std::pair<uint32_t, PeerFactorState>> built_;
  int64_t adopted_ = 0;  // of the journal before next_journal_
};

}  // namespace precondor
