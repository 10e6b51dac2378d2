// SPDX-License-Identifier: Apache-2.0
// Gradients in device memory, from a worker in this process to a server in another, both with the CUDA backend as the
// host runs it: the ring is memory that the two share in earnest.
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "precondor/client.h"
#include "tests/support/child_process.h"
#include "tests/support/normal_floats.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

const std::vector<std::pair<int64_t, int64_t>> kShapes = {{5, 7}, {300, 200}, {16, 3}};
constexpr uint64_t kSteps = 4;

SessionSpec Spec(const std::string& name) {
  SessionSpec spec;
  spec.name = name;
  spec.seed = 5;
  spec.world_size = 1;
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.gradient_dtype = DType::kF32;
  spec.inv_freq = 2;
  spec.warmup_steps = 1;
  spec.method.name = "mkor";
  for (const auto& [d_out, d_in] : kShapes) {
    spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
  }
  return spec;
}

uint64_t SeedOf(uint64_t step, size_t layer) { return step * 1000 + layer * 100; }

std::vector<float> Gradient(uint64_t step, size_t layer) {
  return Normal(kShapes[layer].first * kShapes[layer].second, SeedOf(step, layer));
}

class DevicePlaneTest : public ::testing::Test {
 protected:
  // At the socket `name` in the test's folder.
  std::unique_ptr<ChildProcess> StartServer(const std::vector<std::string>& more, const std::string& name = "s",
                                            const std::string& threads = "2", const std::string& variable = "NONE=") {
    std::vector<std::string> arguments = {"/usr/bin/env",        variable,
                                          PRECONDOR_SERVER,      "--listen=" + Address(name),
                                          "--backend=cuda",      "--log-level=warning",
                                          "--threads=" + threads};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return std::make_unique<ChildProcess>(arguments);
  }
  std::string Address(const std::string& name = "s") const { return "unix:" + folder_.path() + "/" + name; }

  std::unique_ptr<Worker> Join(const SessionSpec& spec, const std::string& name = "s", ClientOptions options = {}) {
    options.coordinator = Address(name);
    options.connect_timeout = absl::Seconds(60);
    auto client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    const auto opened = (*client)->OpenSession(spec);
    EXPECT_TRUE(opened.ok()) << opened.status();
    auto worker = (*client)->Join(spec.name, {});
    EXPECT_TRUE(worker.ok()) << worker.status();
    clients_.push_back(*std::move(client));
    return *std::move(worker);
  }

  static void SendStatistics(Worker& worker, uint64_t step) {
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      if (!worker.NeedsStatistics(step, index)) continue;
      const auto [d_out, d_in] = kShapes[layer];
      const std::vector<float> a = Normal(d_in, SeedOf(step, layer) + 50), g = Normal(d_out, SeedOf(step, layer) + 60);
      EXPECT_TRUE(
          worker
              .SendStatistics(step, index, ConstMatrixView(a.data(), 1, d_in), ConstMatrixView(g.data(), 1, d_out), 10)
              .ok());
    }
  }

  // Steps [first, last) with gradients that lie on the device, or the host; preconditioned in place. By step and layer.
  static std::vector<std::vector<float>> Run(Worker& worker, uint64_t first, uint64_t last, bool on_device) {
    std::vector<std::vector<float>> results;
    for (uint64_t step = first; step < last; ++step) {
      SendStatistics(worker, step);
      const size_t begin = results.size();
      for (size_t layer = 0; layer < kShapes.size(); ++layer) results.push_back(Gradient(step, layer));
      std::vector<PreconditionFuture> futures;
      for (size_t layer = 0; layer < kShapes.size(); ++layer) {
        const auto [d_out, d_in] = kShapes[layer];
        float* const data = results[begin + layer].data();
        const int64_t index = static_cast<int64_t>(layer);
        const DeviceTensor tensor{.data = data, .rows = d_out, .cols = d_in, .stride = d_in};
        const MatrixView view(data, d_out, d_in);
        futures.push_back(on_device ? worker.Precondition(step, index, {tensor, tensor}, 10)
                                    : worker.Precondition(step, index, {view, view}, 10));
      }
      for (const PreconditionFuture& future : futures) {
        const auto result = future.Wait();
        EXPECT_TRUE(result.ok() && result->decision == Decision::kPreconditioned)
            << result.status() << " " << (result.ok() ? result->reason : "");
      }
      const auto directive = worker.ReportStep(step, 1.0, 10, true, 0.1).Wait();
      EXPECT_TRUE(directive.ok()) << directive.status();
    }
    EXPECT_TRUE(worker.Flush().ok());
    return results;
  }

  // The file in which this process counts its waits from the first use of a device on.
  static std::string WaitsOfWorkers() {
    static const TempDir folder;
    return folder.path() + "/waits";
  }
  static void SetUpTestSuite() { ASSERT_EQ(setenv("CUDA_HOST_WAITS", WaitsOfWorkers().c_str(), 1), 0); }

  const TempDir folder_;
  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(DevicePlaneTest, GradientsStayInTheDevicesMemory) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  const auto on_device = Join(Spec("device"));
  EXPECT_TRUE(on_device->DevicePlaneStatus(0, 0).ok()) << "nothing speaks against it so far";
  const auto results = Run(*on_device, 0, kSteps, true);
  EXPECT_TRUE(on_device->DevicePlaneStatus(0, 0).ok()) << on_device->DevicePlaneStatus(0, 0);
  EXPECT_EQ(on_device->DevicePlaneStatus(0, 99).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(on_device->DevicePlaneStatus(3, 0).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(on_device->status().device_plane.in_ring, static_cast<int64_t>(kSteps * kShapes.size()));
  EXPECT_EQ(on_device->status().device_plane.over_socket, 0) << on_device->status().device_plane.reason;
  EXPECT_EQ(on_device->status().traffic.gradient_bytes, 0);
  EXPECT_EQ(on_device->status().traffic.result_bytes, 0);
  // The same to the bit as by way of the host.
  const auto on_host = Join(Spec("host"));
  EXPECT_EQ(results, Run(*on_host, 0, kSteps, false));
  EXPECT_GT(on_host->status().traffic.gradient_bytes, 0);
}

// The count of a program that has loaded the host's CUDA with CUDA_HOST_WAITS=`path`.
int64_t WaitsIn(const std::string& path) {
  int64_t waits = 0;
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&waits), sizeof(waits));
  return waits;
}

TEST_F(DevicePlaneTest, AStepOfManyLayersWaitsAFewTimes) {
  constexpr int64_t kLayers = 144;
  const std::string of_server = folder_.path() + "/server", of_worker = WaitsOfWorkers();
  ASSERT_EQ(setenv("CUDA_HOST_WAITS", of_server.c_str(), 1), 0);
  const auto server = StartServer({"--device-plane-bytes=64MiB"}, "s", "0");
  ASSERT_EQ(setenv("CUDA_HOST_WAITS", of_worker.c_str(), 1), 0);
  SessionSpec spec = Spec("many");
  spec.method.name = "muon";
  spec.layers.assign(kLayers, {"layer", 12, 16, false});
  for (int64_t i = 0; i < kLayers; ++i) absl::StrAppend(&spec.layers[static_cast<size_t>(i)].name, i);
  const auto worker = Join(spec);
  // Timing decides how many layers of a step meet. If each waits for itself, both processes take more than two waits a
  // layer in every step.
  constexpr int64_t kMostSteps = 20;
  int64_t steps = 0;
  bool few = false;
  while (!few && steps < kMostSteps) {
    const auto step = static_cast<uint64_t>(steps++);
    std::vector<std::vector<float>> values;
    for (int64_t i = 0; i < kLayers; ++i) values.push_back(Normal(12 * 16, static_cast<uint64_t>(i)));
    const int64_t server_before = WaitsIn(of_server), worker_before = WaitsIn(of_worker);
    std::vector<PreconditionFuture> futures;
    for (int64_t i = 0; i < kLayers; ++i) {
      const DeviceTensor tensor{.data = values[static_cast<size_t>(i)].data(), .rows = 12, .cols = 16, .stride = 16};
      futures.push_back(worker->Precondition(step, i, {tensor, tensor}, 10));
    }
    for (const PreconditionFuture& future : futures) {
      const auto result = future.Wait();
      ASSERT_TRUE(result.ok()) << result.status();
    }
    ASSERT_TRUE(worker->ReportStep(step, 1.0, 10, true, 0.1).Wait().ok());
    const int64_t by_server = WaitsIn(of_server) - server_before, by_worker = WaitsIn(of_worker) - worker_before;
    RecordProperty(absl::StrCat("waits_of_step_", step), absl::StrCat("server ", by_server, ", worker ", by_worker));
    EXPECT_GT(by_server, 0);
    EXPECT_GT(by_worker, 0);
    few = by_server < kLayers && by_worker < kLayers;
  }
  EXPECT_TRUE(few) << "the waits of each step are properties of the test";
  EXPECT_EQ(worker->status().device_plane.in_ring, steps * kLayers) << worker->status().device_plane.reason;
}

TEST_F(DevicePlaneTest, WithoutARingTheyGoThroughTheHostAndTheWorkerKnowsWhy) {
  const auto server = StartServer({});
  const auto on_device = Join(Spec("device"));
  const auto results = Run(*on_device, 0, 2, true);
  EXPECT_EQ(on_device->status().device_plane.in_ring, 0);
  EXPECT_EQ(on_device->status().device_plane.over_socket, static_cast<int64_t>(2 * kShapes.size()));
  EXPECT_THAT(on_device->status().device_plane.reason, HasSubstr("offers no ring"));
  EXPECT_THAT(std::string(on_device->DevicePlaneStatus(0, 0).message()), HasSubstr("offers no ring"));
  const auto on_host = Join(Spec("host"));
  EXPECT_EQ(results, Run(*on_host, 0, 2, false));
}

TEST_F(DevicePlaneTest, WhatARingCannotTakeGoesThroughTheHost) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  SessionSpec narrow = Spec("bf16");
  narrow.gradient_dtype = DType::kBF16;
  const auto in_bf16 = Join(narrow);
  Run(*in_bf16, 0, 1, true);
  EXPECT_EQ(in_bf16->status().device_plane.in_ring, 0);
  EXPECT_THAT(in_bf16->status().device_plane.reason, HasSubstr("gradient_dtype: expected F32"));
  EXPECT_EQ(in_bf16->DevicePlaneStatus(0, 0).message(), in_bf16->status().device_plane.reason);
}

TEST_F(DevicePlaneTest, AtOtherAddressesItIsKnownBeforehand) {
  const auto server = StartServer({"--device-plane-bytes=64MiB", "--advertise=127.0.0.1:1"});
  const auto worker = Join(Spec("tcp"));
  EXPECT_THAT(std::string(worker->DevicePlaneStatus(0, 0).message()), HasSubstr("shard 127.0.0.1:1: offers no ring"));
}

TEST_F(DevicePlaneTest, ARingThatIsTooSmallTakesWhatFits) {
  // 2 MiB at least: the second layer alone takes more.
  const auto server = StartServer({"--device-plane-bytes=1"});
  SessionSpec spec = Spec("large");
  spec.layers = {{"small", 4, 4, false}, {"large", 1024, 1024, false}};
  spec.method.name = "identity";
  const auto worker = Join(spec);
  for (const LayerSpec& layer : spec.layers) {
    std::vector<float> values = Normal(layer.d_out * layer.d_in, 3);
    const std::vector<float> sent = values;
    const DeviceTensor tensor{.data = values.data(), .rows = layer.d_out, .cols = layer.d_in, .stride = layer.d_in};
    const int64_t index = layer.name == "small" ? 0 : 1;
    const auto result = worker->Precondition(0, index, {tensor, tensor}, 1).Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(values, sent);
  }
  ASSERT_TRUE(worker->Flush().ok());
  EXPECT_EQ(worker->status().device_plane.in_ring, 1);
  EXPECT_EQ(worker->status().device_plane.over_socket, 1);
  EXPECT_THAT(worker->status().device_plane.reason, HasSubstr("no room for layer 1"));
}

TEST_F(DevicePlaneTest, AGradientThatIsNotFiniteSkipsTheStep) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  const auto worker = Join(Spec("device"));
  SendStatistics(*worker, 0);
  std::vector<float> values = Gradient(0, 0), out(values.size(), 7);
  values[3] = std::nanf("");
  const DeviceTensor gradient{.data = values.data(), .rows = 5, .cols = 7, .stride = 7};
  DeviceTensor answer = gradient;
  answer.data = out.data();
  const auto result = worker->Precondition(0, 0, {gradient, answer}, 1).Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->decision, Decision::kSkip);
  EXPECT_EQ(out, std::vector<float>(values.size(), 7)) << "nothing is written";
}

TEST_F(DevicePlaneTest, RowsMayLieApart) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  SessionSpec spec = Spec("strides");
  spec.method.name = "identity";
  const auto worker = Join(spec);
  const std::vector<float> dense = Gradient(0, 0);
  std::vector<float> wide(5 * 10, -1), out(5 * 8, -1);
  for (int64_t i = 0; i < 5; ++i) std::copy_n(dense.begin() + i * 7, 7, wide.begin() + i * 10);
  const DeviceTensor gradient{.data = wide.data(), .rows = 5, .cols = 7, .stride = 10};
  const DeviceTensor answer{.data = out.data(), .rows = 5, .cols = 7, .stride = 8};
  const auto result = worker->Precondition(0, 0, {gradient, answer}, 1).Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t j = 0; j < 7; ++j) EXPECT_EQ(out[i * 8 + j], dense[i * 7 + j]);
    EXPECT_EQ(out[i * 8 + 7], -1) << "between the rows";
  }
}

TEST_F(DevicePlaneTest, AServerThatIsKilledAndComesBackGetsWhatWasNotAnswered) {
  const std::vector<std::string> flags = {"--device-plane-bytes=64MiB", "--data-dir=" + folder_.path() + "/data"};
  auto server = StartServer(flags);
  const auto worker = Join(Spec("device"));
  auto results = Run(*worker, 0, 2, true);
  // Sent, and not answered before the step's statistics are in.
  std::vector<float> open = Gradient(2, 1);
  const DeviceTensor tensor{.data = open.data(), .rows = 300, .cols = 200, .stride = 200};
  const PreconditionFuture waiting = worker->Precondition(2, 1, {tensor, tensor}, 10);
  ASSERT_TRUE(worker->Flush().ok());
  EXPECT_EQ(worker->status().device_plane.in_ring, 7);
  EXPECT_FALSE(waiting.ready());
  server->Signal(SIGKILL);
  server = nullptr;
  server = StartServer(flags);
  SendStatistics(*worker, 2);
  const auto result = waiting.Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  // As without the interruption.
  const auto on_host = StartServer({}, "other");
  const auto undisturbed = Join(Spec("host"), "other");
  EXPECT_EQ(results, Run(*undisturbed, 0, 2, false));
  SendStatistics(*undisturbed, 2);
  std::vector<float> expected = Gradient(2, 1);
  const MatrixView view(expected.data(), 300, 200);
  ASSERT_TRUE(undisturbed->Precondition(2, 1, {view, view}, 10).Wait().ok());
  EXPECT_EQ(open, expected);
}

TEST_F(DevicePlaneTest, AShardAnswersAllAfterTheLossOfItsDevice) {
  const std::string lost = folder_.path() + "/lost";
  const auto server = StartServer({"--device-plane-bytes=64MiB"}, "s", "2", "CUDA_HOST_LOST_DEVICE=" + lost);
  const auto worker = Join(Spec("device"));
  Run(*worker, 0, 1, true);
  std::ofstream(lost + ".new") << "0\n";
  std::filesystem::rename(lost + ".new", lost);
  SendStatistics(*worker, 1);
  std::vector<float> values = Gradient(1, 0);
  const std::vector<float> sent = values;
  const DeviceTensor gradient{.data = values.data(), .rows = 5, .cols = 7, .stride = 7};
  const auto result = worker->Precondition(1, 0, {gradient, gradient}, 1).Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->decision, Decision::kIdentity);
  EXPECT_EQ(values, sent);
}

TEST_F(DevicePlaneTest, WhatAKilledWorkerHasHandedOverCountsForTheNext) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  const SessionSpec spec = Spec("device");
  const auto [rows, cols] = kShapes[1];
  {
    const auto opener = Client::Make({.coordinator = Address(), .connect_timeout = absl::Seconds(60)});
    ASSERT_TRUE(opener->WaitForServer().ok());
    ASSERT_TRUE(opener->OpenSession(spec).ok());
    ChildProcess killed({PRECONDOR_DEVICE_WORKER, Address(), spec.name, "1", absl::StrCat(rows), absl::StrCat(cols)});
    EXPECT_EQ(killed.ReadLine(), "in ring");
    killed.Signal(SIGKILL);
  }
  // The same gradient is answered as it lies there, and others under its key are not taken for it.
  const auto worker = Join(spec);
  SendStatistics(*worker, 0);
  std::vector<float> values(static_cast<size_t>(rows * cols), 0.25f);
  const DeviceTensor tensor{.data = values.data(), .rows = rows, .cols = cols, .stride = cols};
  const auto result = worker->Precondition(0, 1, {tensor, tensor}, 10).Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->decision, Decision::kPreconditioned);
  const auto undisturbed = Join(Spec("host"));
  SendStatistics(*undisturbed, 0);
  std::vector<float> expected(values.size(), 0.5f);
  const MatrixView view(expected.data(), rows, cols);
  ASSERT_TRUE(undisturbed->Precondition(0, 1, {view, view}, 10).Wait().ok());
  EXPECT_EQ(values, expected);
}

TEST_F(DevicePlaneTest, TheSlotOfAGradientThatIsAnsweredTooLateIsUsedAgain) {
  const auto server = StartServer({"--device-plane-bytes=64MiB"});
  ClientOptions options;
  options.result_timeout = absl::Seconds(10);
  const auto worker = Join(Spec("device"), "s", options);
  const auto [rows, cols] = kShapes[0];
  std::vector<float> values = Gradient(0, 0);
  const std::vector<float> sent = values;
  const DeviceTensor tensor{.data = values.data(), .rows = rows, .cols = cols, .stride = cols};
  // Not answered before the step's statistics are in, which come after the wait has ended.
  const absl::Status late = worker->Precondition(0, 0, {tensor, tensor}, 10).Wait().status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_EQ(worker->status().device_plane.in_ring, 1);
  SendStatistics(*worker, 0);
  const auto again = worker->Precondition(0, 0, {tensor, tensor}, 10).Wait();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_NE(values, sent);
  ASSERT_TRUE(worker->ReportStep(0, 1.0, 10, true, 0.1).Wait().ok());
  // Another thread of the shard writes the late answer, which may come after the second one.
  const int64_t before = worker->status().device_plane.in_ring;
  for (uint64_t step = 1; step < 1000 && worker->status().device_plane.in_ring == before; ++step) {
    SendStatistics(*worker, step);
    const std::vector<float> next = Gradient(step, 0);  // where the tensor looks
    std::copy(next.begin(), next.end(), values.begin());
    ASSERT_TRUE(worker->Precondition(step, 0, {tensor, tensor}, 10).Wait().ok());
    ASSERT_TRUE(worker->ReportStep(step, 1.0, 10, true, 0.1).Wait().ok());
  }
  EXPECT_EQ(worker->status().device_plane.in_ring, before + 1) << worker->status().device_plane.reason;
}

TEST_F(DevicePlaneTest, WorkersFollowEachOtherInLittleMemory) {
  // Room for one ring beside the session.
  const auto server = StartServer({"--device-plane-bytes=2MiB", "--memory-limit=10MiB"});
  SessionSpec spec = Spec("device");
  spec.method.name = "identity";
  spec.layers = {{"only", 4, 4, false}};
  for (uint64_t process = 0; process < 6; ++process) {
    const auto worker = Join(spec);
    std::vector<float> values = Normal(16, process);
    const DeviceTensor tensor{.data = values.data(), .rows = 4, .cols = 4, .stride = 4};
    const auto result = worker->Precondition(0, 0, {tensor, tensor}, 1).Wait();
    ASSERT_TRUE(result.ok()) << result.status();
  }
}

TEST_F(DevicePlaneTest, ASessionWhoseWorkersHaveFactorsRefusesThem) {
  const auto server = StartServer({"--device-plane-bytes=2MiB"});
  SessionSpec spec = Spec("replay");
  spec.exchange = ExchangeMode::kReplay;
  const auto worker = Join(spec);
  float value = 0;
  const DeviceTensor tensor{.data = &value, .rows = 5, .cols = 7, .stride = 7};
  const absl::Status refused = worker->Precondition(0, 0, {tensor, tensor}, 1).Wait().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("REPLAY"));
  EXPECT_THAT(std::string(worker->DevicePlaneStatus(0, 0).message()), HasSubstr("REPLAY"));
  DeviceTensor elsewhere = tensor;
  elsewhere.device = 1;
  EXPECT_EQ(worker->Precondition(0, 0, {tensor, elsewhere}, 1).Wait().status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace precondor
