// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/convert.h"

#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/status_codec.h"
#include "proto/wire/tensor_codec.h"

namespace precondor::rpc {
namespace {

v1::ModeInterval EncodeInterval(const ModeInterval& interval) {
  v1::ModeInterval out;
  out.set_first_step(interval.first_step);
  out.set_mode(wire::EncodeMode(interval.mode));
  return out;
}

// Converts to core's type; limits the value to the greatest int64_t.
int64_t Bytes(uint64_t bytes) {
  return static_cast<int64_t>(std::min<uint64_t>(bytes, std::numeric_limits<int64_t>::max()));
}

void EncodeMembers(const std::vector<Member>& members, google::protobuf::RepeatedPtrField<v1::Member>& out) {
  for (const Member& member : members) {
    v1::Member& added = *out.Add();
    added.set_rank(member.rank);
    added.set_incarnation(member.incarnation);
    added.set_first_step(member.first_step);
  }
}

absl::StatusOr<std::vector<Member>> DecodeMembers(const google::protobuf::RepeatedPtrField<v1::Member>& members) {
  std::vector<Member> out;
  std::set<uint32_t> ranks;
  for (const v1::Member& member : members) {
    if (!ranks.insert(member.rank()).second) {
      return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                            absl::StrCat("members: expected each rank once, got ", member.rank(), " twice"));
    }
    out.push_back({member.rank(), member.incarnation(), member.first_step()});
  }
  return out;
}

}  // namespace

ContributionKey DecodeKey(const v1::FrameHeader& header) {
  return {header.session_id(), header.epoch(), header.step(), header.layer(), header.rank(), header.incarnation()};
}

absl::StatusOr<ContributionHeader> DecodeHeader(const v1::FrameHeader& header) {
  ContributionHeader out;
  switch (header.kind()) {
    case v1::FRAME_KIND_STATISTICS:
      out.kind = ContributionKind::kStatistics;
      break;
    case v1::FRAME_KIND_GRADIENT:
      out.kind = ContributionKind::kGradient;
      break;
    case v1::FRAME_KIND_PULL:
      out.kind = ContributionKind::kPull;
      break;
    default:
      return ReasonedStatus(
          absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
          absl::StrCat("header.kind: expected STATISTICS, GRADIENT or PULL, got ", static_cast<int>(header.kind())));
  }
  PRECONDOR_ASSIGN_OR_RETURN(out.mode, wire::DecodeMode(header.mode(), "header.mode"));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<wire::TensorFormat> tensors,
                             wire::DecodeTensorHeaders(header.tensors()));
  for (const wire::TensorFormat& tensor : tensors) out.tensors.push_back({tensor.dtype, tensor.dims, tensor.scale});
  out.key = DecodeKey(header);
  out.samples = header.samples();
  out.abstain = header.abstain();
  for (const v1::GradientPart& part : header.parts()) {
    out.parts.push_back({part.row(), part.rows(), part.col(), part.cols(), !part.only_receives()});
  }
  return out;
}

v1::FrameHeader AnswerHeader(const v1::FrameHeader& contribution, v1::FrameKind kind) {
  v1::FrameHeader header;
  header.set_session_id(contribution.session_id());
  header.set_epoch(contribution.epoch());
  header.set_step(contribution.step());
  header.set_layer(contribution.layer());
  header.set_rank(contribution.rank());
  header.set_incarnation(contribution.incarnation());
  header.set_mode(contribution.mode());
  header.set_kind(kind);
  return header;
}

void EncodeResult(const GradientResult& result, v1::FrameHeader& header, v1::Outcome& outcome) {
  outcome.set_decision(wire::EncodeDecision(result.decision));
  outcome.set_factor_version(result.factor_version);
  outcome.set_inner_product(result.inner_product);
  outcome.set_reason(wire::SafeText(result.reason));
  if (result.bytes == nullptr && result.on_device == nullptr) return;
  for (const TensorDesc& tensor : result.tensors) {
    *header.add_tensors() = wire::EncodeTensorHeader({tensor.dtype, tensor.dims, tensor.scale});
  }
  header.set_payload_bytes(static_cast<uint64_t>(result.payload_bytes()));
}

v1::Directive EncodeDirective(const Directive& directive) {
  v1::Directive out;
  out.set_lease_through_step(directive.lease_through_step);
  out.set_epoch(directive.epoch);
  out.set_rollback_epoch(directive.rollback_epoch);
  out.set_resume_step(directive.resume_step);
  out.set_snapshot_at(directive.snapshot_at);
  out.set_snapshot_id(directive.snapshot_number);
  out.set_report_limit(kReportLimit);
  for (const ModeInterval& interval : directive.modes) *out.add_modes() = EncodeInterval(interval);
  return out;
}

v1::ModeStatus EncodeModeStatus(const CoordinatorSessionSummary& session) {
  v1::ModeStatus out;
  out.set_mode(wire::EncodeMode(session.mode));
  for (const ModeInterval& interval : session.modes) *out.add_schedule() = EncodeInterval(interval);
  out.set_rule(std::string(FallbackReasonName(session.decision.reason)));
  out.set_reason(wire::SafeText(session.decision.sentence));
  const FallbackState& state = session.decision.state;
  if (state.forced.has_value()) out.set_forced(wire::EncodeMode(*state.forced));
  out.set_step(state.last_step);
  out.set_loss(state.trend.loss);
  out.set_rate(state.trend.rate);
  out.set_threshold_rate(session.decision.threshold_rate);
  out.set_phase_steps(state.trend.phase_steps);
  out.set_streak_steps(static_cast<uint64_t>(state.streak_steps));
  out.set_second_order_seconds(state.second_order_seconds);
  out.set_first_order_seconds(state.first_order_seconds);
  return out;
}

v1::ShardMap EncodeShardMap(uint64_t epoch, const std::vector<ShardAssignment>& assignments) {
  v1::ShardMap out;
  out.set_epoch(epoch);
  for (const ShardAssignment& assignment : assignments) {
    v1::ShardAssignment* shard = out.add_assignments();
    shard->set_address(wire::SafeText(assignment.address));
    shard->mutable_layers()->Add(assignment.layers.begin(), assignment.layers.end());
  }
  return out;
}

absl::StatusOr<v1::InstallSessionRequest> EncodeInstall(const SessionInstall& install) {
  v1::InstallSessionRequest request;
  request.set_session_id(install.session_id);
  request.set_epoch(install.epoch);
  request.set_rollback_epoch(install.rollback_epoch);
  request.set_resume_step(install.rollback_step);
  PRECONDOR_ASSIGN_OR_RETURN(*request.mutable_spec(), wire::EncodeSessionSpec(install.spec));
  request.mutable_layers()->Add(install.layers.begin(), install.layers.end());
  EncodeMembers(install.members, *request.mutable_members());
  request.set_secret(install.access.secret);
  request.mutable_tenants()->Add(install.access.tenants.begin(), install.access.tenants.end());
  request.set_must_be_held(install.must_be_held);
  return request;
}

v1::FenceSessionRequest EncodeFence(const EpochFence& fence) {
  v1::FenceSessionRequest request;
  request.set_session_id(fence.session_id);
  request.set_epoch(fence.epoch);
  EncodeMembers(fence.members, *request.mutable_members());
  return request;
}

absl::StatusOr<EpochFence> DecodeFence(const v1::FenceSessionRequest& request) {
  EpochFence fence{.session_id = request.session_id(), .epoch = request.epoch(), .members = {}};
  PRECONDOR_ASSIGN_OR_RETURN(fence.members, DecodeMembers(request.members()));
  return fence;
}

absl::StatusOr<SessionInstall> DecodeInstall(const v1::InstallSessionRequest& request) {
  SessionInstall install;
  install.session_id = request.session_id();
  install.epoch = request.epoch();
  install.rollback_epoch = request.rollback_epoch();
  install.rollback_step = request.resume_step();
  PRECONDOR_ASSIGN_OR_RETURN(install.spec, wire::DecodeSessionSpec(request.spec()));
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(install.spec));
  install.access = {.secret = request.secret(), .tenants = {request.tenants().begin(), request.tenants().end()}};
  install.must_be_held = request.must_be_held();
  install.layers.assign(request.layers().begin(), request.layers().end());
  for (size_t i = 0; i < install.layers.size(); ++i) {
    const bool ascending = i == 0 || install.layers[i] > install.layers[i - 1];
    if (ascending && install.layers[i] < install.spec.layers.size()) continue;
    return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kUnknownLayer,
                          absl::StrCat("layers[", i, "]: expected ascending places below ", install.spec.layers.size(),
                                       ", got ", install.layers[i]));
  }
  PRECONDOR_ASSIGN_OR_RETURN(install.members, DecodeMembers(request.members()));
  for (const Member& member : install.members) {
    if (member.rank < static_cast<uint32_t>(install.spec.world_size)) continue;
    return ReasonedStatus(
        absl::StatusCode::kInvalidArgument, ErrorReason::kUnknownRank,
        absl::StrCat("members: expected ranks below ", install.spec.world_size, ", got ", member.rank));
  }
  return install;
}

void EncodeDevice(const DeviceUse& device, v1::DeviceMemory& out) {
  out.set_name(wire::SafeText(device.name));
  out.set_capacity_bytes(static_cast<uint64_t>(device.capacity_bytes));
  out.set_reserved_bytes(static_cast<uint64_t>(device.reserved_bytes));
  out.set_fault(wire::SafeText(device.fault));
  out.set_ring_device(device.ring_device);
}

v1::DescribeShardResponse EncodeDescription(const ShardDescription& description) {
  v1::DescribeShardResponse out;
  out.set_advertise_address(wire::SafeText(description.advertise_address));
  out.set_capacity_bytes(static_cast<uint64_t>(description.device.capacity_bytes));
  out.set_reserved_bytes(static_cast<uint64_t>(description.device.reserved_bytes));
  EncodeDevice(description.device, *out.add_devices());
  for (const HeldSession& session : description.sessions) {
    v1::HeldSession* held = out.add_sessions();
    held->set_session_id(session.session_id);
    held->set_name(wire::SafeText(session.name));
    held->set_epoch(session.epoch);
    held->set_reserved_bytes(static_cast<uint64_t>(session.reserved_bytes));
    held->set_joined(session.joined);
    held->set_last_step(session.last_step);
    held->mutable_layers()->Add(session.layers.begin(), session.layers.end());
  }
  return out;
}

ShardDescription DecodeDescription(const v1::DescribeShardResponse& response) {
  ShardDescription out;
  out.advertise_address = response.advertise_address();
  out.device.capacity_bytes = Bytes(response.capacity_bytes());
  out.device.reserved_bytes = Bytes(response.reserved_bytes());
  if (response.devices_size() > 0) {
    const v1::DeviceMemory& device = response.devices(0);
    out.device.name = device.name();
    out.device.fault = device.fault();
    out.device.ring_device = device.ring_device();
  }
  for (const v1::HeldSession& session : response.sessions()) {
    out.sessions.push_back({session.session_id(), session.name(), session.epoch(), Bytes(session.reserved_bytes()),
                            session.joined(), session.last_step(),
                            std::vector<uint32_t>(session.layers().begin(), session.layers().end())});
  }
  return out;
}

v1::TakeSnapshotRequest EncodeOrder(const SnapshotOrder& order) {
  v1::TakeSnapshotRequest out;
  out.set_session_id(order.session_id);
  out.set_number(order.number);
  out.set_step(order.step);
  out.set_repeated(order.repeated);
  out.mutable_keep()->Add(order.keep.begin(), order.keep.end());
  out.set_restores(order.restores);
  return out;
}

SnapshotOrder DecodeOrder(const v1::TakeSnapshotRequest& request) {
  return {.session_id = request.session_id(),
          .number = request.number(),
          .step = request.step(),
          .repeated = request.repeated(),
          .keep = {request.keep().begin(), request.keep().end()},
          .restores = request.restores()};
}

v1::SessionSnapshot EncodeSnapshot(const CoordinatorSessionSummary& session, const SnapshotEntry& snapshot) {
  v1::SessionSnapshot out;
  out.set_snapshot_id(snapshot.number);
  out.set_session_id(session.session_id);
  out.set_session(wire::SafeText(session.spec.name));
  out.set_step(snapshot.step);
  out.set_epoch(snapshot.epoch);
  out.set_state(snapshot.state == SnapshotState::kUnderWay   ? v1::SNAPSHOT_STATE_UNDER_WAY
                : snapshot.state == SnapshotState::kComplete ? v1::SNAPSHOT_STATE_COMPLETE
                                                             : v1::SNAPSHOT_STATE_FAILED);
  out.set_reason(wire::SafeText(snapshot.reason));
  for (const SnapshotPart& part : snapshot.parts) {
    v1::SnapshotPart* const encoded = out.add_parts();
    encoded->set_shard(wire::SafeText(part.shard));
    encoded->set_snapshot_id(part.snapshot_id);
    encoded->mutable_layers()->Add(part.layers.begin(), part.layers.end());
  }
  return out;
}

v1::LayerStats EncodeLayerStats(const LayerStats& stats) {
  v1::LayerStats out;
  out.set_layer(stats.layer);
  out.set_name(wire::SafeText(stats.name));
  out.set_factor_version(stats.factor_version);
  out.set_input_representation(stats.input_representation);
  out.set_output_representation(stats.output_representation);
  out.set_input_rank(static_cast<uint32_t>(stats.input_rank));
  out.set_output_rank(static_cast<uint32_t>(stats.output_rank));
  out.set_input_damping(stats.input_damping);
  out.set_output_damping(stats.output_damping);
  out.set_failed_decompositions(static_cast<uint64_t>(stats.failed_decompositions));
  out.set_factor_resets(static_cast<uint64_t>(stats.factor_resets));
  out.set_state_bytes(static_cast<uint64_t>(stats.state_bytes));
  out.set_accepted(stats.accepted);
  out.set_duplicates(stats.duplicates);
  out.set_rejected(stats.rejected);
  out.set_preconditioned(stats.preconditioned);
  out.set_identity(stats.identity);
  out.set_skipped(stats.skipped);
  out.set_last_sealed_step(stats.last_sealed_step);
  out.set_update_seconds(stats.update_seconds);
  out.set_precondition_seconds(stats.precondition_seconds);
  return out;
}

}  // namespace precondor::rpc
