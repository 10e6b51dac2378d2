// SPDX-License-Identifier: Apache-2.0
// Bundles of an Exchange stream, for v1::ExchangeRequest and v1::ExchangeResponse.
#pragma once

#include <vector>

namespace precondor {

// Returns a message's frames, each with its payload. Precondition: `bundled_bytes` are those of its payload.
template <typename Message>
std::vector<Message> FramesOf(const Message& message) {
  if (message.bundle_size() == 0) return {message};
  std::vector<Message> frames(message.bundle().begin(), message.bundle().end());
  size_t at = 0;
  for (int i = 0; i < message.bundled_bytes_size(); ++i) {
    frames[i].set_payload(message.payload().substr(at, message.bundled_bytes(i)));
    at += message.bundled_bytes(i);
  }
  return frames;
}

// Returns a message with these frames.
template <typename Message>
Message BundleOf(const std::vector<Message>& frames) {
  Message bundle;
  for (const Message& frame : frames) {
    *bundle.add_bundle() = frame;
    bundle.mutable_bundle()->rbegin()->clear_payload();
    bundle.add_bundled_bytes(frame.payload().size());
    bundle.mutable_payload()->append(frame.payload());
  }
  return bundle;
}

}  // namespace precondor
