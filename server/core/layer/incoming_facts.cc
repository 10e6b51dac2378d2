// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/incoming_facts.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"

#include "kernels/base/payload_digest.h"
#include "server/core/layer/reduction.h"

namespace precondor {

IncomingFacts::IncomingFacts(const ContributionHeader& header, uint64_t payload_bytes, bool with_norm,
                             bool device_plane)
    : payload_bytes_(payload_bytes),
      gradient_(header.kind == ContributionKind::kGradient && !header.tensors.empty()),
      with_norm_(with_norm),
      device_plane_(device_plane) {
  if (!gradient_) return;
  dtype_ = header.tensors[0].dtype;
  scale_ = header.tensors[0].scale;
}

void IncomingFacts::Advance(absl::Span<const uint8_t> received) {
  const uint64_t block = static_cast<uint64_t>(kBlock) * ByteSize(dtype_);
  const bool whole = received.size() == payload_bytes_;
  while (inspected_ < received.size()) {
    const uint64_t size = std::min<uint64_t>(block, received.size() - inspected_);
    if (size < block && !whole) return;
    InspectBlock(received.subspan(inspected_, size));
    inspected_ += size;
  }
}

void IncomingFacts::InspectBlock(absl::Span<const uint8_t> bytes) {
  const int64_t first = static_cast<int64_t>(inspected_ / ByteSize(dtype_));
  const int64_t count = static_cast<int64_t>(bytes.size() / ByteSize(dtype_));
  if (device_plane_ && gradient_ && dtype_ == DType::kF32) {
    found_.digest += PayloadDigest(bytes.data(), count, first);
  } else {
    found_.digest =
        absl::HashOf(found_.digest, absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  if (!gradient_ || found_.not_finite.has_value()) return;
  float decoded[kBlock];
  absl::Span<const float> values(reinterpret_cast<const float*>(bytes.data()), count);
  if (dtype_ != DType::kF32 || scale_ != 1.0f) {
    DecodeElements(dtype_, bytes.data(), scale_, absl::MakeSpan(decoded, count));
    values = absl::MakeConstSpan(decoded, count);
  }
  if (!AllFinite(values)) {
    found_.not_finite = first;
    return;
  }
  if (with_norm_) found_.squared_norm += SquaredNorm(values);
}

}  // namespace precondor
