// SPDX-License-Identifier: Apache-2.0
// PreconditionService: the stream and the unary call by which workers send gradients to a shard, and what a step waits
// for.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "precondor/v1/precondition.grpc.pb.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/exchange_stream.h"
#include "server/rpc/payload_path.h"
#include "server/rpc/shared_regions.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Implements v1.PreconditionService for a shard. Thread-safe. Lifetime: all references outlive the service.
class PreconditionService final
    : public v1::PreconditionService::WithRawCallbackMethod_Exchange<
          v1::PreconditionService::WithCallbackMethod_Precondition<
              v1::PreconditionService::WithCallbackMethod_ListMissingRanks<v1::PreconditionService::Service>>> {
 public:
  // `shard_generation` is 0 for a shard without a data directory, and otherwise a number that no other process of the
  // shard has. If it is not 0, each stream announces its sum with ShardDataPlane::state_generation(). `regions`
  // allocates the regions of streams from this host; null means that the shard shares no device memory. Streams may
  // share `shared_memory_bytes` of host memory.
  PreconditionService(ShardDataPlane& shard, std::string backend, uint64_t credit_bytes, uint64_t shard_generation,
                      ControlRunner& runner, TransferObserver& observer, SharedRegions* regions,
                      int64_t shared_memory_bytes)
      : shard_(shard),
        backend_(std::move(backend)),
        credit_bytes_(credit_bytes),
        open_payloads_(credit_bytes),
        shard_generation_(shard_generation),
        runner_(runner),
        observer_(observer),
        regions_(regions),
        shared_memory_(shared_memory_bytes) {
    constexpr absl::string_view kPrecondition = "PreconditionService/Precondition";
    constexpr absl::string_view kListMissingRanks = "PreconditionService/ListMissingRanks";
    MarkMethodCallback(MethodIndex(kPrecondition), BoundedHandler<v1::PreconditionRequest, v1::PreconditionResponse>(
                                                       runner, kPrecondition, RefuseGrowth,
                                                       std::bind_front(&PreconditionService::Precondition, this)));
    MarkMethodCallback(MethodIndex(kListMissingRanks),
                       BoundedHandler<v1::ListMissingRanksRequest, v1::ListMissingRanksResponse>(
                           runner, kListMissingRanks, WithinBudget(runner, kListMissingRanks),
                           std::bind_front(&PreconditionService::ListMissingRanks, this)));
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Exchange(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Precondition(grpc::CallbackServerContext* context, const v1::PreconditionRequest* request,
                                         v1::PreconditionResponse* response) override;
  grpc::ServerUnaryReactor* ListMissingRanks(grpc::CallbackServerContext* context,
                                             const v1::ListMissingRanksRequest* request,
                                             v1::ListMissingRanksResponse* response) override;

 private:
  // Calls of a step's ranks wait for each other: their payloads are counted as those of streams are, once they are
  // known to belong to the session.
  static absl::StatusOr<std::function<void()>> RefuseGrowth(uint64_t encoded, uint64_t decoded);

  ShardDataPlane& shard_;
  const std::string backend_;
  const uint64_t credit_bytes_;
  OpenPayloads open_payloads_;
  const uint64_t shard_generation_;
  ControlRunner& runner_;
  TransferObserver& observer_;
  SharedRegions* const regions_;
  SharedMemoryLimit shared_memory_;
};

}  // namespace precondor::rpc
