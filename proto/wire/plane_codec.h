// SPDX-License-Identifier: Apache-2.0
// What the ranks of a session's communicator tell each other beside gradients (docs/collective.md, "A session's
// gradients"). Little-endian bytes of a length that all know, which travel as elements of f32. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor::wire {

// Elements of f32 that so many bytes take.
constexpr int64_t PlaneElements(size_t bytes) { return static_cast<int64_t>((bytes + 3) / 4); }

// Once, from every rank of the session: where it could begin.
inline constexpr size_t kPlaneHelloBytes = 16;
std::string EncodePlaneHello(uint64_t first_step);
// InvalidArgument: of another version.
absl::StatusOr<uint64_t> DecodePlaneHello(absl::string_view bytes);

// Before each bucket, from every rank of the session: what it puts in.
struct PlaneOffer {
  struct Part {
    uint64_t samples = 0;  // 0: nothing
    bool refused = false;  // nothing, because it was not finite
    bool operator==(const Part&) const = default;
  };
  uint64_t step = 0;
  uint32_t bucket = 0;
  Mode mode = Mode::kSecondOrder;
  std::vector<Part> parts;  // by layer of the bucket
};
size_t PlaneOfferBytes(size_t layers);
std::string EncodePlaneOffer(const PlaneOffer& offer);
// InvalidArgument: a value that is none.
absl::StatusOr<PlaneOffer> DecodePlaneOffer(absl::string_view bytes, size_t layers);

// With each bucket's answers, from the shard: what became of one layer.
struct PlaneAnswer {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;
  std::string reason;  // its first kPlaneReasonBytes
};
inline constexpr size_t kPlaneReasonBytes = 110;
inline constexpr size_t kPlaneAnswerBytes = 128;
std::string EncodePlaneAnswer(const PlaneAnswer& answer);
absl::StatusOr<PlaneAnswer> DecodePlaneAnswer(absl::string_view bytes);

// `bytes` as elements, zeros behind them, and back. `elements` has PlaneElements(bytes) of them.
void ToPlaneElements(absl::string_view bytes, absl::Span<float> elements);
absl::string_view FromPlaneElements(absl::Span<const float> elements, size_t bytes);

}  // namespace precondor::wire
