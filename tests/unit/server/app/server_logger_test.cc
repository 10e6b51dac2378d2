// SPDX-License-Identifier: Apache-2.0
#include "server/app/server_logger.h"

#include <array>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/trace/tracer.h"
#include "tests/support/fake_clock.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ServerLoggerTest : public ::testing::Test {
 protected:
  ServerLoggerTest() {
    EXPECT_EQ(pipe(ends_.data()), 0);
    fcntl(ends_[0], F_SETFL, O_NONBLOCK);
  }
  ~ServerLoggerTest() override {
    for (const int end : ends_) close(end);
  }
  // The lines in the pipe, which is empty afterwards.
  std::vector<std::string> Read() {
    std::string text;
    std::array<char, 4096> buffer = {};
    for (ssize_t got = 0; (got = read(ends_[0], buffer.data(), buffer.size())) > 0;) {
      text.append(buffer.data(), static_cast<size_t>(got));
    }
    return absl::StrSplit(text, '\n', absl::SkipEmpty());
  }

  std::array<int, 2> ends_ = {};
  FakeClock clock_;
};

TEST_F(ServerLoggerTest, APipeThatIsNotReadDropsLinesAndBlocksNobody) {
  ServerLogger logger(LogFormat::kText, Severity::kInfo, clock_, ends_[1]);
  const std::string long_value(1000, 'x');
  for (int i = 0; i < 500; ++i) logger.Log(Severity::kInfo, absl::StrCat("message ", i), {{"value", long_value}});
  const int64_t dropped = logger.dropped_lines();
  const std::vector<std::string> lines = Read();
  EXPECT_GT(dropped, 0);
  EXPECT_EQ(static_cast<int64_t>(lines.size()) + dropped, 500);
  logger.Log(Severity::kInfo, "read again", {});
  ASSERT_EQ(Read().size(), 1u);
  EXPECT_EQ(logger.dropped_lines(), dropped);
}

TEST_F(ServerLoggerTest, APipeWithoutAReaderDropsLines) {
  ServerLogger logger(LogFormat::kText, Severity::kInfo, clock_, ends_[1]);
  close(std::exchange(ends_[0], dup(ends_[1])));
  logger.Log(Severity::kInfo, "no reader", {});
  EXPECT_EQ(logger.dropped_lines(), 1);
}

TEST_F(ServerLoggerTest, ALineHasTheTraceOfItsCall) {
  ServerLogger logger(LogFormat::kJson, Severity::kInfo, clock_, ends_[1]);
  {
    const TraceContext caller = {"4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", false};
    const trace::Operation call(nullptr, "call", trace::SpanKind::kServer, absl::Time(), caller, /*keep=*/false);
    logger.Log(Severity::kInfo, "joined", {{"session", "run"}});
  }
  logger.Log(Severity::kInfo, "alone", {});
  const std::vector<std::string> lines = Read();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr(R"("session":"run","trace_id":"4bf92f3577b34da6a3ce929d0e0e4736",)"
                                  R"("span_id":"00f067aa0ba902b7"})"));
  EXPECT_THAT(lines[1], ::testing::Not(HasSubstr("trace_id")));
}

TEST_F(ServerLoggerTest, ALineLongerThanThePipesUnitIsWhole) {
  ServerLogger logger(LogFormat::kText, Severity::kInfo, clock_, ends_[1]);
  const std::string long_value(10'000, 'x');
  logger.Log(Severity::kInfo, "long", {{"value", long_value}});
  const std::vector<std::string> lines = Read();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr(long_value));
}

TEST_F(ServerLoggerTest, AMessageThatRepeatsIsLimitedAndItsLinesAreCounted) {
  ServerLogger logger(LogFormat::kText, Severity::kInfo, clock_, ends_[1]);
  for (int i = 0; i < 180; ++i) logger.Log(Severity::kError, "disk full", {});
  logger.Log(Severity::kInfo, "another message", {});
  EXPECT_EQ(Read().size(), static_cast<size_t>(ServerLogger::kLinesPerWindow) + 1);
  EXPECT_EQ(logger.dropped_lines(), 180 - ServerLogger::kLinesPerWindow);
  clock_.Advance(ServerLogger::kWindow);
  logger.Log(Severity::kError, "disk full", {});
  const std::vector<std::string> lines = Read();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("log lines dropped of_message=\"disk full\" lines=80"));
}

TEST_F(ServerLoggerTest, LinesBelowTheThresholdCountForNothing) {
  ServerLogger logger(LogFormat::kText, Severity::kInfo, clock_, ends_[1]);
  for (int i = 0; i < 180; ++i) logger.Log(Severity::kDebug, "quiet", {});
  EXPECT_TRUE(Read().empty());
  EXPECT_EQ(logger.dropped_lines(), 0);
}

}  // namespace
}  // namespace precondor
