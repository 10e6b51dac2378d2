// SPDX-License-Identifier: Apache-2.0
#include "server/store/crc32c.h"

#include <string>

#include "gtest/gtest.h"

#include "kernels/base/random.h"

namespace precondor::store {
namespace {

// Bit by bit, with the reflected Castagnoli polynomial.
uint32_t NaiveCrc32c(absl::string_view bytes) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

TEST(Crc32cTest, GivesTheVectorsOfRfc3720) {
  std::string ascending, descending;
  for (int i = 0; i < 32; ++i) {
    ascending.push_back(static_cast<char>(i));
    descending.push_back(static_cast<char>(31 - i));
  }
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(Crc32c(ascending), 0x46DD794Eu);
  EXPECT_EQ(Crc32c(descending), 0x113FDB5Cu);
}

TEST(Crc32cTest, EqualsTheNaiveFormAtEveryLengthAndSplit) {
  const uint64_t key[] = {7};
  const CounterRandom random(key);
  std::string bytes;
  for (uint64_t length = 0; length < 300; ++length) {
    EXPECT_EQ(Crc32c(bytes), NaiveCrc32c(bytes)) << length;
    const size_t split = random.Bits(length) % (length + 1);
    EXPECT_EQ(ExtendCrc32c(Crc32c(bytes.substr(0, split)), bytes.substr(split)), NaiveCrc32c(bytes)) << length;
    bytes.push_back(static_cast<char>(random.Bits(1000 + length)));
  }
}

}  // namespace
}  // namespace precondor::store
