// SPDX-License-Identifier: Apache-2.0
// Converts between the wire's messages and core's types. Pure functions; thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "precondor/v1/admin.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "precondor/v1/shard.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "server/core/api/contribution.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"

namespace precondor::rpc {

// Most steps that one ReportStep reports: those of a lease by default.
constexpr size_t kReportLimit = 64;

ContributionKey DecodeKey(const v1::FrameHeader& header);
// Returns INVALID_ARGUMENT (MALFORMED) with the name of the field if the kind, the mode or a tensor is not valid.
absl::StatusOr<ContributionHeader> DecodeHeader(const v1::FrameHeader& header);
// Returns the header of an answer to `contribution`: the contribution's key and mode, and the answer's kind.
v1::FrameHeader AnswerHeader(const v1::FrameHeader& contribution, v1::FrameKind kind);
// Writes the result's tensors and payload size to `header` and its decision to `outcome`.
void EncodeResult(const GradientResult& result, v1::FrameHeader& header, v1::Outcome& outcome);

// Returns the first 16 ranks of a list in ascending order, which are enough to look for a cause.
template <typename Ranks>
google::protobuf::RepeatedField<uint32_t> FirstRanks(const Ranks& ranks) {
  constexpr int kMostRanks = 16;
  google::protobuf::RepeatedField<uint32_t> first;
  for (auto rank = ranks.begin(); rank != ranks.end() && first.size() < kMostRanks; ++rank) first.Add(*rank);
  return first;
}

v1::Directive EncodeDirective(const Directive& directive);
v1::ModeStatus EncodeModeStatus(const CoordinatorSessionSummary& session);
v1::ShardMap EncodeShardMap(uint64_t epoch, const std::vector<ShardAssignment>& assignments);
absl::StatusOr<v1::InstallSessionRequest> EncodeInstall(const SessionInstall& install);
// Returns INVALID_ARGUMENT if the description is not valid, if a layer is not in it or the layers do not ascend
// (UNKNOWN_LAYER), if a member's rank is not below world_size (UNKNOWN_RANK), or if a rank occurs twice (MALFORMED).
absl::StatusOr<SessionInstall> DecodeInstall(const v1::InstallSessionRequest& request);
v1::FenceSessionRequest EncodeFence(const EpochFence& fence);
// Returns INVALID_ARGUMENT (MALFORMED) if a rank occurs twice.
absl::StatusOr<EpochFence> DecodeFence(const v1::FenceSessionRequest& request);
void EncodeDevice(const DeviceUse& device, v1::DeviceMemory& out);
v1::DescribeShardResponse EncodeDescription(const ShardDescription& description);
ShardDescription DecodeDescription(const v1::DescribeShardResponse& response);
v1::TakeSnapshotRequest EncodeOrder(const SnapshotOrder& order);
SnapshotOrder DecodeOrder(const v1::TakeSnapshotRequest& request);
v1::SessionSnapshot EncodeSnapshot(const CoordinatorSessionSummary& session, const SnapshotEntry& snapshot);
v1::LayerStats EncodeLayerStats(const LayerStats& stats);

}  // namespace precondor::rpc
