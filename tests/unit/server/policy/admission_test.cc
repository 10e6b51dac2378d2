// SPDX-License-Identifier: Apache-2.0
#include "server/policy/admission.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(AdmissionTest, AdmitsUpToTheLastByteAndNotBeyond) {
  EXPECT_TRUE(DecideAdmission({.needed = 60, .reserved = 40, .capacity = 100}).admit);
  EXPECT_FALSE(DecideAdmission({.needed = 61, .reserved = 40, .capacity = 100}).admit);
  EXPECT_TRUE(DecideAdmission({.needed = 0, .reserved = 100, .capacity = 100}).admit);
}

TEST(AdmissionTest, DoesNotOverflow) {
  EXPECT_FALSE(
      DecideAdmission({.needed = std::numeric_limits<int64_t>::max(), .reserved = 1, .capacity = int64_t{1} << 40})
          .admit);
}

TEST(AdmissionTest, ReasonHasTheNumbers) {
  const std::string reason = DecideAdmission({.needed = 61, .reserved = 40, .capacity = 100}).reason;
  EXPECT_THAT(reason, HasSubstr("needed 61"));
  EXPECT_THAT(reason, HasSubstr("reserved 40"));
  EXPECT_THAT(reason, HasSubstr("capacity 100"));
}

}  // namespace
}  // namespace precondor
