// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/frame_codec.h"

#include <algorithm>
#include <cstring>
#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/impl/grpc_library.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

using google::protobuf::io::CodedOutputStream;

// Protobuf's wire types that proto3 writers use. 3 and 4 are groups.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

constexpr uint32_t Tag(uint32_t field, WireType type) { return (field << 3) | type; }

absl::Status Malformed(uint64_t position, absl::string_view what) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                        absl::StrCat("frame, byte ", position, ": ", what));
}

// Reads forward over the pieces of a message.
class PieceReader {
 public:
  PieceReader(const std::vector<absl::string_view>& pieces, uint64_t size) : pieces_(pieces), size_(size) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return size_ - position_; }

  // Returns false if the message ends inside the number, or if it has more than 64 bits.
  bool ReadVarint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (remaining() == 0) return false;
      const uint8_t byte = static_cast<uint8_t>(Take(1)[0]);
      if (shift == 63 && byte > 1) return false;
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  // Calls `use` with the next `count` bytes, piece by piece. Precondition: count <= remaining().
  template <typename Use>
  void Consume(uint64_t count, const Use& use) {
    while (count > 0) {
      const absl::string_view piece = Take(count);
      use(piece);
      count -= piece.size();
    }
  }

 private:
  // Returns 1 ... limit bytes of the current piece. Precondition: remaining() > 0.
  absl::string_view Take(uint64_t limit) {
    while (offset_ == pieces_[index_].size()) {
      ++index_;
      offset_ = 0;
    }
    const absl::string_view taken = pieces_[index_].substr(offset_, static_cast<size_t>(limit));
    offset_ += taken.size();
    position_ += taken.size();
    return taken;
  }

  const std::vector<absl::string_view>& pieces_;
  const uint64_t size_;
  uint64_t position_ = 0;
  size_t index_ = 0;
  size_t offset_ = 0;
};

// A message split into its payload's pieces and everything else, as one small string that protobuf can parse.
struct Parts {
  std::string header;
  std::vector<absl::string_view> payload;
  bool has_payload = false;
};

void AppendVarint(uint64_t value, std::string& out) {
  uint8_t bytes[10];
  const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
  out.append(reinterpret_cast<const char*>(bytes), end - bytes);
}

// Copies a field other than the payload to parts.header. The reader is before the field's last `count` bytes.
absl::Status CopyField(PieceReader& reader, uint64_t count, Parts& parts) {
  if (count > reader.remaining()) {
    return Malformed(reader.position(), absl::StrCat("field of ", count, " bytes, ", reader.remaining(), " are left"));
  }
  if (parts.header.size() + count > kMaxHeaderBytes) {
    return Malformed(reader.position(),
                     absl::StrCat("more than ", kMaxHeaderBytes, " bytes of fields other than the payload"));
  }
  reader.Consume(count, [&](absl::string_view piece) { parts.header.append(piece.data(), piece.size()); });
  return absl::OkStatus();
}

absl::Status TakePayload(PieceReader& reader, uint64_t count, Parts& parts) {
  if (count > reader.remaining()) {
    return Malformed(reader.position(),
                     absl::StrCat("payload of ", count, " bytes, ", reader.remaining(), " are left"));
  }
  if (parts.has_payload) return Malformed(reader.position(), "second payload in one frame");
  parts.has_payload = true;
  reader.Consume(count, [&](absl::string_view piece) { parts.payload.push_back(piece); });
  return absl::OkStatus();
}

absl::Status SplitField(PieceReader& reader, uint32_t payload_field, Parts& parts) {
  uint64_t tag = 0;
  if (!reader.ReadVarint(tag)) return Malformed(reader.position(), "broken field tag");
  if (tag > UINT32_MAX || (tag >> 3) == 0) {
    return Malformed(reader.position(), absl::StrCat("expected a field number of 1 ... 2^29 - 1, got ", tag >> 3));
  }
  uint64_t number = 0;
  if (tag == Tag(payload_field, kLengthDelimited)) {
    if (!reader.ReadVarint(number)) return Malformed(reader.position(), "broken length of the payload");
    return TakePayload(reader, number, parts);
  }
  if ((tag >> 3) == payload_field) {
    return Malformed(reader.position(), absl::StrCat("payload with wire type ", tag & 7, ", expected 2"));
  }
  AppendVarint(tag, parts.header);
  switch (tag & 7) {
    case kVarint:
      if (!reader.ReadVarint(number)) return Malformed(reader.position(), "broken varint");
      AppendVarint(number, parts.header);
      return CopyField(reader, 0, parts);
    case kFixed64:
      return CopyField(reader, 8, parts);
    case kFixed32:
      return CopyField(reader, 4, parts);
    case kLengthDelimited:
      if (!reader.ReadVarint(number)) return Malformed(reader.position(), "broken length");
      AppendVarint(number, parts.header);
      return CopyField(reader, number, parts);
    default:
      return Malformed(reader.position(), absl::StrCat("wire type ", tag & 7, " is not used here"));
  }
}

template <typename Message>
absl::StatusOr<Received<Message>> DecodePieces(const std::vector<absl::string_view>& pieces,
                                               std::shared_ptr<const void> owner) {
  uint64_t size = 0;
  for (const absl::string_view piece : pieces) size += piece.size();
  PieceReader reader(pieces, size);
  Parts parts;
  while (reader.remaining() > 0) {
    PRECONDOR_RETURN_IF_ERROR(SplitField(reader, Message::kPayloadFieldNumber, parts));
  }
  Received<Message> out;
  if (!out.message.ParseFromString(parts.header)) {
    return Malformed(size, absl::StrCat("not a ", Message::descriptor()->full_name()));
  }
  out.payload = ReceivedBytes(std::move(parts.payload), std::move(owner));
  return out;
}

template <typename Message>
absl::StatusOr<Received<Message>> Decode(const grpc::ByteBuffer& buffer) {
  if (!buffer.Valid()) return Received<Message>();  // a message without fields
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  if (grpc::Status status = buffer.Dump(slices.get()); !status.ok()) return Malformed(0, status.error_message());
  std::vector<absl::string_view> pieces;
  pieces.reserve(slices->size());
  for (const grpc::Slice& slice : *slices) {
    pieces.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return DecodePieces<Message>(pieces, std::move(slices));
}

absl::Status BadBundle(absl::string_view expected) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                        absl::StrCat("bundle: expected ", expected));
}

template <typename Message>
absl::StatusOr<std::vector<ReceivedBytes>> TakePayloads(Received<Message>& bundle) {
  Message& message = bundle.message;
  const int frames = message.bundle_size();
  bool plain = !message.has_header();
  uint64_t inside = 0, named = 0;  // bytes of payloads
  for (const Message& frame : message.bundle()) {
    plain = plain && frame.bundle_size() == 0;
    inside += frame.payload().size();
  }
  if (frames > kMaxBundleFrames) return BadBundle(absl::StrCat("at most ", kMaxBundleFrames, " frames, got ", frames));
  if (!plain) return BadBundle("frames alone, got a header beside them or a bundle inside");
  bool sizes = true;  // none is more than the whole, so that their sum does not overflow
  for (const uint64_t size : message.bundled_bytes()) {
    sizes = sizes && size <= bundle.payload.size() - named;
    named += sizes ? size : 0;
  }
  sizes = sizes && named == bundle.payload.size() && (inside == 0 || message.bundled_bytes_size() == 0);
  if (!sizes || (message.bundled_bytes_size() != 0 && message.bundled_bytes_size() != frames)) {
    return BadBundle(absl::StrCat("bundled_bytes of ", frames, " frames with ", bundle.payload.size(),
                                  " bytes in all, got ", named, " in ", message.bundled_bytes_size(), " and ", inside,
                                  " inside the frames"));
  }
  if (message.bundled_bytes_size() > 0) return bundle.payload.Split(message.bundled_bytes());
  std::vector<ReceivedBytes> payloads;
  for (Message& frame : *message.mutable_bundle()) {
    auto own = std::make_shared<const std::string>(std::move(*frame.mutable_payload()));
    frame.clear_payload();
    const absl::string_view bytes = *own;
    payloads.emplace_back(std::vector<absl::string_view>{bytes}, std::move(own));
  }
  return payloads;
}

void DropOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

grpc::Slice AliasingSlice(const PayloadPart& part) {
  if (part.owner == nullptr) return grpc::Slice(part.data, part.size, grpc::Slice::STATIC_SLICE);
  // gRPC's signature requires mutable memory, but gRPC only reads it.
  return grpc::Slice(const_cast<void*>(part.data), part.size, &DropOwner, new std::shared_ptr<const void>(part.owner));
}

template <typename Message>
absl::StatusOr<grpc::ByteBuffer> Encode(const Message& message, const std::vector<PayloadPart>& parts) {
  if (!message.payload().empty())
    return absl::InvalidArgumentError("EncodeFrame: the message has a payload of its own");
  uint64_t payload_bytes = 0;
  for (const PayloadPart& part : parts) payload_bytes += part.size;
  const size_t header_bytes = message.ByteSizeLong();
  if (payload_bytes > kMaxFramePayloadBytes || header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("EncodeFrame: at most ", kMaxHeaderBytes, " bytes of header and ",
                                                   kMaxFramePayloadBytes, " of payload fit a frame, got ", header_bytes,
                                                   " and ", payload_bytes));
  }
  constexpr uint32_t kPayloadTag = Tag(Message::kPayloadFieldNumber, kLengthDelimited);
  static_assert(kPayloadTag < 0x80, "the payload's tag is one byte");
  const size_t prefix_bytes = payload_bytes == 0 ? 0 : 1 + CodedOutputStream::VarintSize64(payload_bytes);
  std::vector<grpc::Slice> slices;
  slices.reserve(parts.size() + 1);
  slices.emplace_back(header_bytes + prefix_bytes);
  uint8_t* end = message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slices[0].begin()));
  if (payload_bytes != 0) {
    CodedOutputStream::WriteVarint64ToArray(payload_bytes, CodedOutputStream::WriteTagToArray(kPayloadTag, end));
  }
  for (const PayloadPart& part : parts) {
    if (part.size != 0) slices.push_back(AliasingSlice(part));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace

ReceivedBytes::ReceivedBytes(std::vector<absl::string_view> pieces, std::shared_ptr<const void> owner)
    : pieces_(std::move(pieces)), owner_(std::move(owner)) {
  for (absl::string_view piece : pieces_) size_ += piece.size();
}

void ReceivedBytes::CopyTo(void* out) const {
  auto* to = static_cast<uint8_t*>(out);
  for (absl::string_view piece : pieces_) {
    if (piece.empty()) continue;
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

ReceivedBytes ReceivedBytes::Owned() const {
  if (owner_ != nullptr || size_ == 0) return *this;
  std::shared_ptr<char[]> copy(new char[size_]);
  CopyTo(copy.get());
  return ReceivedBytes({absl::string_view(copy.get(), size_)}, copy);
}

std::vector<ReceivedBytes> ReceivedBytes::Split(absl::Span<const uint64_t> sizes) const {
  PieceReader reader(pieces_, size_);
  std::vector<ReceivedBytes> parts;
  parts.reserve(sizes.size());
  for (const uint64_t size : sizes) {
    std::vector<absl::string_view> pieces;
    reader.Consume(size, [&](absl::string_view piece) { pieces.push_back(piece); });
    parts.emplace_back(std::move(pieces), owner_);
  }
  return parts;
}

absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeRequest& message,
                                             const std::vector<PayloadPart>& parts) {
  return Encode(message, parts);
}

absl::StatusOr<grpc::ByteBuffer> EncodeFrame(const v1::ExchangeResponse& message,
                                             const std::vector<PayloadPart>& parts) {
  return Encode(message, parts);
}

absl::StatusOr<Received<v1::ExchangeRequest>> DecodeRequest(const grpc::ByteBuffer& buffer) {
  return Decode<v1::ExchangeRequest>(buffer);
}

absl::StatusOr<Received<v1::ExchangeResponse>> DecodeResponse(const grpc::ByteBuffer& buffer) {
  return Decode<v1::ExchangeResponse>(buffer);
}

absl::StatusOr<Received<v1::ExchangeRequest>> DecodeContiguousRequest(absl::string_view message) {
  return DecodePieces<v1::ExchangeRequest>({message}, nullptr);
}

absl::StatusOr<Received<v1::ExchangeResponse>> DecodeContiguousResponse(absl::string_view message) {
  return DecodePieces<v1::ExchangeResponse>({message}, nullptr);
}

absl::StatusOr<std::vector<ReceivedBytes>> TakeBundledPayloads(Received<v1::ExchangeRequest>& bundle) {
  return TakePayloads(bundle);
}

absl::StatusOr<std::vector<ReceivedBytes>> TakeBundledPayloads(Received<v1::ExchangeResponse>& bundle) {
  return TakePayloads(bundle);
}

}  // namespace precondor::wire
