// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/decoded_size.h"

#include <grpcpp/support/proto_buffer_writer.h>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "precondor/v1/session.pb.h"
#include "precondor/v1/snapshot.pb.h"

namespace precondor::wire {
namespace {

// In slices of 1,000 bytes, so that fields go over their ends.
grpc::ByteBuffer Buffer(const std::string& bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += 1000) slices.emplace_back(bytes.substr(at, 1000));
  return {slices.data(), slices.size()};
}

template <typename Message>
uint64_t SizeOf(const std::string& bytes) {
  return DecodedSize(*Message::descriptor(), Buffer(bytes));
}

// Returns protobuf's own size of a decoded message.
template <typename Message>
uint64_t Used(const std::string& bytes) {
  Message message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  return message.SpaceUsedLong();
}

std::string Repeat(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(DecodedSizeTest, IsAtLeastWhatProtobufUses) {
  v1::OpenSessionRequest open;
  for (int i = 0; i < 3000; ++i) {
    v1::Layer* const layer = open.mutable_spec()->add_layers();
    if (i % 3 == 0) continue;  // an empty message takes two bytes
    layer->set_name(std::string(i % 100, 'x'));
    layer->set_d_out(i);
    for (int k = 0; k < i % 7; ++k) layer->add_shape(1);
  }
  EXPECT_GE(SizeOf<v1::OpenSessionRequest>(open.SerializeAsString()),
            Used<v1::OpenSessionRequest>(open.SerializeAsString()));
  // Within a small factor, or large sessions would be refused.
  EXPECT_LE(SizeOf<v1::OpenSessionRequest>(open.SerializeAsString()),
            4 * Used<v1::OpenSessionRequest>(open.SerializeAsString()));

  v1::RestoreLayerRequest piece;
  piece.set_data(std::string(1 << 20, 'p'));
  EXPECT_LE(SizeOf<v1::RestoreLayerRequest>(piece.SerializeAsString()), (1 << 20) + 4096);
}

TEST(DecodedSizeTest, CountsWhatTheMessageDoesNotKnow) {
  const std::string number("\xf8\x07\x01", 3), text("\xfa\x07\x02hi", 5);  // of field 127
  for (const std::string& unknown : {number, text, number + text}) {
    const std::string bytes = Repeat(unknown, 5000);
    EXPECT_GE(SizeOf<v1::JoinSessionRequest>(bytes), Used<v1::JoinSessionRequest>(bytes));
  }
}

TEST(DecodedSizeTest, CountsNumbersWhereTheFieldIsAText) {
  const std::string bytes = Repeat(std::string("\x08\x01", 2), 5000);  // JoinSessionRequest.name
  EXPECT_GE(SizeOf<v1::JoinSessionRequest>(bytes), Used<v1::JoinSessionRequest>(bytes));
  EXPECT_GE(SizeOf<v1::JoinSessionRequest>(bytes), 5000u * 16);
}

TEST(DecodedSizeTest, GroupsAndDeepNestingHaveNoSize) {
  EXPECT_GT(SizeOf<v1::JoinSessionRequest>("\xfb\x07\xfc\x07"), uint64_t{1} << 60);
  std::string nested;
  for (int i = 0; i < 40; ++i) {  // ExchangeRequest.bundle, of its own type
    v1::ExchangeRequest outer;
    ASSERT_TRUE(outer.add_bundle()->ParseFromString(nested));
    nested = outer.SerializeAsString();
  }
  EXPECT_GT(SizeOf<v1::ExchangeRequest>(nested), uint64_t{1} << 60);
}

TEST(DecodedSizeTest, BytesThatAreNoMessageEndIt) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(i % 300, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    v1::OpenSessionRequest message;
    if (message.ParseFromString(bytes)) {
      EXPECT_GE(SizeOf<v1::OpenSessionRequest>(bytes), message.SpaceUsedLong());
    } else {
      SizeOf<v1::OpenSessionRequest>(bytes);
    }
  }
  EXPECT_LE(SizeOf<v1::OpenSessionRequest>("\x0a\xff\xff\xff\xff\x0f"), 4096u);
  EXPECT_LE(SizeOf<v1::OpenSessionRequest>(""), 4096u);
}

}  // namespace
}  // namespace precondor::wire
