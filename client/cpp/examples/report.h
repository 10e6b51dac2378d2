// SPDX-License-Identifier: Apache-2.0
// What came of all runs: rows of a table, as text and as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/examples/job.h"
#include "client/cpp/examples/rate_search.h"
#include "client/cpp/examples/task.h"

namespace precondor::digits {

// One method with one base optimizer on one task, over all seeds.
struct Row {
  Run run;  // its seed does not count
  std::vector<uint64_t> seeds;
  std::vector<RunResult> results;                            // as `seeds`
  std::vector<std::optional<int64_t>> steps_to_adamw_final;  // as `seeds`; empty when there is no AdamW row
};

struct ReportContext {
  bool in_process = false;
  int shards = 0;  // 0 in process
  RateSearch search;
  bool rates_chosen = false;  // by ChooseRates with `search`
};

// Fills steps_to_adamw_final: the first evaluated step at which a seed's loss is no more than what AdamW without
// preconditioning ends with from the same seed; none when it never is. The loss is the task's criterion.
void CompareWithAdamw(std::vector<Row>& rows);

// The table with its footer; ends with a newline.
std::string FormatTable(const std::vector<Row>& rows, const ReportContext& context);

// {"runs": [...]}: docs/digits.md describes the fields.
std::string FormatJson(const std::vector<Row>& rows, const ReportContext& context);

// "signed-lowrank + adamw": the row's name within its task; with the fallback where it is not the method's own.
std::string RowLabel(const Row& row);

}  // namespace precondor::digits
