// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/metrics_observer.h"

#include <array>
#include <cmath>
#include <fstream>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "server/metrics/catalog.h"

namespace precondor::metrics {
namespace {

constexpr std::array<const char*, 3> kKindLabels = {"statistics", "gradient", "pull"};
constexpr size_t kKinds = kKindLabels.size();
constexpr std::array<Decision, 3> kDecisions = {Decision::kPreconditioned, Decision::kIdentity, Decision::kSkip};

size_t KindIndex(ContributionKind kind) { return static_cast<size_t>(kind) - 1; }

std::string Lower(absl::string_view name) { return absl::AsciiStrToLower(std::string(name)); }

// Resident pages from the kernel's own table; 0 where there is none.
double ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return file ? static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) : 0.0;
}

using Labels = std::map<std::string, std::string>;

}  // namespace

class MetricsObserver::Impl {
 public:
  // The series of one job, so that an event costs a look-up and an addition.
  struct Job {
    int sessions = 0;  // of its name
    std::vector<std::function<void()>> removers;
  };
  struct ShardJob : Job {
    std::array<prometheus::Counter*, kKinds> contributions, bytes, duplicates;
    std::array<std::array<prometheus::Counter*, kErrorReasonCount>, kKinds> rejected;
    std::array<prometheus::Histogram*, kKinds> seal_wait;
    std::array<prometheus::Counter*, kDecisions.size()> results;
    prometheus::Counter *updates, *update_failures, *updates_lost, *result_bytes, *fetches, *fetched_bytes,
        *data_plane_failures;
    prometheus::Histogram *update_seconds, *precondition_seconds;
    prometheus::Counter *snapshots_done, *snapshots_failed;
    prometheus::Counter *factors_kept, *factors_not_kept, *layers_kept, *layers_fresh;
    prometheus::Gauge *reserved_bytes, *log_stale, *data_plane;
    prometheus::Gauge *lagging_workers, *lagging_rank;
  };
  struct CoordinatorJob : Job {
    prometheus::Counter* steps;
    prometheus::Counter* mode_changes;
    prometheus::Counter* moved_layers;
    prometheus::Gauge *last_step, *loss, *second_order, *epoch, *joined, *expected;
    prometheus::Counter *snapshots_complete, *snapshots_failed;
    prometheus::Gauge* last_snapshot;
    prometheus::Gauge *smoothed_loss, *loss_rate, *fallback_threshold;
  };

  Impl() : registry_(std::make_shared<prometheus::Registry>()) {
    for (size_t id = 0; id < kMetricCount; ++id) {
      const MetricInfo& info = kCatalog[id];
      switch (info.type) {
        case MetricType::kCounter:
          counters_[id] = &prometheus::BuildCounter().Name(info.name).Help(info.help).Register(*registry_);
          break;
        case MetricType::kGauge:
          gauges_[id] = &prometheus::BuildGauge().Name(info.name).Help(info.help).Register(*registry_);
          break;
        case MetricType::kHistogram:
          histograms_[id] = &prometheus::BuildHistogram().Name(info.name).Help(info.help).Register(*registry_);
          break;
      }
    }
    for (MetricId id : {kReservedBytes, kCapacityBytes, kShardSessions, kQuarantinedSessions, kCoordinatorSessions,
                        kJournalFailing, kDraining, kResidentBytes}) {
      plain_[id] = &gauges_[id]->Add({});
    }
    journal_failures_ = &counters_[kJournalFailures]->Add({});
    log_bytes_ = &counters_[kLogBytes]->Add({});
    log_failures_ = &counters_[kLogFailures]->Add({});
  }

  prometheus::Gauge& plain(MetricId id) { return *plain_[id]; }
  prometheus::Counter& journal_failures() { return *journal_failures_; }
  prometheus::Counter& log_bytes() { return *log_bytes_; }
  prometheus::Counter& log_failures() { return *log_failures_; }
  prometheus::Counter& AddCounter(MetricId id, const Labels& labels) { return counters_[id]->Add(labels); }
  prometheus::Gauge& AddGauge(MetricId id, const Labels& labels) { return gauges_[id]->Add(labels); }
  prometheus::Histogram& AddHistogram(MetricId id, const Labels& labels) {
    return histograms_[id]->Add(
        labels, prometheus::Histogram::BucketBoundaries(kSecondsBuckets.begin(), kSecondsBuckets.end()));
  }

  void Install(absl::string_view name) {
    MutexLock lock(mu_);
    Add(shard_jobs_, name, [this](ShardJob& job, const std::string& own) { FillShardJob(job, own); });
  }
  void Open(absl::string_view name) {
    MutexLock lock(mu_);
    Add(coordinator_jobs_, name, [this](CoordinatorJob& job, const std::string& own) { FillCoordinatorJob(job, own); });
  }
  void Remove(absl::string_view name) {
    MutexLock lock(mu_);
    Drop(shard_jobs_, name);
  }
  void Close(absl::string_view name) {
    MutexLock lock(mu_);
    Drop(coordinator_jobs_, name);
  }

  // Runs `record` on the job's series, if there are any, under the lock, which also keeps them from going meanwhile.
  template <typename F>
  void WithShardJob(absl::string_view name, F record) {
    MutexLock lock(mu_);
    if (const auto it = shard_jobs_.find(name); it != shard_jobs_.end()) record(*it->second);
  }
  template <typename F>
  void WithCoordinatorJob(absl::string_view name, F record) {
    MutexLock lock(mu_);
    if (const auto it = coordinator_jobs_.find(name); it != coordinator_jobs_.end()) record(*it->second);
  }

  void RecordRpc(absl::string_view method, absl::StatusCode code, absl::Duration took) {
    MutexLock lock(mu_);
    const std::string name(method);
    prometheus::Counter*& counter = rpcs_[absl::StrCat(name, "/", static_cast<int>(code))];
    if (counter == nullptr) {
      counter = &AddCounter(kRpcs, {{"method", name}, {"code", Lower(absl::StatusCodeToString(code))}});
    }
    prometheus::Histogram*& seconds = rpc_seconds_[name];
    if (seconds == nullptr) seconds = &AddHistogram(kRpcSeconds, {{"method", name}});
    counter->Increment();
    seconds->Observe(absl::ToDoubleSeconds(took));
  }

  std::string Render() {
    plain(kResidentBytes).Set(ResidentBytes());
    return prometheus::TextSerializer().Serialize(registry_->Collect());
  }

  absl::StatusOr<int> Serve(const std::string& address) {
    try {
      exposer_ = std::make_unique<prometheus::Exposer>(address, 1);
    } catch (const std::exception& error) {
      return absl::UnavailableError(absl::StrCat("metrics_listen ", address, ": ", error.what()));
    }
    collectable_ = std::make_shared<Collector>(*this);
    exposer_->RegisterCollectable(collectable_);
    const std::vector<int> ports = exposer_->GetListeningPorts();
    if (ports.empty()) return absl::UnavailableError(absl::StrCat("metrics_listen ", address, ": no port was opened"));
    return ports[0];
  }

 private:
  // The registry, with the gauges that are read at scrape time brought up to date.
  class Collector final : public prometheus::Collectable {
   public:
    explicit Collector(Impl& impl) : impl_(impl) {}
    std::vector<prometheus::MetricFamily> Collect() const override {
      impl_.plain(kResidentBytes).Set(ResidentBytes());
      return impl_.registry_->Collect();
    }

   private:
    Impl& impl_;
  };

  prometheus::Counter* JobCounter(Job& job, MetricId id, const Labels& labels) {
    prometheus::Counter* counter = &AddCounter(id, labels);
    job.removers.push_back([family = counters_[id], counter] { family->Remove(counter); });
    return counter;
  }
  prometheus::Gauge* JobGauge(Job& job, MetricId id, const Labels& labels) {
    prometheus::Gauge* gauge = &AddGauge(id, labels);
    job.removers.push_back([family = gauges_[id], gauge] { family->Remove(gauge); });
    return gauge;
  }
  prometheus::Histogram* JobHistogram(Job& job, MetricId id, const Labels& labels) {
    prometheus::Histogram* histogram = &AddHistogram(id, labels);
    job.removers.push_back([family = histograms_[id], histogram] { family->Remove(histogram); });
    return histogram;
  }

  template <typename J, typename F>
  static void Add(absl::flat_hash_map<std::string, std::unique_ptr<J>>& jobs, absl::string_view name, F fill) {
    std::unique_ptr<J>& job = jobs[name];
    if (job == nullptr) {
      job = std::make_unique<J>();
      fill(*job, std::string(name));
    }
    ++job->sessions;
  }
  template <typename J>
  static void Drop(absl::flat_hash_map<std::string, std::unique_ptr<J>>& jobs, absl::string_view name) {
    const auto it = jobs.find(name);
    if (it == jobs.end() || --it->second->sessions > 0) return;
    for (const auto& remove : it->second->removers) remove();
    jobs.erase(it);
  }

  void FillShardJob(ShardJob& job, const std::string& name) {
    const Labels own = {{"train_job", name}};
    job.lagging_workers = JobGauge(job, kLaggingWorkers, own);
    job.lagging_rank = JobGauge(job, kLaggingRank, own);
    job.lagging_rank->Set(-1);
    for (size_t kind = 0; kind < kKinds; ++kind) {
      Labels labels = {{"train_job", name}, {"kind", kKindLabels[kind]}};
      job.contributions[kind] = JobCounter(job, kContributions, labels);
      job.bytes[kind] = JobCounter(job, kContributionBytes, labels);
      job.duplicates[kind] = JobCounter(job, kDuplicates, labels);
      job.seal_wait[kind] = JobHistogram(job, kSealWait, labels);
      for (size_t reason = 0; reason < kErrorReasonCount; ++reason) {
        labels["reason"] = Lower(ErrorReasonName(static_cast<ErrorReason>(reason)));
        job.rejected[kind][reason] = JobCounter(job, kRejected, labels);
      }
    }
    for (size_t i = 0; i < kDecisions.size(); ++i) {
      job.results[i] =
          JobCounter(job, kResults, {{"train_job", name}, {"decision", Lower(DecisionName(kDecisions[i]))}});
    }
    job.updates = JobCounter(job, kUpdates, own);
    job.update_failures = JobCounter(job, kUpdateFailures, own);
    job.updates_lost = JobCounter(job, kUpdatesLost, own);
    job.update_seconds = JobHistogram(job, kUpdateSeconds, own);
    job.precondition_seconds = JobHistogram(job, kPreconditionSeconds, own);
    job.result_bytes = JobCounter(job, kResultBytes, own);
    job.fetches = JobCounter(job, kFetches, own);
    job.fetched_bytes = JobCounter(job, kFetchedBytes, own);
    job.reserved_bytes = JobGauge(job, kJobReservedBytes, own);
    job.log_stale = JobGauge(job, kLogStale, own);
    job.data_plane = JobGauge(job, kDataPlane, own);
    job.data_plane_failures = JobCounter(job, kDataPlaneFailures, own);
    job.snapshots_done = JobCounter(job, kSnapshots, {{"train_job", name}, {"outcome", "durable"}});
    job.snapshots_failed = JobCounter(job, kSnapshots, {{"train_job", name}, {"outcome", "given_up"}});
    job.factors_kept = JobCounter(job, kReleases, {{"train_job", name}, {"outcome", "durable"}});
    job.factors_not_kept = JobCounter(job, kReleases, {{"train_job", name}, {"outcome", "failed"}});
    job.layers_kept = JobCounter(job, kReturnedLayers, {{"train_job", name}, {"factors", "kept"}});
    job.layers_fresh = JobCounter(job, kReturnedLayers, {{"train_job", name}, {"factors", "fresh"}});
  }

  void FillCoordinatorJob(CoordinatorJob& job, const std::string& name) {
    const Labels own = {{"train_job", name}};
    job.steps = JobCounter(job, kSteps, own);
    job.last_step = JobGauge(job, kLastStep, own);
    job.loss = JobGauge(job, kLoss, own);
    job.second_order = JobGauge(job, kSecondOrder, own);
    job.second_order->Set(1);
    job.epoch = JobGauge(job, kEpoch, own);
    job.joined = JobGauge(job, kWorkersJoined, own);
    job.expected = JobGauge(job, kWorkersExpected, own);
    job.mode_changes = JobCounter(job, kModeChanges, own);
    job.moved_layers = JobCounter(job, kMovedLayers, own);
    job.smoothed_loss = JobGauge(job, kSmoothedLoss, own);
    job.loss_rate = JobGauge(job, kLossRate, own);
    job.fallback_threshold = JobGauge(job, kFallbackThreshold, own);
    job.snapshots_complete = JobCounter(job, kSessionSnapshots, {{"train_job", name}, {"outcome", "complete"}});
    job.snapshots_failed = JobCounter(job, kSessionSnapshots, {{"train_job", name}, {"outcome", "failed"}});
    job.last_snapshot = JobGauge(job, kLastSessionSnapshot, own);
    job.last_snapshot->Set(-1);
  }

  const std::shared_ptr<prometheus::Registry> registry_;
  std::array<prometheus::Family<prometheus::Counter>*, kMetricCount> counters_ = {};
  std::array<prometheus::Family<prometheus::Gauge>*, kMetricCount> gauges_ = {};
  std::array<prometheus::Family<prometheus::Histogram>*, kMetricCount> histograms_ = {};
  std::array<prometheus::Gauge*, kMetricCount> plain_ = {};
  prometheus::Counter *journal_failures_ = nullptr, *log_bytes_ = nullptr, *log_failures_ = nullptr;

  Mutex mu_;
  absl::flat_hash_map<std::string, std::unique_ptr<ShardJob>> shard_jobs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::unique_ptr<CoordinatorJob>> coordinator_jobs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, prometheus::Counter*> rpcs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, prometheus::Histogram*> rpc_seconds_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<Collector> collectable_;  // the exposer holds it weakly
  std::unique_ptr<prometheus::Exposer> exposer_;
};

MetricsObserver::MetricsObserver(absl::string_view version, absl::string_view role) : impl_(std::make_unique<Impl>()) {
  impl_->AddGauge(kBuildInfo, {{"version", std::string(version)}, {"role", std::string(role)}}).Set(1);
}

MetricsObserver::~MetricsObserver() = default;

absl::StatusOr<int> MetricsObserver::Serve(const std::string& address) { return impl_->Serve(address); }
std::string MetricsObserver::Render() const { return impl_->Render(); }

void MetricsObserver::OnRpc(absl::string_view method, absl::StatusCode code, absl::Duration took) {
  impl_->RecordRpc(method, code, took);
}
void MetricsObserver::OnDrain() { impl_->plain(kDraining).Set(1); }

void MetricsObserver::OnSessionInstalled(absl::string_view train_job) { impl_->Install(train_job); }
void MetricsObserver::OnSessionRemoved(absl::string_view train_job) { impl_->Remove(train_job); }
void MetricsObserver::OnSessionOpened(absl::string_view train_job) { impl_->Open(train_job); }
void MetricsObserver::OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.contributions[KindIndex(kind)]->Increment();
    job.bytes[KindIndex(kind)]->Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnDuplicate(absl::string_view train_job, ContributionKind kind) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { job.duplicates[KindIndex(kind)]->Increment(); });
}
void MetricsObserver::OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {
  impl_->WithShardJob(
      train_job, [&](Impl::ShardJob& job) { job.rejected[KindIndex(kind)][static_cast<size_t>(reason)]->Increment(); });
}
void MetricsObserver::OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.seal_wait[KindIndex(kind)]->Observe(absl::ToDoubleSeconds(open_for));
  });
}
void MetricsObserver::OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.updates->Increment();
    if (!ok) job.update_failures->Increment();
    job.update_seconds->Observe(absl::ToDoubleSeconds(took));
  });
}
void MetricsObserver::OnUpdatesLost(absl::string_view train_job, int64_t updates) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { job.updates_lost->Increment(static_cast<double>(updates)); });
}
void MetricsObserver::OnPrecondition(absl::string_view train_job, absl::Duration took) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { job.precondition_seconds->Observe(absl::ToDoubleSeconds(took)); });
}
void MetricsObserver::OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    for (size_t i = 0; i < kDecisions.size(); ++i) {
      if (kDecisions[i] == decision) job.results[i]->Increment();
    }
    job.result_bytes->Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnFetch(absl::string_view train_job, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.fetches->Increment();
    job.fetched_bytes->Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnSessionMemory(absl::string_view train_job, int64_t reserved) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { job.reserved_bytes->Set(static_cast<double>(reserved)); });
}
void MetricsObserver::OnReservedBytes(int64_t reserved, int64_t capacity) {
  impl_->plain(kReservedBytes).Set(static_cast<double>(reserved));
  impl_->plain(kCapacityBytes).Set(static_cast<double>(capacity));
}
void MetricsObserver::OnDeviceMemory(absl::string_view device, int64_t reserved, int64_t capacity) {
  const Labels labels = {{"device", std::string(device)}};
  impl_->AddGauge(kDeviceReservedBytes, labels).Set(static_cast<double>(reserved));
  impl_->AddGauge(kDeviceCapacityBytes, labels).Set(static_cast<double>(capacity));
}
void MetricsObserver::OnDevice(absl::string_view device, bool usable) {
  impl_->AddGauge(kDeviceStatus, {{"device", std::string(device)}}).Set(usable ? 1 : 0);
}
void MetricsObserver::OnShardSessions(int64_t sessions) {
  impl_->plain(kShardSessions).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnQuarantinedSessions(int64_t sessions) {
  impl_->plain(kQuarantinedSessions).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnLogAppend(int64_t bytes, bool ok) {
  ok ? impl_->log_bytes().Increment(static_cast<double>(bytes)) : impl_->log_failures().Increment();
}
void MetricsObserver::OnLogStale(absl::string_view train_job, bool stale) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { job.log_stale->Set(stale ? 1 : 0); });
}
void MetricsObserver::OnDataPlane(absl::string_view train_job, bool joined) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { job.data_plane->Set(joined ? 1 : 0); });
}
void MetricsObserver::OnDataPlaneFailure(absl::string_view train_job) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { job.data_plane_failures->Increment(); });
}
void MetricsObserver::OnSnapshot(absl::string_view train_job, bool ok) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { (ok ? job.snapshots_done : job.snapshots_failed)->Increment(); });
}
void MetricsObserver::OnFactorsKept(absl::string_view train_job, bool ok) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { (ok ? job.factors_kept : job.factors_not_kept)->Increment(); });
}
void MetricsObserver::OnFactorsReturned(absl::string_view train_job, int64_t kept_layers, int64_t fresh_layers) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.layers_kept->Increment(static_cast<double>(kept_layers));
    job.layers_fresh->Increment(static_cast<double>(fresh_layers));
  });
}
void MetricsObserver::OnCoordinatorSessions(int64_t sessions) {
  impl_->plain(kCoordinatorSessions).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnLaggards(absl::string_view train_job, const std::vector<uint32_t>& ranks) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.lagging_workers->Set(static_cast<double>(ranks.size()));
    job.lagging_rank->Set(ranks.empty() ? -1.0 : static_cast<double>(ranks.front()));
  });
}
void MetricsObserver::OnJournal(bool ok) {
  if (!ok) impl_->journal_failures().Increment();
  impl_->plain(kJournalFailing).Set(ok ? 0 : 1);
}
void MetricsObserver::OnDecision(absl::string_view train_job, const FallbackDecision& decision) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.smoothed_loss->Set(decision.inputs.loss);
    job.loss_rate->Set(decision.inputs.rate);
    job.fallback_threshold->Set(decision.inputs.threshold_rate);
  });
}
void MetricsObserver::OnLayersMoved(absl::string_view train_job, int64_t layers) {
  impl_->WithCoordinatorJob(
      train_job, [layers](Impl::CoordinatorJob& job) { job.moved_layers->Increment(static_cast<double>(layers)); });
}
void MetricsObserver::OnSessionSnapshot(absl::string_view train_job, bool complete) {
  impl_->WithCoordinatorJob(train_job, [complete](Impl::CoordinatorJob& job) {
    (complete ? job.snapshots_complete : job.snapshots_failed)->Increment();
  });
}
void MetricsObserver::OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {
  impl_->WithCoordinatorJob(train_job,
                            [step](Impl::CoordinatorJob& job) { job.last_snapshot->Set(static_cast<double>(step)); });
}
void MetricsObserver::OnModeChange(absl::string_view train_job, Mode) {
  impl_->WithCoordinatorJob(train_job, [](Impl::CoordinatorJob& job) { job.mode_changes->Increment(); });
}
void MetricsObserver::OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.steps->Increment();
    job.last_step->Set(static_cast<double>(step));
    if (std::isfinite(loss)) job.loss->Set(loss);
    job.second_order->Set(mode == Mode::kSecondOrder ? 1 : 0);
  });
}
void MetricsObserver::OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.epoch->Set(static_cast<double>(epoch));
    job.joined->Set(static_cast<double>(joined));
    job.expected->Set(static_cast<double>(world_size));
  });
}
void MetricsObserver::OnSessionClosed(absl::string_view train_job) { impl_->Close(train_job); }

}  // namespace precondor::metrics
