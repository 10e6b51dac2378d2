// SPDX-License-Identifier: Apache-2.0
// Which link carries which layer. Layers go to other shards in a later epoch; what has not been answered goes with
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "client/cpp/src/outbox.h"
#include "client/cpp/src/shard_link.h"
#include "kernels/base/mutex.h"
#include "precondor/v1/session.pb.h"

namespace precondor {

// Thread-safe; Change is called by one thread at a time, and not on one of a link's. Lock order: move_mu_, a link's
// lock, mu_. move_mu_ is held while Change waits for a stream's end: what streams call must not need it.
class ShardRoutes {
 public:
  using Link = std::shared_ptr<ShardLink>;
  using MakeLink = std::function<Link(const std::string& address, uint64_t epoch)>;
  // `what`: for messages.
  ShardRoutes(std::string what, size_t layers, MakeLink make_link);

  // Goes on in `epoch` with the shards of `map`: links that are in both stay, new ones are made. Internal when the map
  // has a layer on no shard, and then nothing has changed.
  absl::Status Change(const v1::ShardMap& map, uint64_t epoch);
  // The highest step whose gradient has been answered, in any layer; nullopt: none.
  std::optional<uint64_t> answered_through() const;
  // See Outbox, for every layer.
  void BeginAt(uint64_t step);
  // The layer's link, now.
  Link of_layer(size_t layer) const { return table()->of_layer[layer]; }
  // To the layer's link; see ShardLink::Submit.
  absl::Status Submit(size_t layer, Outbox::Item item);
  // Waits until every link's contributions are acknowledged; the first that has any left at `deadline`, or null.
  Link WaitAcknowledged(absl::Time deadline) const;
  std::vector<Link> links() const;
  // Fails every link, also those still to come. On any thread: no link ends in it.
  void Fail(const absl::Status& status);
  // Ends all links, once calls of Fail under way have let go of them: no hook is called afterwards.
  void Clear();

 private:
  struct Table {
    std::map<std::string, Link> links;  // by address
    std::vector<Link> of_layer;
  };
  std::shared_ptr<const Table> table() const;
  absl::StatusOr<std::shared_ptr<Table>> MakeTable(const v1::ShardMap& map, uint64_t epoch, const Table& before) const;

  const std::string what_;
  const size_t layers_;
  const MakeLink make_link_;

  Mutex move_mu_;  // no contribution comes between two tables
  mutable Mutex mu_;
  std::shared_ptr<const Table> table_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<const Table>> failed_tables_ ABSL_GUARDED_BY(mu_);  // until Clear
  int failing_ ABSL_GUARDED_BY(mu_) = 0;                                          // calls of Fail that hold links
  CondVar changed_;
};

}  // namespace precondor
