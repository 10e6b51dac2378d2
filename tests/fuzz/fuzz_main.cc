// SPDX-License-Identifier: Apache-2.0
// The functions that libFuzzer calls: the seeds go into the first folder of the command line, then the target gets its
// inputs.
#include <fstream>
#include <google/protobuf/stubs/logging.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerInitialize(const int* argc, char*** argv) {
  google::protobuf::SetLogHandler(nullptr);  // a line for each text that is not UTF-8
  for (int i = 1; i < *argc; ++i) {
    const absl::string_view corpus = (*argv)[i];
    if (absl::StartsWith(corpus, "-")) continue;
    const std::vector<std::string> seeds = precondor::fuzz::Seeds();
    for (size_t s = 0; s < seeds.size(); ++s) {
      std::ofstream(absl::StrCat(corpus, "/seed-", s), std::ios::binary | std::ios::trunc) << seeds[s];
    }
    break;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  precondor::fuzz::Run(absl::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
