// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/shard_routes.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

ShardRoutes::ShardRoutes(std::string what, size_t layers, MakeLink make_link)
    : what_(std::move(what)),
      layers_(layers),
      make_link_(std::move(make_link)),
      table_(std::make_shared<Table>(Table{.links = {}, .of_layer = std::vector<Link>(layers)})) {}

std::shared_ptr<const ShardRoutes::Table> ShardRoutes::table() const {
  MutexLock lock(mu_);
  return table_;
}

std::vector<ShardRoutes::Link> ShardRoutes::links() const {
  const std::shared_ptr<const Table> held = table();  // the current table may be replaced meanwhile
  std::vector<Link> links;
  for (const auto& [address, link] : held->links) links.push_back(link);
  return links;
}

absl::StatusOr<std::shared_ptr<ShardRoutes::Table>> ShardRoutes::MakeTable(const v1::ShardMap& map, uint64_t epoch,
                                                                           const Table& before) const {
  std::vector<const std::string*> owners(layers_, nullptr);
  for (const v1::ShardAssignment& assignment : map.assignments()) {
    for (const uint32_t layer : assignment.layers()) {
      if (layer < layers_) owners[layer] = &assignment.address();
    }
  }
  auto next = std::make_shared<Table>();
  for (size_t layer = 0; layer < layers_; ++layer) {
    if (owners[layer] == nullptr) {
      return absl::InternalError(absl::StrCat(what_, ": the shard map has no shard for layer ", layer));
    }
    Link& link = next->links[*owners[layer]];
    if (link == nullptr) {
      const auto known = before.links.find(*owners[layer]);
      link = known != before.links.end() ? known->second : make_link_(*owners[layer], epoch);
    }
    next->of_layer.push_back(link);
  }
  return next;
}

absl::Status ShardRoutes::Change(const v1::ShardMap& map, uint64_t epoch) {
  const std::shared_ptr<const Table> before = table();
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<Table> next, MakeTable(map, epoch, *before));
  MutexLock moving(move_mu_);
  for (const auto& [address, link] : before->links) link->ChangeEpoch(epoch);
  struct Move {
    Link from, to;
    std::set<uint32_t> layers;
  };
  std::vector<Move> moves;  // in the order of their first layers
  for (size_t layer = 0; layer < layers_; ++layer) {
    const Link& from = before->of_layer[layer];
    const Link& to = next->of_layer[layer];
    if (from == nullptr || from == to) continue;
    auto move = std::find_if(moves.begin(), moves.end(),
                             [&](const Move& known) { return known.from == from && known.to == to; });
    if (move == moves.end()) move = moves.insert(move, {from, to, {}});
    move->layers.insert(static_cast<uint32_t>(layer));
  }
  for (const Move& move : moves) move.to->Adopt(move.from->TakeLayers(move.layers));
  absl::Status failed;
  {
    MutexLock lock(mu_);
    table_ = next;
    failed = failed_;
  }
  // A gradient in device memory that waits for the ring at the old address goes to the new one.
  for (const auto& [address, link] : before->links) {
    if (!next->links.contains(address)) link->path().StopWaiting();
  }
  if (failed.ok()) return absl::OkStatus();
  for (const auto& [address, link] : next->links) link->Fail(failed);
  return failed;
}

absl::Status ShardRoutes::Submit(size_t layer, Outbox::Item item) {
  MutexLock staying(move_mu_);
  return table()->of_layer[layer]->Submit(std::move(item));
}

void ShardRoutes::BeginAt(uint64_t step, absl::Span<const uint64_t> factor_versions) {
  MutexLock staying(move_mu_);
  const std::shared_ptr<const Table> held = table();
  for (size_t layer = 0; layer < layers_; ++layer) {
    const uint64_t version = factor_versions.empty() ? 0 : factor_versions[layer];
    held->of_layer[layer]->BeginAt(static_cast<uint32_t>(layer), step, version);
  }
}

std::optional<uint64_t> ShardRoutes::answered_through() const {
  std::optional<uint64_t> highest;
  for (const Link& link : links()) highest = std::max(highest, link->answered_through());
  return highest;
}

ShardRoutes::Link ShardRoutes::WaitAcknowledged(absl::Time deadline) const {
  // If addresses change meanwhile, waits for the new links too.
  for (std::shared_ptr<const Table> seen; seen != table();) {
    seen = table();
    for (const auto& [address, link] : seen->links) {
      if (!link->WaitAcknowledged(deadline)) return link;
    }
  }
  return nullptr;
}

void ShardRoutes::Fail(const absl::Status& status) {
  std::shared_ptr<const Table> failing;
  {
    MutexLock lock(mu_);
    if (failed_.ok()) failed_ = status;
    failing = table_;
    // A link's destructor waits for its callbacks. This call may be one of them and hold the last reference to a
    // replaced table, so the table is kept until Clear.
    failed_tables_.push_back(table_);
    ++failing_;
  }
  for (const auto& [address, link] : failing->links) link->Fail(status);
  // A callback of the failure may destroy the worker: release the links before Clear goes on.
  failing.reset();
  MutexLock lock(mu_);
  --failing_;
  changed_.notify_all();
}

void ShardRoutes::Clear() {
  // Destroyed after the locks are released.
  std::vector<std::shared_ptr<const Table>> failed;
  std::shared_ptr<const Table> ending;
  MutexLock staying(move_mu_);
  MutexLock lock(mu_);
  changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return failing_ == 0; });
  failed = std::exchange(failed_tables_, {});
  ending = std::exchange(table_, std::make_shared<Table>(Table{.links = {}, .of_layer = std::vector<Link>(layers_)}));
}

}  // namespace precondor
