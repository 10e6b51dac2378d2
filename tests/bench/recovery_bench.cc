// SPDX-License-Identifier: Apache-2.0
// The cost of recovery for a shard of BERT-Large's layers, and of a small GPT's with muon, and how fast
// it does: two shards in this process take the same steps in turns, one with a journal on a disk, one without.
// Usage: recovery_bench --dir=DIR --json=FILE [--steps=N] [--short]
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/process_setup.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/core/executors/thread_pool.h"
#include "server/core/shard/shard.h"
#include "server/recovery/shard_store.h"
#include "server/store/posix_file_system.h"
#include "tests/bench/bench_rows.h"
#include "tests/support/submit.h"

namespace precondor::recovery {
namespace {

constexpr uint64_t kSession = 1;
constexpr int64_t kHidden = 1024, kInner = 4096;
constexpr int kThreads = 2;

struct Options {
  std::string dir;
  int64_t steps = 40;  // of which the log holds the records in the replay
  bool is_short = false;
};

SessionSpec Spec(const Options& options) {
  SessionSpec spec;
  spec.name = "bench";
  spec.world_size = 8;
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.inv_freq = 1;
  spec.warmup_steps = 0;
  spec.method.name = "mkor";
  spec.method.options["representation"] = std::string("LOW_RANK");
  spec.method.options["rank"] = 128.0;
  for (int block = 0; block < (options.is_short ? 1 : 24); ++block) {
    for (const auto& [d_out, d_in] :
         {std::pair(kHidden, kHidden), std::pair(kHidden, kHidden), std::pair(kHidden, kHidden),
          std::pair(kHidden, kHidden), std::pair(kInner, kHidden), std::pair(kHidden, kInner)}) {
      spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
    }
  }
  return spec;
}

// The hidden layers of a GPT of 3 million parameters, whose gradients one rank sends.
SessionSpec GradientSpec(const Options& options) {
  constexpr int64_t kWidth = 256;
  SessionSpec spec;
  spec.name = "gradients";
  spec.world_size = 1;
  spec.exchange = ExchangeMode::kDelegate;
  spec.gradient_dtype = DType::kF32;
  spec.method.name = "muon";
  for (int block = 0; block < (options.is_short ? 1 : 4); ++block) {
    for (const auto& [d_out, d_in] : {std::pair(3 * kWidth, kWidth), std::pair(kWidth, kWidth),
                                      std::pair(4 * kWidth, kWidth), std::pair(kWidth, 4 * kWidth)}) {
      spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
    }
  }
  return spec;
}

class SnapshotCounter final : public Observer {
 public:
  void OnSnapshot(absl::string_view, bool written) override {
    PRECONDOR_CHECK(written);
    ++snapshots;
  }
  std::atomic<int64_t> snapshots = 0;
};

// A shard with its threads; with a journal when `dir` is not empty.
class Server {
 public:
  Server(const SessionSpec& spec, const std::string& dir) : spec_(spec), executor_(kThreads) {
    auto backend = MakeCpuBackend({});
    PRECONDOR_CHECK(backend.ok());
    backend_ = *std::move(backend);
    ShardOptions options;
    if (!dir.empty()) {
      // No snapshot comes due, so that a replay has all steps.
      store_ = std::make_unique<ShardStore>(fs_, dir, ShardLogOptions(), clock_, logger_, observer_,
                                            GradientLogOptions{.snapshot_bytes = uint64_t{1} << 40});
      options.journal = store_.get();
    }
    shard_ = std::make_unique<Shard>(options, *backend_, executor_, clock_, logger_, observer_);
    if (store_ != nullptr) {
      shard_->replay().Begin();
      PRECONDOR_CHECK(store_->Restore(*shard_).ok());
      executor_.Drain();  // the window's updates
    }
  }
  ~Server() { executor_.Drain(); }

  void Install() {
    SessionInstall install{.session_id = kSession, .epoch = 1, .spec = spec_, .layers = {}, .members = {}};
    for (uint32_t layer = 0; layer < spec_.layers.size(); ++layer) install.layers.push_back(layer);
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec_.world_size); ++rank)
      install.members.push_back({.rank = rank, .incarnation = 1});
    PRECONDOR_CHECK(shard_->Install(install).ok());
  }

  // Seconds of one step: every worker's statistics taken in, sealed, written down and applied.
  double Step(const Payload& noise) {
    return ClockSeconds([&] { MakeStep(noise); });
  }

  // Seconds of one step of a method that learns from gradients: every layer's gradient taken in, written down,
  // answered.
  double GradientStep(const Payload& noise) {
    return ClockSeconds([&] { MakeGradientStep(noise); });
  }

  // Seconds that all updates took so far, summed over the threads.
  double KernelSeconds() const {
    double sum = 0;
    const auto stats = shard_->GetLayerStats(spec_.name);
    PRECONDOR_CHECK(stats.ok());
    for (const LayerStats& layer : *stats) sum += layer.update_seconds * static_cast<double>(layer.factor_version);
    return sum;
  }
  void RequestSnapshot() {
    PRECONDOR_CHECK(shard_->snapshots().Take({.session_id = kSession, .number = step_, .step = step_}).ok());
  }
  int64_t snapshots() const { return observer_.snapshots; }
  ShardStore& store() { return *store_; }
  uint64_t factor_version() const { return shard_->GetLayerStats(spec_.name)->front().factor_version; }

 private:
  void MakeStep(const Payload& noise) {
    for (uint32_t layer = 0; layer < spec_.layers.size(); ++layer) {
      for (uint32_t rank = 0; rank < 8; ++rank) SendStatistics(layer, rank, noise);
    }
    // The answer to a step from which all ranks abstained ends the step.
    for (uint32_t layer = 0; layer < spec_.layers.size(); ++layer) {
      ContributionHeader header = Header(layer, static_cast<uint32_t>(DelegateRank(spec_, layer)));
      header.kind = ContributionKind::kGradient;
      header.abstain = true;
      SubmitTo(*shard_, header, {}, &Expect,
               [](const absl::StatusOr<GradientResult>& result) { PRECONDOR_CHECK(result.ok()); });
    }
    executor_.Drain();
    ++step_;
  }

  void MakeGradientStep(const Payload& noise) {
    for (uint32_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const LayerSpec& shape = spec_.layers[layer];
      ContributionHeader header = Header(layer, 0);
      header.kind = ContributionKind::kGradient;
      header.tensors = {{.dtype = DType::kF32, .dims = {shape.d_out, shape.d_in}, .scale = 1.0f}};
      const auto bytes = static_cast<int64_t>(sizeof(float)) * shape.d_out * shape.d_in;
      const auto first = noise.begin() + static_cast<int64_t>(sizeof(float) * ((step_ * 31 + layer) % 4096));
      SubmitTo(*shard_, header, Payload(first, first + bytes), &Expect,
               [](const absl::StatusOr<GradientResult>& result) {
                 PRECONDOR_CHECK(result.ok() && result->decision == Decision::kPreconditioned);
               });
    }
    executor_.Drain();
    ++step_;
  }

  static void Expect(const absl::StatusOr<bool>& duplicate) {
    if (!duplicate.ok()) std::cerr << duplicate.status() << "\n";
    PRECONDOR_CHECK(duplicate.ok() && !*duplicate);
  }
  ContributionHeader Header(uint32_t layer, uint32_t rank) const {
    ContributionHeader header;
    header.key = {.session_id = kSession, .epoch = 1, .step = step_, .layer = layer, .rank = rank, .incarnation = 1};
    return header;
  }
  void SendStatistics(uint32_t layer, uint32_t rank, const Payload& noise) {
    ContributionHeader header = Header(layer, rank);
    header.kind = ContributionKind::kStatistics;
    const LayerSpec& shape = spec_.layers[layer];
    header.tensors = {{.dtype = spec_.statistics_dtype, .dims = {1, shape.d_in}, .scale = 1.0f},
                      {.dtype = spec_.statistics_dtype, .dims = {1, shape.d_out}, .scale = 1.0f}};
    const size_t bytes = static_cast<size_t>((shape.d_in + shape.d_out) * ByteSize(spec_.statistics_dtype));
    // A place in the noise that differs by rank, layer and step, on an element's boundary.
    const uint64_t number = (step_ * spec_.layers.size() + layer) * 8 + rank;
    const size_t place = number * 7919 % ((noise.size() - bytes) / 4) * 4;
    const auto first = noise.begin() + static_cast<int64_t>(place);
    SubmitTo(*shard_, header, Payload(first, first + static_cast<int64_t>(bytes)), &Expect);
  }

  const SessionSpec spec_;
  store::PosixFileSystem fs_;
  RealClock clock_;
  NullLogger logger_;
  SnapshotCounter observer_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<ShardStore> store_;
  ThreadPoolExecutor executor_;
  std::unique_ptr<Shard> shard_;
  uint64_t step_ = 0;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), spec_(Spec(options)) {
    std::vector<float> values(size_t{1} << 20);
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    noise_.resize(values.size() * static_cast<size_t>(ByteSize(spec_.statistics_dtype)));
    EncodeElements(spec_.statistics_dtype, values, 1.0f, noise_.data());
  }

  void Run() {
    std::filesystem::remove_all(Data());  // of a run that was cut short
    auto plain = std::make_unique<Server>(spec_, "");
    auto logged = std::make_unique<Server>(spec_, Data());
    plain->Install();
    logged->Install();
    for (int i = 0; i < (options_.is_short ? 2 : 40); ++i) {
      plain->Step(noise_);
      logged->Step(noise_);
    }
    Live(*plain, *logged);
    Replay(*plain, std::move(logged));
    plain.reset();
    std::filesystem::remove_all(Data());
    Snapshot();
    Gradients();
  }

  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  std::string Data() const { return store::JoinPath(options_.dir, "data"); }

  // Seconds of `steps` steps without the journal and with it, in turns.
  struct Turns {
    std::vector<double> without, with;
  };
  static void AddTurns(int64_t steps, const std::function<double(Server&)>& step, Server& plain, Server& logged,
                       Turns& turns) {
    for (int64_t i = 0; i < steps; ++i) {
      for (const bool with : {i % 2 != 0, i % 2 == 0}) {  // who begins changes
        (with ? turns.with : turns.without).push_back(step(with ? logged : plain));
      }
    }
  }
  void AddStepRows(const std::string& name, const Turns& turns, double target) {
    rows_.push_back({absl::StrCat("recovery/", name), Median(turns.with) * 1e3, "ms"});
    rows_.push_back(
        {absl::StrCat("recovery/", name, "_to_plain"), MedianRatio(turns.with, turns.without), "x", 0, target, true});
  }

  // Steps in turns, and every now and then a snapshot beside them.
  void Live(Server& plain, Server& logged) {
    Turns turns;
    std::vector<double> beside, cuts;
    const int rounds = options_.is_short ? 1 : 12, quiet = options_.is_short ? 2 : 10;
    for (int round = 0; round < rounds; ++round) {
      AddTurns(
          quiet, [&](Server& server) { return server.Step(noise_); }, plain, logged, turns);
      const int64_t before = logged.snapshots();
      logged.RequestSnapshot();
      cuts.push_back(logged.Step(noise_));
      while (logged.snapshots() == before) beside.push_back(logged.Step(noise_));
    }
    AddStepRows("log_step", turns, 1.05);
    const double step = Median(turns.with);
    rows_.push_back({"recovery/snapshot_step_to_step", Median(cuts) / step, "x"});
    if (beside.empty()) return;  // written within one step
    rows_.push_back({"recovery/snapshot_beside_step_to_step", Median(beside) / step, "x", 0, 1.10, true});
  }

  // Snapshot and log, against the same number of steps' updates on one thread.
  void Replay(Server& plain, std::unique_ptr<Server> logged) {
    const int64_t before = logged->snapshots();
    logged->RequestSnapshot();
    const int64_t steps = options_.is_short ? 3 : options_.steps;
    for (int64_t i = 0; i < steps; ++i) logged->Step(noise_);
    logged->store().snapshots().WaitIdle();
    PRECONDOR_CHECK(logged->snapshots() == before + 1);
    const uint64_t version = logged->factor_version();
    logged.reset();
    std::vector<double> restored, updates;
    // A replay of minutes needs no median.
    for (int i = 0; i < (options_.is_short || steps >= 500 ? 1 : 3); ++i) {
      const double begin = plain.KernelSeconds();
      for (int64_t step = 0; step < steps; ++step) plain.Step(noise_);
      updates.push_back(plain.KernelSeconds() - begin);
      std::unique_ptr<Server> back;
      restored.push_back(ClockSeconds([&] { back = std::make_unique<Server>(spec_, Data()); }));
      // The last step's update waits until the step before it has been asked for again, or passed over.
      PRECONDOR_CHECK(back->factor_version() + 1 == version);
    }
    rows_.push_back({absl::StrCat("recovery/replay_", steps, "_steps"), Median(restored), "s", Median(updates), 0.5});
  }

  // Steps of muon in turns, and a replay of so many steps against the time that they took.
  void Gradients() {
    const SessionSpec spec = GradientSpec(options_);
    int64_t elements = 0, largest = 0;
    for (const LayerSpec& layer : spec.layers) {
      elements += layer.d_out * layer.d_in;
      largest = std::max(largest, layer.d_out * layer.d_in);
    }
    std::vector<float> values(static_cast<size_t>(largest) + 4096);
    std::mt19937_64 random(2);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    Payload noise(values.size() * sizeof(float));
    std::memcpy(noise.data(), values.data(), noise.size());

    auto plain = std::make_unique<Server>(spec, "");
    auto logged = std::make_unique<Server>(spec, Data());
    plain->Install();
    logged->Install();
    Turns turns;
    const int64_t steps = options_.is_short ? 4 : options_.steps;
    AddTurns(
        steps, [&](Server& server) { return server.GradientStep(noise); }, *plain, *logged, turns);
    PRECONDOR_CHECK(!logged->store().LacksGradientsSince(kSession).has_value());
    const uint64_t version = logged->factor_version();
    logged.reset();
    std::unique_ptr<Server> back;
    const double restored = ClockSeconds([&] { back = std::make_unique<Server>(spec, Data()); });
    PRECONDOR_CHECK(back->factor_version() == version);
    back.reset();
    AddStepRows("gradient_step", turns, 1.10);
    rows_.push_back({"recovery/gradient_step_bytes", static_cast<double>(elements) * sizeof(float) / 1e6, "MB"});
    rows_.push_back({absl::StrCat("recovery/gradient_replay_", steps, "_steps"), restored, "s",
                     Median(turns.without) * static_cast<double>(steps), 0.3});
    std::filesystem::remove_all(Data());
  }

  // A session's state of 1 GB, as the shard's snapshot writer gets it, against the same bytes in one file, in the way
  // of the two that this disk is faster in.
  void Snapshot() {
    const size_t layers = 144, layer_bytes = (options_.is_short ? size_t{32} << 20 : size_t{1} << 30) / layers;
    const std::string state(layer_bytes, 'x');
    InstallRecord install;
    install.install.session_id = kSession;
    install.install.epoch = 1;
    install.install.spec = spec_;
    for (uint32_t layer = 0; layer < layers; ++layer) install.install.layers.push_back(layer);
    std::vector<double> ours, cached, direct;
    for (uint64_t i = 0; i < (options_.is_short ? 1 : 5); ++i) {
      ours.push_back(WriteSnapshot(install, state, i + 1));
      cached.push_back(WritePlain(layers * layer_bytes, 0));
      direct.push_back(WritePlain(layers * layer_bytes, O_DIRECT));
    }
    const double plain = std::min(Median(cached), Median(direct));
    const double megabytes = static_cast<double>(layers * layer_bytes) / 1e6;
    rows_.push_back({"recovery/snapshot_1_gb", megabytes / Median(ours), "MB/s"});
    rows_.push_back({"recovery/snapshot_1_gb_of_plain", plain / Median(ours), "of plain", 0, 0.5});
  }
  double WriteSnapshot(const InstallRecord& install, const std::string& state, uint64_t step) {
    store::PosixFileSystem fs;
    RealClock clock;
    NullLogger logger;
    SnapshotCounter observer;
    const std::string dir = store::JoinPath(options_.dir, "snapshots");
    double seconds = 0;
    {
      ShardSnapshots snapshots(fs, dir, clock, logger, observer);
      PRECONDOR_CHECK(snapshots.Open([](const SnapshotImages&) {}, [](const SnapshotImages&, uint64_t) {}).ok());
      for (const uint32_t layer : install.install.layers) {
        LayerImage image{.at = {.session_id = kSession, .layer = layer, .step = step}, .outcomes = {}, .state = state};
        // The last one begins the writing.
        seconds = ClockSeconds([&] {
          snapshots.Keep(std::move(image), install, 1);
          if (layer + 1 == install.install.layers.size()) snapshots.WaitIdle();
        });
      }
    }
    PRECONDOR_CHECK(observer.snapshots == 1);
    std::filesystem::remove_all(dir);
    sync();  // the next run's disk is idle
    return seconds;
  }
  // Without O_DIRECT through the page cache. Seconds.
  double WritePlain(size_t bytes, int flags) {
    constexpr size_t kPart = size_t{1} << 20, kBlock = 4096;
    const std::string path = store::JoinPath(options_.dir, "plain");
    const std::unique_ptr<char, decltype(&std::free)> part(static_cast<char*>(std::aligned_alloc(kBlock, kPart)),
                                                           &std::free);
    std::memset(part.get(), 'x', kPart);
    double seconds = std::numeric_limits<double>::infinity();  // a file system without O_DIRECT
    const auto write_all = [&] {
      const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | flags, 0644);
      if (fd < 0) return false;
      for (size_t done = 0; done < bytes; done += kPart) {
        PRECONDOR_CHECK(write(fd, part.get(), kPart) == static_cast<ssize_t>(kPart));
      }
      PRECONDOR_CHECK(fdatasync(fd) == 0 && close(fd) == 0);
      return true;
    };
    bool written = false;
    const double taken = ClockSeconds([&] { written = write_all(); });
    if (written) seconds = taken;
    std::filesystem::remove_all(path);
    sync();
    return seconds;
  }

  const Options options_;
  const SessionSpec spec_;
  Payload noise_;
  std::vector<BenchRow> rows_;
};

}  // namespace
}  // namespace precondor::recovery

int main(int argc, char** argv) {
  precondor::KeepLargeBlocks();  // as the server does
  precondor::recovery::Options options;
  return precondor::BenchMain(
      argc, argv,
      [&](bool is_short) {
        PRECONDOR_CHECK(!options.dir.empty());
        options.is_short = is_short;
        std::filesystem::create_directories(options.dir);
        precondor::recovery::Bench bench(options);
        bench.Run();
        std::filesystem::remove_all(options.dir);
        return bench.rows();
      },
      [&](absl::string_view argument) {
        if (absl::ConsumePrefix(&argument, "--steps=")) {
          return absl::SimpleAtoi(argument, &options.steps) && options.steps > 0;
        }
        if (!absl::ConsumePrefix(&argument, "--dir=")) return false;
        options.dir = std::string(argument);
        return true;
      });
}
