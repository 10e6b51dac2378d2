// SPDX-License-Identifier: Apache-2.0
// Loss curves as an SVG picture: one panel a task and base optimizer, one line a row of the table.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "client/cpp/examples/report.h"

namespace precondor::digits {

struct ChartLine {
  std::string label;
  bool dashed = false;
  std::vector<std::pair<double, double>> points;  // x ascending; y positive
};

struct ChartPanel {
  std::string title;
  std::string x_label;
  std::string y_label;
  double reference = 0;  // a horizontal line, where positive
  std::string reference_label;
  std::vector<ChartLine> lines;
};

// Panels two abreast, y on a logarithmic axis. Needs at least one panel and in each at least one point.
std::string RenderSvg(const std::vector<ChartPanel>& panels);

// The panels of a report: medians over the seeds of the task's loss, the reference where AdamW without preconditioning
// ends. Low-rank methods are dashed, because they often lie on the dense ones.
std::vector<ChartPanel> PanelsOf(const std::vector<Row>& rows);

}  // namespace precondor::digits
