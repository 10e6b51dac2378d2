// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/frame_codec.h"

#include <algorithm>
#include <cstdlib>
#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "tests/support/status_matchers.h"
#include "tests/support/text_proto.h"
#include "tests/unit/proto/wire/wire_testing.h"

namespace {
// The largest single allocation of this thread since it was last set to 0.
thread_local size_t largest_allocation = 0;
}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  largest_allocation = std::max(largest_allocation, size);
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;

v1::ExchangeRequest Request() {
  return FromText<v1::ExchangeRequest>(R"(
    header {
      session_id: 0xFEDCBA9876543210 epoch: 3 step: 12345 layer: 143 rank: 7 incarnation: 1700000000000000000
      kind: FRAME_KIND_STATISTICS mode: MODE_SECOND_ORDER samples: 128 chunk_offset: 1048576 payload_bytes: 3145728
      tensors { data_type: DATA_TYPE_F16 dims: 4 dims: 1024 scale: 8 }
      tensors { data_type: DATA_TYPE_F16 dims: 4 dims: 4096 scale: 8 }
    })");
}

v1::ExchangeResponse Response() {
  auto response = FromText<v1::ExchangeResponse>(R"(
    duplicate: true error { message: "größer" } credit_bytes: 1099511627776 contribution: FRAME_KIND_GRADIENT
    outcome { decision: DECISION_IDENTITY inner_product: -1.5e-3 reason: "no statistics yet" })");
  *response.mutable_header() = Request().header();
  return response;
}

std::string RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

std::vector<PayloadPart> Split(const std::string& bytes, size_t part) {
  std::vector<PayloadPart> parts;
  for (size_t begin = 0; begin < bytes.size(); begin += part) {
    parts.push_back({bytes.data() + begin, std::min(part, bytes.size() - begin), nullptr});
  }
  return parts;
}

absl::StatusOr<Received<v1::ExchangeRequest>> Decode(const v1::ExchangeRequest&, const grpc::ByteBuffer& buffer) {
  return DecodeRequest(buffer);
}
absl::StatusOr<Received<v1::ExchangeResponse>> Decode(const v1::ExchangeResponse&, const grpc::ByteBuffer& buffer) {
  return DecodeResponse(buffer);
}

// `expected` has its payload in place.
template <typename Message>
void ExpectDecodes(const Message& expected, const grpc::ByteBuffer& buffer) {
  const absl::StatusOr<Received<Message>> received = Decode(expected, buffer);
  ASSERT_TRUE(received.ok()) << received.status();
  Message whole = received->message;
  EXPECT_TRUE(whole.payload().empty());
  whole.set_payload(Joined(received->payload));
  EXPECT_EQ(whole.SerializeAsString(), expected.SerializeAsString());
}

template <typename Message>
void ExpectSameAsProtobuf(Message message, size_t size) {
  const std::string payload = RandomBytes(size, 1 + size);
  for (const size_t part : {size_t{1} << 30, size / 3 + 1}) {
    const absl::StatusOr<grpc::ByteBuffer> buffer = EncodeFrame(message, Split(payload, part));
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    Message whole = message;
    whole.set_payload(payload);
    EXPECT_EQ(Joined(*buffer), whole.SerializeAsString()) << size;
    ExpectDecodes(whole, *buffer);
    ExpectDecodes(whole, Sliced(whole.SerializeAsString()));
  }
}

TEST(FrameCodecTest, WritesByteForByteWhatProtobufWrites) {
  for (const size_t size : {0, 1, 2, 127, 128, 129, 16383, 16384, 1 << 20, (1 << 21) + 3}) {
    ExpectSameAsProtobuf(Request(), size);
    ExpectSameAsProtobuf(Response(), size);
    ExpectSameAsProtobuf(v1::ExchangeRequest(), size);
  }
}

TEST(FrameCodecTest, AliasesThePayloadAndLetsGoOfItsOwner) {
  auto owner = std::make_shared<std::string>(RandomBytes(100000, 5));
  const std::weak_ptr<std::string> watch = owner;
  const void* memory = owner->data();
  {
    absl::StatusOr<grpc::ByteBuffer> buffer = EncodeFrame(Request(), {{owner->data(), owner->size(), owner}});
    owner.reset();
    ASSERT_TRUE(buffer.ok());
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer->Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(slices[1].begin(), memory);
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

TEST(FrameCodecTest, ReceivedBytesAliasTheBufferAndOutliveIt) {
  v1::ExchangeRequest request = Request();
  request.set_payload(RandomBytes(5000, 9));
  ReceivedBytes payload;
  {
    const grpc::ByteBuffer buffer = Sliced(request.SerializeAsString());
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    absl::StatusOr<Received<v1::ExchangeRequest>> received = DecodeRequest(buffer);
    ASSERT_TRUE(received.ok());
    payload = received->payload;
    ASSERT_EQ(payload.pieces().size(), 1u);
    EXPECT_EQ(static_cast<const void*>(payload.pieces()[0].end()), slices[0].end()) << "not copied";
  }
  EXPECT_EQ(Joined(payload), request.payload());
}

// The parts of a bundle's payload are found at every slice boundary, empty ones included, and are not copied.
TEST(FrameCodecTest, DividesABundlesPayload) {
  v1::ExchangeRequest bundle;
  const std::vector<std::string> payloads = {"abc", "", "defgh", "i", ""};
  for (const std::string& payload : payloads) {
    bundle.add_bundle()->mutable_header()->set_step(payload.size());
    bundle.add_bundled_bytes(payload.size());
    bundle.mutable_payload()->append(payload);
  }
  const std::string bytes = bundle.SerializeAsString();
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    std::vector<ReceivedBytes> parts;
    {
      auto received = DecodeRequest(Sliced(bytes, {cut}));
      ASSERT_TRUE(received.ok()) << received.status();
      auto divided = TakeBundledPayloads(*received);
      ASSERT_TRUE(divided.ok()) << divided.status();
      parts = *std::move(divided);
    }
    ASSERT_EQ(parts.size(), payloads.size());
    for (size_t i = 0; i < parts.size(); ++i) EXPECT_EQ(Joined(parts[i]), payloads[i]);
  }
}

TEST(FrameCodecTest, RefusesToEncodeWhatNobodyWouldRead) {
  v1::ExchangeRequest with_payload = Request();
  with_payload.set_payload("x");
  EXPECT_EQ(EncodeFrame(with_payload, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const char byte = 0;
  EXPECT_EQ(EncodeFrame(Request(), {{&byte, kMaxFramePayloadBytes + 1, nullptr}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  v1::ExchangeResponse long_header;
  long_header.mutable_outcome()->set_reason(std::string(kMaxHeaderBytes, 'x'));
  EXPECT_EQ(EncodeFrame(long_header, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(FrameCodecTest, DecodesAtEverySliceBoundary) {
  v1::ExchangeRequest request = Request();
  request.set_payload(RandomBytes(70, 3));
  const std::string bytes = request.SerializeAsString();
  for (size_t first = 0; first <= bytes.size(); ++first) {
    ExpectDecodes(request, Sliced(bytes, {first}));
    for (size_t second = first; second <= bytes.size(); second += 3)
      ExpectDecodes(request, Sliced(bytes, {first, second}));
  }
  std::vector<size_t> everywhere;
  for (size_t i = 1; i < bytes.size(); ++i) everywhere.push_back(i);
  ExpectDecodes(request, Sliced(bytes, everywhere));
}

TEST(FrameCodecTest, AcceptsAnyFieldOrderAndMergesAHeaderSentInParts) {
  v1::ExchangeRequest payload_only, first, second, expected = Request();
  payload_only.set_payload("payload");
  first.mutable_header()->set_epoch(99);
  *second.mutable_header() = Request().header();
  expected.set_payload("payload");
  const std::string a = payload_only.SerializeAsString();
  const std::string b = first.SerializeAsString();
  const std::string c = second.SerializeAsString();
  for (const std::string& bytes : {a + b + c, b + a + c, b + c + a}) {
    ExpectDecodes(expected, Sliced(bytes));
    ExpectDecodes(expected, Sliced(bytes, {1, 3, 10, 11, 40}));
  }
}

TEST(FrameCodecTest, KeepsUnknownFieldsOfEveryWireType) {
  const std::string varint("\xA0\x06\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", 12);  // field 100
  const std::string fixed64("\xA9\x06\x01zzzzzzz", 10);                              // field 101
  const std::string text("\xB2\x06\x03xyz", 6);                                      // field 102
  const std::string fixed32("\xBD\x06WXYZ", 6);                                      // field 103
  const std::string known = Request().SerializeAsString();
  v1::ExchangeRequest payload;
  payload.set_payload("data");
  const std::string bytes = varint + payload.SerializeAsString() + fixed64 + known + text + fixed32;
  v1::ExchangeRequest expected;
  ASSERT_TRUE(expected.ParseFromString(bytes));
  ExpectDecodes(expected, Sliced(bytes));
  ExpectDecodes(expected, Sliced(bytes, {1, 2, 15, 16, 40, 41}));
}

TEST(FrameCodecTest, AnEmptyMessageIsAMessageWithoutFields) {
  ExpectDecodes(v1::ExchangeRequest(), Sliced(""));
  ExpectDecodes(v1::ExchangeRequest(), grpc::ByteBuffer());
  v1::ExchangeResponse empty_payload;
  ExpectDecodes(empty_payload, Sliced(absl::string_view("\x7A\x00", 2)));
}

TEST(FrameCodecTest, RefusesMalformedFrames) {
  const std::string known = Request().SerializeAsString();
  const std::string payload("\x7A\x03xyz", 5);
  const struct {
    const char* name;
    std::string bytes;
    const char* expected;
  } cases[] = {
      {"tag cut off", std::string("\x80", 1), "broken field tag"},
      {"tag of 11 bytes", std::string(11, '\xFF'), "broken field tag"},
      {"tag above 32 bits", std::string("\xFF\xFF\xFF\xFF\x7F\x00", 6), "field number"},
      {"field 0", std::string("\x02\x00", 2), "field number of 1 ... 2^29 - 1, got 0"},
      {"length cut off", known + std::string("\x7A\x80", 2), "broken length of the payload"},
      {"length of 65 bits", known + "\x7A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02", "broken length of the payload"},
      {"payload longer than the frame", known + "\x7A\x04xyz", "payload of 4 bytes, 3 are left"},
      {"payload of 5 GB", known + std::string("\x7A\x80\xE4\x97\xD0\x12xyz", 9),
       "payload of 5000000000 bytes, 3 are left"},
      {"payload of 2^64 - 1 bytes", known + std::string("\x7A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01xy", 13),
       "payload of 18446744073709551615 bytes, 2 are left"},
      {"two payloads", payload + known + payload, "second payload"},
      {"two payloads, one empty", std::string("\x7A\x00", 2) + payload, "second payload"},
      {"payload as a varint", known + std::string("\x78\x01", 2), "payload with wire type 0, expected 2"},
      {"payload as a group", known + std::string("\x7B\x7C", 2), "payload with wire type 3, expected 2"},
      {"a group", std::string("\xA3\x06\xA4\x06", 4), "wire type 3 is not used here"},
      {"an end of group", std::string("\xA4\x06", 2), "wire type 4 is not used here"},
      {"wire type 6", std::string("\xA6\x06", 2), "wire type 6 is not used here"},
      {"wire type 7", std::string("\xA7\x06", 2), "wire type 7 is not used here"},
      {"header longer than the frame", std::string("\x0A\x7F\x08", 3), "field of 127 bytes, 1 are left"},
      {"header of 2^63 bytes", std::string("\x0A\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", 11), "0 are left"},
      {"fixed64 cut off", std::string("\xA9\x06xyz", 5), "field of 8 bytes, 3 are left"},
      {"fixed32 cut off", std::string("\xAD\x06xyz", 5), "field of 4 bytes, 3 are left"},
      {"varint cut off", std::string("\xA0\x06\x80", 3), "broken varint"},
      {"garbage in the header", std::string("\x0A\x02\x08\x80", 4), "not a precondor.v1.ExchangeRequest"},
      {"header above the limit", std::string("\x0A\x80\x80\x20", 4) + std::string(1 << 19, '\0'),
       "more than 262144 bytes of fields other than the payload"},
  };
  for (const auto& c : cases) {
    for (const std::vector<size_t>& cuts : {std::vector<size_t>{}, {1}, {c.bytes.size() / 2, c.bytes.size() - 1}}) {
      EXPECT_THAT(DecodeRequest(Sliced(c.bytes, cuts)),
                  StatusIs(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed, HasSubstr(c.expected)))
          << c.name;
    }
  }
}

TEST(FrameCodecTest, ManySmallFieldsAreHeldToTheLimitToo) {
  std::string bytes;
  while (bytes.size() <= kMaxHeaderBytes) bytes += std::string("\xA0\x06\x01", 3);
  EXPECT_THAT(DecodeRequest(Sliced(bytes)), ReasonIs(ErrorReason::kMalformed));
}

TEST(FrameCodecTest, RefusesTextThatIsNotUtf8) {
  // outcome { reason: "\xFF" }
  EXPECT_EQ(GetErrorReason(DecodeResponse(Sliced("\x1A\x03\x22\x01\xFF")).status()), ErrorReason::kMalformed);
}

// Overwrites, inserts, removes, repeats or cuts off a few bytes.
std::string Mutated(std::string bytes, std::mt19937& random) {
  const auto position = [&] { return bytes.empty() ? 0 : random() % bytes.size(); };
  for (uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
    switch (random() % 6) {
      case 0:
        if (!bytes.empty()) bytes[position()] = static_cast<char>(random());
        break;
      case 1:
        if (!bytes.empty()) bytes[position()] ^= static_cast<char>(1 << (random() % 8));
        break;
      case 2:
        bytes.insert(position(), 1 + random() % 9, static_cast<char>(random()));
        break;
      case 3:
        if (!bytes.empty()) bytes.erase(position(), 1 + random() % 5);
        break;
      case 4:
        bytes += bytes.substr(position(), 30);
        break;
      default:
        bytes.resize(position());
    }
  }
  return bytes;
}

// These are refused here and not by protobuf.
bool RefusedOnPurpose(absl::string_view message) {
  for (absl::string_view text : {"second payload", "wire type 3", "payload with wire type", "broken varint",
                                 "broken field tag", "broken length", "expected a field number"}) {
    if (absl::StrContains(message, text)) return true;
  }
  return false;
}

// Agrees with protobuf on every mutated frame, and never takes more memory than the frame's own size calls for.
template <typename Message>
void Mutate(const Message& seed, uint32_t random_seed) {
  SCOPED_TRACE(absl::StrCat("random seed ", random_seed));
  const google::protobuf::LogSilencer quiet;  // it prints a line for each string that is not UTF-8
  std::mt19937 random(random_seed);
  const std::string original = seed.SerializeAsString();
  int accepted = 0, refused = 0;
  for (int round = 0; round < 10000; ++round) {
    const std::string bytes = Mutated(original, random);
    std::vector<size_t> cuts = {random() % (bytes.size() + 1), random() % (bytes.size() + 1)};
    std::sort(cuts.begin(), cuts.end());
    const grpc::ByteBuffer buffer = Sliced(bytes, cuts);
    Message stock;
    const bool stock_ok = stock.ParseFromString(bytes);
    largest_allocation = 0;
    const absl::StatusOr<Received<Message>> received = Decode(seed, buffer);
    // A packed list of one-byte numbers grows eightfold in memory, and growth by doubling leaves room for twice that.
    ASSERT_LE(largest_allocation, 4096 + 16 * bytes.size()) << "round " << round;
    if (received.ok()) {
      ASSERT_TRUE(stock_ok) << "round " << round;
      ASSERT_EQ(Joined(received->payload), stock.payload()) << "round " << round;
      stock.clear_payload();
      ASSERT_EQ(received->message.SerializeAsString(), stock.SerializeAsString()) << "round " << round;
      ++accepted;
    } else {
      ASSERT_TRUE(!stock_ok || RefusedOnPurpose(received.status().message())) << received.status();
      ASSERT_EQ(GetErrorReason(received.status()), ErrorReason::kMalformed);
      ++refused;
    }
  }
  EXPECT_GT(accepted, 500);
  EXPECT_GT(refused, 500);
}

TEST(FrameCodecTest, SurvivesMutatedRequests) {
  v1::ExchangeRequest request = Request();
  request.set_payload(RandomBytes(60, 1));
  Mutate(request, 71001);
}

TEST(FrameCodecTest, SurvivesMutatedResponses) {
  v1::ExchangeResponse response = Response();
  response.set_payload(RandomBytes(60, 2));
  Mutate(response, 71002);
}

}  // namespace
}  // namespace precondor::wire
