// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/printable.h"

#include <string>

#include "gtest/gtest.h"

namespace precondor {
namespace {

TEST(PrintableTest, LeavesTextOfAnyLanguage) {
  for (const char* text :
       {"", "encoder.0.weight", "caf\u00e9", "\u0434\u0436", "\u05e9\u05dc", "\u6f22\u5b57", "\U0001f600", "\\u0041"}) {
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(PrintableTest, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("a\x1b[2Jb\rc\nd\te\x7f"), "a\\u001b[2Jb\\u000dc\\u000ad\\u0009e\\u007f");
  EXPECT_EQ(Printable("\u009b31m"), "\\u009b31m") << "CSI as one character";
  EXPECT_EQ(Printable("a\u202eb\u2066c\u200fd\u061ce"), "a\\u202eb\\u2066c\\u200fd\\u061ce") << "direction";
  EXPECT_EQ(Printable("a\u2028b"), "a\\u2028b") << "a line";
  EXPECT_EQ(Printable(std::string("a\0b", 3)), "a\\u0000b");
}

TEST(PrintableTest, EscapesBytesThatAreNotUtf8) {
  for (const char* bytes :
       {"\x80", "\xc0", "\xc1\x81", "\xe2\x82", "\xed\xa0\x80", "\xf5\x80\x80\x80", "\xe0\x80\x80", "\xff"}) {
    EXPECT_EQ(Printable(bytes).substr(0, 6), "\\ufffd");
    EXPECT_EQ(Printable(std::string("a") + bytes + "b").front(), 'a');
    EXPECT_EQ(Printable(std::string("a") + bytes + "b").back(), 'b');
  }
}

}  // namespace
}  // namespace precondor
