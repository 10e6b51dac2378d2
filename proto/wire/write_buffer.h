// SPDX-License-Identifier: Apache-2.0
// GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE of both ends.
#pragma once

namespace precondor::wire {

// A write with a buffer hint ends when gRPC has so many bytes or fewer still to send, so that the next message is there
// when the connection takes more. It is below kChunkBytes: a chunk never waits for the next message.
inline constexpr int kWriteBufferBytes = 512 << 10;

}  // namespace precondor::wire
