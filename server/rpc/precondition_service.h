// SPDX-License-Identifier: Apache-2.0
// PreconditionService: the stream by which workers exchange frames with a shard, and what a step waits for.
#pragma once

#include <cstdint>
#include <grpcpp/grpcpp.h>
#include <string>

#include "server/core/shard/shard_data_plane.h"
#include "server/rpc/control_service.h"
#include "server/rpc/exchange_stream.h"
#include "server/rpc/payload_path.h"
#include "server/rpc/shared_regions.h"

namespace precondor::rpc {

// Implements v1.PreconditionService for a shard. Thread-safe. Lifetime: all references outlive the service.
class PreconditionService final : public ControlService {
 public:
  // `shard_generation` is 0 for a shard without a data directory, and otherwise a number that no other process of the
  // shard has. If it is not 0, each stream announces its sum with ShardDataPlane::state_generation(). `regions`
  // allocates the regions of streams from this host; null means that the shard shares no device memory. Streams may
  // share `shared_memory_bytes` of host memory.
  PreconditionService(ShardDataPlane& shard, std::string backend, uint64_t credit_bytes, uint64_t shard_generation,
                      ControlRunner& runner, TransferObserver& observer, SharedRegions* regions,
                      int64_t shared_memory_bytes);

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Exchange(grpc::CallbackServerContext* context);

  ShardDataPlane& shard_;
  const std::string backend_;
  const uint64_t credit_bytes_;
  OpenPayloads open_payloads_;
  const uint64_t shard_generation_;
  TransferObserver& observer_;
  SharedRegions* const regions_;
  SharedMemoryLimit shared_memory_;
};

}  // namespace precondor::rpc
