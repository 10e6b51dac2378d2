// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/record_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/fields.h"
#include "kernels/base/session_spec.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"

namespace precondor {
// For enumerations that several records have.
constexpr Mode LastEnumerator(Mode) { return Mode::kFirstOrder; }
}  // namespace precondor

namespace precondor::recovery {

// Encodes values as bytes and decodes them, for the records of shards and coordinators. A struct goes by its
// PRECONDOR_FIELDS, in order: a change of them, or of their types, is another format.
//
// Format, little-endian: bool and enumerations take 1 byte, integers their size, double its 8 IEEE bytes. string and
// vector are an 8-byte count and the elements. optional is a bool and the value. A struct is its fields.

template <typename T>
concept Number = std::integral<T> && !std::same_as<T, bool>;

template <typename T>
void Put(std::string& out, const T& value);
// If the bytes are too few or invalid, decoder.ok() is false afterwards, and `value` has what was decoded before the
// error.
template <typename T>
void Take(Decoder& decoder, T& value);

namespace internal {

template <typename T>
struct Code {
  static void Put(std::string& out, const T& value) {
    std::apply([&out](const auto&... fields) { (recovery::Put(out, fields), ...); }, Fields(value));
  }
  static void Take(Decoder& decoder, T& value) {
    std::apply([&decoder](auto&&... fields) { (recovery::Take(decoder, fields), ...); }, Fields(value));
  }
};

template <Number T>
struct Code<T> {
  static void Put(std::string& out, T value) { PutFixed(out, static_cast<uint64_t>(value), sizeof(T)); }
  static void Take(Decoder& decoder, T& value) { value = static_cast<T>(decoder.Fixed(sizeof(T))); }
};

template <>
struct Code<bool> {
  static void Put(std::string& out, bool value) { PutFixed(out, value ? 1 : 0, 1); }
  static void Take(Decoder& decoder, bool& value) {
    const uint8_t byte = decoder.U8();
    if (byte > 1) decoder.Fail();
    value = byte == 1;
  }
};

template <>
struct Code<double> {
  static void Put(std::string& out, double value) { PutU64(out, std::bit_cast<uint64_t>(value)); }
  static void Take(Decoder& decoder, double& value) { value = std::bit_cast<double>(decoder.U64()); }
};

// Enumerators count from 1. LastEnumerator(E), in E's namespace, returns the last one.
template <typename T>
requires std::is_enum_v<T>
struct Code<T> {
  static void Put(std::string& out, T value) { PutFixed(out, static_cast<uint64_t>(value), 1); }
  static void Take(Decoder& decoder, T& value) {
    const uint8_t byte = decoder.U8();
    if (byte < 1 || byte > static_cast<uint64_t>(LastEnumerator(T{}))) decoder.Fail();
    value = static_cast<T>(byte);
  }
};

template <>
struct Code<std::string> {
  static void Put(std::string& out, const std::string& value) { PutBytes(out, value); }
  static void Take(Decoder& decoder, std::string& value) { value = std::string(decoder.Bytes()); }
};

template <typename T>
struct Code<std::vector<T>> {
  static void Put(std::string& out, const std::vector<T>& value) {
    PutU64(out, value.size());
    for (const T& element : value) recovery::Put(out, element);
  }
  static void Take(Decoder& decoder, std::vector<T>& value) {
    value.clear();
    // The vector grows only while bytes are left, so that a wrong count cannot claim memory.
    for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) recovery::Take(decoder, value.emplace_back());
  }
};

template <typename T>
struct Code<std::optional<T>> {
  static void Put(std::string& out, const std::optional<T>& value) {
    recovery::Put(out, value.has_value());
    if (value.has_value()) recovery::Put(out, *value);
  }
  static void Take(Decoder& decoder, std::optional<T>& value) {
    bool there = false;
    recovery::Take(decoder, there);
    value.reset();
    if (there) recovery::Take(decoder, value.emplace());
  }
};

}  // namespace internal

template <typename T>
void Put(std::string& out, const T& value) {
  internal::Code<T>::Put(out, value);
}

template <typename T>
void Take(Decoder& decoder, T& value) {
  internal::Code<T>::Take(decoder, value);
}

}  // namespace precondor::recovery

namespace precondor {

// The fields of records. Not in an unnamed namespace: argument-dependent lookup would not see them there.
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
PRECONDOR_FIELDS(LayerStep, session_id, layer, step, rollback_epoch, updates)
PRECONDOR_FIELDS(Plan, decision, factor_version, reason)
PRECONDOR_FIELDS(RemoveRecord, session_id)
PRECONDOR_FIELDS(FailedUpdateRecord, at)
PRECONDOR_FIELDS(PlanRecord, at, mode, plan)
PRECONDOR_FIELDS(QuarantineRecord, session_id, back, last_step)
PRECONDOR_FIELDS(StepOutcome, step, mode, updated, plan)
// Without the state, which is apart.
auto Fields(Is<LayerImage> auto& value) {
  auto& [at, factor_version, outcomes, state] = value;
  return std::tie(at, factor_version, outcomes);
}
constexpr Decision LastEnumerator(Decision) { return Decision::kSkip; }

namespace recovery {
namespace {

constexpr uint32_t kImageFormat = 6;
// By the index in ShardRecord.
constexpr RecordType kTypes[] = {RecordType::kInstall,      RecordType::kRemove, RecordType::kUpdate,
                                 RecordType::kFailedUpdate, RecordType::kPlan,   RecordType::kQuarantine};
static_assert(std::size(kTypes) == std::variant_size_v<ShardRecord>);

void PutContributions(EncodedRecord& out, absl::Span<const StagedContribution> contributions) {
  PutU64(out.own, contributions.size());
  for (const StagedContribution& contribution : contributions) {
    PutU64(out.own, contribution.samples);
    for (const float scale : contribution.scales) PutU32(out.own, std::bit_cast<uint32_t>(scale));
    PutU64(out.own, contribution.bytes.size());
    out.contributions.emplace_back(
        out.own.size(),
        absl::string_view(reinterpret_cast<const char*>(contribution.bytes.data()), contribution.bytes.size()));
  }
}

std::vector<StagedContribution> TakeContributions(Decoder& in) {
  std::vector<StagedContribution> contributions;
  const uint64_t count = in.U64();
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    StagedContribution contribution;
    contribution.samples = in.U64();
    for (float& scale : contribution.scales) scale = std::bit_cast<float>(in.U32());
    const absl::string_view bytes = in.Bytes();
    contribution.bytes.assign(bytes.begin(), bytes.end());
    contributions.push_back(std::move(contribution));
  }
  return contributions;
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(what, ": the bytes are not what was written"));
}

absl::StatusOr<ShardRecord> DecodeInstallRecord(absl::string_view payload) {
  v1::InstallSessionRequest request;
  if (!request.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) return Damaged("install record");
  PRECONDOR_ASSIGN_OR_RETURN(SessionInstall install, rpc::DecodeInstall(request));
  return InstallRecord{std::move(install)};
}

template <typename Record>
absl::StatusOr<ShardRecord> DecodePlain(uint8_t type, absl::string_view payload) {
  Decoder in(payload);
  Record record;
  if constexpr (std::is_same_v<Record, UpdateRecord>) {
    Take(in, record.at);
    record.contributions = TakeContributions(in);
  } else {
    Take(in, record);
  }
  if (!in.done()) return Damaged(absl::StrCat("record of type ", type));
  return record;
}

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

std::vector<absl::string_view> EncodedRecord::Pieces() const {
  std::vector<absl::string_view> pieces;
  pieces.reserve(2 * contributions.size() + 1);
  size_t done = 0;
  for (const auto& [at, contribution] : contributions) {
    pieces.push_back(absl::string_view(own).substr(done, at - done));
    pieces.push_back(contribution);
    done = at;
  }
  pieces.push_back(absl::string_view(own).substr(done));
  return pieces;
}

absl::StatusOr<std::string> EncodeInstall(const InstallRecord& record) {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::InstallSessionRequest install, rpc::EncodeInstall(record.install));
  return install.SerializeAsString();
}

absl::StatusOr<EncodedRecord> EncodeRecord(const ShardRecord& record) {
  EncodedRecord out{.type = kTypes[record.index()], .own = {}, .contributions = {}};
  absl::Status status;
  std::visit(
      [&out, &status](const auto& one) {
        using Record = std::remove_cvref_t<decltype(one)>;
        if constexpr (std::is_same_v<Record, InstallRecord>) {
          absl::StatusOr<std::string> install = EncodeInstall(one);
          if (install.ok()) out.own = *std::move(install);
          status = install.status();
        } else if constexpr (std::is_same_v<Record, UpdateRecord>) {
          Put(out.own, one.at);
          PutContributions(out, one.contributions);
        } else {
          Put(out.own, one);
        }
      },
      record);
  if (!status.ok()) return status;
  return out;
}

absl::StatusOr<ShardRecord> DecodeRecord(uint8_t type, absl::string_view payload) {
  switch (static_cast<RecordType>(type)) {
    case RecordType::kInstall:
      return DecodeInstallRecord(payload);
    case RecordType::kRemove:
      return DecodePlain<RemoveRecord>(type, payload);
    case RecordType::kUpdate:
      return DecodePlain<UpdateRecord>(type, payload);
    case RecordType::kFailedUpdate:
      return DecodePlain<FailedUpdateRecord>(type, payload);
    case RecordType::kPlan:
      return DecodePlain<PlanRecord>(type, payload);
    case RecordType::kQuarantine:
      return DecodePlain<QuarantineRecord>(type, payload);
    case RecordType::kGradient:
      break;
  }
  return absl::FailedPreconditionError(absl::StrCat("record type: expected 1 ... 5 or 9, got ", type));
}

EncodedRecord EncodeGradient(const GradientRecord& record, uint64_t log_sequence) {
  EncodedRecord out{.type = RecordType::kGradient, .own = {}, .contributions = {}};
  Put(out.own, record.at);
  PutU64(out.own, record.factor_version);
  PutU64(out.own, log_sequence);
  const bool covariances = !record.covariances.empty();
  PutU64(out.own, record.covariances.size());
  for (const StagedContribution& contribution : record.covariances) {
    for (const int64_t rows : contribution.rows) PutU64(out.own, static_cast<uint64_t>(rows));
  }
  PutContributions(out,
                   covariances ? absl::MakeConstSpan(record.covariances) : absl::MakeConstSpan(&record.average, 1));
  return out;
}

absl::StatusOr<StoredGradient> DecodeGradient(uint8_t type, absl::string_view payload) {
  if (type != static_cast<uint8_t>(RecordType::kGradient)) {
    return absl::FailedPreconditionError(absl::StrCat("record type in the log of gradients: expected 10, got ", type));
  }
  Decoder in(payload);
  StoredGradient gradient;
  Take(in, gradient.record.at);
  gradient.record.factor_version = in.U64();
  gradient.log_sequence = in.U64();
  const uint64_t covariances = in.U64();
  std::vector<std::array<int64_t, 2>> rows;
  for (uint64_t i = 0; i < covariances && in.ok(); ++i) {
    rows.push_back({static_cast<int64_t>(in.U64()), static_cast<int64_t>(in.U64())});
  }
  std::vector<StagedContribution> contributions = TakeContributions(in);
  if (!in.done() || contributions.size() != std::max<uint64_t>(covariances, 1)) return Damaged("record of a gradient");
  if (covariances == 0) {
    gradient.record.average = std::move(contributions[0]);
    return gradient;
  }
  for (uint64_t i = 0; i < covariances; ++i) contributions[i].rows = rows[i];
  gradient.record.covariances = std::move(contributions);
  return gradient;
}

uint64_t SessionOf(const ShardRecord& record) {
  return std::visit(
      [](const auto& one) -> uint64_t {
        using Record = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<Record, InstallRecord>) {
          return one.install.session_id;
        } else if constexpr (requires { one.session_id; }) {
          return one.session_id;
        } else {
          return one.at.session_id;
        }
      },
      record);
}

std::string EncodeImageHead(const LayerImage& image) {
  std::string out;
  PutU32(out, kImageFormat);
  Put(out, image);
  PutU64(out, image.state.size());
  return out;
}

absl::StatusOr<LayerImage> DecodeImage(absl::string_view bytes) {
  Decoder head(bytes.substr(0, kMostImageHeadBytes));
  const size_t begin = head.left();
  const uint32_t format = head.U32();
  if (head.ok() && format != kImageFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer image: format: expected ", kImageFormat, ", got ", format,
                     ", of another version: docs/operate/operations.md#upgrade says how to go on"));
  }
  LayerImage image;
  Take(head, image);
  const uint64_t state_bytes = head.U64();
  const absl::string_view state = bytes.substr(begin - head.left());
  if (!head.ok() || state_bytes != state.size()) return Damaged("layer image");
  image.state = std::string(state);
  return image;
}

// --- a coordinator's records -----------------------------------------------------------------------------------------

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
