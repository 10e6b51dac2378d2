// SPDX-License-Identifier: Apache-2.0
// What it costs a shard of BERT-Large's layers, and of a small GPT's with muon, to be able to come back, and how fast
// it does: two shards in this process take the same steps in turns, one with a journal on a disk, one without.
// Usage: recovery_bench --dir=DIR --json=FILE [--steps=N] [--rank=N] [--short] [--gradients]
// --gradients measures muon alone.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
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
#include "kernels/base/malloc_options.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/core/executors/thread_pool.h"
#include "server/core/shard/shard.h"
#include "server/recovery/shard_store.h"
#include "server/store/posix_file_system.h"
#include "tests/support/submit.h"

namespace precondor::recovery {
namespace {

constexpr uint64_t kSession = 1;
constexpr int64_t kHidden = 1024, kInner = 4096;
constexpr int kThreads = 2;

struct Options {
  std::string dir, json;
  int64_t steps = 40;  // of which the log holds the records in the replay
  int64_t rank = 128;
  bool is_short = false;
  bool only_gradients = false;
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
  spec.method.options["rank"] = static_cast<double>(options.rank);
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

double Since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  PRECONDOR_CHECK(!values.empty());
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
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
    const auto begin = std::chrono::steady_clock::now();
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
    return Since(begin);
  }

  // Seconds of one step of a method that learns from gradients: every layer's gradient taken in, written down,
  // answered.
  double GradientStep(const Payload& noise) {
    const auto begin = std::chrono::steady_clock::now();
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
    return Since(begin);
  }

  // Seconds that all updates took so far, summed over the threads.
  double KernelSeconds() const {
    double sum = 0;
    const auto stats = shard_->GetLayerStats(spec_.name);
    PRECONDOR_CHECK(stats.ok());
    for (const LayerStats& layer : *stats) sum += layer.update_seconds * static_cast<double>(layer.factor_version);
    return sum;
  }
  void RequestSnapshot() { PRECONDOR_CHECK(shard_->snapshots().Request(spec_.name, step_).ok()); }
  int64_t snapshots() const { return observer_.snapshots; }
  ShardStore& store() { return *store_; }
  uint64_t factor_version() const { return shard_->GetLayerStats(spec_.name)->front().factor_version; }

 private:
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

struct Row {
  std::string name, unit;
  double value = 0, limit = 0, ratio = 0;
  double target = 0;
  bool at_most = false;  // the ratio may be the target at most, otherwise at least
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
    if (options_.only_gradients) return Gradients();
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

  bool WriteRows() const {
    std::ofstream out(options_.json);
    out << "{\"rows\": [";
    for (const Row& row : rows_) {
      const bool pass = row.target == 0 || (row.at_most ? row.ratio <= row.target : row.ratio >= row.target);
      out << (&row == rows_.data() ? "\n" : ",\n") << "{\"name\": \"recovery/" << row.name
          << "\", \"value\": " << row.value << ", \"unit\": \"" << row.unit << "\", \"limit\": " << row.limit
          << ", \"ratio\": " << row.ratio << ", \"target\": " << (row.target == 0 ? "null" : absl::StrCat(row.target))
          << ", \"pass\": " << (pass ? "true" : "false") << "}";
    }
    out << "\n]}\n";
    return out.good();
  }

 private:
  std::string Data() const { return store::JoinPath(options_.dir, "data"); }

  // Steps in turns, and every now and then a snapshot beside them.
  void Live(Server& plain, Server& logged) {
    std::vector<double> without, with, ratios, beside, cuts;
    const int rounds = options_.is_short ? 1 : 12, quiet = options_.is_short ? 2 : 10;
    for (int round = 0; round < rounds; ++round) {
      for (int i = 0; i < quiet; ++i) {
        const bool first = i % 2 == 0;  // who begins changes
        const double one = (first ? plain : logged).Step(noise_);
        const double other = (first ? logged : plain).Step(noise_);
        without.push_back(first ? one : other);
        with.push_back(first ? other : one);
        ratios.push_back(with.back() / without.back());
      }
      const int64_t before = logged.snapshots();
      logged.RequestSnapshot();
      cuts.push_back(logged.Step(noise_));
      while (logged.snapshots() == before) beside.push_back(logged.Step(noise_));
    }
    constexpr double kMilli = 1e3;
    rows_.push_back({"log_step", "ms", Median(with) * kMilli, Median(without) * kMilli, Median(ratios), 1.05, true});
    rows_.push_back({"snapshot_step", "ms", Median(cuts) * kMilli, Median(with) * kMilli, Median(cuts) / Median(with)});
    if (beside.empty()) return;  // written within one step
    rows_.push_back({"snapshot_beside_step", "ms", Median(beside) * kMilli, Median(with) * kMilli,
                     Median(beside) / Median(with), 1.10, true});
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
    // What takes minutes needs no median.
    for (int i = 0; i < (options_.is_short || steps >= 500 ? 1 : 3); ++i) {
      const double begin = plain.KernelSeconds();
      for (int64_t step = 0; step < steps; ++step) plain.Step(noise_);
      updates.push_back(plain.KernelSeconds() - begin);
      const auto start = std::chrono::steady_clock::now();
      const Server back(spec_, Data());
      restored.push_back(Since(start));
      // The last step's update waits until the step before it has been asked for again, or passed over.
      PRECONDOR_CHECK(back.factor_version() + 1 == version);
    }
    rows_.push_back({absl::StrCat("replay_", steps, "_steps"), "s", Median(restored), Median(updates),
                     Median(updates) / Median(restored), 0.5, false});
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
    std::vector<double> without, with, ratios;
    const int64_t steps = options_.is_short ? 4 : options_.steps;
    for (int64_t i = 0; i < steps; ++i) {
      const bool first = i % 2 == 0;  // who begins changes
      const double one = (first ? plain : logged)->GradientStep(noise);
      const double other = (first ? logged : plain)->GradientStep(noise);
      without.push_back(first ? one : other);
      with.push_back(first ? other : one);
      ratios.push_back(with.back() / without.back());
    }
    PRECONDOR_CHECK(!logged->store().LacksGradientsSince(kSession).has_value());
    const uint64_t version = logged->factor_version();
    logged.reset();
    const auto start = std::chrono::steady_clock::now();
    const Server back(spec, Data());
    const double restored = Since(start);
    PRECONDOR_CHECK(back.factor_version() == version);
    const double live = Median(without) * static_cast<double>(steps);
    rows_.push_back({"gradient_step", "ms", Median(with) * 1e3, Median(without) * 1e3, Median(ratios), 1.10, true});
    rows_.push_back({"gradient_step_bytes", "MB", static_cast<double>(elements) * sizeof(float) / 1e6});
    rows_.push_back(
        {absl::StrCat("gradient_replay_", steps, "_steps"), "s", restored, live, live / restored, 0.3, false});
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
    rows_.push_back(
        {"snapshot_1_gb", "MB/s", megabytes / Median(ours), megabytes / plain, plain / Median(ours), 0.5, false});
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
        const auto start = std::chrono::steady_clock::now();
        LayerImage image{.at = {.session_id = kSession, .layer = layer, .step = step}, .outcomes = {}, .state = state};
        // The last one begins the writing.
        const bool last = layer + 1 == install.install.layers.size();
        snapshots.Keep(std::move(image), install, 1);
        if (!last) continue;
        snapshots.WaitIdle();
        seconds = Since(start);
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
    const auto start = std::chrono::steady_clock::now();
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | flags, 0644);
    double seconds = std::numeric_limits<double>::infinity();  // a file system without O_DIRECT
    if (fd >= 0) {
      for (size_t done = 0; done < bytes; done += kPart) {
        PRECONDOR_CHECK(write(fd, part.get(), kPart) == static_cast<ssize_t>(kPart));
      }
      PRECONDOR_CHECK(fdatasync(fd) == 0);
      seconds = Since(start);
      close(fd);
    }
    std::filesystem::remove_all(path);
    sync();
    return seconds;
  }

  const Options options_;
  const SessionSpec spec_;
  Payload noise_;
  std::vector<Row> rows_;
};

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    bool good = true;
    if (absl::ConsumePrefix(&argument, "--dir=")) {
      options.dir = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--json=")) {
      options.json = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--steps=")) {
      good = absl::SimpleAtoi(argument, &options.steps) && options.steps > 0;
    } else if (absl::ConsumePrefix(&argument, "--rank=")) {
      good = absl::SimpleAtoi(argument, &options.rank) && options.rank > 0;
    } else if (argument == "--gradients") {
      options.only_gradients = true;
    } else {
      good = argument == "--short";
      options.is_short = true;
    }
    if (!good) {
      std::cerr << "recovery_bench: bad argument " << argv[i] << "\n";
      return 2;
    }
  }
  if (options.dir.empty() || options.json.empty()) {
    std::cerr << "recovery_bench: needs --dir=DIR and --json=FILE\n";
    return 2;
  }
  std::filesystem::create_directories(options.dir);
  Bench bench(options);
  bench.Run();
  const bool written = bench.WriteRows();
  std::filesystem::remove_all(options.dir);
  return written ? 0 : 1;
}

}  // namespace
}  // namespace precondor::recovery

int main(int argc, char** argv) {
  precondor::KeepLargeBlocks();  // as the server does
  return precondor::recovery::Main(argc, argv);
}
