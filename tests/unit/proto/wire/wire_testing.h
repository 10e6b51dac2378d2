// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of proto/wire: buffers cut at will, and the bytes of a buffer.
#pragma once

#include <grpcpp/impl/grpc_library.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/wire/frame_codec.h"

namespace precondor::wire {

// A received message of `bytes`, in slices that end before each of the ascending `cuts` and at the end.
inline grpc::ByteBuffer Sliced(absl::string_view bytes, const std::vector<size_t>& cuts = {}) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    slices.emplace_back(bytes.data() + begin, cut - begin);
    begin = cut;
  }
  slices.emplace_back(bytes.data() + begin, bytes.size() - begin);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

inline std::string Joined(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return "<no slices>";
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

inline std::string Joined(const ReceivedBytes& received) {
  std::string bytes(received.size(), '\0');
  received.CopyTo(bytes.data());
  return bytes;
}

// `bytes` as a received payload that owns its memory, in pieces of at most `piece` bytes.
inline ReceivedBytes AsReceived(absl::string_view bytes, size_t piece = SIZE_MAX) {
  auto owner = std::make_shared<const std::string>(bytes);
  std::vector<absl::string_view> pieces;
  for (size_t begin = 0; begin < owner->size(); begin += piece) {
    pieces.push_back(absl::string_view(*owner).substr(begin, piece));
    if (owner->size() - begin <= piece) break;
  }
  return ReceivedBytes(std::move(pieces), std::move(owner));
}

}  // namespace precondor::wire
