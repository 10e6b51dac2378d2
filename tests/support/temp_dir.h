// SPDX-License-Identifier: Apache-2.0
// A new directory under the test's temporary one, removed with all that is in it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "gtest/gtest.h"

#include "kernels/base/check.h"

namespace precondor {

class TempDir {
 public:
  TempDir() : path_(::testing::TempDir() + "/precondor-XXXXXX") { PRECONDOR_CHECK(mkdtemp(path_.data()) != nullptr); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace precondor
