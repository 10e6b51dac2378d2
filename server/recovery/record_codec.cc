// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/record_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"

namespace precondor::recovery {
namespace {

constexpr uint32_t kImageFormat = 4;

void PutStep(std::string& out, const LayerStep& at) {
  PutU64(out, at.session_id);
  PutU32(out, at.layer);
  PutU64(out, at.step);
  PutU64(out, at.rollback_epoch);
  PutU64(out, at.updates);
}

LayerStep TakeStep(Decoder& in) {
  LayerStep at;
  at.session_id = in.U64();
  at.layer = in.U32();
  at.step = in.U64();
  at.rollback_epoch = in.U64();
  at.updates = in.U64();
  return at;
}

void PutPlan(std::string& out, Mode mode, const Plan& plan) {
  out.push_back(static_cast<char>(mode));
  out.push_back(static_cast<char>(plan.decision));
  PutU64(out, plan.factor_version);
  PutBytes(out, plan.reason);
}

// Returns false if an enumerator is out of range.
bool TakePlan(Decoder& in, Mode& mode, Plan& plan) {
  mode = static_cast<Mode>(in.U8());
  plan.decision = static_cast<Decision>(in.U8());
  plan.factor_version = in.U64();
  plan.reason = std::string(in.Bytes());
  return (mode == Mode::kSecondOrder || mode == Mode::kFirstOrder) && plan.decision >= Decision::kPreconditioned &&
         plan.decision <= Decision::kSkip;
}

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

struct Encoder {
  absl::StatusOr<EncodedRecord> operator()(const InstallRecord& record) const {
    PRECONDOR_ASSIGN_OR_RETURN(std::string install, EncodeInstall(record));
    return EncodedRecord{RecordType::kInstall, std::move(install), {}};
  }
  absl::StatusOr<EncodedRecord> operator()(const RemoveRecord& record) const {
    EncodedRecord out{.type = RecordType::kRemove, .own = {}, .contributions = {}};
    PutU64(out.own, record.session_id);
    return out;
  }
  absl::StatusOr<EncodedRecord> operator()(const QuarantineRecord& record) const {
    EncodedRecord out{.type = RecordType::kQuarantine, .own = {}, .contributions = {}};
    PutU64(out.own, record.session_id);
    PutFixed(out.own, record.back ? 1 : 0, 1);
    PutU64(out.own, record.last_step);
    return out;
  }
  absl::StatusOr<EncodedRecord> operator()(const UpdateRecord& record) const {
    EncodedRecord out{.type = RecordType::kUpdate, .own = {}, .contributions = {}};
    PutStep(out.own, record.at);
    PutContributions(out, record.contributions);
    return out;
  }
  absl::StatusOr<EncodedRecord> operator()(const FailedUpdateRecord& record) const {
    EncodedRecord out{.type = RecordType::kFailedUpdate, .own = {}, .contributions = {}};
    PutStep(out.own, record.at);
    return out;
  }
  absl::StatusOr<EncodedRecord> operator()(const PlanRecord& record) const {
    EncodedRecord out{.type = RecordType::kPlan, .own = {}, .contributions = {}};
    PutStep(out.own, record.at);
    PutPlan(out.own, record.mode, record.plan);
    return out;
  }
  absl::StatusOr<EncodedRecord> operator()(const FactorsRecord& record) const {
    EncodedRecord out{.type = RecordType::kFactors, .own = {}, .contributions = {}};
    PutStep(out.own, record.at);
    out.own.push_back(record.held ? 1 : 0);
    return out;
  }
};

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(what, ": the bytes are not what was written"));
}

absl::StatusOr<ShardRecord> DecodeInstallRecord(absl::string_view payload) {
  v1::InstallSessionRequest request;
  if (!request.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) return Damaged("install record");
  PRECONDOR_ASSIGN_OR_RETURN(SessionInstall install, rpc::DecodeInstall(request));
  return InstallRecord{std::move(install)};
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

absl::StatusOr<EncodedRecord> EncodeRecord(const ShardRecord& record) { return std::visit(Encoder(), record); }

absl::StatusOr<ShardRecord> DecodeRecord(uint8_t type, absl::string_view payload) {
  Decoder in(payload);
  bool valid = true;
  ShardRecord record;
  switch (static_cast<RecordType>(type)) {
    case RecordType::kInstall:
      return DecodeInstallRecord(payload);
    case RecordType::kRemove:
      record = RemoveRecord{in.U64()};
      break;
    case RecordType::kQuarantine: {
      QuarantineRecord quarantine{.session_id = in.U64()};
      quarantine.back = in.U8() != 0;
      quarantine.last_step = in.U64();
      record = quarantine;
      break;
    }
    case RecordType::kUpdate: {
      UpdateRecord update{.at = TakeStep(in), .contributions = {}};
      update.contributions = TakeContributions(in);
      record = std::move(update);
      break;
    }
    case RecordType::kFailedUpdate:
      record = FailedUpdateRecord{TakeStep(in)};
      break;
    case RecordType::kPlan: {
      PlanRecord plan{.at = TakeStep(in), .plan = {}};
      valid = TakePlan(in, plan.mode, plan.plan);
      record = std::move(plan);
      break;
    }
    case RecordType::kFactors:
    case RecordType::kKeptFactors: {
      FactorsRecord factors{.at = TakeStep(in)};
      factors.held = in.U8() != 0;
      if (static_cast<RecordType>(type) == RecordType::kKeptFactors) {
        in.U64();
        if (in.done() && factors.held) {
          return absl::FailedPreconditionError(
              absl::StrCat("record of type ", type, ", session ", factors.at.session_id,
                           ": an earlier version returned it to second order with factors that it had kept on the "
                           "disk, which this version does not read"));
        }
      }
      record = factors;
      break;
    }
    default:
      return absl::FailedPreconditionError(absl::StrCat("record type: expected 1 ... 7 or 9, got ", type));
  }
  if (!valid || !in.done()) return Damaged(absl::StrCat("record of type ", type));
  return record;
}

EncodedRecord EncodeGradient(const GradientRecord& record, uint64_t log_sequence) {
  EncodedRecord out{.type = RecordType::kGradient, .own = {}, .contributions = {}};
  PutStep(out.own, record.at);
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
  StoredGradient gradient{.record = {.at = TakeStep(in)}};
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
  PutStep(out, image.at);
  PutU64(out, image.factor_version);
  out.push_back(image.held ? 1 : 0);
  PutU64(out, 0);  // earlier versions wrote the number of the factors that they kept on the disk
  PutU64(out, image.outcomes.size());
  for (const StepOutcome& outcome : image.outcomes) {
    PutU64(out, outcome.step);
    out.push_back(outcome.updated ? 1 : 0);
    out.push_back(outcome.plan.has_value() ? 1 : 0);
    PutPlan(out, outcome.mode, outcome.plan.value_or(Plan{}));
  }
  PutU64(out, image.state.size());
  return out;
}

absl::StatusOr<LayerImage> DecodeImage(absl::string_view bytes) {
  Decoder in(bytes);
  const uint32_t format = in.U32();
  if (in.ok() && format != kImageFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer image: format: expected ", kImageFormat, ", got ", format));
  }
  LayerImage image{.at = TakeStep(in), .outcomes = {}, .state = {}};
  image.factor_version = in.U64();
  image.held = in.U8() != 0;
  in.U64();
  const uint64_t count = in.U64();
  bool valid = true;
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    StepOutcome outcome{.step = in.U64(), .plan = {}};
    outcome.updated = in.U8() != 0;
    const bool planned = in.U8() != 0;
    Plan plan;
    valid = TakePlan(in, outcome.mode, plan) && valid;
    if (planned) outcome.plan = std::move(plan);
    image.outcomes.push_back(std::move(outcome));
  }
  image.state = std::string(in.Bytes());
  if (!valid || !in.done()) return Damaged("layer image");
  return image;
}

}  // namespace precondor::recovery
