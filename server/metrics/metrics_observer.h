// SPDX-License-Identifier: Apache-2.0
// Exports the events of core's Observer as Prometheus series over HTTP. The only user of prometheus-cpp.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "server/core/api/observer.h"
#include "server/http/http_server.h"

namespace precondor::metrics {

// Thread-safe. A job has the series of what this process runs: a shard's from OnSessionInstalled to OnSessionRemoved, a
// coordinator's from OnSessionOpened to OnSessionClosed. They start at zero. If several sessions of one name are
// installed or opened, the series end with the last one. Events of other jobs are dropped, so that a late event does
// not create series again.
class MetricsObserver final : public Observer {
 public:
  MetricsObserver(absl::string_view version, absl::string_view role);
  ~MetricsObserver() override;

  // Serves /metrics and `pages` (by path) on `listening_socket`, which it owns from now on. Errors: those of
  // HttpServer::Start.
  absl::Status Serve(int listening_socket, std::map<std::string, Page> pages = {});
  // Stops serving. After it returns, no page function is called.
  void StopServing();
  // Precondition: Serve has not been called. `probe` is called before each scrape, to report values that are read then
  // instead of reported as events.
  void SetProbe(std::function<void(MetricsObserver&)> probe);
  // Returns the text with which /metrics answers.
  std::string Render() const;

  void OnRpc(absl::string_view method, absl::StatusCode code, absl::Duration took);
  void OnDrain();
  void OnShardStep(absl::string_view train_job, uint64_t step);
  void OnDroppedLogLines(int64_t total);
  // Totals since the server started. `dropped` is the part of `made` that was dropped.
  void OnTraceSpans(int64_t made, int64_t dropped);
  void OnAcceptFailure();
  void OnMemoryBudget(absl::string_view part, int64_t bytes);
  // `bytes` is 0 if there is no limit.
  void OnContainerMemory(int64_t bytes);
  // `unix_seconds` is 0 without a certificate.
  void OnCertificateExpiry(int64_t unix_seconds);

  // TransferObserver.
  void OnReceived(TransferPath path, TransferKind kind, int64_t bytes) override;
  void OnSent(TransferPath path, TransferKind kind, int64_t bytes) override;
  void OnAcknowledged(absl::Duration took) override;
  void OnReply(absl::Duration took) override;
  // LayerObserver.
  void OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) override;
  void OnDuplicate(absl::string_view train_job, ContributionKind kind) override;
  void OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) override;
  void OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) override;
  void OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) override;
  void OnUpdatesLost(absl::string_view train_job, int64_t updates) override;
  void OnPrecondition(absl::string_view train_job, absl::Duration took) override;
  void OnPlan(Decision decision, AnswerCause cause) override;
  void OnResult(absl::string_view train_job, Decision decision, int64_t bytes) override;
  void OnFetch(absl::string_view train_job, int64_t bytes) override;
  // ShardObserver.
  void OnSessionInstalled(absl::string_view train_job) override;
  void OnSessionRemoved(absl::string_view train_job) override;
  void OnSessionMemory(absl::string_view train_job, int64_t reserved) override;
  void OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) override;
  void OnShardSessions(int64_t sessions) override;
  void OnQuarantinedSessions(int64_t sessions) override;
  void OnAdmission(bool admitted) override;
  void OnReservedBytes(int64_t reserved, int64_t capacity) override;
  void OnDevice(absl::string_view device, bool usable) override;
  // StoreObserver.
  void OnLogAppend(int64_t bytes, bool ok) override;
  void OnLogStale(absl::string_view train_job, bool stale) override;
  void OnGradientsMissing(absl::string_view train_job, bool missing) override;
  void OnLogSync(absl::Duration took, int64_t log_bytes) override;
  void OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) override;
  void OnSnapshot(absl::string_view train_job, bool ok) override;
  // CoordinatorObserver.
  void OnSessionOpened(absl::string_view train_job) override;
  void OnSessionClosed(absl::string_view train_job) override;
  void OnCoordinatorSessions(int64_t sessions) override;
  void OnUnreachableShards(int64_t shards) override;
  void OnSessionSnapshot(absl::string_view train_job, bool complete) override;
  void OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) override;
  void OnJournal(bool ok) override;
  void OnDecision(absl::string_view train_job, const FallbackDecision& decision) override;
  void OnModeChange(absl::string_view train_job, Mode mode) override;
  void OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) override;
  void OnLease(absl::string_view train_job, uint64_t through_step) override;
  void OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) override;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace precondor::metrics
