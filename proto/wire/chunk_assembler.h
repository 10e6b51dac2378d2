// SPDX-License-Identifier: Apache-2.0
// Puts the chunks of one stream's contributions (or results) together.
//
// Invariants: nothing is allocated for a payload before its size has been found to be what its tensors need and the
// owner's admission has agreed; chunks of one key come in order, without gap or overlap; of a refused contribution
// nothing is kept, and the chunks that follow the refused one in order are passed over in silence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/frame_codec.h"

namespace precondor::wire {

struct AssemblerLimits {
  size_t max_open = 256;                          // contributions begun and not complete
  uint64_t max_open_bytes = uint64_t{256} << 20;  // of them together; one alone may be larger
};

// One stream's; one thread at a time.
class ChunkAssembler {
 public:
  enum class Progress : uint8_t {
    kComplete,  // header and payload are those of the whole contribution
    kPartial,   // more chunks to come
    kIgnored,   // belongs to a contribution that was refused already
  };
  struct Result {
    Progress progress = Progress::kPartial;
    v1::FrameHeader header;
    std::vector<uint8_t> payload;
  };
  // Asked once per contribution, with its first chunk's header, before memory is taken for header.payload_bytes().
  using Admission = absl::FunctionRef<absl::Status(const v1::FrameHeader& header)>;

  explicit ChunkAssembler(AssemblerLimits limits = {}) : limits_(limits) {}

  // Takes in one frame; copies its bytes once, to their final place. A refusal drops what had come of the
  // contribution. InvalidArgument: MALFORMED (tensor headers, an abstention with tensors, an empty chunk, a header that
  // differs from the first chunk's), SIZE_MISMATCH (payload_bytes is not what the tensors need, a chunk beyond the end
  // or not where the last one ended), DUPLICATE_FRAME (bytes that had come already). ResourceExhausted (CAPACITY)
  // beyond the limits. Else what `admit` says.
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
  // The rest of a refused contribution: the next offset to pass over, and where it ends.
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
