// SPDX-License-Identifier: Apache-2.0
// A coordinator and its shards on loopback, each the whole server as main() starts it, in this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/log.h"
#include "server/app/app.h"

namespace precondor::e2e {

class LocalService {
 public:
  // Serves when it returns, on free ports.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(int shards);

  std::string coordinator() const { return AddressOf(*coordinator_); }

 private:
  LocalService() = default;
  static std::string AddressOf(const App& app);

  NullLogger logger_;
  std::vector<std::unique_ptr<App>> shards_;
  std::unique_ptr<App> coordinator_;  // goes first
};

}  // namespace precondor::e2e
