// SPDX-License-Identifier: Apache-2.0
// Messages that the ranks of a session's communicator exchange besides gradients (docs/collective.md, "A session's
// gradients"). They are little-endian bytes of a length known to all ranks, and are sent as elements of f32. Pure
// functions.
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

// Returns the number of f32 elements that hold `bytes`.
constexpr int64_t PlaneElements(size_t bytes) { return static_cast<int64_t>((bytes + 3) / 4); }

// Sent once by every rank of the session: the first step of which it has sent nothing over gRPC.
inline constexpr size_t kPlaneHelloBytes = 16;
std::string EncodePlaneHello(uint64_t first_step);
// Returns InvalidArgument if the message has another version.
absl::StatusOr<uint64_t> DecodePlaneHello(absl::string_view bytes);

// Sent by every rank of the session before each bucket: what it contributes to each layer.
struct PlaneOffer {
  struct Part {
    uint64_t samples = 0;  // 0 means no gradient
    bool refused = false;  // no gradient, because it was not finite
    bool operator==(const Part&) const = default;
  };
  uint64_t step = 0;
  uint32_t bucket = 0;
  Mode mode = Mode::kSecondOrder;
  std::vector<Part> parts;  // one per layer of the bucket
};
size_t PlaneOfferBytes(size_t layers);
std::string EncodePlaneOffer(const PlaneOffer& offer);
// Returns InvalidArgument if a field has an invalid value.
absl::StatusOr<PlaneOffer> DecodePlaneOffer(absl::string_view bytes, size_t layers);

// Sent by the shard with each bucket's answers: the outcome of one layer.
struct PlaneAnswer {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;
  std::string reason;  // truncated to kPlaneReasonBytes
};
inline constexpr size_t kPlaneReasonBytes = 110;
inline constexpr size_t kPlaneAnswerBytes = 128;
std::string EncodePlaneAnswer(const PlaneAnswer& answer);
absl::StatusOr<PlaneAnswer> DecodePlaneAnswer(absl::string_view bytes);

// Copies `bytes` to elements, padded with zeros, and back. `elements` has PlaneElements(bytes) elements.
void ToPlaneElements(absl::string_view bytes, absl::Span<float> elements);
absl::string_view FromPlaneElements(absl::Span<const float> elements, size_t bytes);

}  // namespace precondor::wire
