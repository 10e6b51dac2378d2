// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/chunk_assembler.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/tensor_codec.h"

namespace precondor::wire {
namespace {

std::string Describe(const v1::FrameHeader& header) {
  return absl::StrCat(v1::FrameKind_Name(header.kind()), " of session ", header.session_id(), " epoch ", header.epoch(),
                      " step ", header.step(), " layer ", header.layer(), " rank ", header.rank());
}

absl::Status Refusal(ErrorReason reason, const v1::FrameHeader& header, absl::string_view what) {
  const auto code =
      reason == ErrorReason::kCapacity ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInvalidArgument;
  return ReasonedStatus(code, reason, absl::StrCat(Describe(header), ": ", what));
}

// Checks the whole contribution, which the header of the first chunk describes.
absl::Status CheckFirst(const v1::FrameHeader& header, uint64_t size) {
  if (header.abstain() && header.tensors_size() != 0) {
    return Refusal(ErrorReason::kMalformed, header, "an abstention has no tensors");
  }
  absl::StatusOr<uint64_t> expected = PayloadBytes(header.tensors());
  if (!expected.ok()) {
    return ReasonedStatus(expected.status().code(), GetErrorReason(expected.status()),
                          absl::StrCat(Describe(header), ": ", expected.status().message()));
  }
  if (*expected != header.payload_bytes()) {
    return Refusal(ErrorReason::kSizeMismatch, header,
                   absl::StrCat("the tensors take ", *expected, " bytes, payload_bytes says ", header.payload_bytes()));
  }
  if (header.chunk_offset() != 0) {
    return Refusal(ErrorReason::kSizeMismatch, header,
                   absl::StrCat("expected a first chunk at 0, got one at ", header.chunk_offset()));
  }
  if (size > *expected) {
    return Refusal(ErrorReason::kSizeMismatch, header, absl::StrCat("expected ", *expected, " bytes, got ", size));
  }
  if (size == 0 && *expected != 0) return Refusal(ErrorReason::kMalformed, header, "a chunk without bytes");
  return absl::OkStatus();
}

// Returns whether `header`, of a later chunk, describes the same contribution as the first one's. The secret is not
// compared, because a stream may show it only once.
bool SameContribution(const v1::FrameHeader& first, v1::FrameHeader header) {
  header.set_chunk_offset(first.chunk_offset());
  header.set_secret(first.secret());
  return header.SerializeAsString() == first.SerializeAsString();
}

void Append(const ReceivedBytes& chunk, std::vector<uint8_t>& payload) {
  for (absl::string_view piece : chunk.pieces()) {
    // Equal types on both sides: with chars the library would copy byte by byte.
    const auto* bytes = reinterpret_cast<const uint8_t*>(piece.data());
    payload.insert(payload.end(), bytes, bytes + piece.size());
  }
}

}  // namespace

ChunkAssembler::Key ChunkAssembler::KeyOf(const v1::FrameHeader& header) {
  return Key{header.session_id(), header.epoch(), header.step(), header.incarnation(),
             header.layer(),      header.rank(),  header.kind()};
}

absl::StatusOr<ChunkAssembler::Result> ChunkAssembler::Add(const v1::FrameHeader& header, const ReceivedBytes& chunk,
                                                           Admission admit) {
  const Key key = KeyOf(header);
  if (SkipFrame(key, header, chunk.size())) return Result{.progress = Progress::kIgnored};
  const auto it = open_.find(key);
  absl::StatusOr<Result> result =
      it == open_.end() ? Begin(key, header, chunk, admit) : Continue(key, it->second, header, chunk);
  if (!result.ok()) Refuse(key, header, chunk.size());
  return result;
}

absl::StatusOr<ChunkAssembler::Result> ChunkAssembler::Begin(const Key& key, const v1::FrameHeader& header,
                                                             const ReceivedBytes& chunk, Admission admit) {
  PRECONDOR_RETURN_IF_ERROR(CheckFirst(header, chunk.size()));
  const uint64_t total = header.payload_bytes();
  const bool whole = chunk.size() == total;
  if (!whole && open_.size() >= limits_.max_open) {
    return Refusal(ErrorReason::kCapacity, header,
                   absl::StrCat(open_.size(), " contributions are open on this stream"));
  }
  if (!whole && !open_.empty() && open_bytes_ + total > limits_.max_open_bytes) {
    return Refusal(ErrorReason::kCapacity, header,
                   absl::StrCat(total, " bytes on top of ", open_bytes_, " open on this stream, at most ",
                                limits_.max_open_bytes));
  }
  Result result;
  PRECONDOR_ASSIGN_OR_RETURN(result.payload, admit(header));
  result.header = header;
  try {
    result.payload.reserve(total);
  } catch (const std::exception&) {  // bad_alloc, length_error: admission knows layers, not the memory of today
    return Refusal(ErrorReason::kCapacity, header, absl::StrCat("no memory for ", total, " bytes"));
  }
  Append(chunk, result.payload);
  result.progress = whole ? Progress::kComplete : Progress::kPartial;
  if (!whole) {
    open_bytes_ += total;
    const auto [opened, fresh] = open_.emplace(key, Assembly{std::move(result.header), std::move(result.payload)});
    return Result{.received = opened->second.payload};
  }
  return result;
}

absl::StatusOr<ChunkAssembler::Result> ChunkAssembler::Continue(const Key& key, Assembly& assembly,
                                                                const v1::FrameHeader& header,
                                                                const ReceivedBytes& chunk) {
  const uint64_t have = assembly.payload.size();
  const uint64_t total = assembly.header.payload_bytes();
  if (header.chunk_offset() < have) {
    return Refusal(ErrorReason::kDuplicateFrame, header,
                   absl::StrCat("expected the chunk at ", have, ", got one at ", header.chunk_offset()));
  }
  if (header.chunk_offset() > have || chunk.size() > total - have) {
    return Refusal(ErrorReason::kSizeMismatch, header,
                   absl::StrCat("expected a chunk at ", have, " of at most ", total - have, " bytes, got ",
                                chunk.size(), " at ", header.chunk_offset()));
  }
  if (chunk.size() == 0) return Refusal(ErrorReason::kMalformed, header, "a chunk without bytes");
  if (!SameContribution(assembly.header, header)) {
    return Refusal(ErrorReason::kMalformed, header, "the header differs from that of the first chunk");
  }
  Append(chunk, assembly.payload);
  if (assembly.payload.size() < total) return Result{.received = assembly.payload};
  Result result{
      .progress = Progress::kComplete, .header = std::move(assembly.header), .payload = std::move(assembly.payload)};
  open_bytes_ -= total;
  open_.erase(key);
  return result;
}

bool ChunkAssembler::SkipFrame(const Key& key, const v1::FrameHeader& header, uint64_t size) {
  const auto it = refused_.find(key);
  if (it == refused_.end()) return false;
  Refused& refused = it->second;
  const bool follows = header.chunk_offset() == refused.next && size > 0 && size <= refused.end - refused.next;
  if (!follows) {  // sent again from the start, or not what the first chunk said: judged afresh
    refused_.erase(it);
    return false;
  }
  refused.next += size;
  if (refused.next == refused.end) refused_.erase(it);
  return true;
}

void ChunkAssembler::Refuse(const Key& key, const v1::FrameHeader& header, uint64_t size) {
  if (const auto it = open_.find(key); it != open_.end()) {
    open_bytes_ -= it->second.header.payload_bytes();
    open_.erase(it);
  }
  const uint64_t begin = header.chunk_offset();
  const uint64_t end = header.payload_bytes();
  if (begin >= end || size >= end - begin) return;  // nothing of it can follow
  if (refused_.size() >= limits_.max_open) refused_.erase(refused_.begin());
  refused_[key] = Refused{begin + size, end};
}

}  // namespace precondor::wire
