// SPDX-License-Identifier: Apache-2.0
// Checks what workers send. A header is checked before memory is reserved for its payload, and becomes a value of a
// type that only ShardDataPlane can make. Layers take no other type. They check its payload when it has arrived.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/check.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "server/core/api/contribution.h"

namespace precondor {

// What a shard finds out about the payload of a contribution while it arrives, when its newest bytes are still in the
// processor's caches: its digest and, for a gradient, what decides whether it is taken. Not thread-safe.
class IncomingFacts {
 public:
  // `with_norm`: the gradient's norm is needed. With `device_plane`, an f32 gradient has equal digests as bytes and in
  // device memory; this takes a few times as long.
  IncomingFacts(const ContributionHeader& header, uint64_t payload_bytes, bool with_norm, bool device_plane);

  // Inspects `received`, the bytes from the payload's begin on, as far as no earlier call has. They are aligned for
  // f32. The result does not depend on how many calls there were, once one had the whole payload.
  void Advance(absl::Span<const uint8_t> received);

  struct Found {
    uint64_t digest = 0;                // depends on every byte; not stable between processes
    std::optional<int64_t> not_finite;  // the first of kBlock elements among which one is not finite, after its scale
    double squared_norm = 0;            // of what comes before
  };
  // Precondition: Advance has had the whole payload.
  const Found& found() const { return found_; }

  static constexpr int64_t kBlock = 1024;  // elements inspected at a time

 private:
  void InspectBlock(absl::Span<const uint8_t> bytes);

  uint64_t payload_bytes_;
  DType dtype_ = DType::kF32;
  float scale_ = 1;
  bool gradient_;
  bool with_norm_;
  bool device_plane_;
  uint64_t inspected_ = 0;
  Found found_;
};

struct SessionContext;

// A contribution whose session, epoch, rank, incarnation, layer, mode, step window, samples, tensors and byte count
// have passed their checks. Its payload may not have arrived yet. What can change afterwards (the session or epoch
// ends, the step leaves the window) is decided when the contribution is filed: see LayerMachine.
class AdmittedContribution {
 public:
  AdmittedContribution(AdmittedContribution&&) = default;
  AdmittedContribution& operator=(AdmittedContribution&&) = default;

  const ContributionHeader& header() const { return header_; }
  // Size in bytes of the payload that must be submitted with it.
  uint64_t payload_bytes() const { return payload_bytes_; }
  // Returns true if it was admitted to this session. Another session with an equal id may belong to another job.
  bool IsFor(const std::shared_ptr<const SessionContext>& session) const { return session_.lock() == session; }
  // Sets the payload. Precondition: the header was admitted with `on_device`, and `payload` has payload_bytes() bytes.
  void PlaceOnDevice(std::shared_ptr<const DevicePayload> payload) {
    PRECONDOR_CHECK(header_.on_device != nullptr && static_cast<uint64_t>(payload->bytes()) == payload_bytes_);
    header_.on_device = std::move(payload);
  }
  // Returns an empty payload to fill, perhaps with memory that the session has kept.
  Payload MakePayload() const;
  // Inspects the part of the payload that has arrived, so that the layer has less to do with the whole.
  void Inspect(absl::Span<const uint8_t> received) { facts_.Advance(received); }
  const IncomingFacts& facts() const { return facts_; }

 private:
  friend class ShardDataPlane;
  AdmittedContribution(ContributionHeader header, uint64_t payload_bytes, IncomingFacts facts,
                       std::weak_ptr<const SessionContext> session)
      : header_(std::move(header)), payload_bytes_(payload_bytes), facts_(facts), session_(std::move(session)) {}

  ContributionHeader header_;
  uint64_t payload_bytes_;
  IncomingFacts facts_;
  std::weak_ptr<const SessionContext> session_;  // weak: the session may be freed before the payload arrives
};

// The processes that may send to a session: the members of its epoch, as a shard knows them.
struct RankHolders {
  uint64_t epoch = 0;
  uint64_t rollback_epoch = 0;  // of the last install
  uint32_t joined = 0;
  bool fenced = false;                 // `epoch` is the next epoch, which is not installed here yet
  std::vector<uint64_t> incarnations;  // by rank; 0 if not joined; while fenced, the last epoch's
};

// The rest are pure functions; every status has an ErrorReason and names session, step, layer and rank.

// Checks step, epoch, rank and incarnation. Returns
// - INVALID_ARGUMENT (MALFORMED) if the step is greater than kMaxStep;
// - FAILED_PRECONDITION (STALE_EPOCH) for an earlier epoch, UNAVAILABLE (FUTURE_EPOCH) for a later one;
// - UNAVAILABLE (NOT_ACTIVE) while ranks are missing or the epoch is fenced;
// - NOT_FOUND (UNKNOWN_RANK) if the session has no such rank or the incarnation has not joined;
// - FAILED_PRECONDITION (STALE_INCARNATION) if a later incarnation holds the rank.
absl::Status CheckSender(const SessionSpec& spec, const RankHolders& holders, const ContributionKey& key);

// Checks whether the layer takes a contribution of this kind, at this step, from this rank. Returns
// - INVALID_ARGUMENT (MALFORMED) for a PULL or GRADIENT that the exchange mode does not have, or a PULL that abstains;
// - FAILED_PRECONDITION (NOT_STATISTIC_STEP) for statistics or a PULL outside a statistic step in second order, and for
//   a PULL to a layer that takes no statistics;
// - FAILED_PRECONDITION (NOT_DELEGATE) for a gradient that another rank has to send.
// Preconditions: the layer exists, and `method` is the layer's.
absl::Status CheckRole(const SessionSpec& spec, const Method& method, const ContributionHeader& header);

// Checks samples, number and types of the tensors, their shapes and scales, and the byte count against the layer table.
// Returns INVALID_ARGUMENT (MALFORMED, DTYPE_MISMATCH, SHAPE_MISMATCH or SIZE_MISMATCH) with the expected and the
// actual value. Precondition: the layer exists.
absl::Status CheckTensors(const SessionSpec& spec, const ContributionHeader& header, uint64_t payload_bytes);

// --- payloads -------------------------------------------------------------------------------------------------------

// Describes a key for messages: "session \"bert\" step 5 layer 2 \"enc.0\" rank 1".
std::string DescribeKey(const SessionSpec& spec, const ContributionKey& key);

// Returns 64 bits that depend on everything that must be equal in a repetition. Not stable between processes. `payload`
// has the whole payload, unless it is in device memory.
uint64_t Digest(const ContributionHeader& header, const IncomingFacts& payload);

// Returns INVALID_ARGUMENT (NON_FINITE) if an element is not finite, and INVALID_ARGUMENT (OVER_NORM) if a row has |v|
// > max_norm_per_sqrt_element * sqrt(d); a packed covariance has the root of its trace in place of |v|. Both name the
// tensor and row. Precondition: the header has passed CheckTensors.
absl::Status CheckStatistics(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                             double max_norm_per_sqrt_element);

// Returns the rows of a and of g for StagedContribution::rows. Precondition: the header has passed CheckTensors.
std::array<int64_t, 2> RowsOf(const SessionSpec& spec, const ContributionHeader& header);

// The shape of one side of a contribution: side 0 is a, side 1 is g. DecodeStatistics writes the side's elements as
// floats to `out`. Precondition of both functions: the contribution has passed CheckStatistics.
struct StatisticsSide {
  int64_t rows = 0;  // 1 for a packed covariance
  int64_t cols = 0;
  bool packed = false;
  int64_t elements() const { return rows * cols; }
};
StatisticsSide SideOf(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side);
void DecodeStatistics(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side,
                      absl::Span<float> out);

// Returns INVALID_ARGUMENT (NON_FINITE) unless every element, times its scale, is finite in f32, and INVALID_ARGUMENT
// (OVER_NORM) if the elements' norm is above `max_norm`. A gradient in device memory has no norm here. Precondition:
// the header has passed CheckTensors.
absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const IncomingFacts& payload,
                           double max_norm);

}  // namespace precondor
