// SPDX-License-Identifier: Apache-2.0
// Rows of a server under load: the families statistics/ and memory/, jobs/, or layers/, of tests/bench/run.sh.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <iostream>
#include <malloc.h>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "client/cpp/src/control.h"
#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/perf.h"
#include "client/cpp/tools/perf_training.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr double kTarget = 2;                              // greatest ratio of p99 beside the large job to p99 alone
constexpr int kTurns = 4;                                  // turns alone, and turns beside the large job
constexpr absl::Duration kPause = absl::Milliseconds(10);  // between two steps of the small job

// A job of one rank, with layers of one shape. Its method is muon, which has no statistics and much arithmetic for each
// byte.
class Job {
 public:
  static absl::StatusOr<std::unique_ptr<Job>> Begin(const PerfServer& server, const std::string& name, int layers,
                                                    int64_t side) {
    auto job = std::unique_ptr<Job>(new Job(side));
    SessionSpec spec;
    spec.name = absl::StrCat("perf-jobs-", name);
    spec.method.name = "muon";
    for (int layer = 0; layer < layers; ++layer) spec.layers.push_back({absl::StrCat("l", layer), side, side, false});
    ClientOptions options;
    options.coordinator = server.address();
    PRECONDOR_ASSIGN_OR_RETURN(job->client_, Client::Connect(options));
    PRECONDOR_RETURN_IF_ERROR(job->client_->OpenSession(spec).status());
    PRECONDOR_ASSIGN_OR_RETURN(job->worker_, job->client_->Join(spec.name, {0, 0}));
    job->gradients_.resize(layers);
    for (size_t layer = 0; layer < job->gradients_.size(); ++layer) {
      std::vector<float>& gradient = job->gradients_[layer];
      gradient.resize(side * side);
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>((i * 37 + layer) % 64) / 32 - 1;
    }
    job->answers_ = job->gradients_;
    return job;
  }

  // Runs a step. Returns the milliseconds until all layers are answered.
  absl::StatusOr<double> Step() {
    const absl::Time start = MonotonicNow();
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < gradients_.size(); ++layer) {
      futures.push_back(worker_->Precondition(
          step_, static_cast<int64_t>(layer),
          {ConstMatrixView(gradients_[layer].data(), side_, side_), MatrixView(answers_[layer].data(), side_, side_)},
          1));
    }
    for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    const double milliseconds = absl::ToDoubleMilliseconds(MonotonicNow() - start);
    PRECONDOR_RETURN_IF_ERROR(worker_->ReportStep(step_++, 1, 1, true, 0.1).Wait().status());
    return milliseconds;
  }

  absl::Status End() {
    const std::string name = worker_->session().spec.name;
    worker_.reset();
    return client_->CloseSession(name).status();
  }

 private:
  explicit Job(int64_t side) : side_(side) {}

  const int64_t side_;
  std::vector<std::vector<float>> gradients_, answers_;  // must outlive worker_
  std::unique_ptr<Client> client_;
  std::unique_ptr<Worker> worker_;
  uint64_t step_ = 0;
};

// Runs `steps` steps and appends their milliseconds.
absl::Status AddSteps(Job& job, int64_t steps, std::vector<double>& milliseconds) {
  for (int64_t step = 0; step < steps; ++step) {
    PRECONDOR_ASSIGN_OR_RETURN(milliseconds.emplace_back(), job.Step());
    absl::SleepFor(kPause);
  }
  return absl::OkStatus();
}

// Like AddSteps, while `other` makes steps. Adds the number of its steps to `others`.
absl::Status AddStepsBeside(Job& job, Job& other, int64_t steps, std::vector<double>& milliseconds, int64_t& others) {
  std::atomic<bool> stop = false;
  absl::Status of_other;
  std::thread thread([&] {
    for (; !stop && of_other.ok(); ++others) of_other = other.Step().status();
  });
  const absl::Status status = AddSteps(job, steps, milliseconds);
  stop = true;
  thread.join();
  return status.ok() ? of_other : status;
}

// Measures the steps of a small job, in turns alone and beside a large job whose layers keep the server's threads busy.
absl::StatusOr<std::vector<PerfRow>> MeasureJobs(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Job> small, Job::Begin(server, "small", 4, 64));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Job> large, Job::Begin(server, "large", 16, 384));
  std::vector<double> first, alone, beside;
  PRECONDOR_RETURN_IF_ERROR(AddSteps(*small, options.warmup, first));
  PRECONDOR_RETURN_IF_ERROR(large->Step().status());
  int64_t of_large = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    PRECONDOR_RETURN_IF_ERROR(AddSteps(*small, options.steps, alone));
    PRECONDOR_RETURN_IF_ERROR(AddStepsBeside(*small, *large, options.steps, beside, of_large));
  }
  PRECONDOR_RETURN_IF_ERROR(small->End());
  PRECONDOR_RETURN_IF_ERROR(large->End());
  std::vector<PerfRow> rows;
  for (const auto& [name, fraction] : {std::pair("p50", 0.5), std::pair("p99", 0.99)}) {
    const double limit = Percentile(alone, fraction), value = Percentile(beside, fraction);
    PerfRow row{absl::StrCat("jobs/small_beside_large_", name), value, "ms", limit, value / limit};
    if (fraction > 0.5) {
      row.target = kTarget * limit;
      row.pass = value <= *row.target;
    }
    rows.push_back(row);
  }
  rows.push_back({"jobs/large_steps_meanwhile", static_cast<double>(of_large), "steps"});
  return rows;
}

constexpr double kMilli = 1e3;

int64_t Widest(const std::vector<LayerSpec>& layers) {
  int64_t widest = 0;
  for (const LayerSpec& layer : layers) widest = std::max({widest, layer.d_in, layer.d_out});
  return widest;
}

SessionSpec Spec(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method,
                 int64_t factor_rank) {
  SessionSpec spec;
  spec.name = absl::StrCat("perf-", method, "-", factor_rank);
  spec.world_size = static_cast<int32_t>(options.workers);
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.inv_freq = 1;
  spec.warmup_steps = 0;
  spec.method.name = method;
  if (method == "mkor") {
    spec.method.options["representation"] = std::string("LOW_RANK");
    spec.method.options["rank"] = static_cast<double>(factor_rank);
  }
  spec.layers = layers;
  return spec;
}

// The server's counters of a session, summed over layers.
struct Counters {
  double update_seconds = 0;
  int64_t state_bytes = 0;
};

absl::StatusOr<Counters> ReadCounters(ControlClient& control, const std::string& session) {
  v1::GetLayerStatsRequest request;
  request.set_session(session);
  Canceller canceller;
  PRECONDOR_ASSIGN_OR_RETURN(const auto response, control.Call<v1::GetLayerStatsResponse>(request, canceller));
  Counters counters;
  for (const v1::LayerStats& layer : response.layers()) {
    counters.state_bytes += static_cast<int64_t>(layer.state_bytes());
    counters.update_seconds += layer.update_seconds() * static_cast<double>(layer.factor_version());
  }
  return counters;
}

// A session whose workers step together.
class Run {
 public:
  Run(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method, int64_t factor_rank,
      const PerfServer& server)
      : spec_(Spec(options, layers, method, factor_rank)),
        address_(server.address()),
        control_(server.address(), absl::Seconds(30), options.security),
        widest_(static_cast<size_t>(Widest(layers))),
        noise_(std::max(size_t{1} << 20, 4 * widest_)) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    for (float& value : noise_) value = normal(rng);
  }

  absl::Status OpenSession() {
    ClientOptions options;
    options.coordinator = address_;
    PRECONDOR_ASSIGN_OR_RETURN(client_, Client::Connect(options));
    PRECONDOR_RETURN_IF_ERROR(client_->OpenSession(spec_).status());
    workers_.resize(static_cast<size_t>(spec_.world_size));
    return ForEachRank(workers_.size(), [this](uint32_t rank) -> absl::Status {
      PRECONDOR_ASSIGN_OR_RETURN(workers_[rank], client_->Join(spec_.name, {rank, 0}));
      return absl::OkStatus();
    });
  }

  absl::Status Close() {
    workers_.clear();
    return client_->CloseSession(spec_.name).status();
  }

  // Runs a step and returns its seconds: the statistics of every worker are sent, sealed and applied. The shard answers
  // a layer's abstaining gradient only after it has applied the statistics of the step, so the answers mark the end.
  absl::StatusOr<double> Step() {
    const absl::Time start = MonotonicNow();
    PRECONDOR_RETURN_IF_ERROR(ForEachRank(workers_.size(), [this](uint32_t rank) -> absl::Status {
      PRECONDOR_RETURN_IF_ERROR(Send(rank));
      return AwaitApplied(*workers_[rank]);
    }));
    const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
    PRECONDOR_RETURN_IF_ERROR(ForEachRank(workers_.size(), [this](uint32_t rank) {
      return workers_[rank]->ReportStep(step_, 1.0, 1, true, 0.1).Wait().status();
    }));
    ++step_;
    return seconds;
  }

  absl::StatusOr<Counters> ReadCounters() { return precondor::ReadCounters(control_, spec_.name); }

  // Precondition: the session is open. All workers send the same number of bytes.
  int64_t sent_bytes() const {
    return static_cast<int64_t>(workers_.size()) * workers_[0]->status().traffic.statistics_bytes;
  }

 private:
  absl::Status Send(uint32_t rank) {
    for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const LayerSpec& shape = spec_.layers[layer];
      PRECONDOR_RETURN_IF_ERROR(workers_[rank]->SendStatistics(
          step_, static_cast<int64_t>(layer), ConstMatrixView(Vector(rank, layer), 1, shape.d_in),
          ConstMatrixView(Vector(rank, layer + 1), 1, shape.d_out), 1));
    }
    return absl::OkStatus();
  }

  // Returns a place in the noise that differs by rank, layer and step, because equal vectors would give factors of rank
  // 1.
  const float* Vector(uint32_t rank, size_t layer) const {
    const uint64_t place = (step_ * spec_.layers.size() + layer) * static_cast<uint64_t>(spec_.world_size) + rank;
    return noise_.data() + place * 7919 % (noise_.size() - widest_);
  }

  absl::Status AwaitApplied(Worker& worker) {
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      if (worker.SendsGradient(index)) futures.push_back(worker.AbstainGradient(step_, index));
    }
    for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    return worker.Flush();
  }

  const SessionSpec spec_;
  const std::string address_;
  ControlClient control_;
  const size_t widest_;
  std::vector<float> noise_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Worker>> workers_;
  uint64_t step_ = 0;
};

struct Measured {
  std::vector<double> seconds;
  std::vector<double> other_seconds;  // of each step: its time without that in kernels, divided by the server's threads
  int64_t resident_bytes = 0;
  int64_t state_bytes = 0;
  int64_t payload_bytes = 0;  // of one worker in one step
};

absl::StatusOr<Measured> Measure(const PerfOptions& options, const std::vector<LayerSpec>& layers,
                                 const std::string& method, int64_t factor_rank, const PerfServer& server) {
  Run run(options, layers, method, factor_rank, server);
  PRECONDOR_RETURN_IF_ERROR(run.OpenSession());
  for (int64_t i = 0; i < options.warmup; ++i) PRECONDOR_RETURN_IF_ERROR(run.Step().status());
  Measured measured;
  PRECONDOR_ASSIGN_OR_RETURN(Counters before, run.ReadCounters());
  for (int64_t i = 0; i < options.steps; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const double seconds, run.Step());
    PRECONDOR_ASSIGN_OR_RETURN(const Counters after, run.ReadCounters());
    const double kernels = (after.update_seconds - before.update_seconds) / static_cast<double>(options.threads);
    measured.seconds.push_back(seconds);
    measured.other_seconds.push_back(seconds - kernels);
    before = after;
  }
  measured.resident_bytes = server.resident_bytes();
  measured.state_bytes = before.state_bytes;
  measured.payload_bytes = run.sent_bytes() / options.workers / (options.warmup + options.steps);
  PRECONDOR_RETURN_IF_ERROR(run.Close());
  return measured;
}

// Measures steps, and the server's memory. A step begins when all workers begin to send, and ends when every layer has
// applied all statistics. Memory is compared with the state that the server reports and two copies of a step's
// statistics.
absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerSpec> layers, PerfLayers(options));
  const int64_t idle_bytes = server.resident_bytes();
  // Measures the run whose memory is reported first, while the server has held nothing else.
  PRECONDOR_ASSIGN_OR_RETURN(const Measured mkor, Measure(options, layers, "mkor", options.rank, server));
  PRECONDOR_ASSIGN_OR_RETURN(const Measured transport, Measure(options, layers, "identity", 0, server));
  const double step = Percentile(mkor.seconds, 0.5) * kMilli;
  const double other = Percentile(mkor.other_seconds, 0.5) * kMilli;
  const double transport_step = Percentile(transport.seconds, 0.5) * kMilli;
  constexpr double kTargetMs = 20;
  std::vector<PerfRow> rows = {
      {"statistics/step_p50", step, "ms"},
      {"statistics/step_p99", Percentile(mkor.seconds, 0.99) * kMilli, "ms"},
      {"statistics/not_kernels_p50", other, "ms", step, other / step, kTargetMs,
       // A negative value means that other work on the machine delayed the threads, so the measurement is invalid.
       other >= 0 && other < kTargetMs},
      {"statistics/transport_acknowledged", transport_step, "ms", step, transport_step / step},
  };
  if (mkor.resident_bytes > 0) {
    const double state = static_cast<double>(mkor.state_bytes) / 1e6;
    // The vectors (f16) of every worker in one step, twice: as the transport received them, and as kept until they are
    // reduced.
    const double staging = 2 * static_cast<double>(options.workers * mkor.payload_bytes) / 1e6;
    const double resident = static_cast<double>(mkor.resident_bytes - idle_bytes) / 1e6;
    const double computed = state + staging, target = 1.1 * computed;
    rows.push_back({"memory/resident_to_state_and_staging", resident, "MB", computed, resident / computed, target,
                    resident <= target});
  }
  return rows;
}

// --- a step of small layers ------------------------------------------------------------------------------------------

constexpr int kStepLayers = 16;
constexpr int64_t kStepSide = 64;
constexpr double kTargetMilliseconds = 0.4;
constexpr double kTargetMicroseconds = 20;  // of both processes, for a layer

double ProcessorSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Runs one step, and returns its milliseconds.
absl::StatusOr<double> LayersStep(Worker& worker, uint64_t step, const std::vector<float>& gradient,
                                  std::vector<std::vector<float>>& answers) {
  const absl::Time start = MonotonicNow();
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < kStepLayers; ++layer) {
    futures.push_back(worker.Precondition(step, static_cast<int64_t>(layer),
                                          {ConstMatrixView(gradient.data(), kStepSide, kStepSide),
                                           MatrixView(answers[layer].data(), kStepSide, kStepSide)},
                                          1,
                                          /*more=*/true));
  }
  // As the Python client does: the last one's answer is usually the last, so that this thread wakes up once.
  for (auto future = futures.rbegin(); future != futures.rend(); ++future) {
    PRECONDOR_RETURN_IF_ERROR(future->Wait().status());
  }
  const double milliseconds = absl::ToDoubleMilliseconds(MonotonicNow() - start);
  static_cast<void>(worker.ReportStep(step, 1, 1, true, 0.1));  // a later step waits if the lease does not reach it
  return milliseconds;
}

absl::StatusOr<std::vector<PerfRow>> MeasureLayers(const PerfOptions& options, const PerfServer& server) {
  SessionSpec spec;
  spec.name = "perf-step";
  spec.method.name = "identity";
  spec.inv_freq = 1 << 30;
  spec.warmup_steps = 0;
  for (int layer = 0; layer < kStepLayers; ++layer)
    spec.layers.push_back({absl::StrCat("l", layer), kStepSide, kStepSide, false});
  ClientOptions client_options;
  client_options.coordinator = server.address();
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(client_options));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  const std::vector<float> gradient(kStepSide * kStepSide, 0.5F);
  std::vector<std::vector<float>> answers(kStepLayers, gradient);  // must outlive the worker
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, client->Join(spec.name, {0, 0}));
  uint64_t step = 0;
  std::vector<double> milliseconds;
  double own = 0, servers = 0;
  for (int64_t i = 0; i < options.warmup + options.steps; ++i) {
    if (i == options.warmup) own = ProcessorSeconds(), servers = server.processor_seconds();
    PRECONDOR_ASSIGN_OR_RETURN(const double took, LayersStep(*worker, step++, gradient, answers));
    if (i >= options.warmup) milliseconds.push_back(took);
  }
  const auto micros = [&](double seconds) { return 1e6 * seconds / static_cast<double>(options.steps * kStepLayers); };
  own = micros(ProcessorSeconds() - own);
  servers = micros(server.processor_seconds() - servers);
  worker.reset();
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(spec.name).status());
  PerfRow p50{"layers/step_p50", Percentile(milliseconds, 0.5), "ms"};
  p50.target = kTargetMilliseconds;
  p50.pass = p50.value <= *p50.target;
  PerfRow both{"layers/processor", own + servers, "us"};
  both.target = kTargetMicroseconds;
  both.pass = both.value <= *both.target;
  return std::vector<PerfRow>{p50,
                              {"layers/step_p99", Percentile(milliseconds, 0.99), "ms"},
                              both,
                              {"layers/processor_client", own, "us"},
                              {"layers/processor_server", servers, "us"}};
}

constexpr char kUsage[] = R"(Usage: service_bench --rows=statistics|jobs|layers --server-binary=FILE [FLAGS]
  --rows=statistics  statistic steps of BERT-Large's 144 linear layers: workers send one f16 vector a side and layer, the
                     server applies them. p50 and p99 of a whole step, the part that is not kernels (less the time in
                     updates by the server's counters, over its threads; and transport alone, with the method identity),
                     and the server's memory against the computed.
  --rows=jobs        a small job (4 layers of 64 x 64, method muon) alone and beside a large one (16 of 384 x 384) on the
                     server, in turns: p50 and p99 of its steps, at most twice as long beside as alone.
  --rows=layers      a step of 16 layers of 64 x 64, method identity, by one worker: its p50 and p99, and the processor
                     time of a layer.
  --server-binary=FILE  the precondor-server to start on loopback and stop; its memory is read
  --json=FILE        the rows {name, value, unit, limit, ratio, target, pass}
  --workers=8  --steps=60  --warmup=40  --rank=128  --threads=2
)";

absl::StatusOr<std::vector<PerfRow>> Measure(const std::string& rows, const PerfOptions& options) {
  const std::map<std::string, decltype(&MeasureJobs)> families = {
      {"jobs", MeasureJobs}, {"layers", MeasureLayers}, {"statistics", MeasureStatistics}};
  const auto family = families.find(rows);
  if (family == families.end()) return absl::InvalidArgumentError("--rows: expected jobs, layers or statistics");
  const auto server = PerfServer::Start(options);
  if (!server.ok()) return server.status();
  return family->second(options, **server);
}

int Main(const std::vector<std::string>& arguments) {
  PerfOptions options;
  options.preset = "bert-large";
  std::string family;
  const auto count = [](int64_t& out) { return Integer(out, 1, 100000); };
  const auto measures = ParseFlags(arguments, {{"rows", Text(family)},
                                               {"server-binary", Text(options.server_binary)},
                                               {"json", Text(options.json)},
                                               {"workers", count(options.workers), "1 ... 100000"},
                                               {"steps", count(options.steps), "1 ... 100000"},
                                               {"warmup", count(options.warmup), "1 ... 100000"},
                                               {"rank", count(options.rank), "1 ... 100000"},
                                               {"threads", count(options.threads), "1 ... 100000"}});
  if (measures.ok() && measures->help) {
    std::cout << kUsage;
    return 0;
  }
  const auto rows = measures.ok() ? Measure(family, options) : measures.status();
  if (!rows.ok()) {
    std::cerr << "service_bench: " << rows.status().message() << "\n";
    return 1;
  }
  std::cout << RowsTable(*rows);
  if (!options.json.empty()) std::ofstream(options.json) << RowsJson(*rows);
  return 0;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  // As precondor-perf has it: to return large blocks to the system costs more than the copies that they are for.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  return precondor::Main({argv + 1, argv + argc});
}
