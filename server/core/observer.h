// SPDX-License-Identifier: Apache-2.0
// What core and the folders above it tell the outside as it happens; server/metrics turns it into Prometheus series.
#pragma once

#include "server/core/coordinator/coordinator_observer.h"
#include "server/core/layer/layer_observer.h"
#include "server/core/shard/shard_observer.h"
#include "server/core/shard/store_observer.h"
#include "server/core/transfer_observer.h"

namespace precondor {

// All of it. A part takes only the interface of what it tells. Calls are cheap, come from any thread, possibly under a
// core lock, and must not call back. Every method does nothing by default. What concerns a job may still come when it
// is no longer there: an update that was under way ends later.
class Observer : public LayerObserver,
                 public ShardObserver,
                 public StoreObserver,
                 public TransferObserver,
                 public CoordinatorObserver {};

}  // namespace precondor
