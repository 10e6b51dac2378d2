// SPDX-License-Identifier: Apache-2.0
#include "server/plane_transports.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/local_collective.h"
#include "kernels/cuda/nccl_module.h"

namespace precondor {
namespace {

// Transport for ranks on this host.
PlaneTransport LocalTransport() {
  return {.name = "local",
          .open = []() -> absl::StatusOr<PlaneTransport::Rendezvous> {
            PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<LocalRendezvous> rendezvous, LocalRendezvous::Start());
            const std::string unique_id = rendezvous->unique_id();
            return PlaneTransport::Rendezvous{unique_id, std::shared_ptr<LocalRendezvous>(std::move(rendezvous))};
          },
          .join = &MakeLocalCollective};
}

// Transport for ranks on any host, each with a CUDA device.
PlaneTransport NcclTransport(int device) {
  return {.name = "nccl",
          .open = []() -> absl::StatusOr<PlaneTransport::Rendezvous> {
            PRECONDOR_ASSIGN_OR_RETURN(std::string unique_id, LoadNewNcclId());
            return PlaneTransport::Rendezvous{std::move(unique_id), nullptr};
          },
          .join =
              [device](absl::string_view unique_id, int rank, int size, absl::Duration timeout,
                       const std::atomic<bool>* give_up) {
                return LoadHostNcclCollective(unique_id, rank, size, {.device = device, .give_up = give_up}, timeout);
              }};
}

}  // namespace

absl::StatusOr<PlaneTransport> MakePlaneTransport(const ServerConfig& config) {
  if (config.plane_transport == "local") return LocalTransport();
  PRECONDOR_RETURN_IF_ERROR(FindNccl());
  return NcclTransport(static_cast<int>(config.plane_device));
}

}  // namespace precondor
