// SPDX-License-Identifier: Apache-2.0
// The hot messages as raw gRPC byte buffers: a small header slice, then the payload's own memory behind it. On the
// wire they are exactly the messages of precondition.proto: what is written here any protobuf reads, and whatever a
// protobuf writer may produce (any field order, unknown fields, any split into slices) is read here.
//
// Includes of grpcpp stay in the .cc; callers need <grpcpp/support/byte_buffer.h> for the type itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "precondor/v1/precondition.pb.h"

namespace grpc {
class ByteBuffer;
}

namespace precondor::wire {

// Most bytes that all fields but the payload may take together; a frame with more is refused.
inline constexpr size_t kMaxHeaderBytes = 256 << 10;
// Most bytes of frames, payloads included, to put into one bundle: it is read as a header, with room to spare.
inline constexpr size_t kMaxBundleBytes = 240 << 10;
// Most frames in one bundle. A frame has a header of 30 bytes and more, so that only a bundle of empty ones exceeds it.
inline constexpr int kMaxBundleFrames = 8192;
// Most bytes of payload in one message: protobuf messages end below 2^31.
inline constexpr uint64_t kMaxFramePayloadBytes = (uint64_t{1} << 31) - (128 << 10);

// A part of an outgoing payload. gRPC may read `data` until it drops `owner`, on any thread: give it whatever keeps
// the memory alive, or a shared_ptr with a deleter that tells you. A null owner means that the memory outlives the
// connection.
struct PayloadPart {
  const void* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
};

// Serializes `message`, whose own payload field must be empty, with `parts` as its payload: nothing of the parts is
// copied. InvalidArgument: above kMaxFramePayloadBytes, or a payload set in `message`.
absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeRequest& message, const std::vector<PayloadPart>& parts);
absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeResponse& message,
                                             const std::vector<PayloadPart>& parts);

// Bytes inside a received message: pieces in order, which stay valid while this object or a copy of it lives.
class ReceivedBytes {
 public:
  ReceivedBytes() = default;
  ReceivedBytes(std::vector<absl::string_view> pieces, std::shared_ptr<const void> owner);
  uint64_t size() const { return size_; }
  const std::vector<absl::string_view>& pieces() const { return pieces_; }
  // Writes all size() bytes to `out`.
  void CopyTo(void* out) const;

 private:
  std::vector<absl::string_view> pieces_;
  std::shared_ptr<const void> owner_;
  uint64_t size_ = 0;
};

// A decoded frame: `message` without its payload, and the payload where gRPC received it.
template <typename Message>
struct Received {
  Message message;
  ReceivedBytes payload;
};

// InvalidArgument (MALFORMED) with the offset: truncated or overlong varint, length beyond the message, field number
// 0, wire type that protobuf does not use or that is a group, two payloads, more than kMaxHeaderBytes besides the
// payload, a header that protobuf refuses. Lengths are checked before anything is allocated for them. The meaning of
// the header is not checked (tensor_codec.h, chunk_assembler.h and the shard do).
absl::StatusOr<Received<v1::ExchangeRequest>> DecodeRequest(const grpc::ByteBuffer& buffer);
absl::StatusOr<Received<v1::ExchangeResponse>> DecodeResponse(const grpc::ByteBuffer& buffer);

}  // namespace precondor::wire
