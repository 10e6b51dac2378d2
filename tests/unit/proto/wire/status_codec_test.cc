// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/status_codec.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

#include "tests/support/status_matchers.h"

namespace precondor::wire {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

TEST(StatusCodecTest, EveryCodeAndReasonSurvivesBothWays) {
  for (int code = 1; code <= 16; ++code) {
    for (int reason = 0; reason <= v1::ErrorReason_MAX; ++reason) {
      SCOPED_TRACE(absl::StrCat("code ", code, " reason ", reason));
      const absl::Status status =
          ReasonedStatus(static_cast<absl::StatusCode>(code), static_cast<ErrorReason>(reason), "layer 3: expected 4");
      for (const absl::Status& back : {FromGrpcStatus(ToGrpcStatus(status)), FromErrorDetail(ToErrorDetail(status))}) {
        EXPECT_EQ(back.code(), status.code());
        EXPECT_EQ(GetErrorReason(back), GetErrorReason(status));
        EXPECT_EQ(back.message(), status.message());
      }
    }
  }
}

TEST(StatusCodecTest, OkIsOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(StatusCodecTest, DetailsAreASerializedErrorDetail) {
  const grpc::Status status =
      ToGrpcStatus(ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "epoch 2, now 3"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "epoch 2, now 3");
  v1::ErrorDetail detail;
  ASSERT_TRUE(detail.ParseFromString(status.error_details()));
  EXPECT_EQ(detail.code(), 9);
  EXPECT_EQ(detail.reason(), v1::ERROR_REASON_STALE_EPOCH);
  EXPECT_EQ(detail.message(), "epoch 2, now 3");
}

TEST(StatusCodecTest, ForeignDetailsAreLeftOut) {
  v1::ErrorDetail other_code;
  other_code.set_code(5);
  other_code.set_reason(v1::ERROR_REASON_UNKNOWN_LAYER);
  for (const std::string& details : {std::string("\xff\xff\xff"), std::string(), other_code.SerializeAsString()}) {
    EXPECT_THAT(FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection lost", details)),
                StatusIs(absl::StatusCode::kUnavailable, ErrorReason::kUnspecified, "connection lost"));
  }
}

TEST(StatusCodecTest, CodesOutsideTheRangeAreUnknown) {
  EXPECT_EQ(FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(31), "?")).code(), absl::StatusCode::kUnknown);
  // A server that has no memory for messages now will have some; a message that is too large stays so.
  const auto exhausted = [](const char* message) {
    return FromGrpcStatus(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, message)).code();
  };
  EXPECT_EQ(exhausted("Received RST_STREAM with error code 11"), absl::StatusCode::kUnavailable);
  EXPECT_EQ(exhausted("Buffers full"), absl::StatusCode::kUnavailable);
  EXPECT_EQ(exhausted("Received message larger than max (5 vs. 4)"), absl::StatusCode::kResourceExhausted);
  for (const int code : {0, -1, 17, 1 << 30}) {
    v1::ErrorDetail detail;
    detail.set_code(code);
    detail.set_message("text");
    EXPECT_THAT(FromErrorDetail(detail), StatusIs(absl::StatusCode::kUnknown, "text")) << code;
  }
}

TEST(StatusCodecTest, AReasonOfALaterReleaseIsUnspecified) {
  v1::ErrorDetail detail;
  detail.set_code(3);
  detail.set_reason(static_cast<v1::ErrorReason>(200));
  EXPECT_EQ(GetErrorReason(FromErrorDetail(detail)), ErrorReason::kUnspecified);
  EXPECT_EQ(FromErrorDetail(detail).code(), absl::StatusCode::kInvalidArgument);
}

TEST(StatusCodecTest, MessagesUpToTheLimitAreLeftAlone) {
  const std::string exact(kMaxMessageBytes, 'x');
  EXPECT_EQ(SafeText(exact), exact);
  EXPECT_EQ(SafeText(""), "");
  EXPECT_EQ(SafeText("größer als €5 \xF0\x9F\x8E\x89"), "größer als €5 \xF0\x9F\x8E\x89");
}

TEST(StatusCodecTest, LongMessagesEndBeforeTheCharacterThatDoesNotFit) {
  EXPECT_EQ(SafeText(std::string(kMaxMessageBytes + 1, 'x')), std::string(kMaxMessageBytes - 3, 'x') + "...");
  // Characters of 2, 3 and 4 bytes, at every phase to the limit.
  for (const std::string character : {"é", "€", "\xF0\x9F\x8E\x89"}) {
    for (size_t phase = 0; phase < 4; ++phase) {
      std::string text(phase, 'x');
      while (text.size() <= kMaxMessageBytes) text += character;
      const std::string safe = SafeText(text);
      EXPECT_LE(safe.size(), kMaxMessageBytes);
      EXPECT_GT(safe.size() + character.size(), kMaxMessageBytes);
      EXPECT_THAT(safe, EndsWith(character + "..."));
      EXPECT_THAT(text, StartsWith(safe.substr(0, safe.size() - 3)));
    }
  }
}

TEST(StatusCodecTest, BytesThatAreNotUtf8BecomeQuestionMarks) {
  EXPECT_EQ(SafeText("a\xFFz"), "a?z");
  EXPECT_EQ(SafeText("\xC0\xAF"), "??");            // overlong "/"
  EXPECT_EQ(SafeText("\xED\xA0\x80"), "???");       // surrogate
  EXPECT_EQ(SafeText("\xF4\x90\x80\x80"), "????");  // above U+10FFFF
  EXPECT_EQ(SafeText("\xE2\x82"), "??");            // cut off
  EXPECT_EQ(SafeText(std::string("a\0b", 3)), std::string("a\0b", 3));
}

TEST(StatusCodecTest, AnyBytesSurviveAsAProtobufString) {
  std::mt19937 random(20240611);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 2000, '\0');
    for (char& c : bytes) c = static_cast<char>(round % 2 == 0 ? random() : 0x80 + random() % 0x80);
    const v1::ErrorDetail detail = ToErrorDetail(absl::InternalError(bytes));
    ASSERT_LE(detail.message().size(), kMaxMessageBytes);
    v1::ErrorDetail back;  // protobuf refuses a string that is not UTF-8
    ASSERT_TRUE(back.ParseFromString(detail.SerializeAsString())) << "round " << round;
  }
}

}  // namespace
}  // namespace precondor::wire
