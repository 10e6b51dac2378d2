// SPDX-License-Identifier: Apache-2.0
// Every metric of a server: name, type and help. Rules: precondor_<noun>_<unit>[_total], base units; a job's name is
// the label train_job; never a label by rank, step, layer, peer or session id. docs/operations.md tells what to watch.
#pragma once

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace precondor::metrics {

enum class MetricType : uint8_t { kCounter, kGauge, kHistogram };

struct MetricInfo {
  const char* name;
  MetricType type;
  const char* labels;  // separated by commas
  const char* help;
};

// Buckets of every histogram: seconds.
inline constexpr std::array<double, 14> kSecondsBuckets = {.0005, .001, .0025, .005, .01, .025, .05,
                                                           .1,    .25,  .5,    1,    2.5, 5,    10};

// By the places that MetricsObserver uses; kCatalog is in this order.
enum MetricId : uint8_t {
  kContributions,
  kContributionBytes,
  kDuplicates,
  kRejected,
  kSealWait,
  kUpdates,
  kUpdateFailures,
  kUpdatesLost,
  kUpdateSeconds,
  kPreconditionSeconds,
  kResults,
  kResultBytes,
  kFetches,
  kFetchedBytes,
  kJobReservedBytes,
  kReservedBytes,
  kCapacityBytes,
  kDeviceReservedBytes,
  kDeviceCapacityBytes,
  kDeviceStatus,
  kShardSessions,
  kQuarantinedSessions,
  kLogStale,
  kSnapshots,
  kReleases,
  kReturnedLayers,
  kLogBytes,
  kLogFailures,
  kLaggingWorkers,
  kLaggingRank,
  kDataPlane,
  kDataPlaneFailures,
  kCoordinatorSessions,
  kSteps,
  kLastStep,
  kLoss,
  kSecondOrder,
  kSmoothedLoss,
  kLossRate,
  kFallbackThreshold,
  kModeChanges,
  kMovedLayers,
  kEpoch,
  kWorkersJoined,
  kWorkersExpected,
  kSessionSnapshots,
  kLastSessionSnapshot,
  kJournalFailures,
  kJournalFailing,
  kRpcs,
  kRpcSeconds,
  kDraining,
  kResidentBytes,
  kBuildInfo,
  kMetricCount,
};

inline constexpr std::array<MetricInfo, kMetricCount> kCatalog = {{
    {"precondor_contributions_total", MetricType::kCounter, "train_job,kind",
     "Contributions taken in, repetitions and refusals not counted"},
    {"precondor_contribution_bytes_total", MetricType::kCounter, "train_job,kind", "Payload bytes of contributions"},
    {"precondor_duplicates_total", MetricType::kCounter, "train_job,kind", "Repetitions acknowledged and not counted"},
    {"precondor_rejected_total", MetricType::kCounter, "train_job,kind,reason", "Contributions refused"},
    {"precondor_seal_wait_seconds", MetricType::kHistogram, "train_job,kind",
     "From the first contribution of a (step, layer) to its seal"},
    {"precondor_updates_total", MetricType::kCounter, "train_job", "Factor updates attempted"},
    {"precondor_update_failures_total", MetricType::kCounter, "train_job",
     "Factor updates that failed; the last good factors stay"},
    {"precondor_updates_lost_total", MetricType::kCounter, "train_job",
     "Factor updates that workers have had answers of and a shard came back without."},
    {"precondor_update_seconds", MetricType::kHistogram, "train_job", "Time of one factor update"},
    {"precondor_precondition_seconds", MetricType::kHistogram, "train_job", "Time of one layer's precondition"},
    {"precondor_results_total", MetricType::kCounter, "train_job,decision",
     "Answers to gradients and pulls by decision"},
    {"precondor_result_bytes_total", MetricType::kCounter, "train_job", "Payload bytes of these answers"},
    {"precondor_fetches_total", MetricType::kCounter, "train_job",
     "Layers whose factors were given to a worker that asked for them as they are"},
    {"precondor_fetched_bytes_total", MetricType::kCounter, "train_job", "Payload bytes of these factors"},
    {"precondor_job_reserved_bytes", MetricType::kGauge, "train_job",
     "Memory that the job has reserved on this shard; less while its factors are released"},
    {"precondor_reserved_bytes", MetricType::kGauge, "",
     "Memory that sessions have reserved on this shard, on all of its devices together"},
    {"precondor_capacity_bytes", MetricType::kGauge, "", "Memory that sessions may reserve on all of these together"},
    {"precondor_device_reserved_bytes", MetricType::kGauge, "device",
     "The part of precondor_reserved_bytes on one of the shard's devices"},
    {"precondor_device_capacity_bytes", MetricType::kGauge, "device", "Memory that sessions may reserve on it"},
    {"precondor_device_status", MetricType::kGauge, "device",
     "1 while the shard's device can be used, 0 since it is lost"},
    {"precondor_shard_sessions", MetricType::kGauge, "", "Sessions installed on this shard"},
    {"precondor_quarantined_sessions", MetricType::kGauge, "",
     "Sessions on this shard's disk that its coordinator did not know"},
    {"precondor_log_stale_status", MetricType::kGauge, "train_job",
     "1 while the shard's log lacks records of the session, which then cannot come back"},
    {"precondor_snapshots_total", MetricType::kCounter, "train_job,outcome", "Snapshots of a session on this shard"},
    {"precondor_factor_releases_total", MetricType::kCounter, "train_job,outcome",
     "Attempts to write factors to the disk that a session in first order has released"},
    {"precondor_returned_layers_total", MetricType::kCounter, "train_job,factors",
     "Layers that went on in second order with the factors they had released, or with fresh ones"},
    {"precondor_log_bytes_total", MetricType::kCounter, "", "Bytes of records in the shard's log"},
    {"precondor_log_failures_total", MetricType::kCounter, "", "Writes of the shard's log that failed"},
    {"precondor_lagging_workers", MetricType::kGauge, "train_job", "Ranks that hold all others up"},
    {"precondor_lagging_rank_number", MetricType::kGauge, "train_job", "The lowest of them; -1: none"},
    {"precondor_data_plane_status", MetricType::kGauge, "train_job",
     "1 while the job's gradients come by a communicator to this shard, 0 while over gRPC"},
    {"precondor_data_plane_failures_total", MetricType::kCounter, "train_job",
     "Communicators of the job that ended before their epoch, and no rank had left"},
    {"precondor_coordinator_sessions", MetricType::kGauge, "", "Sessions open on this coordinator"},
    {"precondor_steps_total", MetricType::kCounter, "train_job", "Steps that all workers have reported"},
    {"precondor_last_step_number", MetricType::kGauge, "train_job", "Greatest step that all workers have reported"},
    {"precondor_training_loss", MetricType::kGauge, "train_job", "Sample-weighted loss of that step"},
    {"precondor_second_order_mode", MetricType::kGauge, "train_job", "1 in second order, 0 after the fallback"},
    {"precondor_smoothed_loss", MetricType::kGauge, "train_job", "Smoothed loss that the fallback policy sees"},
    {"precondor_loss_rate", MetricType::kGauge, "train_job", "Smoothed decrease of that loss a step"},
    {"precondor_fallback_threshold_rate", MetricType::kGauge, "train_job",
     "Decrease a step below which the policy LOSS_RATE speaks for first order"},
    {"precondor_mode_changes_total", MetricType::kCounter, "train_job", "Changes of mode written down"},
    {"precondor_moved_layers_total", MetricType::kCounter, "train_job",
     "Layers that began anew on other shards because theirs was lost"},
    {"precondor_epoch_number", MetricType::kGauge, "train_job", "Current epoch of the session"},
    {"precondor_joined_workers", MetricType::kGauge, "train_job", "Ranks that have joined"},
    {"precondor_expected_workers", MetricType::kGauge, "train_job", "World size of the session"},
    {"precondor_session_snapshots_total", MetricType::kCounter, "train_job,outcome", "Snapshots of whole sessions"},
    {"precondor_last_session_snapshot_step_number", MetricType::kGauge, "train_job",
     "Step of the last one that is complete; -1: none"},
    {"precondor_journal_failures_total", MetricType::kCounter, "", "Writes of the coordinator's journal that failed"},
    {"precondor_journal_failing_status", MetricType::kGauge, "", "1 when the last such write failed"},
    {"precondor_rpcs_total", MetricType::kCounter, "method,code", "Finished RPCs by status code"},
    {"precondor_rpc_seconds", MetricType::kHistogram, "method", "Time of an RPC; of Exchange, of a whole stream"},
    {"precondor_draining_status", MetricType::kGauge, "", "1 once a drain has begun"},
    {"precondor_resident_memory_bytes", MetricType::kGauge, "", "Resident memory of the process"},
    {"precondor_build_info", MetricType::kGauge, "version,role", "1; the labels tell what runs"},
}};

}  // namespace precondor::metrics
