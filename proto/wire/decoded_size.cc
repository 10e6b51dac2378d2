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

// Of libprotobuf on 64 bits, with what the allocator and a repeated field's growth add.
constexpr uint64_t kMessage = 256;
constexpr uint64_t kString = 64;
constexpr uint64_t kScalar = 32;  // an element of a repeated field, or an unknown field
constexpr int kDeepest = 32;
constexpr uint64_t kUnbounded = std::numeric_limits<uint64_t>::max() / 2;

// Adds the sizes of the fields up to the stream's limit. Returns false at an error.
bool Add(const Descriptor* type, int depth, google::protobuf::io::CodedInputStream& in, uint64_t& size) {
  if (depth > kDeepest) {
    size = kUnbounded;
    return false;
  }
  while (const uint32_t tag = in.ReadTag()) {
    // Null in an unknown field, whose content is kept as it is.
    const FieldDescriptor* const field =
        type == nullptr ? nullptr : type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const auto wire_type = WireFormatLite::GetTagWireType(tag);
    if (wire_type == WireFormatLite::WIRETYPE_START_GROUP || wire_type == WireFormatLite::WIRETYPE_END_GROUP) {
      size = kUnbounded;
      return false;
    }
    if (wire_type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (field == nullptr || field->is_repeated()) size += kScalar;
      if (!WireFormatLite::SkipField(&in, tag)) return false;
      continue;
    }
    uint32_t length = 0;
    if (!in.ReadVarint32(&length) || length > static_cast<uint32_t>(std::numeric_limits<int32_t>::max())) return false;
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      size += kMessage;
      const auto limit = in.PushLimit(static_cast<int>(length));
      if (!Add(field->message_type(), depth + 1, in, size) || in.BytesUntilLimit() > 0) return false;
      in.PopLimit(limit);
      continue;
    }
    // A packed field's elements have at least one byte each.
    const bool packed = field != nullptr && field->is_packable();
    size += packed ? uint64_t{length} * sizeof(uint64_t) * 2 : kString + length;
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
  uint64_t size = kMessage;
  Add(&type, 0, in, size);
  return size;
}

}  // namespace precondor::wire
