// SPDX-License-Identifier: Apache-2.0
// Notifications of core and of the folders above it. server/metrics turns them into Prometheus series.
#pragma once

#include "server/core/api/coordinator_observer.h"
#include "server/core/api/layer_observer.h"
#include "server/core/api/shard_observer.h"
#include "server/core/api/store_observer.h"
#include "server/core/api/transfer_observer.h"

namespace precondor {

// Receives all notifications; each part of the server takes only the interface of its own notifications. A call must be
// cheap, and must neither block nor call back: it comes from any thread, possibly under a lock of core. Every method
// does nothing by default. A notification about a job may arrive after the job's session has been removed, because an
// update that was under way ends later.
class Observer : public LayerObserver,
                 public ShardObserver,
                 public StoreObserver,
                 public TransferObserver,
                 public CoordinatorObserver {};

}  // namespace precondor
