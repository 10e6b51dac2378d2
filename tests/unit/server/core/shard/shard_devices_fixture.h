// SPDX-License-Identifier: Apache-2.0
// A shard with several devices, which remember the peak of their memory and fail on demand.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/methods/registry.h"
#include "server/core/device_assignment.h"
#include "server/core/reservation.h"
#include "server/core/thread_pool.h"
#include "tests/support/faulty_backend.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {

struct MemoryObserver final : Observer {
  void OnReservedBytes(int64_t reserved, int64_t capacity) override { whole = {reserved, capacity}; }
  void OnDeviceMemory(absl::string_view device, int64_t reserved, int64_t capacity) override {
    devices[std::string(device)] = {reserved, capacity};
  }
  void OnDevice(absl::string_view device, bool usable) override { usables.emplace_back(device, usable); }
  std::pair<int64_t, int64_t> whole;
  std::map<std::string, std::pair<int64_t, int64_t>> devices;
  std::vector<std::pair<std::string, bool>> usables;  // in the order in which it heard
};

class ShardDevicesFixture : public ShardFixture {
 protected:
  ~ShardDevicesFixture() override { shard = nullptr; }

  ShardDevicesFixture() {
    options.make_method = MakeMethod;
    spec.method = {.name = "mkor", .options = {}};
    spec.layers.clear();
    // No two cost the same.
    for (int64_t i = 0; i < 5; ++i) {
      spec.layers.push_back(
          {.name = std::string(1, static_cast<char>('a' + i)), .d_out = 12 + 3 * i, .d_in = 40 - i, .has_bias = false});
    }
  }

  Shard& Make(size_t count) {
    shard = nullptr;
    devices_.clear();
    std::vector<ShardDevice> devices;
    for (size_t i = 0; i < count; ++i) {
      auto& device = *devices_.emplace_back(std::make_unique<TestDevice>());
      device.cpu = MakeCpuBackend({}).value();
      device.backend = std::make_unique<FaultyBackend>(*device.cpu);
      devices.push_back({.name = absl::StrCat("test:", i), .backend = *device.backend, .executor = device.executor});
    }
    shard = std::make_unique<Shard>(options, std::move(devices), clock, logger, seen);
    return *shard;
  }
  // Layers by device, as the shard says.
  std::vector<std::vector<uint32_t>> Where() const {
    std::vector<std::vector<uint32_t>> where(devices_.size());
    const auto layers = shard->GetLayerStats("job").value();
    for (const LayerStats& layer : layers) where[layer.device].push_back(layer.layer);
    return where;
  }
  int64_t BytesOf(const std::vector<uint32_t>& layers, int parallelism = 1) const {
    const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
    return ComputeReservation(spec, methods, layers, options.window_steps, parallelism).total();
  }
  std::vector<int64_t> Reserved() const {
    std::vector<int64_t> bytes;
    for (const DeviceUse& device : shard->devices()) bytes.push_back(device.reserved_bytes);
    return bytes;
  }
  // The layers' answers to one step of all ranks.
  std::map<uint32_t, std::shared_ptr<Reply>> Step(uint64_t step) {
    std::map<uint32_t, std::shared_ptr<Reply>> replies;
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
        if (kind == ContributionKind::kStatistics && !TakesStatistics(spec, layer)) continue;
        for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
          const ContributionHeader header = Header(kind, step, rank, layer);
          replies[layer] = Send(header, Distinct(header));
          EXPECT_TRUE(replies[layer]->accepted()) << replies[layer]->ack->status();
        }
      }
    }
    return replies;
  }
  // The same where the devices work on threads.
  std::vector<absl::StatusOr<GradientResult>> StepOn(const std::vector<std::unique_ptr<ThreadPoolExecutor>>& threads,
                                                     uint64_t step) {
    std::vector<absl::StatusOr<GradientResult>> results(spec.layers.size());
    const auto taken = [](const absl::StatusOr<bool>& ack) { EXPECT_TRUE(ack.ok()) << ack.status(); };
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
        const ContributionHeader statistics = Header(ContributionKind::kStatistics, step, rank, layer);
        SubmitTo(*shard, statistics, Distinct(statistics), taken);
        const ContributionHeader gradient = Header(ContributionKind::kGradient, step, rank, layer);
        SubmitTo(*shard, gradient, Distinct(gradient), taken,
                 [&results, layer](absl::StatusOr<GradientResult> result) { results[layer] = std::move(result); });
      }
    }
    for (const auto& pool : threads) pool->Drain();
    return results;
  }
  std::vector<Payload> Answers(uint64_t step) {
    std::vector<Payload> answers;
    for (const auto& [layer, reply] : Step(step)) {
      EXPECT_EQ(reply->decision(), Decision::kPreconditioned) << layer << ": " << (*reply->result)->reason;
      answers.push_back(*(*reply->result)->bytes);
    }
    return answers;
  }

  struct TestDevice {
    std::unique_ptr<Backend> cpu;
    std::unique_ptr<FaultyBackend> backend;
    InlineExecutor executor;
  };
  std::vector<std::unique_ptr<TestDevice>> devices_;
  MemoryObserver seen;
};

}  // namespace precondor
