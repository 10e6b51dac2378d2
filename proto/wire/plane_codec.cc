// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/plane_codec.h"

#include <cstring>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"

namespace precondor::wire {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kOfferBytes = 13;  // without its parts
constexpr size_t kPartBytes = 9;

}  // namespace

std::string EncodePlaneHello(uint64_t first_step) {
  std::string out;
  PutU32(out, kVersion);
  PutU32(out, 0);
  PutU64(out, first_step);
  return out;
}

absl::StatusOr<uint64_t> DecodePlaneHello(absl::string_view bytes) {
  Decoder in(bytes);
  const uint32_t version = in.U32();
  in.U32();
  const uint64_t first_step = in.U64();
  if (in.ok() && version == kVersion) return first_step;
  return absl::InvalidArgumentError(absl::StrCat("expected version ", kVersion, " of the data plane, got ", version));
}

size_t PlaneOfferBytes(size_t layers) { return kOfferBytes + layers * kPartBytes; }

std::string EncodePlaneOffer(const PlaneOffer& offer) {
  std::string out;
  PutU64(out, offer.step);
  PutU32(out, offer.bucket);
  PutFixed(out, static_cast<uint64_t>(offer.mode), 1);
  for (const PlaneOffer::Part& part : offer.parts) {
    PutU64(out, part.samples);
    PutFixed(out, part.refused ? 1 : 0, 1);
  }
  return out;
}

absl::StatusOr<PlaneOffer> DecodePlaneOffer(absl::string_view bytes, size_t layers) {
  Decoder in(bytes);
  PlaneOffer offer;
  offer.step = in.U64();
  offer.bucket = in.U32();
  const uint8_t mode = in.U8();
  bool good = mode == static_cast<uint8_t>(Mode::kSecondOrder) || mode == static_cast<uint8_t>(Mode::kFirstOrder);
  offer.mode = static_cast<Mode>(mode);
  for (size_t i = 0; i < layers; ++i) {
    PlaneOffer::Part part;
    part.samples = in.U64();
    const uint8_t refused = in.U8();
    part.refused = refused == 1;
    good = good && refused <= 1 && !(part.refused && part.samples > 0);
    offer.parts.push_back(part);
  }
  if (good && in.ok()) return offer;
  return absl::InvalidArgumentError("an offer that does not decode");
}

std::string EncodePlaneAnswer(const PlaneAnswer& answer) {
  const absl::string_view reason = absl::string_view(answer.reason).substr(0, kPlaneReasonBytes);
  std::string out;
  PutFixed(out, static_cast<uint64_t>(answer.decision), 1);
  PutFixed(out, reason.size(), 1);
  PutU64(out, answer.factor_version);
  PutU64(out, absl::bit_cast<uint64_t>(answer.inner_product));
  absl::StrAppend(&out, reason);
  out.resize(kPlaneAnswerBytes);
  return out;
}

absl::StatusOr<PlaneAnswer> DecodePlaneAnswer(absl::string_view bytes) {
  Decoder in(bytes);
  PlaneAnswer answer;
  const uint8_t decision = in.U8();
  const uint8_t length = in.U8();
  answer.decision = static_cast<Decision>(decision);
  answer.factor_version = in.U64();
  answer.inner_product = absl::bit_cast<double>(in.U64());
  answer.reason = std::string(in.Take(length));
  if (in.ok() && decision >= 1 && decision <= static_cast<uint8_t>(Decision::kSkip)) return answer;
  return absl::InvalidArgumentError("an answer that does not decode");
}

void ToPlaneElements(absl::string_view bytes, absl::Span<float> elements) {
  if (elements.empty()) return;
  elements.back() = 0;
  std::memcpy(elements.data(), bytes.data(), bytes.size());
}

absl::string_view FromPlaneElements(absl::Span<const float> elements, size_t bytes) {
  return {reinterpret_cast<const char*>(elements.data()), bytes};
}

}  // namespace precondor::wire
