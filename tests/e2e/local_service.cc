// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/local_service.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::e2e {

std::string LocalService::AddressOf(const App& app) { return absl::StrCat("127.0.0.1:", app.port()); }

absl::StatusOr<std::unique_ptr<LocalService>> LocalService::Start(int shards) {
  std::unique_ptr<LocalService> service(new LocalService());
  ServerConfig config;
  config.listen = {"127.0.0.1:0"};
  config.role = ServerRole::kShard;
  ServerConfig coordinator = config;
  coordinator.role = ServerRole::kCoordinator;
  for (int i = 0; i < shards; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<App> shard, App::Start(config, service->logger_));
    coordinator.shards.push_back(AddressOf(*shard));
    service->shards_.push_back(std::move(shard));
  }
  PRECONDOR_ASSIGN_OR_RETURN(service->coordinator_, App::Start(coordinator, service->logger_));
  return service;
}

}  // namespace precondor::e2e
