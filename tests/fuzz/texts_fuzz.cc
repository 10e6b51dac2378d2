// SPDX-License-Identifier: Apache-2.0
// Texts that people write: options, the configuration file, the access file, layer tables, schedules.
#include <fstream>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "client/cpp/tools/model_shapes.h"
#include "kernels/base/check.h"
#include "kernels/base/schedule.h"
#include "server/app/config.h"
#include "server/rpc/access_list.h"
#include "tests/fuzz/fuzz.h"

namespace precondor::fuzz {
namespace {

constexpr size_t kLongestTable = 256;

void Arguments(absl::string_view text) {
  ParseServerConfig(absl::StrSplit(text, '\n'), {}).IgnoreError();
  const std::pair<std::string, std::string> variable = absl::StrSplit(text, absl::MaxSplits('=', 1));
  ParseServerConfig({}, {{"PRECONDOR_" + variable.first, variable.second}}).IgnoreError();
}

// A printed configuration reads back as itself.
void ConfigurationFile(absl::string_view text) {
  static const std::string& path = *new std::string(absl::StrCat("/tmp/precondor-fuzz-", getpid(), ".yaml"));
  const auto parse = [](absl::string_view contents) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
    auto parsed = ParseServerConfig({"--config=" + path}, {});
    unlink(path.c_str());
    return parsed;
  };
  const auto parsed = parse(text);
  if (!parsed.ok()) return;
  const std::string printed = PrintServerConfig(parsed->config);
  const auto again = parse(printed);
  PRECONDOR_CHECK(again.ok());
}

void Table(absl::string_view text) {
  const auto model = ParseLayerTable(text, "table");
  // 65,536 layers of a long name are some 100 MB, of which AddressSanitizer keeps what is freed.
  if (model.ok() && text.size() < kLongestTable) ExpandLayers(*model, {}).IgnoreError();
}

void Access(absl::string_view text) { rpc::AccessList::Parse(text, "access").IgnoreError(); }

void ScheduleText(absl::string_view text) {
  const auto schedule = Schedule::Parse(text);
  if (schedule.ok()) schedule->At(1000);
}

constexpr void (*kDecoders[])(absl::string_view) = {Arguments, ConfigurationFile, Table, Access, ScheduleText};

}  // namespace

std::vector<std::string> Seeds() {
  const auto of = [](char decoder, absl::string_view text) { return absl::StrCat(std::string(1, decoder), text); };
  return {of(0, "--role=shard\n--listen=127.0.0.1:0\n--memory-limit=8GiB"),
          of(0, "MEMORY_LIMIT=8GiB"),
          of(1, PrintServerConfig({})),
          of(2, R"([{"name": "fc*", "d_out": 4096, "d_in": 1024, "bias": true, "count": 24}])"),
          of(3, "worker,operator@team token abcdefghijklmnop\n# nothing\ncoordinator name client.example\n"),
          of(4, "linear(0.1, 0.01, 100)"),
          of(4, "0.001"),
          of(4, "exponential(0.1, 0.9, 0.01)")};
}

void Run(absl::string_view input) { kDecoders[Choose(input, std::size(kDecoders))](input); }

}  // namespace precondor::fuzz
