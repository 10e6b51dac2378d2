// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/record_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/struct_encoding.h"
#include "server/rpc/convert.h"

namespace precondor {

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

}  // namespace recovery
}  // namespace precondor
