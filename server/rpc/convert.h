// SPDX-License-Identifier: Apache-2.0
// Between the wire's messages and core's types, one direction each. Pure functions; thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "precondor/v1/admin.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "precondor/v1/shard.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "server/core/contribution.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"

namespace precondor::rpc {

ContributionKey DecodeKey(const v1::FrameHeader& header);
// InvalidArgument (MALFORMED) names the field.
absl::StatusOr<ContributionHeader> DecodeHeader(const v1::FrameHeader& header);
// `header` of the contribution that is answered, with the answer's kind and without tensors.
v1::FrameHeader AnswerHeader(const v1::FrameHeader& contribution, v1::FrameKind kind);
// Adds the result's tensors and outcome.
void EncodeResult(const GradientResult& result, v1::FrameHeader& header, v1::Outcome& outcome);

v1::Directive EncodeDirective(const Directive& directive);
v1::ModeStatus EncodeModeStatus(const CoordinatorSessionSummary& session);
v1::ShardMap EncodeShardMap(uint64_t epoch, const std::vector<ShardAssignment>& assignments);
absl::StatusOr<v1::InstallSessionRequest> EncodeInstall(const SessionInstall& install);
absl::StatusOr<SessionInstall> DecodeInstall(const v1::InstallSessionRequest& request);
v1::FenceSessionRequest EncodeFence(const EpochFence& fence);
absl::StatusOr<EpochFence> DecodeFence(const v1::FenceSessionRequest& request);
v1::DescribeShardRequest EncodeLease(const ShardLease& lease);
ShardLease DecodeLease(const v1::DescribeShardRequest& request);
void EncodeDevice(const DeviceUse& device, v1::DeviceMemory& out);
v1::DescribeShardResponse EncodeDescription(const ShardDescription& description);
// Costs that are not finite are left out.
ShardDescription DecodeDescription(const v1::DescribeShardResponse& response);
absl::StatusOr<v1::QuarantinedPart> EncodeQuarantined(const QuarantinedSession& session);
absl::StatusOr<QuarantinedSession> DecodeQuarantined(const v1::QuarantinedPart& part);
absl::StatusOr<v1::QuarantinedSession> EncodeQuarantined(const QuarantineSummary& summary);
v1::TakeSnapshotRequest EncodeOrder(const SnapshotOrder& order);
SnapshotOrder DecodeOrder(const v1::TakeSnapshotRequest& request);
v1::SessionSnapshot EncodeSnapshot(const CoordinatorSessionSummary& session, const SessionSnapshot& snapshot);
v1::LayerStats EncodeLayerStats(const LayerStats& stats);

}  // namespace precondor::rpc
