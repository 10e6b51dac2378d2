// SPDX-License-Identifier: Apache-2.0
// Records to write down.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/core/api/shard_journal.h"

namespace precondor::recovery {

inline InstallRecord MakeInstall(uint64_t session_id, uint64_t epoch = 1) {
  SessionInstall install;
  install.session_id = session_id;
  install.epoch = epoch;
  install.spec.name = "job" + std::to_string(session_id);
  install.spec.world_size = 2;
  install.spec.sketches = 1;
  install.spec.layers = {{"a", 2, 3, false}, {"b", 3, 2, true}};
  install.layers = {0, 1};
  install.members = {{.rank = 0, .incarnation = 5}, {.rank = 1, .incarnation = 6}};
  return {install};
}

inline UpdateRecord MakeUpdate(uint64_t session_id, uint32_t layer, uint64_t updates, size_t bytes = 3) {
  StagedContribution contribution{
      .samples = 9, .bytes = Payload(bytes, static_cast<uint8_t>(updates)), .scales = {1.0f, 0.25f}};
  return {
      .at = {.session_id = session_id, .layer = layer, .step = updates * 10, .rollback_epoch = 2, .updates = updates},
      .contributions = {std::move(contribution)}};
}

}  // namespace precondor::recovery
