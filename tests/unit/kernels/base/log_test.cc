// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/log.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace precondor {
namespace {

class FixedClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::FromUnixMillis(1767323045678); }
};

std::string Line(LogFormat format, absl::string_view message, std::initializer_list<LogField> fields) {
  const FixedClock clock;
  std::string line;
  LineLogger logger(format, Severity::kInfo, clock, [&line](absl::string_view text) { line += std::string(text); });
  logger.Log(Severity::kInfo, message, fields);
  logger.Log(Severity::kDebug, "below the threshold", {});
  return line;
}

TEST(LogTest, WritesTextLines) {
  EXPECT_EQ(Line(LogFormat::kText, "sealed", {{"session", "run 7"}, {"step", 12}, {"ok", true}, {"reason", ""}}),
            "2026-01-02T03:04:05.678Z INFO sealed session=\"run 7\" step=12 ok=true reason=\"\"\n");
}

TEST(LogTest, WritesJsonLines) {
  EXPECT_EQ(Line(LogFormat::kJson, "a \"b\"\n", {{"session", "run"}, {"step", uint64_t{1} << 63}, {"loss", 0.5}}),
            "{\"ts\":\"2026-01-02T03:04:05.678Z\",\"severity\":\"INFO\",\"message\":\"a \\\"b\\\"\\u000a\","
            "\"session\":\"run\",\"step\":9223372036854775808,\"loss\":0.5}\n");
}

// Names come from clients, and people read logs on terminals.
TEST(LogTest, EscapesWhatATerminalWouldObey) {
  EXPECT_NE(Line(LogFormat::kText, "m", {{"layer", "a\u202e\u009bb"}}).find(" layer=\"a\\u202e\\u009bb\"\n"),
            std::string::npos);
  EXPECT_NE(Line(LogFormat::kJson, "m", {{"layer", "a\u202e\xff"}}).find("\"layer\":\"a\\u202e\\ufffd\""),
            std::string::npos);
}

TEST(LogTest, QuotesNumbersThatJsonLacks) {
  EXPECT_NE(Line(LogFormat::kJson, "m", {{"loss", std::nan("")}}).find("\"loss\":\"nan\""), std::string::npos);
}

TEST(LogTest, KeepsLinesWholeFromManyThreads) {
  const FixedClock clock;
  std::vector<std::string> lines;
  LineLogger logger(LogFormat::kText, Severity::kInfo, clock, [&lines](absl::string_view l) { lines.emplace_back(l); });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&logger] {
      for (int i = 0; i < 100; ++i) logger.Log(Severity::kWarning, "m", {{"i", i}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines.size(), 400u);
  for (const std::string& line : lines) EXPECT_EQ(line.back(), '\n');
}

}  // namespace
}  // namespace precondor
