// SPDX-License-Identifier: Apache-2.0
// Lists every metric of a server with name, type and help. Rules: names are precondor_<noun>_<unit>[_total] in base
// units. The label train_job is the job's name. A rank, step, layer, peer or session id is never a label.
// docs/operate/monitoring.md describes what to watch.
// A job has at most 58 series on a server of role all (tests/unit/server/metrics/metrics_test.cc). Therefore histograms
// and reasons are per server, and jobs have sums only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace precondor::metrics {

enum class MetricType : uint8_t { kCounter, kGauge, kHistogram };

// Lifetime of a series. kServer: from the server's start. kShardJob: while the shard has the job's session.
// kCoordinatorJob: while the session is open on the coordinator.
enum class MetricOwner : uint8_t { kServer, kShardJob, kCoordinatorJob };

struct MetricInfo {
  const char* name;
  MetricType type;
  const char* labels;  // separated by commas
  const char* help;
  MetricOwner owner = MetricOwner::kServer;
};

// Upper bounds of the buckets of every histogram, in seconds.
inline constexpr std::array<double, 14> kSecondsBuckets = {.0005, .001, .0025, .005, .01, .025, .05,
                                                           .1,    .25,  .5,    1,    2.5, 5,    10};

inline constexpr MetricInfo kCatalog[] = {
    {"precondor_contributions_total", MetricType::kCounter, "train_job,kind,result",
     "Contributions by result. A duplicate is acknowledged and not counted again", MetricOwner::kShardJob},
    {"precondor_contribution_bytes_total", MetricType::kCounter, "train_job,kind",
     "Payload bytes of accepted contributions", MetricOwner::kShardJob},
    {"precondor_results_total", MetricType::kCounter, "train_job,decision",
     "Answers to gradients and pulls, by decision", MetricOwner::kShardJob},
    {"precondor_plans_total", MetricType::kCounter, "decision,reason",
     "Steps of layers of all jobs, by decision, and by reason where the answers are not preconditioned"},
    {"precondor_result_bytes_total", MetricType::kCounter, "train_job",
     "Payload bytes of answers to gradients and pulls", MetricOwner::kShardJob},
    {"precondor_updates_total", MetricType::kCounter, "train_job", "Factor updates attempted", MetricOwner::kShardJob},
    {"precondor_update_failures_total", MetricType::kCounter, "train_job",
     "Factor updates that failed. The layer keeps its last good factors", MetricOwner::kShardJob},
    {"precondor_updates_lost_total", MetricType::kCounter, "train_job",
     "Factor updates that a restarted shard lacks although workers have received their answers",
     MetricOwner::kShardJob},
    {"precondor_job_stages_total", MetricType::kCounter, "train_job,stage",
     "Passes of the job's layers through a stage", MetricOwner::kShardJob},
    {"precondor_job_stage_seconds_total", MetricType::kCounter, "train_job,stage",
     "Time of the job's layers in a stage", MetricOwner::kShardJob},
    {"precondor_fetches_total", MetricType::kCounter, "train_job", "Layers whose factors a worker has fetched",
     MetricOwner::kShardJob},
    {"precondor_fetched_bytes_total", MetricType::kCounter, "train_job", "Payload bytes of fetched factors",
     MetricOwner::kShardJob},
    {"precondor_job_reserved_bytes", MetricType::kGauge, "train_job", "Memory that the job has reserved on this shard",
     MetricOwner::kShardJob},
    {"precondor_shard_step_number", MetricType::kGauge, "train_job",
     "Greatest step of the job that this shard has sealed", MetricOwner::kShardJob},
    {"precondor_log_stale_status", MetricType::kGauge, "train_job",
     "1 while the shard's log lacks records of the session. The session cannot recover from such a log",
     MetricOwner::kShardJob},
    {"precondor_gradients_missing_status", MetricType::kGauge, "train_job",
     "1 while the journal lacks gradients of the session. After a crash, the session has older factors",
     MetricOwner::kShardJob},
    {"precondor_snapshots_total", MetricType::kCounter, "train_job,outcome", "Snapshots of a session on this shard",
     MetricOwner::kShardJob},
    {"precondor_last_snapshot_timestamp_seconds", MetricType::kGauge, "train_job",
     "Unix time of the session's last durable snapshot on this shard. 0 means none since the server started",
     MetricOwner::kShardJob},
    {"precondor_last_snapshot_bytes", MetricType::kGauge, "train_job",
     "Size of the factors in the session's last durable snapshot on this shard", MetricOwner::kShardJob},
    {"precondor_lagging_workers", MetricType::kGauge, "train_job", "Ranks that all other ranks wait for",
     MetricOwner::kShardJob},
    {"precondor_lagging_rank_number", MetricType::kGauge, "train_job",
     "Lowest rank that all other ranks wait for. -1 means none", MetricOwner::kShardJob},
    {"precondor_stage_seconds", MetricType::kHistogram, "stage",
     "Time of a layer in a stage of a step: receive, seal_wait, update, precondition or reply"},
    {"precondor_rejected_total", MetricType::kCounter, "reason", "Rejected contributions, by reason"},
    {"precondor_transfer_bytes_total", MetricType::kCounter, "direction,path,kind",
     "Payload bytes between workers and this server, with retransmissions"},
    {"precondor_reserved_bytes", MetricType::kGauge, "", "Reserved memory on the shard's device"},
    {"precondor_capacity_bytes", MetricType::kGauge, "", "Memory that sessions can reserve on the shard's device"},
    {"precondor_device_status", MetricType::kGauge, "device",
     "1 while the shard can use the device, 0 after it has lost it"},
    {"precondor_admissions_total", MetricType::kCounter, "result", "Reservations of memory, by result"},
    {"precondor_shard_sessions", MetricType::kGauge, "", "Sessions installed on this shard"},
    {"precondor_quarantined_sessions", MetricType::kGauge, "",
     "Sessions on the disk of this shard that its coordinator does not know"},
    {"precondor_log_bytes_total", MetricType::kCounter, "", "Bytes of records written to the shard's log"},
    {"precondor_log_failures_total", MetricType::kCounter, "", "Failed writes of the shard's log"},
    {"precondor_log_size_bytes", MetricType::kGauge, "", "Size of the shard's log on the disk"},
    {"precondor_last_log_sync_timestamp_seconds", MetricType::kGauge, "",
     "Unix time of the last sync of the shard's log. 0 means none"},
    {"precondor_log_sync_seconds", MetricType::kHistogram, "", "Time of a sync of the shard's log"},
    {"precondor_snapshot_seconds", MetricType::kHistogram, "", "Time to write a snapshot of a session"},
    {"precondor_steps_total", MetricType::kCounter, "train_job", "Steps that all workers have reported",
     MetricOwner::kCoordinatorJob},
    {"precondor_last_step_number", MetricType::kGauge, "train_job", "Greatest step that all workers have reported",
     MetricOwner::kCoordinatorJob},
    {"precondor_lease_step_number", MetricType::kGauge, "train_job", "Last step that a worker may begin now",
     MetricOwner::kCoordinatorJob},
    {"precondor_training_loss", MetricType::kGauge, "train_job",
     "Sample-weighted loss of the last reported step with a finite loss", MetricOwner::kCoordinatorJob},
    {"precondor_second_order_mode", MetricType::kGauge, "train_job", "1 in second order, 0 after the fallback",
     MetricOwner::kCoordinatorJob},
    {"precondor_smoothed_loss", MetricType::kGauge, "train_job", "Smoothed loss, an input of the fallback policy",
     MetricOwner::kCoordinatorJob},
    {"precondor_loss_rate", MetricType::kGauge, "train_job",
     "Smoothed decrease of the loss in a step, an input of the fallback policy", MetricOwner::kCoordinatorJob},
    {"precondor_fallback_threshold_rate", MetricType::kGauge, "train_job",
     "Decrease of the loss in a step below which the policy LOSS_RATE changes to first order",
     MetricOwner::kCoordinatorJob},
    {"precondor_mode_step_seconds", MetricType::kGauge, "train_job,mode",
     "Smoothed time of a step in each mode, an input of the fallback policy; 0: not known",
     MetricOwner::kCoordinatorJob},
    {"precondor_mode_changes_total", MetricType::kCounter, "train_job", "Changes of mode",
     MetricOwner::kCoordinatorJob},
    {"precondor_epoch_number", MetricType::kGauge, "train_job", "Current epoch of the session",
     MetricOwner::kCoordinatorJob},
    {"precondor_joined_workers", MetricType::kGauge, "train_job", "Ranks that have joined",
     MetricOwner::kCoordinatorJob},
    {"precondor_expected_workers", MetricType::kGauge, "train_job", "World size of the session",
     MetricOwner::kCoordinatorJob},
    {"precondor_session_snapshots_total", MetricType::kCounter, "train_job,outcome", "Snapshots of whole sessions",
     MetricOwner::kCoordinatorJob},
    {"precondor_last_session_snapshot_step_number", MetricType::kGauge, "train_job",
     "Step of the last complete snapshot of the whole session. -1 means none", MetricOwner::kCoordinatorJob},
    {"precondor_coordinator_sessions", MetricType::kGauge, "", "Sessions open on this coordinator"},
    {"precondor_unreachable_shards", MetricType::kGauge, "",
     "Shards that left the coordinator's last three probes unanswered"},
    {"precondor_journal_failures_total", MetricType::kCounter, "", "Failed writes of the coordinator's journal"},
    {"precondor_journal_failing_status", MetricType::kGauge, "",
     "1 while the last write of the coordinator's journal has failed"},
    {"precondor_rpcs_total", MetricType::kCounter, "method,code", "Finished RPCs by status code"},
    {"precondor_rpc_seconds", MetricType::kHistogram, "method",
     "Time of an RPC. An Exchange lasts as long as its stream"},
    {"precondor_draining_status", MetricType::kGauge, "", "1 after a drain has begun"},
    {"precondor_memory_budget_bytes", MetricType::kGauge, "part",
     "Most memory that a part of the process can use with the present sessions"},
    {"precondor_container_memory_bytes", MetricType::kGauge, "", "Memory limit of the container. 0 means none"},
    {"precondor_certificate_expiry_timestamp_seconds", MetricType::kGauge, "",
     "Unix time at which the server's certificate expires. 0 means plaintext"},
    {"precondor_dropped_log_lines_total", MetricType::kCounter, "",
     "Log lines that standard error did not accept at once, or that repeated a message more than 100 times in 10 s"},
    {"precondor_accept_failures_total", MetricType::kCounter, "",
     "Failed attempts to accept a connection, such as without a free descriptor. The server repeats each after 0.1 s"},
    {"precondor_trace_spans_total", MetricType::kCounter, "", "Spans made for the collector of traces"},
    {"precondor_dropped_trace_spans_total", MetricType::kCounter, "",
     "Spans that did not fit into the queue, or that the collector did not accept"},
    {"precondor_allocated_bytes", MetricType::kGauge, "", "Memory in use as the allocator counts it"},
    {"precondor_resident_memory_bytes", MetricType::kGauge, "", "Resident memory of the process"},
    {"precondor_start_timestamp_seconds", MetricType::kGauge, "", "Unix time at which the process started"},
    {"precondor_build_info", MetricType::kGauge, "version,role",
     "1. The labels have the version and the role of the server"},
};
inline constexpr size_t kMetricCount = std::size(kCatalog);

// Returns a metric's index in kCatalog. An unknown name does not compile.
consteval size_t Metric(std::string_view name) {
  size_t place = 0;
  while (name != kCatalog[place].name) ++place;
  return place;
}

}  // namespace precondor::metrics
