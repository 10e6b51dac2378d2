// SPDX-License-Identifier: Apache-2.0
// What other shards have written down, for a shard that is given layers of one that is lost. Core does no file I/O.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

class PeerReplay;

// A layer's factors, from such a journal.
struct PeerFactorState {
  std::unique_ptr<LayerState> state;
  uint64_t began = 0;        // see LayerStep: what that shard knew of it
  uint64_t next_update = 0;  // the first step since then of which no statistics are in them
};

// One shard's journal, as it lies there: nothing of it is changed. Its owner may be gone, or be writing to it.
class PeerJournal {
 public:
  virtual ~PeerJournal() = default;
  virtual const std::string& name() const = 0;  // for the log
  // Hands over the newest whole image of each wanted layer, and the session's records in order, until
  // `into` has no use for more. Errors, after which `into` is worth nothing: DataLoss with the file; those of the disk.
  virtual absl::Status Read(PeerReplay& into) = 0;
  // See ShardJournal.
  virtual absl::StatusOr<std::string> ReadFactors(uint64_t release, uint32_t layer) = 0;
};

// Thread-safe.
class PeerFactors {
 public:
  virtual ~PeerFactors() = default;
  // Has the one thread for this work run a job, after those before it. When the process ends, what has not begun is
  // dropped.
  virtual void Post(std::function<void()> job) = 0;
  // True once the process ends: what is under way may be left.
  virtual bool stopping() const = 0;
  // The journals that know any of the layers, that of the last owner first. Those that cannot be read are logged.
  virtual std::vector<std::unique_ptr<PeerJournal>> Find(uint64_t session_id, const std::set<uint32_t>& layers) = 0;
};

}  // namespace precondor
