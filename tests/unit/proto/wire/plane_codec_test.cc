// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/plane_codec.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;

TEST(PlaneCodecTest, HelloNamesTheFirstStepAndTheVersion) {
  std::string bytes = EncodePlaneHello(0x0102030405060708);
  EXPECT_EQ(bytes, std::string("\x01\0\0\0\0\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01", 16));
  ASSERT_EQ(bytes.size(), kPlaneHelloBytes);
  EXPECT_EQ(*DecodePlaneHello(bytes), 0x0102030405060708u);
  bytes[0] = 2;
  EXPECT_THAT(std::string(DecodePlaneHello(bytes).status().message()),
              HasSubstr("expected version 1 of the data plane, got 2"));
  EXPECT_FALSE(DecodePlaneHello("short").ok());
}

TEST(PlaneCodecTest, OffersKeepEveryField) {
  const PlaneOffer offer = {
      .step = uint64_t{1} << 40, .bucket = 3, .mode = Mode::kFirstOrder, .parts = {{7}, {0, true}, {0}}};
  const std::string bytes = EncodePlaneOffer(offer);
  ASSERT_EQ(bytes.size(), PlaneOfferBytes(3));
  const auto back = DecodePlaneOffer(bytes, 3);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->step, offer.step);
  EXPECT_EQ(back->bucket, offer.bucket);
  EXPECT_EQ(back->mode, offer.mode);
  EXPECT_EQ(back->parts, offer.parts);
}

TEST(PlaneCodecTest, OffersThatMeanNothingAreRefused) {
  const std::string good = EncodePlaneOffer({.step = 1, .bucket = 0, .mode = Mode::kSecondOrder, .parts = {{7}}});
  ASSERT_TRUE(DecodePlaneOffer(good, 1).ok());
  EXPECT_FALSE(DecodePlaneOffer(good, 2).ok()) << "another number of layers";
  for (const size_t place : {size_t{12}, good.size() - 1}) {  // the mode; refused, with samples
    for (const char value : {3, 0, 1, 2}) {
      std::string bad = good;
      bad[place] = value;
      EXPECT_EQ(DecodePlaneOffer(bad, 1).ok(), place == 12 ? value == 1 || value == 2 : value == 0) << int{value};
    }
  }
}

TEST(PlaneCodecTest, AnswersKeepEveryFieldAndTheBeginningOfTheReason) {
  const PlaneAnswer answer = {
      .decision = Decision::kSkip, .factor_version = 9, .inner_product = -0.25, .reason = std::string(300, 'x')};
  const std::string bytes = EncodePlaneAnswer(answer);
  ASSERT_EQ(bytes.size(), kPlaneAnswerBytes);
  const auto back = DecodePlaneAnswer(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->decision, Decision::kSkip);
  EXPECT_EQ(back->factor_version, 9u);
  EXPECT_EQ(back->inner_product, -0.25);
  EXPECT_EQ(back->reason, std::string(kPlaneReasonBytes, 'x'));
  for (const char decision : {0, 4}) {
    std::string bad = bytes;
    bad[0] = decision;
    EXPECT_FALSE(DecodePlaneAnswer(bad).ok());
  }
  std::string overlong = bytes;
  overlong[1] = static_cast<char>(kPlaneReasonBytes + 1);
  EXPECT_FALSE(DecodePlaneAnswer(overlong).ok());
}

TEST(PlaneCodecTest, BytesTravelAsElements) {
  EXPECT_EQ(PlaneElements(13), 4);
  EXPECT_EQ(PlaneElements(16), 4);
  // Among them the bits of a signalling NaN.
  const std::string bytes("\x01\x00\xA0\x7F\xFF\xFF\xFF\xFF\x05", 9);
  std::vector<float> elements(3, 1.0f);
  ToPlaneElements(bytes, absl::MakeSpan(elements));
  EXPECT_EQ(FromPlaneElements(elements, 9), bytes);
  EXPECT_EQ(FromPlaneElements(elements, 12).substr(9), std::string(3, '\0'));
}

}  // namespace
}  // namespace precondor::wire
