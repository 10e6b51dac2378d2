// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/decoded_size.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <limits>

namespace precondor::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

// What libprotobuf allocates on 64 bits, with what the allocator and the growth of repeated fields add.
constexpr uint64_t kMessageBytes = 256;
constexpr uint64_t kStringBytes = 128;
constexpr uint64_t kScalarBytes = 48;  // an element of a repeated field, or an unknown field
constexpr uint64_t kPackedBytes = 24;  // an element of a packed field, which has at least one encoded byte
constexpr int kDeepestNesting = 32;
constexpr uint64_t kRefusedBytes = std::numeric_limits<uint64_t>::max() / 2;

// Adds the sizes of the fields up to the stream's limit. Returns false at an error.
bool Add(const Descriptor* type, int depth, google::protobuf::io::CodedInputStream& in, uint64_t& size) {
  if (depth > kDeepestNesting) {
    size = kRefusedBytes;
    return false;
  }
  while (const uint32_t tag = in.ReadTag()) {
    // Null in an unknown field, whose content is kept as it is.
    const FieldDescriptor* const field =
        type == nullptr ? nullptr : type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const auto wire_type = WireFormatLite::GetTagWireType(tag);
    if (wire_type == WireFormatLite::WIRETYPE_START_GROUP || wire_type == WireFormatLite::WIRETYPE_END_GROUP) {
      size = kRefusedBytes;
      return false;
    }
    if (wire_type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      // Protobuf keeps a number of another wire type than the field's as an unknown field.
      const bool fits = field != nullptr && WireFormatLite::WireTypeForFieldType(
                                                static_cast<WireFormatLite::FieldType>(field->type())) == wire_type;
      if (!fits || field->is_repeated()) size += kScalarBytes;
      if (!WireFormatLite::SkipField(&in, tag)) return false;
      continue;
    }
    uint32_t length = 0;
    if (!in.ReadVarint32(&length) || length > static_cast<uint32_t>(std::numeric_limits<int32_t>::max())) return false;
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      size += kMessageBytes;
      const auto limit = in.PushLimit(static_cast<int>(length));
      if (!Add(field->message_type(), depth + 1, in, size) || in.BytesUntilLimit() > 0) return false;
      in.PopLimit(limit);
      continue;
    }
    const bool packed = field != nullptr && field->is_packable();
    size += kStringBytes + (packed ? kPackedBytes : 1) * uint64_t{length};
    if (!in.Skip(static_cast<int>(length))) return false;
  }
  return true;
}

}  // namespace

uint64_t DecodedSize(const Descriptor& type, const grpc::ByteBuffer& encoded) {
  grpc::ByteBuffer shared = encoded;  // a reader wants a buffer that is not const
  grpc::ProtoBufferReader reader(&shared);
  if (!reader.status().ok()) return 0;
  google::protobuf::io::CodedInputStream in(&reader);
  in.SetTotalBytesLimit(std::numeric_limits<int>::max());
  uint64_t size = kMessageBytes;
  Add(&type, 0, in, size);
  return size;
}

}  // namespace precondor::wire
