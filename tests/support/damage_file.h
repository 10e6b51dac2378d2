// SPDX-License-Identifier: Apache-2.0
// A file on the real disk with a bit that is wrong.
#pragma once

#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace precondor {

// Inverts a bit of the byte in its middle.
inline void DamageFile(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(0, std::ios::end);
  const auto middle = file.tellg() / 2;
  file.seekg(middle);
  const char byte = static_cast<char>(file.get() ^ 0x40);
  file.seekp(middle);
  file.put(byte);
  ASSERT_TRUE(file.good()) << path;
}

}  // namespace precondor
