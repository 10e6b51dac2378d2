// SPDX-License-Identifier: Apache-2.0
#include "server/store/coordinator_encoding.h"

#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "server/store/session_encoding.h"
#include "server/store/struct_encoding.h"

namespace precondor {

// Not in an unnamed namespace: argument-dependent lookup would not see them there.
auto Fields(store::Is<PlacedLayers> auto& value) {
  auto& [shard, address, layers] = value;
  return std::tie(shard, address, layers);
}

auto Fields(store::Is<Membership> auto& value) {
  auto& [epoch, rollback_epoch, resume_step, incarnations, first_steps, last_holders] = value;
  return std::tie(epoch, rollback_epoch, resume_step, incarnations, first_steps, last_holders);
}

auto Fields(store::Is<LeaseTerms> auto& value) {
  auto& [durable_through, schedule, fallback] = value;
  return std::tie(durable_through, schedule, fallback);
}

auto Fields(store::Is<SessionAccess> auto& value) {
  auto& [secret, tenants] = value;
  return std::tie(secret, tenants);
}

auto Fields(store::Is<SessionRecord> auto& value) {
  auto& [session_id, spec, placement, membership, lease, access] = value;
  return std::tuple_cat(
      std::tie(session_id, spec, placement, membership, lease), std::make_tuple(store::Retired<uint8_t>{1}),
      std::tie(spec.layer_methods),
      std::make_tuple(store::LayerShapes<decltype((spec.layers))>{spec.layers}, store::Retired<uint8_t>{1}),
      std::tie(access, spec.delegates));
}

auto Fields(store::Is<MembershipRecord> auto& value) {
  auto& [session_id, membership] = value;
  return std::tie(session_id, membership);
}

auto Fields(store::Is<LeaseRecord> auto& value) {
  auto& [session_id, lease] = value;
  return std::tie(session_id, lease);
}

auto Fields(store::Is<CloseRecord> auto& value) {
  auto& [session_id] = value;
  return std::tie(session_id);
}

auto Fields(store::Is<ClosingRecord> auto& value) {
  auto& [session_id] = value;
  return std::tie(session_id);
}

auto Fields(store::Is<LeaderRecord> auto& value) {
  auto& [token] = value;
  return std::tie(token);
}

constexpr SnapshotState LastEnumerator(SnapshotState) { return SnapshotState::kFailed; }

auto Fields(store::Is<SnapshotPart> auto& value) {
  auto& [shard, snapshot_id, layers] = value;
  return std::tie(shard, snapshot_id, layers);
}

auto Fields(store::Is<SnapshotEntry> auto& value) {
  auto& [number, step, epoch, state, reason, parts, restores] = value;
  return std::tie(number, step, epoch, state, reason, parts, restores);
}

auto Fields(store::Is<SnapshotsRecord> auto& value) {
  auto& [session_id, snapshots] = value;
  return std::tie(session_id, snapshots);
}

namespace store {
namespace {

// 2: a SessionRecord ends with on_shard_loss. 3: then layer_methods. 4: then the shapes of layers. 5: then a data
// plane. 6: then the session's secret and tenants. 7: then delegates.
constexpr uint8_t kVersion = 7;
constexpr uint8_t kVersionWithoutDelegates = 6;

// Converts a record of an earlier version. Version 1 has no on_shard_loss. Before version 3 all layers
// have one method, before version 4 no shapes, before version 5 no data plane, before version 6 no secret, and before
// version 7 no delegates.
template <typename Record>
std::string FromVersion(uint8_t version, absl::string_view bytes) {
  std::string next(bytes);
  if constexpr (std::is_same_v<Record, SessionRecord>) {
    if (version < 2) Put(next, Retired<uint8_t>{1});
    if (version < 3) Put(next, std::vector<LayerMethod>());
    if (version < 4) Put(next, std::map<uint32_t, std::vector<int64_t>>());
    if (version < 5) Put(next, Retired<uint8_t>{1});
    if (version < 6) Put(next, SessionAccess());
    if (version < 7) Put(next, std::vector<uint32_t>());
  }
  return next;
}

template <typename Record>
absl::StatusOr<CoordinatorRecord> DecodeAs(absl::string_view bytes) {
  std::string converted;
  if (!bytes.empty() && bytes.front() >= 1 && bytes.front() < kVersion) {
    bytes = converted = FromVersion<Record>(static_cast<uint8_t>(bytes.front()), bytes);
  }
  Decoder decoder(bytes);
  const uint8_t version = decoder.U8();
  if (decoder.ok() && version > kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("coordinator record has version ", version, ", this program reads up to ", kVersion));
  }
  Record record;
  Take(decoder, record);
  if (version < 1 || !decoder.done()) {
    return absl::DataLossError(absl::StrCat("coordinator record of ", bytes.size(), " bytes does not decode"));
  }
  return record;
}

template <uint8_t kKind, typename Record>
constexpr bool IsKind = std::is_same_v<std::variant_alternative_t<kKind - 1, CoordinatorRecord>, Record>;
static_assert(std::variant_size_v<CoordinatorRecord> == 7);
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

// Writes the earliest version that has all of the record, so that an earlier program can take over.
std::string EncodeCoordinatorRecord(const CoordinatorRecord& record) {
  const auto* const session = std::get_if<SessionRecord>(&record);
  const bool delegates = session != nullptr && !session->spec.delegates.empty();
  std::string bytes(1, static_cast<char>(delegates ? kVersion : kVersionWithoutDelegates));
  std::visit([&bytes](const auto& held) { Put(bytes, held); }, record);
  if (session != nullptr && !delegates) {
    std::string none;
    Put(none, session->spec.delegates);
    bytes.resize(bytes.size() - none.size());
  }
  return bytes;
}

absl::StatusOr<CoordinatorRecord> DecodeCoordinatorRecord(uint8_t kind, absl::string_view bytes) {
  switch (kind) {
    case kSessionRecord:
      return DecodeAs<SessionRecord>(bytes);
    case kMembershipRecord:
      return DecodeAs<MembershipRecord>(bytes);
    case kLeaseRecord:
      return DecodeAs<LeaseRecord>(bytes);
    case kCloseRecord:
      return DecodeAs<CloseRecord>(bytes);
    case kSnapshotsRecord:
      return DecodeAs<SnapshotsRecord>(bytes);
    case kClosingRecord:
      return DecodeAs<ClosingRecord>(bytes);
    case kLeaderRecord:
      return DecodeAs<LeaderRecord>(bytes);
    default:
      return absl::FailedPreconditionError(
          absl::StrCat("coordinator record of kind ", kind, ", this program knows 1 to 7"));
  }
}

}  // namespace store
}  // namespace precondor
