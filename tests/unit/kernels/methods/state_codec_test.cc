// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/state_codec.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cpu/cpu_backend.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

void PutNumber(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// As state_codec.cc describes it, word by word: FNV-1a in `sums` sums, to which words go in turns.
uint64_t NaiveChecksum(const std::string& bytes, size_t sums) {
  const auto add = [](uint64_t sum, uint64_t word) {
    const uint64_t product = (sum ^ word) * 1099511628211u;
    return product ^ (product >> 32);
  };
  std::string padded = bytes;
  padded.resize((bytes.size() + 7) / 8 * 8, '\0');
  std::vector<uint64_t> each(sums, 14695981039346656037u);
  for (size_t word = 0; word < padded.size() / 8; ++word) {
    uint64_t value = 0;
    for (size_t i = 8; i-- > 0;) value = value << 8 | static_cast<uint8_t>(padded[word * 8 + i]);
    each[word % sums] = add(each[word % sums], value);
  }
  for (size_t i = 1; i < sums; ++i) each[0] = add(each[0], each[i]);
  return (each[0] ^ bytes.size()) * 1099511628211u;
}

// A state of the method "m" that holds one text.
std::string Written(uint32_t format, size_t sums, const std::string& text) {
  std::string out = "PCDRSTAT";
  PutNumber(out, format, 4);
  PutNumber(out, 1, 8);
  out += "m";
  PutNumber(out, text.size(), 8);
  out += text;
  PutNumber(out, NaiveChecksum(out, sums), 8);
  return out;
}

TEST(StateCodecTest, WritesWhatTheFormatSays) {
  for (size_t length = 0; length < 200; ++length) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text.push_back(static_cast<char>(i * 37 + length));
    StateWriter out("m");
    out.Text(text);
    EXPECT_EQ(out.Finish(), Written(2, 8, text)) << length;
  }
}

TEST(StateCodecTest, ReadsTheFirstFormatToo) {
  const std::string bytes = Written(1, 1, "some text of no round length");
  StateReader in(bytes);
  ASSERT_TRUE(in.Begin("m").ok());
  EXPECT_TRUE(in.ExpectText("text", "some text of no round length").ok());
  EXPECT_TRUE(in.Finish().ok());
}

TEST(StateCodecTest, TellsANewerFormatFromDamage) {
  const std::string newer = Written(3, 8, "text"), mixed = Written(1, 8, "text");
  const absl::Status refused = StateReader(newer).Begin("m");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("expected at most 2, got 3"));
  EXPECT_EQ(StateReader(mixed).Begin("m").code(), absl::StatusCode::kDataLoss);
}

TEST(StateCodecTest, FindsEveryInvertedBit) {
  const std::string bytes = Written(2, 8, "a text that is longer than all of the sums' first words together are");
  for (size_t bit = 96; bit < 8 * bytes.size(); ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_EQ(StateReader(damaged).Begin("m").code(), absl::StatusCode::kDataLoss) << bit;
  }
}

TEST(StateCodecTest, RefusesMoreNumbersThanThereAreBytesFor) {
  for (const uint64_t count : {uint64_t{3}, uint64_t{16}, uint64_t{17}, UINT64_MAX}) {
    StateWriter out("m");
    out.Integer(count);
    out.Number(1);
    out.Number(2);
    const std::string bytes = out.Finish();
    StateReader in(bytes);
    ASSERT_TRUE(in.Begin("m").ok());
    EXPECT_EQ(in.Numbers("weights").status().code(), absl::StatusCode::kDataLoss) << count;
  }
}

// Rows that fill a part, do not, and are each longer than one.
TEST(StateCodecTest, MatricesComeBackWhateverTheirShape) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({}).value();
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {3, 0}, {1, (64 << 10) + 7}, {5, 64 << 10}, {130, 1024}, {2, 100000}}) {
    std::vector<float> values(static_cast<size_t>(rows * cols)), back(values.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.5f + 1.0f;
    StateWriter out("m", 100);
    ASSERT_TRUE(out.Matrix(*backend, ConstMatrixView(values.data(), rows, cols)).ok());
    const std::string bytes = out.Finish();
    StateReader in(bytes);
    ASSERT_TRUE(in.Begin("m").ok());
    ASSERT_TRUE(in.Matrix("matrix", *backend, MatrixView(back.data(), rows, cols)).ok()) << rows << " x " << cols;
    EXPECT_TRUE(in.Finish().ok());
    EXPECT_EQ(back, values) << rows << " x " << cols;
  }
}

}  // namespace
}  // namespace precondor
