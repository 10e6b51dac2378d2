// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/metrics_observer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <malloc.h>
#include <prometheus/counter.h>
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
#include "absl/time/clock.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "server/metrics/catalog.h"

namespace precondor::metrics {
namespace {

constexpr std::array<const char*, 3> kKindLabels = {"statistics", "gradient", "pull"};
constexpr size_t kKinds = kKindLabels.size();
constexpr size_t kKindsWithBytes = 2;  // a pull has no bytes
enum ContributionResult : uint8_t { kAccepted, kDuplicate, kRefused };
constexpr std::array<const char*, 3> kContributionResults = {"accepted", "duplicate", "rejected"};
enum Stage : uint8_t { kReceive, kSealWait, kUpdate, kPrecondition, kReply };
constexpr std::array<const char*, 5> kStages = {"receive", "seal_wait", "update", "precondition", "reply"};
constexpr std::array<Stage, 3> kJobStageList = {kSealWait, kUpdate, kPrecondition};
constexpr std::array<const char*, 2> kDirections = {"received", "sent"};
constexpr std::array<const char*, 2> kPaths = {"stream", "ring"};
constexpr std::array<const char*, 4> kTransferKinds = {"statistics", "gradient", "answer", "factors"};
constexpr size_t kAnswerCauses = std::size(kAnswerCauseNames);
constexpr std::array<Decision, 3> kDecisions = {Decision::kPreconditioned, Decision::kIdentity, Decision::kSkip};

size_t KindIndex(ContributionKind kind) { return static_cast<size_t>(kind) - 1; }

std::string Lower(absl::string_view name) { return absl::AsciiStrToLower(std::string(name)); }

// Resident bytes according to the kernel; 0 if the file cannot be read.
double ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return file ? static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) : 0.0;
}

// Bytes in blocks that malloc has given out; 0 if malloc is not glibc's, which then must not be asked (a sanitizer, or
// a library that is preloaded).
double AllocatedBytes() {
  static const bool is_glibcs = [] {
    Dl_info allocator = {}, asked = {};
    return dladdr(reinterpret_cast<void*>(&malloc), &allocator) != 0 &&
           dladdr(reinterpret_cast<void*>(&mallinfo2), &asked) != 0 && allocator.dli_fbase == asked.dli_fbase;
  }();
  if (!is_glibcs) return 0;
  const struct mallinfo2 info = mallinfo2();
  return static_cast<double>(info.uordblks) + static_cast<double>(info.hblkhd);
}

// Wall clock, because Prometheus compares the value with its own.
double UnixSeconds() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

using Labels = std::map<std::string, std::string>;

}  // namespace

class MetricsObserver::Impl {
 public:
  // The series of one job, so that an event costs a look-up and an addition. Series whose only label is the job are
  // found by their index in the catalog.
  struct Job {
    prometheus::Counter& counter(size_t id) { return *counters[id]; }
    prometheus::Gauge& gauge(size_t id) { return *gauges[id]; }

    int sessions = 0;  // number of its sessions
    std::array<prometheus::Counter*, kMetricCount> counters = {};
    std::array<prometheus::Gauge*, kMetricCount> gauges = {};
    std::vector<std::function<void()>> removers;
  };
  struct ShardJob : Job {
    std::array<std::array<prometheus::Counter*, kContributionResults.size()>, kKinds> contributions;
    std::array<prometheus::Counter*, kKindsWithBytes> bytes;
    std::array<prometheus::Counter*, kStages.size()> stages, stage_seconds;  // null if not in kJobStageList
    std::array<prometheus::Counter*, kDecisions.size()> results;
    prometheus::Counter *snapshots_done, *snapshots_failed;
  };
  struct CoordinatorJob : Job {
    prometheus::Counter *snapshots_complete, *snapshots_failed;
    prometheus::Gauge *second_order_seconds, *first_order_seconds;
  };

  Impl() : registry_(std::make_shared<prometheus::Registry>()) {
    for (size_t id = 0; id < kMetricCount; ++id) {
      const MetricInfo& info = kCatalog[id];
      const bool plain = info.owner == MetricOwner::kServer && *info.labels == '\0';
      switch (info.type) {
        case MetricType::kCounter:
          counters_[id] = &prometheus::BuildCounter().Name(info.name).Help(info.help).Register(*registry_);
          if (plain) plain_.counters[id] = &AddCounter(id, {});
          break;
        case MetricType::kGauge:
          gauges_[id] = &prometheus::BuildGauge().Name(info.name).Help(info.help).Register(*registry_);
          if (plain) plain_.gauges[id] = &AddGauge(id, {});
          break;
        case MetricType::kHistogram:
          histograms_[id] = &prometheus::BuildHistogram().Name(info.name).Help(info.help).Register(*registry_);
          if (plain) plain_histograms_[id] = &AddHistogram(id, {});
          break;
      }
    }
    for (size_t i = 0; i < kStages.size(); ++i) {
      stages_[i] = &AddHistogram(Metric("precondor_stage_seconds"), {{"stage", kStages[i]}});
    }
    for (size_t i = 0; i < kDecisions.size(); ++i) {
      const bool preconditioned = kDecisions[i] == Decision::kPreconditioned;
      for (size_t cause = preconditioned ? 0 : 1; cause < (preconditioned ? 1 : kAnswerCauses); ++cause) {
        plans_[i][cause] = &AddCounter(
            Metric("precondor_plans_total"),
            {{"decision", Lower(DecisionName(kDecisions[i]))}, {"reason", std::string(kAnswerCauseNames[cause])}});
      }
    }
    for (size_t reason = 0; reason < kErrorReasonCount; ++reason) {
      rejected_[reason] = &AddCounter(Metric("precondor_rejected_total"),
                                      {{"reason", Lower(ErrorReasonName(static_cast<ErrorReason>(reason)))}});
    }
    for (const bool admitted : {false, true}) {
      admissions_[admitted] =
          &AddCounter(Metric("precondor_admissions_total"), {{"result", admitted ? "admitted" : "refused"}});
    }
    for (const auto& [path, kind] : {std::pair(0, 0), {0, 1}, {1, 1}}) AddTransfer(0, path, kind);
    for (const auto& [path, kind] : {std::pair(0, 2), {0, 3}, {1, 2}}) AddTransfer(1, path, kind);
    gauge(Metric("precondor_start_timestamp_seconds")).Set(UnixSeconds());
  }

  // Returns null for a combination that does not occur.
  prometheus::Counter* transfer(size_t direction, TransferPath path, TransferKind kind) {
    return transfers_[direction][static_cast<size_t>(path)][static_cast<size_t>(kind)];
  }
  prometheus::Counter& plan(Decision decision, AnswerCause cause) {
    const auto place = std::find(kDecisions.begin(), kDecisions.end(), decision) - kDecisions.begin();
    if (decision == Decision::kPreconditioned) {
      cause = AnswerCause::kNone;
    } else if (cause == AnswerCause::kNone) {
      cause = AnswerCause::kFailed;
    }
    return *plans_[static_cast<size_t>(place)][static_cast<size_t>(cause)];
  }
  prometheus::Counter& rejected(ErrorReason reason) { return *rejected_[static_cast<size_t>(reason)]; }
  prometheus::Counter& admissions(bool admitted) { return *admissions_[admitted]; }
  // Holds the lock, because scrapes may overlap.
  void RaiseTo(size_t metric, int64_t total) {
    MutexLock lock(mu_);
    prometheus::Counter& raised = counter(metric);
    raised.Increment(std::max(0.0, static_cast<double>(total) - raised.Value()));
  }
  void ObserveStage(Stage stage, absl::Duration took) { stages_[stage]->Observe(absl::ToDoubleSeconds(took)); }
  static void AddToStage(ShardJob& job, Stage stage, absl::Duration took) {
    job.stages[stage]->Increment();
    job.stage_seconds[stage]->Increment(std::max(0.0, absl::ToDoubleSeconds(took)));
  }

  // Series of metrics without labels.
  prometheus::Counter& counter(size_t id) { return plain_.counter(id); }
  prometheus::Gauge& gauge(size_t id) { return plain_.gauge(id); }
  prometheus::Histogram& histogram(size_t id) { return *plain_histograms_[id]; }
  prometheus::Counter& AddCounter(size_t id, const Labels& labels) { return counters_[id]->Add(labels); }
  prometheus::Gauge& AddGauge(size_t id, const Labels& labels) { return gauges_[id]->Add(labels); }
  prometheus::Histogram& AddHistogram(size_t id, const Labels& labels) {
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

  // Calls `record` with the job's series, if there are any. Holds the lock, so that they are not removed meanwhile.
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
      counter = &AddCounter(Metric("precondor_rpcs_total"),
                            {{"method", name}, {"code", Lower(absl::StatusCodeToString(code))}});
    }
    prometheus::Histogram*& seconds = rpc_seconds_[name];
    if (seconds == nullptr) seconds = &AddHistogram(Metric("precondor_rpc_seconds"), {{"method", name}});
    counter->Increment();
    seconds->Observe(absl::ToDoubleSeconds(took));
  }

  void SetProbe(std::function<void()> probe) { probe_ = std::move(probe); }

  std::string Render() {
    if (probe_) probe_();
    gauge(Metric("precondor_resident_memory_bytes")).Set(ResidentBytes());
    gauge(Metric("precondor_allocated_bytes")).Set(AllocatedBytes());
    return prometheus::TextSerializer().Serialize(registry_->Collect());
  }

  absl::Status Serve(int listening_socket, std::map<std::string, Page> pages) {
    pages["/metrics"] = {.content_type = "text/plain; version=0.0.4; charset=utf-8",
                         .make = [this] { return Render(); }};
    PRECONDOR_ASSIGN_OR_RETURN(http_, HttpServer::Start(listening_socket, std::move(pages)));
    return absl::OkStatus();
  }
  void StopServing() { http_.reset(); }

 private:
  void AddTransfer(size_t direction, size_t path, size_t kind) {
    transfers_[direction][path][kind] =
        &AddCounter(Metric("precondor_transfer_bytes_total"),
                    {{"direction", kDirections[direction]}, {"path", kPaths[path]}, {"kind", kTransferKinds[kind]}});
  }

  prometheus::Counter* JobCounter(Job& job, size_t id, const Labels& labels) {
    prometheus::Counter* counter = &AddCounter(id, labels);
    job.removers.push_back([family = counters_[id], counter] { family->Remove(counter); });
    return counter;
  }
  prometheus::Gauge* JobGauge(Job& job, size_t id, const Labels& labels) {
    prometheus::Gauge* gauge = &AddGauge(id, labels);
    job.removers.push_back([family = gauges_[id], gauge] { family->Remove(gauge); });
    return gauge;
  }

  void FillJob(Job& job, MetricOwner owner, const std::string& name) {
    for (size_t id = 0; id < kMetricCount; ++id) {
      if (kCatalog[id].owner != owner || kCatalog[id].labels != std::string_view("train_job")) continue;
      if (kCatalog[id].type == MetricType::kCounter) job.counters[id] = JobCounter(job, id, {{"train_job", name}});
      if (kCatalog[id].type == MetricType::kGauge) job.gauges[id] = JobGauge(job, id, {{"train_job", name}});
    }
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
    FillJob(job, MetricOwner::kShardJob, name);
    job.gauge(Metric("precondor_lagging_rank_number")).Set(-1);
    for (size_t kind = 0; kind < kKinds; ++kind) {
      Labels labels = {{"train_job", name}, {"kind", kKindLabels[kind]}};
      if (kind < kKindsWithBytes)
        job.bytes[kind] = JobCounter(job, Metric("precondor_contribution_bytes_total"), labels);
      for (size_t result = 0; result < kContributionResults.size(); ++result) {
        labels["result"] = kContributionResults[result];
        job.contributions[kind][result] = JobCounter(job, Metric("precondor_contributions_total"), labels);
      }
    }
    for (const Stage stage : kJobStageList) {
      const Labels labels = {{"train_job", name}, {"stage", kStages[stage]}};
      job.stages[stage] = JobCounter(job, Metric("precondor_job_stages_total"), labels);
      job.stage_seconds[stage] = JobCounter(job, Metric("precondor_job_stage_seconds_total"), labels);
    }
    for (size_t i = 0; i < kDecisions.size(); ++i) {
      job.results[i] = JobCounter(job, Metric("precondor_results_total"),
                                  {{"train_job", name}, {"decision", Lower(DecisionName(kDecisions[i]))}});
    }
    job.snapshots_done =
        JobCounter(job, Metric("precondor_snapshots_total"), {{"train_job", name}, {"outcome", "durable"}});
    job.snapshots_failed =
        JobCounter(job, Metric("precondor_snapshots_total"), {{"train_job", name}, {"outcome", "given_up"}});
  }

  void FillCoordinatorJob(CoordinatorJob& job, const std::string& name) {
    FillJob(job, MetricOwner::kCoordinatorJob, name);
    job.second_order_seconds =
        JobGauge(job, Metric("precondor_mode_step_seconds"), {{"train_job", name}, {"mode", "second_order"}});
    job.first_order_seconds =
        JobGauge(job, Metric("precondor_mode_step_seconds"), {{"train_job", name}, {"mode", "first_order"}});
    job.gauge(Metric("precondor_second_order_mode")).Set(1);
    job.snapshots_complete =
        JobCounter(job, Metric("precondor_session_snapshots_total"), {{"train_job", name}, {"outcome", "complete"}});
    job.snapshots_failed =
        JobCounter(job, Metric("precondor_session_snapshots_total"), {{"train_job", name}, {"outcome", "failed"}});
    job.gauge(Metric("precondor_last_session_snapshot_step_number")).Set(-1);
  }

  const std::shared_ptr<prometheus::Registry> registry_;
  std::array<prometheus::Family<prometheus::Counter>*, kMetricCount> counters_ = {};
  std::array<prometheus::Family<prometheus::Gauge>*, kMetricCount> gauges_ = {};
  std::array<prometheus::Family<prometheus::Histogram>*, kMetricCount> histograms_ = {};
  Job plain_;
  std::array<prometheus::Histogram*, kMetricCount> plain_histograms_ = {};
  std::array<prometheus::Histogram*, kStages.size()> stages_ = {};
  std::array<prometheus::Counter*, kErrorReasonCount> rejected_ = {};
  // Null if the decision cannot have the cause: a preconditioned answer has no cause, and the others have one.
  std::array<std::array<prometheus::Counter*, kAnswerCauses>, kDecisions.size()> plans_ = {};
  std::array<prometheus::Counter*, 2> admissions_ = {};
  std::array<std::array<std::array<prometheus::Counter*, kTransferKinds.size()>, kPaths.size()>, kDirections.size()>
      transfers_ = {};

  Mutex mu_;
  absl::flat_hash_map<std::string, std::unique_ptr<ShardJob>> shard_jobs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::unique_ptr<CoordinatorJob>> coordinator_jobs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, prometheus::Counter*> rpcs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, prometheus::Histogram*> rpc_seconds_ ABSL_GUARDED_BY(mu_);

  std::function<void()> probe_;       // set before Serve
  std::unique_ptr<HttpServer> http_;  // calls the members above; destroyed first
};

MetricsObserver::MetricsObserver(absl::string_view version, absl::string_view role) : impl_(std::make_unique<Impl>()) {
  impl_->AddGauge(Metric("precondor_build_info"), {{"version", std::string(version)}, {"role", std::string(role)}})
      .Set(1);
}

MetricsObserver::~MetricsObserver() = default;

absl::Status MetricsObserver::Serve(int listening_socket, std::map<std::string, Page> pages) {
  return impl_->Serve(listening_socket, std::move(pages));
}
void MetricsObserver::StopServing() { impl_->StopServing(); }
void MetricsObserver::SetProbe(std::function<void(MetricsObserver&)> probe) {
  impl_->SetProbe([this, probe = std::move(probe)] { probe(*this); });
}
std::string MetricsObserver::Render() const { return impl_->Render(); }

void MetricsObserver::OnRpc(absl::string_view method, absl::StatusCode code, absl::Duration took) {
  impl_->RecordRpc(method, code, took);
}
void MetricsObserver::OnDrain() { impl_->gauge(Metric("precondor_draining_status")).Set(1); }
void MetricsObserver::OnShardStep(absl::string_view train_job, uint64_t step) {
  impl_->WithShardJob(train_job, [step](Impl::ShardJob& job) {
    job.gauge(Metric("precondor_shard_step_number")).Set(static_cast<double>(step));
  });
}
void MetricsObserver::OnDroppedLogLines(int64_t total) {
  impl_->RaiseTo(Metric("precondor_dropped_log_lines_total"), total);
}
void MetricsObserver::OnTraceSpans(int64_t made, int64_t dropped) {
  impl_->RaiseTo(Metric("precondor_trace_spans_total"), made);
  impl_->RaiseTo(Metric("precondor_dropped_trace_spans_total"), dropped);
}
void MetricsObserver::OnMemoryBudget(absl::string_view part, int64_t bytes) {
  impl_->AddGauge(Metric("precondor_memory_budget_bytes"), {{"part", std::string(part)}})
      .Set(static_cast<double>(bytes));
}
void MetricsObserver::OnContainerMemory(int64_t bytes) {
  impl_->gauge(Metric("precondor_container_memory_bytes")).Set(static_cast<double>(bytes));
}
void MetricsObserver::OnCertificateExpiry(int64_t unix_seconds) {
  impl_->gauge(Metric("precondor_certificate_expiry_timestamp_seconds")).Set(static_cast<double>(unix_seconds));
}
void MetricsObserver::OnAcceptFailure() { impl_->counter(Metric("precondor_accept_failures_total")).Increment(); }
void MetricsObserver::OnReceived(TransferPath path, TransferKind kind, int64_t bytes) {
  if (auto* counter = impl_->transfer(0, path, kind); counter != nullptr) {
    counter->Increment(static_cast<double>(bytes));
  }
}
void MetricsObserver::OnSent(TransferPath path, TransferKind kind, int64_t bytes) {
  if (auto* counter = impl_->transfer(1, path, kind); counter != nullptr) {
    counter->Increment(static_cast<double>(bytes));
  }
}
void MetricsObserver::OnReceive(absl::Duration took) { impl_->ObserveStage(kReceive, took); }
void MetricsObserver::OnReply(absl::Duration took) { impl_->ObserveStage(kReply, took); }

void MetricsObserver::OnSessionInstalled(absl::string_view train_job) { impl_->Install(train_job); }
void MetricsObserver::OnSessionRemoved(absl::string_view train_job) { impl_->Remove(train_job); }
void MetricsObserver::OnSessionOpened(absl::string_view train_job) { impl_->Open(train_job); }
void MetricsObserver::OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.contributions[KindIndex(kind)][kAccepted]->Increment();
    if (KindIndex(kind) < kKindsWithBytes) job.bytes[KindIndex(kind)]->Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnDuplicate(absl::string_view train_job, ContributionKind kind) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { job.contributions[KindIndex(kind)][kDuplicate]->Increment(); });
}
void MetricsObserver::OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {
  impl_->rejected(reason).Increment();
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { job.contributions[KindIndex(kind)][kRefused]->Increment(); });
}
void MetricsObserver::OnSealed(absl::string_view train_job, ContributionKind, absl::Duration open_for) {
  impl_->ObserveStage(kSealWait, open_for);
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { Impl::AddToStage(job, kSealWait, open_for); });
}
void MetricsObserver::OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {
  impl_->ObserveStage(kUpdate, took);
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.counter(Metric("precondor_updates_total")).Increment();
    if (!ok) job.counter(Metric("precondor_update_failures_total")).Increment();
    Impl::AddToStage(job, kUpdate, took);
  });
}
void MetricsObserver::OnUpdatesLost(absl::string_view train_job, int64_t updates) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.counter(Metric("precondor_updates_lost_total")).Increment(static_cast<double>(updates));
  });
}
void MetricsObserver::OnPrecondition(absl::string_view train_job, absl::Duration took) {
  impl_->ObserveStage(kPrecondition, took);
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) { Impl::AddToStage(job, kPrecondition, took); });
}
void MetricsObserver::OnPlan(Decision decision, AnswerCause cause) { impl_->plan(decision, cause).Increment(); }
void MetricsObserver::OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    for (size_t i = 0; i < kDecisions.size(); ++i) {
      if (kDecisions[i] == decision) job.results[i]->Increment();
    }
    job.counter(Metric("precondor_result_bytes_total")).Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnFetch(absl::string_view train_job, int64_t bytes) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.counter(Metric("precondor_fetches_total")).Increment();
    job.counter(Metric("precondor_fetched_bytes_total")).Increment(static_cast<double>(bytes));
  });
}
void MetricsObserver::OnSessionMemory(absl::string_view train_job, int64_t reserved) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.gauge(Metric("precondor_job_reserved_bytes")).Set(static_cast<double>(reserved));
  });
}
void MetricsObserver::OnAdmission(bool admitted) { impl_->admissions(admitted).Increment(); }
void MetricsObserver::OnLogSync(absl::Duration took, int64_t log_bytes) {
  impl_->histogram(Metric("precondor_log_sync_seconds")).Observe(absl::ToDoubleSeconds(took));
  impl_->gauge(Metric("precondor_log_size_bytes")).Set(static_cast<double>(log_bytes));
  impl_->gauge(Metric("precondor_last_log_sync_timestamp_seconds")).Set(UnixSeconds());
}
void MetricsObserver::OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) {
  impl_->histogram(Metric("precondor_snapshot_seconds")).Observe(absl::ToDoubleSeconds(took));
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.gauge(Metric("precondor_last_snapshot_bytes")).Set(static_cast<double>(bytes));
    job.gauge(Metric("precondor_last_snapshot_timestamp_seconds")).Set(UnixSeconds());
  });
}
void MetricsObserver::OnReservedBytes(int64_t reserved, int64_t capacity) {
  impl_->gauge(Metric("precondor_reserved_bytes")).Set(static_cast<double>(reserved));
  impl_->gauge(Metric("precondor_capacity_bytes")).Set(static_cast<double>(capacity));
}
void MetricsObserver::OnDevice(absl::string_view device, bool usable) {
  impl_->AddGauge(Metric("precondor_device_status"), {{"device", std::string(device)}}).Set(usable ? 1 : 0);
}
void MetricsObserver::OnShardSessions(int64_t sessions) {
  impl_->gauge(Metric("precondor_shard_sessions")).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnQuarantinedSessions(int64_t sessions) {
  impl_->gauge(Metric("precondor_quarantined_sessions")).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnLogAppend(int64_t bytes, bool ok) {
  ok ? impl_->counter(Metric("precondor_log_bytes_total")).Increment(static_cast<double>(bytes))
     : impl_->counter(Metric("precondor_log_failures_total")).Increment();
}
void MetricsObserver::OnLogStale(absl::string_view train_job, bool stale) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { job.gauge(Metric("precondor_log_stale_status")).Set(stale ? 1 : 0); });
}
void MetricsObserver::OnGradientsMissing(absl::string_view train_job, bool missing) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.gauge(Metric("precondor_gradients_missing_status")).Set(missing ? 1 : 0);
  });
}
void MetricsObserver::OnSnapshot(absl::string_view train_job, bool ok) {
  impl_->WithShardJob(train_job,
                      [&](Impl::ShardJob& job) { (ok ? job.snapshots_done : job.snapshots_failed)->Increment(); });
}
void MetricsObserver::OnCoordinatorSessions(int64_t sessions) {
  impl_->gauge(Metric("precondor_coordinator_sessions")).Set(static_cast<double>(sessions));
}
void MetricsObserver::OnUnreachableShards(int64_t shards) {
  impl_->gauge(Metric("precondor_unreachable_shards")).Set(static_cast<double>(shards));
}
void MetricsObserver::OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) {
  impl_->WithShardJob(train_job, [&](Impl::ShardJob& job) {
    job.gauge(Metric("precondor_lagging_workers")).Set(static_cast<double>(ranks.size()));
    job.gauge(Metric("precondor_lagging_rank_number")).Set(ranks.empty() ? -1.0 : static_cast<double>(ranks.front()));
  });
}
void MetricsObserver::OnJournal(bool ok) {
  if (!ok) impl_->counter(Metric("precondor_journal_failures_total")).Increment();
  impl_->gauge(Metric("precondor_journal_failing_status")).Set(ok ? 0 : 1);
}
void MetricsObserver::OnDecision(absl::string_view train_job, const FallbackDecision& decision) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.gauge(Metric("precondor_smoothed_loss")).Set(decision.state.trend.loss);
    job.gauge(Metric("precondor_loss_rate")).Set(decision.state.trend.rate);
    job.gauge(Metric("precondor_fallback_threshold_rate")).Set(decision.threshold_rate);
    job.second_order_seconds->Set(decision.state.second_order_seconds);
    job.first_order_seconds->Set(decision.state.first_order_seconds);
  });
}
void MetricsObserver::OnSessionSnapshot(absl::string_view train_job, bool complete) {
  impl_->WithCoordinatorJob(train_job, [complete](Impl::CoordinatorJob& job) {
    (complete ? job.snapshots_complete : job.snapshots_failed)->Increment();
  });
}
void MetricsObserver::OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {
  impl_->WithCoordinatorJob(train_job, [step](Impl::CoordinatorJob& job) {
    job.gauge(Metric("precondor_last_session_snapshot_step_number")).Set(static_cast<double>(step));
  });
}
void MetricsObserver::OnModeChange(absl::string_view train_job, Mode) {
  impl_->WithCoordinatorJob(
      train_job, [](Impl::CoordinatorJob& job) { job.counter(Metric("precondor_mode_changes_total")).Increment(); });
}
void MetricsObserver::OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.counter(Metric("precondor_steps_total")).Increment();
    job.gauge(Metric("precondor_last_step_number")).Set(static_cast<double>(step));
    if (std::isfinite(loss)) job.gauge(Metric("precondor_training_loss")).Set(loss);
    job.gauge(Metric("precondor_second_order_mode")).Set(mode == Mode::kSecondOrder ? 1 : 0);
  });
}
void MetricsObserver::OnLease(absl::string_view train_job, uint64_t through_step) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.gauge(Metric("precondor_lease_step_number")).Set(static_cast<double>(through_step));
  });
}
void MetricsObserver::OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {
  impl_->WithCoordinatorJob(train_job, [&](Impl::CoordinatorJob& job) {
    job.gauge(Metric("precondor_epoch_number")).Set(static_cast<double>(epoch));
    job.gauge(Metric("precondor_joined_workers")).Set(static_cast<double>(joined));
    job.gauge(Metric("precondor_expected_workers")).Set(static_cast<double>(world_size));
  });
}
void MetricsObserver::OnSessionClosed(absl::string_view train_job) { impl_->Close(train_job); }

}  // namespace precondor::metrics
