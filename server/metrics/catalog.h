// SPDX-License-Identifier: Apache-2.0
// Lists every metric of a server with name, type and help. Rules: names are precondor_<noun>_<unit>[_total] in base
// units. The label train_job is the job's name. A rank, step, layer, peer or session id is never a label.
// docs/operate/monitoring.md describes what to watch.
// A job has at most 59 series on a server of role all (tests/unit/server/metrics_test.cc). Therefore histograms and
// reasons are per server, and jobs have sums only.
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
     "Contributions: accepted, duplicate (acknowledged and not counted again) or rejected", MetricOwner::kShardJob},
    {"precondor_contribution_bytes_total", MetricType::kCounter, "train_job,kind",
     "Payload bytes of accepted contributions", MetricOwner::kShardJob},
    {"precondor_results_total", MetricType::kCounter, "train_job,decision",
     "Answers to gradients and pulls by decision", MetricOwner::kShardJob},
    {"precondor_plans_total", MetricType::kCounter, "decision,reason",
     "Layers' steps of all jobs, by what all ranks are answered with and, where that is not preconditioned, why"},
    {"precondor_result_bytes_total", MetricType::kCounter, "train_job", "Payload bytes of these answers",
     MetricOwner::kShardJob},
    {"precondor_updates_total", MetricType::kCounter, "train_job", "Factor updates attempted", MetricOwner::kShardJob},
    {"precondor_update_failures_total", MetricType::kCounter, "train_job",
     "Factor updates that failed; the last good factors stay", MetricOwner::kShardJob},
    {"precondor_updates_lost_total", MetricType::kCounter, "train_job",
     "Factor updates that workers have had answers of and a shard came back without", MetricOwner::kShardJob},
    {"precondor_job_stages_total", MetricType::kCounter, "train_job,stage",
     "Times that a layer of the job went through a stage", MetricOwner::kShardJob},
    {"precondor_job_stage_seconds_total", MetricType::kCounter, "train_job,stage",
     "Time that layers of the job spent in a stage", MetricOwner::kShardJob},
    {"precondor_fetches_total", MetricType::kCounter, "train_job",
     "Layers whose factors were sent to a worker that asked for them", MetricOwner::kShardJob},
    {"precondor_fetched_bytes_total", MetricType::kCounter, "train_job", "Payload bytes of these factors",
     MetricOwner::kShardJob},
    {"precondor_job_reserved_bytes", MetricType::kGauge, "train_job,part",
     "Memory that the job has reserved on this shard: gradients is what first order needs too, factors the rest, 0 "
     "while they "
     "are released",
     MetricOwner::kShardJob},
    {"precondor_shard_step_number", MetricType::kGauge, "train_job",
     "Greatest step that this shard has sealed of the job", MetricOwner::kShardJob},
    {"precondor_log_stale_status", MetricType::kGauge, "train_job",
     "1 while the log of the shard lacks records of the session, which then cannot come back", MetricOwner::kShardJob},
    {"precondor_gradients_missing_status", MetricType::kGauge, "train_job",
     "1 while the journal lacks gradients of the session: a crash would bring it back with older factors",
     MetricOwner::kShardJob},
    {"precondor_snapshots_total", MetricType::kCounter, "train_job,outcome", "Snapshots of a session on this shard",
     MetricOwner::kShardJob},
    {"precondor_last_snapshot_timestamp_seconds", MetricType::kGauge, "train_job",
     "Unix time of the last snapshot of the session that is durable on this shard; 0: none since the server started",
     MetricOwner::kShardJob},
    {"precondor_last_snapshot_bytes", MetricType::kGauge, "train_job", "Size of the factors in that snapshot",
     MetricOwner::kShardJob},
    {"precondor_factor_releases_total", MetricType::kCounter, "train_job,outcome",
     "Attempts to write factors to the disk that a session in first order has released", MetricOwner::kShardJob},
    {"precondor_returned_layers_total", MetricType::kCounter, "train_job,factors",
     "Layers that returned to second order with the factors they had released, or with fresh ones",
     MetricOwner::kShardJob},
    {"precondor_lagging_workers", MetricType::kGauge, "train_job", "Ranks that hold up all others",
     MetricOwner::kShardJob},
    {"precondor_lagging_rank_number", MetricType::kGauge, "train_job", "The lowest of them; -1: none",
     MetricOwner::kShardJob},
    {"precondor_stage_seconds", MetricType::kHistogram, "stage",
     "Time of the stages of a step, one layer at a time: receive, seal_wait, update, precondition, reply"},
    {"precondor_rejected_total", MetricType::kCounter, "reason", "Contributions refused, by reason"},
    {"precondor_transfer_bytes_total", MetricType::kCounter, "direction,path,kind",
     "Payload bytes between workers and this server, retransmissions included"},
    {"precondor_reserved_bytes", MetricType::kGauge, "", "Memory reserved on all devices of this shard together"},
    {"precondor_capacity_bytes", MetricType::kGauge, "", "Memory that can be reserved on all of these together"},
    {"precondor_device_reserved_bytes", MetricType::kGauge, "device",
     "The part of precondor_reserved_bytes on one of the devices of the shard"},
    {"precondor_device_capacity_bytes", MetricType::kGauge, "device", "Memory that can be reserved on it"},
    {"precondor_device_status", MetricType::kGauge, "device", "1 while the device can be used, 0 after it is lost"},
    {"precondor_admissions_total", MetricType::kCounter, "result", "Reservations of memory, admitted or refused"},
    {"precondor_shard_sessions", MetricType::kGauge, "", "Sessions installed on this shard"},
    {"precondor_quarantined_sessions", MetricType::kGauge, "",
     "Sessions on the disk of this shard that its coordinator did not know"},
    {"precondor_log_bytes_total", MetricType::kCounter, "", "Bytes of records written to the log of the shard"},
    {"precondor_log_failures_total", MetricType::kCounter, "", "Writes of the log of the shard that failed"},
    {"precondor_log_size_bytes", MetricType::kGauge, "", "Size of the log of the shard on the disk"},
    {"precondor_last_log_sync_timestamp_seconds", MetricType::kGauge, "",
     "Unix time of the last sync of that log; 0: none"},
    {"precondor_log_sync_seconds", MetricType::kHistogram, "", "Time of a sync of that log"},
    {"precondor_snapshot_seconds", MetricType::kHistogram, "", "Time to write a snapshot of a session"},
    {"precondor_steps_total", MetricType::kCounter, "train_job", "Steps that all workers have reported",
     MetricOwner::kCoordinatorJob},
    {"precondor_last_step_number", MetricType::kGauge, "train_job", "Greatest step that all workers have reported",
     MetricOwner::kCoordinatorJob},
    {"precondor_lease_step_number", MetricType::kGauge, "train_job", "Last step that any worker may begin now",
     MetricOwner::kCoordinatorJob},
    {"precondor_training_loss", MetricType::kGauge, "train_job",
     "Sample-weighted loss of the last reported step whose loss was finite", MetricOwner::kCoordinatorJob},
    {"precondor_second_order_mode", MetricType::kGauge, "train_job", "1 in second order, 0 after the fallback",
     MetricOwner::kCoordinatorJob},
    {"precondor_smoothed_loss", MetricType::kGauge, "train_job", "Smoothed loss, an input of the fallback policy",
     MetricOwner::kCoordinatorJob},
    {"precondor_loss_rate", MetricType::kGauge, "train_job",
     "Smoothed decrease of that loss in a step, an input of the fallback policy", MetricOwner::kCoordinatorJob},
    {"precondor_fallback_threshold_rate", MetricType::kGauge, "train_job",
     "Decrease in a step below which the policy LOSS_RATE falls back to first order", MetricOwner::kCoordinatorJob},
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
     "Step of the last one that is complete; -1: none", MetricOwner::kCoordinatorJob},
    {"precondor_coordinator_sessions", MetricType::kGauge, "", "Sessions open on this coordinator"},
    {"precondor_unreachable_shards", MetricType::kGauge, "",
     "Shards that left the coordinator's last three probes unanswered"},
    {"precondor_journal_failures_total", MetricType::kCounter, "",
     "Writes of the journal of the coordinator that failed"},
    {"precondor_journal_failing_status", MetricType::kGauge, "", "1 when the last such write failed"},
    {"precondor_rpcs_total", MetricType::kCounter, "method,code", "Finished RPCs by status code"},
    {"precondor_rpc_seconds", MetricType::kHistogram, "method", "Time of an RPC; of Exchange, of a whole stream"},
    {"precondor_draining_status", MetricType::kGauge, "", "1 after a drain has begun"},
    {"precondor_open_streams", MetricType::kGauge, "", "Streams of workers that are open"},
    {"precondor_incomplete_bytes", MetricType::kGauge, "",
     "Payload bytes of contributions that are arriving, and of unary gradients until they are answered"},
    {"precondor_memory_budget_bytes", MetricType::kGauge, "part",
     "Memory that each part of the process may come to use with the sessions that there are"},
    {"precondor_container_memory_bytes", MetricType::kGauge, "", "Memory limit of the container; 0: none"},
    {"precondor_certificate_expiry_timestamp_seconds", MetricType::kGauge, "",
     "Unix time at which the server's certificate expires; 0: plaintext"},
    {"precondor_dropped_log_lines_total", MetricType::kCounter, "",
     "Log lines that standard error did not take at once, or that repeated a message more than 100 times in 10 s"},
    {"precondor_accept_failures_total", MetricType::kCounter, "",
     "Attempts to accept a connection that failed, as for want of a descriptor; each is made again after 0.1 s"},
    {"precondor_trace_spans_total", MetricType::kCounter, "", "Spans made for the collector of traces"},
    {"precondor_dropped_trace_spans_total", MetricType::kCounter, "",
     "Spans that did not fit into the queue, or that the collector did not take"},
    {"precondor_allocated_bytes", MetricType::kGauge, "", "Memory in use by the allocator's own figure"},
    {"precondor_resident_memory_bytes", MetricType::kGauge, "", "Resident memory of the process"},
    {"precondor_start_timestamp_seconds", MetricType::kGauge, "", "Unix time at which the process started"},
    {"precondor_build_info", MetricType::kGauge, "version,role", "1; the labels tell what runs"},
};
inline constexpr size_t kMetricCount = std::size(kCatalog);

// Returns a metric's index in kCatalog. An unknown name does not compile.
consteval size_t Metric(std::string_view name) {
  size_t place = 0;
  while (name != kCatalog[place].name) ++place;
  return place;
}

}  // namespace precondor::metrics
