// SPDX-License-Identifier: Apache-2.0
// What can be done to the cluster besides what the network does to each message. To add one: write a function in
// fault_kinds.cc and a line in its table.
#pragma once

#include "absl/types/span.h"

namespace precondor::sim {

class World;

struct FaultKind {
  const char* name;
  // Now, in the middle of a run. What it breaks it mends itself after a while; World::Heal mends everything at the
  // scenario's horizon.
  void (*inflict)(World& world);
};

absl::Span<const FaultKind> FaultKinds();

}  // namespace precondor::sim
