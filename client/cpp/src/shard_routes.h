// SPDX-License-Identifier: Apache-2.0
// Knows which link carries which layer, and moves layers to a new link when the address of their shard changes.
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

// Routes contributions to the links of their layers. Thread-safe. Only one thread at a time calls Change, and not a
// thread of a link. Lock order: move_mu_, a link's lock, mu_. Change holds move_mu_ while it waits for a stream to end,
// so code that streams call must not take it.
class ShardRoutes {
 public:
  using Link = std::shared_ptr<ShardLink>;
  using MakeLink = std::function<Link(const std::string& address, uint64_t epoch)>;
  // `what` begins the messages of errors.
  ShardRoutes(std::string what, size_t layers, MakeLink make_link);

  // Enters `epoch` with the shards of `map`: keeps links to shards that are in both maps, makes new ones, and moves
  // unanswered contributions with their layers. Returns INTERNAL, with nothing changed, if the map has no shard for a
  // layer.
  absl::Status Change(const v1::ShardMap& map, uint64_t epoch);
  // The highest step of any layer whose gradient has been answered; nullopt if there is none.
  std::optional<uint64_t> answered_through() const;
  // Calls Outbox::BeginAt for every layer, with its version, or 0 if there are none.
  void BeginAt(uint64_t step, absl::Span<const uint64_t> factor_versions);
  // Current link of the layer; null before the first Change.
  Link of_layer(size_t layer) const { return table()->of_layer[layer]; }
  // Submits to the layer's link; see ShardLink::Submit.
  absl::Status Submit(size_t layer, Outbox::Item item);
  // Waits until the contributions of every link are acknowledged. Returns null, or the first link that has
  // unacknowledged ones at `deadline`.
  Link WaitAcknowledged(absl::Time deadline) const;
  std::vector<Link> links() const;
  // Fails every current and later link. May be called on any thread, because it never destroys a link.
  void Fail(const absl::Status& status);
  // Destroys all links once running calls of Fail have released them. No hook is called afterwards.
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

  // Held while a contribution is routed and while the table changes, so that a contribution uses one table.
  Mutex move_mu_;
  mutable Mutex mu_;
  std::shared_ptr<const Table> table_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<const Table>> failed_tables_ ABSL_GUARDED_BY(mu_);  // kept until Clear
  int failing_ ABSL_GUARDED_BY(mu_) = 0;  // running calls of Fail that hold links
  CondVar changed_;
};

}  // namespace precondor
