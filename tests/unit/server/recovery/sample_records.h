// SPDX-License-Identifier: Apache-2.0
// Coordinator records with a distinct, non-default value in every field.
#pragma once

#include <string>

#include "server/core/api/coordinator_journal.h"

namespace precondor {

inline FallbackState SampleFallbackState() {
  return {.observed = true,
          .last_step = 41,
          .uncounted_steps = 2,
          .trend = {.started = true,
                    .loss = 0.1,
                    .rate = -0.0,
                    .learning_rate = 3e-4,
                    .phase_step = 17,
                    .phase_loss = 2.25,
                    .phase_steps = 20},
          .second_order_seconds = 0.5,
          .first_order_seconds = 0.25,
          .streak_steps = 11,
          .mode = Mode::kFirstOrder,
          .switch_step = 30,
          .forced = Mode::kSecondOrder};
}

inline SessionSpec SampleSpec(const std::string& name = "job") {
  SessionSpec spec;
  spec.name = name;
  spec.seed = 0xFEDCBA9876543210;
  spec.world_size = 3;
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.sketches = 2;
  spec.inv_freq = 20;
  spec.warmup_steps = 30;
  spec.statistics_dtype = DType::kBF16;
  spec.gradient_dtype = DType::kF16;
  spec.method = {.name = "mkor", .options = {{"gamma", 0.99}, {"rank", 8.0}, {"rule", std::string("BLEND")}}};
  spec.fallback = {.policy = FallbackPolicy::kAtStep,
                   .at_step = 500,
                   .rate_decay = 0.8,
                   .lr_jump = 0.7,
                   .min_steps = 1,
                   .beta = 0.6,
                   .patience_steps = 2};
  spec.layers = {{.name = "first", .d_out = 5, .d_in = 6, .has_bias = true},
                 {.name = "second", .d_out = int64_t{1} << 20, .d_in = 1, .has_bias = false, .shape = {64, 128, 128}}};
  spec.layer_methods = {
      {.method = {.name = "identity", .options = {}}, .statistics = StatisticsKind::kCovariance, .layers = {1}}};
  spec.delegates = {2, 1};
  return spec;
}

inline Membership SampleMembership() {
  return {.epoch = 4,
          .rollback_epoch = 3,
          .resume_step = 12,
          .incarnations = {7, 0, 9},
          .first_steps = {1, 2, 3},
          .last_holders = {7, 8, 9}};
}

inline LeaseTerms SampleLease() {
  return {.durable_through = 104,
          .schedule = {{0, Mode::kSecondOrder}, {64, Mode::kFirstOrder}},
          .fallback = SampleFallbackState()};
}

inline SessionRecord SampleSession(uint64_t session_id, const std::string& name = "job") {
  return {.session_id = session_id,
          .spec = SampleSpec(name),
          .placement = {{.shard = "shard0", .address = "host-one:1", .layers = {0}},
                        {.shard = "shard1", .address = "", .layers = {1}}},
          .membership = SampleMembership(),
          .lease = SampleLease(),
          .access = {.secret = "0123456789abcdef", .tenants = {"tenant a"}}};
}

inline SnapshotsRecord SampleSnapshots(uint64_t session_id) {
  return {.session_id = session_id,
          .snapshots = {
              {.number = 5,
               .step = 640,
               .epoch = 2,
               .state = SnapshotState::kFailed,
               .reason = "shard1: down",
               .parts = {{.shard = "shard0", .snapshot_id = 9, .layers = {0}}, {.shard = "shard1", .layers = {1}}},
               .restores = true}}};
}

// True when both say the same of the same session.
inline bool Same(const CoordinatorRecord& a, const CoordinatorRecord& b) {
  if (a.index() != b.index()) return false;
  if (const auto* session = std::get_if<SessionRecord>(&a)) {
    const auto& other = std::get<SessionRecord>(b);
    return session->session_id == other.session_id && session->spec == other.spec &&
           session->placement == other.placement && session->membership == other.membership &&
           session->lease == other.lease && session->access == other.access;
  }
  if (const auto* membership = std::get_if<MembershipRecord>(&a)) {
    const auto& other = std::get<MembershipRecord>(b);
    return membership->session_id == other.session_id && membership->membership == other.membership;
  }
  if (const auto* lease = std::get_if<LeaseRecord>(&a)) {
    const auto& other = std::get<LeaseRecord>(b);
    return lease->session_id == other.session_id && lease->lease == other.lease;
  }
  if (const auto* snapshots = std::get_if<SnapshotsRecord>(&a)) {
    const auto& other = std::get<SnapshotsRecord>(b);
    return snapshots->session_id == other.session_id && snapshots->snapshots == other.snapshots;
  }
  if (const auto* lead = std::get_if<LeaderRecord>(&a)) return lead->token == std::get<LeaderRecord>(b).token;
  if (const auto* closing = std::get_if<ClosingRecord>(&a)) {
    return closing->session_id == std::get<ClosingRecord>(b).session_id;
  }
  return std::get<CloseRecord>(a).session_id == std::get<CloseRecord>(b).session_id;
}

}  // namespace precondor
