// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes the messages with bulk data as raw gRPC byte buffers: a small header slice, followed by the
// payload's own memory without a copy. The bytes are those of the messages in precondition.proto. Every protobuf reader
// accepts what is written here. Every message of a protobuf writer is accepted here (any field order, unknown fields,
// any split into slices), within the limits below.
//
// grpcpp is included only by the .cc; callers need <grpcpp/support/byte_buffer.h> for the type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "precondor/v1/precondition.pb.h"

namespace grpc {
class ByteBuffer;
}

namespace precondor::wire {

// Maximum size of all fields except the payload. A frame with more is refused.
inline constexpr size_t kMaxHeaderBytes = 256 << 10;
// A bundle that a sender makes has frames with smaller payloads than the first, and at most so many bytes of payloads
// and of headers in all. The headers leave room below kMaxHeaderBytes, because they are read as one.
inline constexpr size_t kMaxBundledFrameBytes = 64 << 10;
inline constexpr size_t kMaxBundlePayloadBytes = 1 << 20;
inline constexpr size_t kMaxBundleHeaderBytes = 240 << 10;
// Maximum number of frames in a bundle. A frame's header takes at least 30 bytes, so that only bundles of empty frames
// exceed it.
inline constexpr int kMaxBundleFrames = 8192;
// Maximum payload of one message: protobuf messages are smaller than 2^31 bytes.
inline constexpr uint64_t kMaxFramePayloadBytes = (uint64_t{1} << 31) - (128 << 10);

// A part of an outgoing payload. gRPC may read `data`, on any thread, until it releases `owner`. `owner` keeps the
// memory alive, or its deleter reports the release. A null owner means that the memory outlives the connection.
struct PayloadPart {
  const void* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
};

// Serializes `message`, whose own payload field must be empty, with `parts` as its payload. The parts are not copied.
// Returns InvalidArgument above kMaxFramePayloadBytes or kMaxHeaderBytes, and if `message` has a payload.
absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeRequest& message, const std::vector<PayloadPart>& parts);
absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeResponse& message,
                                             const std::vector<PayloadPart>& parts);

// Bytes inside a received message: pieces in order, which are valid while this object or a copy of it exists. Without
// an owner they are valid as long as the message is.
class ReceivedBytes {
 public:
  ReceivedBytes() = default;
  ReceivedBytes(std::vector<absl::string_view> pieces, std::shared_ptr<const void> owner);
  uint64_t size() const { return size_; }
  const std::vector<absl::string_view>& pieces() const { return pieces_; }
  // Returns these bytes, copied to memory of their own if they have no owner.
  ReceivedBytes Owned() const;
  // Writes all size() bytes to `out`.
  void CopyTo(void* out) const;
  // Returns parts of these sizes, in order. Precondition: their sum is size().
  std::vector<ReceivedBytes> Split(absl::Span<const uint64_t> sizes) const;

 private:
  std::vector<absl::string_view> pieces_;
  std::shared_ptr<const void> owner_;
  uint64_t size_ = 0;
};

// A decoded frame: `message` without its payload, and the payload in the memory where gRPC received it.
template <typename Message>
struct Received {
  Message message;
  ReceivedBytes payload;
};

// Return InvalidArgument (MALFORMED) with the offset for: a truncated or overlong varint, a length beyond the message,
// field number 0, a wire type that protobuf does not use or that is a group, two payloads, more than kMaxHeaderBytes
// besides the payload, a header that protobuf refuses. Lengths are checked before memory is allocated for them. The
// header's contents are not checked here, but by tensor_codec.h, chunk_assembler.h and the shard.
absl::StatusOr<Received<v1::ExchangeRequest>> DecodeRequest(const grpc::ByteBuffer& buffer);
absl::StatusOr<Received<v1::ExchangeResponse>> DecodeResponse(const grpc::ByteBuffer& buffer);
// Decode a message in memory that another process may change meanwhile. The payload is valid as long as `message` is.
absl::StatusOr<Received<v1::ExchangeRequest>> DecodeContiguousRequest(absl::string_view message);
absl::StatusOr<Received<v1::ExchangeResponse>> DecodeContiguousResponse(absl::string_view message);

// Returns the payloads of a bundle's frames. A bundle without `bundled_bytes`, which has been sent by development
// versions, has them inside its frames, from which this function takes them. Returns INVALID_ARGUMENT (MALFORMED) for a
// bundle with a header, with more than kMaxBundleFrames frames or with a bundle inside, and for sizes that are not
// those of its frames and its payload.
absl::StatusOr<std::vector<ReceivedBytes>> TakeBundledPayloads(Received<v1::ExchangeRequest>& bundle);
absl::StatusOr<std::vector<ReceivedBytes>> TakeBundledPayloads(Received<v1::ExchangeResponse>& bundle);

}  // namespace precondor::wire
