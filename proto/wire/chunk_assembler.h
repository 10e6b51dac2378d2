// SPDX-License-Identifier: Apache-2.0
// Assembles the chunks of the contributions (or results) of one stream.
//
// Invariants: memory for a payload is allocated only after its size was found to fit its tensors and the owner's
// admission has accepted it. The chunks of one key arrive in order, without gap or overlap. No data of a refused
// contribution are kept, and its later chunks are ignored as long as they follow in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/frame_codec.h"

namespace precondor::wire {

struct AssemblerLimits {
  size_t max_open = 256;                          // number of incomplete contributions
  uint64_t max_open_bytes = uint64_t{256} << 20;  // their total size; a single one may be larger
};

// Assembles the contributions of one stream. Threads: calls must not overlap.
class ChunkAssembler {
 public:
  enum class Progress : uint8_t {
    kComplete,  // header and payload are complete
    kPartial,   // more chunks must follow
    kIgnored,   // the chunk belongs to a contribution that was refused before
  };
  struct Result {
    Progress progress = Progress::kPartial;
    v1::FrameHeader header = {};
    std::vector<uint8_t> payload = {};
    absl::Span<const uint8_t> received = {};  // of a partial payload, what has arrived; valid until the next call
  };
  // Called once per contribution, with the header of its first chunk, before header.payload_bytes() of memory are
  // allocated. Returns an empty payload, which may have memory for them.
  using Admission = absl::FunctionRef<absl::StatusOr<std::vector<uint8_t>>(const v1::FrameHeader& header)>;

  explicit ChunkAssembler(AssemblerLimits limits = {}) : limits_(limits) {}

  // Takes in one frame and copies its bytes once, to their final place. An error drops the chunks received so far.
  // Returns InvalidArgument with MALFORMED (tensor headers, an abstention with tensors, an empty chunk, a header that
  // differs from that of the first chunk), SIZE_MISMATCH (payload_bytes does not fit the tensors; the chunk reaches
  // beyond the end, or leaves a gap) or DUPLICATE_FRAME (bytes that were received before). Returns ResourceExhausted
  // (CAPACITY) beyond the limits or without memory. Otherwise returns the error of `admit`.
  absl::StatusOr<Result> Add(const v1::FrameHeader& header, const ReceivedBytes& chunk, Admission admit);

  size_t open() const { return open_.size(); }
  uint64_t open_bytes() const { return open_bytes_; }

 private:
  // session, epoch, step, layer, rank, incarnation, kind.
  struct Key {
    uint64_t session_id, epoch, step, incarnation;
    uint32_t layer, rank;
    int kind;
    bool operator==(const Key&) const = default;
    template <typename H>
    friend H AbslHashValue(H h, const Key& k) {
      return H::combine(std::move(h), k.session_id, k.epoch, k.step, k.incarnation, k.layer, k.rank, k.kind);
    }
  };
  struct Assembly {
    v1::FrameHeader header;  // of the first chunk
    std::vector<uint8_t> payload;
  };
  // The remaining chunks of a refused contribution: the next offset to ignore, and the end.
  struct Refused {
    uint64_t next = 0;
    uint64_t end = 0;
  };

  static Key KeyOf(const v1::FrameHeader& header);
  absl::StatusOr<Result> Begin(const Key& key, const v1::FrameHeader& header, const ReceivedBytes& chunk,
                               Admission admit);
  absl::StatusOr<Result> Continue(const Key& key, Assembly& assembly, const v1::FrameHeader& header,
                                  const ReceivedBytes& chunk);
  // True when the chunk belongs to a refused contribution.
  bool SkipFrame(const Key& key, const v1::FrameHeader& header, uint64_t size);
  void Refuse(const Key& key, const v1::FrameHeader& header, uint64_t size);

  const AssemblerLimits limits_;
  absl::flat_hash_map<Key, Assembly> open_;
  absl::flat_hash_map<Key, Refused> refused_;
  uint64_t open_bytes_ = 0;
};

}  // namespace precondor::wire
