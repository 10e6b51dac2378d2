// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/svg_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace precondor::digits {
namespace {

constexpr size_t kColumns = 2;
constexpr double kPanelWidth = 560;
constexpr double kPlotHeight = 340;
constexpr double kLeft = 72;
constexpr double kRight = 24;
constexpr double kTop = 44;
constexpr double kBelowPlot = 56;
constexpr double kLegendLine = 18;
constexpr double kLegendKey = 26;
// Told apart by colour-blind readers too (Okabe and Ito 2008).
constexpr std::array<const char*, 8> kColors = {"#000000", "#999999", "#E69F00", "#56B4E9",
                                                "#009E73", "#0072B2", "#D55E00", "#CC79A7"};

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

// Maps data to the picture; y is logarithmic.
struct Axes {
  double x_max = 1;
  double log_low = 0;
  double log_high = 1;
  double origin_x = 0;
  double origin_y = 0;

  double X(double x) const { return origin_x + kLeft + x / x_max * (kPanelWidth - kLeft - kRight); }
  double Y(double y) const { return top() + (log_high - std::log10(y)) / (log_high - log_low) * kPlotHeight; }
  double top() const { return origin_y + kTop; }
  double bottom() const { return top() + kPlotHeight; }
};

Axes AxesFor(const ChartPanel& panel, double origin_x, double origin_y) {
  Axes axes;
  axes.origin_x = origin_x;
  axes.origin_y = origin_y;
  axes.x_max = 0;
  double low = panel.reference > 0 ? panel.reference : 1e300;
  double high = panel.reference;
  for (const ChartLine& line : panel.lines) {
    for (const auto& [x, y] : line.points) {
      axes.x_max = std::max(axes.x_max, x);
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  axes.log_low = std::log10(low) - 0.03;
  axes.log_high = std::log10(high) + 0.03;
  return axes;
}

// 1, 2, 5 times powers of ten in the axis' range; all digits when that gives few.
std::vector<double> Ticks(const Axes& axes) {
  const auto collect = [&](const std::vector<double>& steps) {
    std::vector<double> ticks;
    for (int power = static_cast<int>(std::floor(axes.log_low)); power <= axes.log_high; ++power) {
      for (const double step : steps) {
        const double tick = step * std::pow(10.0, power);
        if (std::log10(tick) > axes.log_low && std::log10(tick) < axes.log_high) ticks.push_back(tick);
      }
    }
    return ticks;
  };
  std::vector<double> ticks = collect({1, 2, 5});
  if (ticks.size() < 5) ticks = collect({1, 1.5, 2, 3, 4, 5, 6, 8});
  return ticks;
}

// Steps between x ticks: at most about eight of them.
double TickStep(double x_max) {
  double step = std::pow(10.0, std::floor(std::log10(std::max(x_max, 10.0) / 8)));
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    if (x_max / (step * factor) <= 8) return step * factor;
  }
  return step * 10;
}

void Text(std::string& svg, double x, double y, const char* anchor, const std::string& text, const char* extra = "") {
  absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y, anchor, extra,
                        Escape(text));
}

void Segment(std::string& svg, double x1, double y1, double x2, double y2, const char* style) {
  absl::StrAppendFormat(&svg, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, style);
}

std::string LineStyle(size_t index, bool dashed) {
  return absl::StrFormat("stroke=\"%s\" stroke-width=\"1.8\" fill=\"none\"%s", kColors[index % kColors.size()],
                         dashed ? " stroke-dasharray=\"7 4\"" : "");
}

void DrawFrame(std::string& svg, const ChartPanel& panel, const Axes& axes) {
  const double bottom = axes.bottom();
  for (const double tick : Ticks(axes)) {
    Segment(svg, axes.X(0), axes.Y(tick), axes.X(axes.x_max), axes.Y(tick), "stroke=\"#dddddd\"");
    Text(svg, axes.X(0) - 8, axes.Y(tick) + 4, "end", absl::StrFormat("%.4g", tick));
  }
  const double step = TickStep(axes.x_max);
  for (int i = 0; i * step <= axes.x_max * 1.0001; ++i) {
    const double x = i * step;
    Segment(svg, axes.X(x), bottom, axes.X(x), bottom + 5, "stroke=\"#444444\"");
    Text(svg, axes.X(x), bottom + 19, "middle", absl::StrFormat("%g", x));
  }
  Segment(svg, axes.X(0), bottom, axes.X(axes.x_max), bottom, "stroke=\"#444444\"");
  Segment(svg, axes.X(0), axes.top(), axes.X(0), bottom, "stroke=\"#444444\"");
  Text(svg, axes.X(axes.x_max / 2), axes.top() - 18, "middle", panel.title, " font-weight=\"bold\" font-size=\"15\"");
  Text(svg, axes.X(axes.x_max / 2), bottom + 38, "middle", panel.x_label);
  const double label_x = axes.origin_x + 16;
  const double label_y = axes.top() + kPlotHeight / 2;
  Text(svg, label_x, label_y, "middle", panel.y_label,
       absl::StrFormat(" transform=\"rotate(-90 %.1f %.1f)\"", label_x, label_y).c_str());
  if (panel.reference > 0) {
    Segment(svg, axes.X(0), axes.Y(panel.reference), axes.X(axes.x_max), axes.Y(panel.reference),
            "stroke=\"#888888\" stroke-dasharray=\"2 3\"");
    // Below the line at the left no curve is: losses begin high.
    Text(svg, axes.X(0) + 6, axes.Y(panel.reference) + 14, "start", panel.reference_label, " fill=\"#666666\"");
  }
}

void DrawPanel(std::string& svg, const ChartPanel& panel, double origin_x, double origin_y) {
  const Axes axes = AxesFor(panel, origin_x, origin_y);
  DrawFrame(svg, panel, axes);
  double legend_y = axes.bottom() + kBelowPlot + kLegendLine;
  for (size_t i = 0; i < panel.lines.size(); ++i) {
    const ChartLine& line = panel.lines[i];
    const std::string style = LineStyle(i, line.dashed);
    absl::StrAppend(&svg, "<polyline ", style, " points=\"");
    for (const auto& [x, y] : line.points) absl::StrAppendFormat(&svg, "%.1f,%.1f ", axes.X(x), axes.Y(y));
    absl::StrAppend(&svg, "\"/>\n");
    Segment(svg, axes.X(0), legend_y - 4, axes.X(0) + kLegendKey, legend_y - 4, style.c_str());
    Text(svg, axes.X(0) + kLegendKey + 8, legend_y, "start", line.label);
    legend_y += kLegendLine;
  }
}

// Medians over the seeds of the row's loss at each evaluated step.
ChartLine LineOf(const Row& row) {
  ChartLine line;
  line.label = absl::StrFormat("%s (lr %g)", RowLabel(row), row.run.learning_rate);
  line.dashed = row.run.method.representation == "low_rank";
  for (size_t i = 0; i < row.results.front().curve.size(); ++i) {
    std::vector<double> losses;
    for (const RunResult& result : row.results) losses.push_back(CriterionLoss(row.run.task, result.curve[i]));
    const double median = Median(losses);
    if (std::isfinite(median) && median > 0) {
      line.points.emplace_back(static_cast<double>(row.results.front().curve[i].step), median);
    }
  }
  return line;
}

}  // namespace

std::string RenderSvg(const std::vector<ChartPanel>& panels) {
  size_t most_lines = 0;
  for (const ChartPanel& panel : panels) most_lines = std::max(most_lines, panel.lines.size());
  const size_t columns = std::min(panels.size(), kColumns);
  const size_t rows = (panels.size() + kColumns - 1) / kColumns;
  const double panel_height = kTop + kPlotHeight + kBelowPlot + kLegendLine * static_cast<double>(most_lines + 1);
  const double width = kPanelWidth * static_cast<double>(columns);
  const double height = panel_height * static_cast<double>(rows);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      width, height, width, height);
  for (size_t i = 0; i < panels.size(); ++i) {
    const size_t row = i / kColumns;
    const size_t column = i % kColumns;
    DrawPanel(svg, panels[i], kPanelWidth * static_cast<double>(column), panel_height * static_cast<double>(row));
  }
  absl::StrAppend(&svg, "</svg>\n");
  return svg;
}

std::vector<ChartPanel> PanelsOf(const std::vector<Row>& rows) {
  std::vector<ChartPanel> panels;
  std::map<std::string, double> references;  // by task
  std::vector<std::string> tasks;            // as panels
  for (const Row& row : rows) {
    const std::string title = absl::StrCat(row.run.task.name, ", ", row.run.optimizer);
    if (panels.empty() || panels.back().title != title) {
      const bool training = row.run.task.criterion == Criterion::kTrainingLoss;
      panels.push_back(ChartPanel{title, "step", training ? "training loss" : "held-out loss", 0, "", {}});
      tasks.push_back(row.run.task.name);
    }
    ChartLine line = LineOf(row);
    if (row.run.method.name == "none" && row.run.optimizer == "adamw" && !line.points.empty()) {
      references[row.run.task.name] = line.points.back().second;
    }
    panels.back().lines.push_back(std::move(line));
  }
  for (size_t i = 0; i < panels.size(); ++i) {
    const auto reference = references.find(tasks[i]);
    if (reference == references.end()) continue;
    panels[i].reference = reference->second;
    panels[i].reference_label = "where AdamW alone ends";
  }
  return panels;
}

}  // namespace precondor::digits
