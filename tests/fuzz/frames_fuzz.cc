// SPDX-License-Identifier: Apache-2.0
// The frames of an exchange stream, as the server and a client take them in: messages, bundles, chunks and headers.
#include <fuzzer/FuzzedDataProvider.h>
#include <grpcpp/support/byte_buffer.h>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/chunk_assembler.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/tensor_codec.h"
#include "server/rpc/convert.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/bundles.h"

namespace precondor::fuzz {
namespace {

constexpr uint64_t kCredit = 64 << 10;
constexpr size_t kSlices = 3;

// In up to kSlices slices, as a network delivers it.
grpc::ByteBuffer Received(const std::string& message, FuzzedDataProvider& choices) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (size_t i = 0; i + 1 < kSlices; ++i) {
    const size_t size = choices.ConsumeIntegralInRange<size_t>(0, message.size() - begin);
    slices.emplace_back(message.data() + begin, size);
    begin += size;
  }
  slices.emplace_back(message.data() + begin, message.size() - begin);
  return {slices.data(), slices.size()};
}

void TakeIn(wire::ChunkAssembler& assembler, const v1::ExchangeRequest& frame, const wire::ReceivedBytes& payload) {
  const auto admit = [](const v1::FrameHeader& first) -> absl::StatusOr<std::vector<uint8_t>> {
    if (first.payload_bytes() > kCredit) return absl::ResourceExhaustedError("a layer of another size");
    PRECONDOR_RETURN_IF_ERROR(rpc::DecodeHeader(first).status());
    return std::vector<uint8_t>();
  };
  const auto result = assembler.Add(frame.header(), payload, admit);
  PRECONDOR_CHECK(assembler.open_bytes() <= kCredit || assembler.open() == 1);
  if (!result.ok() || result->progress != wire::ChunkAssembler::Progress::kComplete) return;
  PRECONDOR_CHECK(result->payload.size() == result->header.payload_bytes());
  const auto bytes = wire::PayloadBytes(result->header.tensors());
  PRECONDOR_CHECK(bytes.ok() && *bytes == result->payload.size());
}

// A decoded message is encoded as bytes that decode to an equal one.
template <typename Message, typename Decode>
void RoundTrip(const wire::Received<Message>& frame, const Decode& decode) {
  std::string payload(frame.payload.size(), 0);
  frame.payload.CopyTo(payload.data());
  const auto encoded = wire::EncodeFrame(frame.message, {{payload.data(), payload.size(), nullptr}});
  if (!encoded.ok()) return;  // too large
  const auto again = decode(*encoded);
  PRECONDOR_CHECK(again.ok() && again->message.SerializeAsString() == frame.message.SerializeAsString());
  PRECONDOR_CHECK(again->payload.size() == payload.size());
}

v1::ExchangeRequest Gradient() {
  v1::ExchangeRequest frame;
  v1::FrameHeader& header = *frame.mutable_header();
  header.set_kind(v1::FRAME_KIND_GRADIENT);
  header.set_session_id(7);
  header.set_epoch(1);
  header.set_step(3);
  header.set_samples(16);
  v1::TensorHeader& tensor = *header.add_tensors();
  tensor.set_data_type(v1::DATA_TYPE_F32);
  tensor.add_dims(2);
  tensor.add_dims(3);
  tensor.set_scale(1);
  header.set_payload_bytes(24);
  frame.set_payload(std::string(24, 0));
  return frame;
}

}  // namespace

// An input is the choices, and behind them messages, which FuzzedDataProvider takes from its two ends.
std::vector<std::string> Seeds() {
  v1::ExchangeRequest resume = Gradient();
  resume.clear_payload();
  resume.mutable_header()->set_kind(v1::FRAME_KIND_RESUME);
  const v1::ExchangeRequest bundle = BundleOf<v1::ExchangeRequest>({Gradient(), resume});
  v1::ExchangeResponse credit;
  credit.mutable_header()->set_kind(v1::FRAME_KIND_CREDIT);
  credit.set_credit_bytes(kCredit);
  // The choices are at the end: how many messages, and whether they are answers.
  const std::string request("\0\0", 2), answer("\0\1", 2);
  return {Gradient().SerializeAsString() + request, bundle.SerializeAsString() + request,
          credit.SerializeAsString() + answer};
}

void Run(absl::string_view input) {
  FuzzedDataProvider choices(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  wire::ChunkAssembler assembler(wire::AssemblerLimits{.max_open = 4, .max_open_bytes = kCredit});
  const bool answers = choices.ConsumeBool();
  for (size_t messages = choices.ConsumeIntegralInRange<size_t>(1, 4); messages > 0; --messages) {
    const std::string message =
        messages == 1 ? choices.ConsumeRemainingBytesAsString() : choices.ConsumeRandomLengthString();
    const grpc::ByteBuffer buffer = Received(message, choices);
    if (answers) {
      if (auto frame = wire::DecodeResponse(buffer); frame.ok()) {
        RoundTrip(*frame, wire::DecodeResponse);
        (void)wire::TakeBundledPayloads(*frame).ok();
      }
      continue;
    }
    auto frame = wire::DecodeRequest(buffer);
    if (!frame.ok()) continue;
    RoundTrip(*frame, wire::DecodeRequest);
    if (frame->message.bundle_size() == 0) TakeIn(assembler, frame->message, frame->payload);
    const auto payloads = wire::TakeBundledPayloads(*frame);
    if (!payloads.ok()) continue;
    for (int i = 0; i < frame->message.bundle_size(); ++i) TakeIn(assembler, frame->message.bundle(i), (*payloads)[i]);
  }
}

}  // namespace precondor::fuzz
