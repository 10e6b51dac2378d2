// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/coordinator_encoding.h"

#include <string>
#include <tuple>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/recovery/struct_encoding.h"

namespace precondor {

// Not in an unnamed namespace: argument-dependent lookup would not see them there.
PRECONDOR_FIELDS(PlacedLayers, shard, address, layers)
PRECONDOR_FIELDS(Membership, epoch, rollback_epoch, resume_step, incarnations, first_steps, last_holders)
PRECONDOR_FIELDS(ModeInterval, first_step, mode)
PRECONDOR_FIELDS(LossTrend, started, loss, rate, learning_rate, phase_step, phase_loss, phase_steps)
PRECONDOR_FIELDS(FallbackState, observed, last_step, uncounted_steps, trend, second_order_seconds, first_order_seconds,
                 streak_steps, mode, switch_step, forced)
PRECONDOR_FIELDS(LeaseTerms, durable_through, schedule, fallback)
PRECONDOR_FIELDS(SessionAccess, secret, tenants)
PRECONDOR_FIELDS(MembershipRecord, session_id, membership)
PRECONDOR_FIELDS(LeaseRecord, session_id, lease)
PRECONDOR_FIELDS(CloseRecord, session_id)
PRECONDOR_FIELDS(ClosingRecord, session_id)
PRECONDOR_FIELDS(LeaderRecord, token)
PRECONDOR_FIELDS(SnapshotPart, shard, snapshot_id, layers)
PRECONDOR_FIELDS(SnapshotEntry, number, step, epoch, state, reason, parts, restores)
PRECONDOR_FIELDS(SnapshotsRecord, session_id, snapshots)
// Without the description, which is a message behind these.
auto Fields(Is<SessionRecord> auto& value) {
  auto& [session_id, spec, placement, membership, lease, access] = value;
  return std::tie(session_id, placement, membership, lease, access);
}
constexpr SnapshotState LastEnumerator(SnapshotState) { return SnapshotState::kFailed; }

namespace recovery {
namespace {

constexpr uint8_t kCoordinatorFormat = 8;

// MethodConfig and FallbackConfig are checked where they are decoded.
template <typename Message>
absl::Status CheckNoLaterFields(const Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("session: ", message.GetDescriptor()->name(),
                                                    ": expected the fields of this version, got field ",
                                                    unknown.field(0).number(), " of a later one"));
}

absl::StatusOr<SessionSpec> DecodeSpec(absl::string_view bytes) {
  v1::SessionSpec spec;
  if (!spec.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return absl::DataLossError("session: no message");
  PRECONDOR_RETURN_IF_ERROR(CheckNoLaterFields(spec));
  for (const v1::Layer& layer : spec.layers()) PRECONDOR_RETURN_IF_ERROR(CheckNoLaterFields(layer));
  for (const v1::LayerMethod& methods : spec.layer_methods()) PRECONDOR_RETURN_IF_ERROR(CheckNoLaterFields(methods));
  absl::StatusOr<SessionSpec> decoded = wire::DecodeSessionSpec(spec);
  // This version does not know a stored field that the wire refuses in the message of a client.
  if (!decoded.ok()) return absl::FailedPreconditionError(absl::StrCat("session: ", decoded.status().message()));
  return decoded;
}

template <typename Record>
absl::StatusOr<CoordinatorRecord> DecodeAs(absl::string_view bytes) {
  Decoder decoder(bytes);
  const uint8_t format = decoder.U8();
  if (decoder.ok() && format != kCoordinatorFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("coordinator record: format: expected ", kCoordinatorFormat, ", got ", format,
                     ", of another version: docs/operate/operations.md#upgrade says how to go on"));
  }
  Record record;
  Take(decoder, record);
  if constexpr (std::is_same_v<Record, SessionRecord>) {
    const absl::string_view spec = decoder.Bytes();
    if (decoder.done()) {
      PRECONDOR_ASSIGN_OR_RETURN(record.spec, DecodeSpec(spec));
    }
  }
  if (!decoder.done()) {
    return absl::DataLossError(absl::StrCat("coordinator record of ", bytes.size(), " bytes does not decode"));
  }
  return record;
}

// Calls DecodeAs with the kind's type. Kinds are 1 + the index in CoordinatorRecord.
template <size_t kIndex = 0>
absl::StatusOr<CoordinatorRecord> DecodeKind(uint8_t kind, absl::string_view bytes) {
  constexpr size_t kKinds = std::variant_size_v<CoordinatorRecord>;
  if constexpr (kIndex < kKinds) {
    if (kind != kIndex + 1) return DecodeKind<kIndex + 1>(kind, bytes);
    return DecodeAs<std::variant_alternative_t<kIndex, CoordinatorRecord>>(bytes);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("coordinator record of kind ", kind, ", this program knows 1 to ", kKinds));
}

template <uint8_t kKind, typename Record>
constexpr bool IsKind = std::is_same_v<std::variant_alternative_t<kKind - 1, CoordinatorRecord>, Record>;
static_assert(IsKind<kSessionRecord, SessionRecord> && IsKind<kMembershipRecord, MembershipRecord> &&
              IsKind<kLeaseRecord, LeaseRecord> && IsKind<kCloseRecord, CloseRecord> &&
              IsKind<kSnapshotsRecord, SnapshotsRecord> && IsKind<kClosingRecord, ClosingRecord> &&
              IsKind<kLeaderRecord, LeaderRecord>);

}  // namespace

uint8_t KindOf(const CoordinatorRecord& record) { return static_cast<uint8_t>(record.index() + 1); }

uint64_t SessionIdOf(const CoordinatorRecord& record) {
  return std::visit(
      [](const auto& held) -> uint64_t {
        if constexpr (requires { held.session_id; }) return held.session_id;
        return 0;
      },
      record);
}

absl::StatusOr<std::string> EncodeCoordinatorRecord(const CoordinatorRecord& record) {
  std::string bytes(1, static_cast<char>(kCoordinatorFormat));
  std::visit([&bytes](const auto& held) { Put(bytes, held); }, record);
  if (const auto* const session = std::get_if<SessionRecord>(&record)) {
    PRECONDOR_ASSIGN_OR_RETURN(const v1::SessionSpec spec, wire::EncodeSessionSpec(session->spec));
    PutBytes(bytes, spec.SerializeAsString());
  }
  return bytes;
}

absl::StatusOr<CoordinatorRecord> DecodeCoordinatorRecord(uint8_t kind, absl::string_view bytes) {
  return DecodeKind(kind, bytes);
}

}  // namespace recovery
}  // namespace precondor
