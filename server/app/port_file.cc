// SPDX-License-Identifier: Apache-2.0
#include "server/app/port_file.h"

#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace precondor {

absl::Status WritePortFile(const std::string& path, absl::string_view port) {
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::ofstream file(temporary);
  file << port << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("port file: cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace precondor
