// SPDX-License-Identifier: Apache-2.0
// AdminService: lets operators inspect and control one process of any role.
#pragma once

#include <functional>
#include <string>

#include "absl/time/time.h"

#include "precondor/v1/admin.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"
#include "server/rpc/control_service.h"

namespace precondor::rpc {

// The process that the service reports on. `shard` or `coordinator` is null if the process does not have that role.
// Lifetime: the objects outlive the service.
struct AdminSubject {
  std::string version;
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::string backend;
  Shard* shard = nullptr;
  Coordinator* coordinator = nullptr;
  std::function<absl::Duration()> uptime;
  std::function<bool()> draining;
  std::function<void(absl::Duration deadline)> begin_drain;  // zero means the server's configured deadline
};

// Implements v1.AdminService for an AdminSubject. Thread-safe.
class AdminService final : public ControlService {
 public:
  AdminService(AdminSubject subject, ControlRunner& runner);

 private:
  const AdminSubject subject_;
};

}  // namespace precondor::rpc
