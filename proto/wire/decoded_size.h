// SPDX-License-Identifier: Apache-2.0
// How much memory a message will take when it is decoded: two bytes can become an object of a hundred.
#pragma once

#include <cstdint>
#include <grpcpp/support/byte_buffer.h>

namespace google::protobuf {
class Descriptor;
}

namespace precondor::wire {

// Returns an upper estimate of the bytes that protobuf allocates for an encoded message of this type, unknown fields
// included. Reads each byte at most once a level of nesting. A message that cannot be decoded has the size of what
// comes before its error; one with groups, or nested deeper than decoders allow, has the largest.
uint64_t DecodedSize(const google::protobuf::Descriptor& type, const grpc::ByteBuffer& encoded);

}  // namespace precondor::wire
