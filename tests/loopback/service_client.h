// SPDX-License-Identifier: Apache-2.0
// Clients of servers in this process: the library, a job's ranks and precondorctl.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"

#include "client/cpp/tools/ctl_commands.h"
#include "precondor/client.h"

namespace precondor {

inline std::unique_ptr<Client> ConnectTo(const std::string& address) {
  auto client = Client::Connect({.coordinator = address});
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

// Does the ranks' work at the same time, as each can wait for the others.
inline void ForEachRank(uint32_t ranks, const std::function<void(uint32_t rank)>& work) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&work, rank] { work(rank); });
  for (std::thread& thread : threads) thread.join();
}

// All ranks join at once, as each waits for the others.
inline std::vector<std::unique_ptr<Worker>> JoinAll(Client& client, const SessionSpec& spec, uint64_t incarnation = 1,
                                                    uint64_t first_step = 0) {
  std::vector<std::unique_ptr<Worker>> workers(static_cast<size_t>(spec.world_size));
  ForEachRank(static_cast<uint32_t>(spec.world_size), [&](uint32_t rank) {
    auto worker = client.Join(spec.name, {.rank = rank, .incarnation = incarnation, .first_step = first_step});
    ASSERT_TRUE(worker.ok()) << worker.status();
    workers[rank] = *std::move(worker);
  });
  return workers;
}

// Returns the text that precondorctl prints.
inline absl::StatusOr<std::string> Ctl(const std::string& address, std::vector<std::string> arguments) {
  arguments.push_back("--server=" + address);
  const auto options = ParseCtlOptions(arguments);
  if (!options.ok()) return options.status();
  const auto output = RunCtlCommand(*options);
  if (!output.ok()) return output.status();
  return output->text;
}

}  // namespace precondor
