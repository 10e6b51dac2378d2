// SPDX-License-Identifier: Apache-2.0
// What a shard finds out about the payload of a contribution while it arrives, when its newest bytes are still in the
// processor's caches.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/types/span.h"

#include "server/core/api/contribution.h"

namespace precondor {

// A payload's digest and, for a gradient, what decides whether it is taken. Not thread-safe.
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

}  // namespace precondor
