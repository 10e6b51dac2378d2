// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_rows.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/check.h"
#include "kernels/base/process_setup.h"

namespace precondor {

std::string RowJson(const BenchRow& row) {
  const double ratio = row.limit > 0 ? row.limit / row.value : 0;
  const double judged = ratio > 0 ? ratio : row.value;
  const bool pass = row.target == 0 || (row.at_most ? judged <= row.target : judged >= row.target);
  const auto number = [](double value) { return value > 0 ? absl::StrCat(value) : std::string("null"); };
  const Summary& spread = row.spread;
  return absl::StrCat("{\"name\": \"", row.name, "\", \"value\": ", row.value, ", \"unit\": \"", row.unit,
                      "\", \"limit\": ", number(row.limit), ", \"ratio\": ", number(ratio),
                      ", \"target\": ", number(row.target), ", \"pass\": ", pass ? "true" : "false", ", \"spread\": ",
                      spread.count == 0 ? "null"
                                        : absl::StrCat("{\"q1\": ", spread.low, ", \"q3\": ", spread.high,
                                                       ", \"n\": ", spread.count, "}"),
                      "}");
}

void WriteRows(const std::vector<BenchRow>& rows, const std::string& path) {
  std::ofstream out(path);
  out << "{\"rows\": [";
  for (const BenchRow& row : rows) out << (&row == rows.data() ? "\n" : ",\n") << RowJson(row);
  out << "\n]}\n";
  PRECONDOR_CHECK(out.good());
}

Summary Summarize(std::vector<double> values) {
  PRECONDOR_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  // Linear between the two nearest values.
  const auto quantile = [&](double part) {
    const double at = part * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(at), above = std::min(below + 1, values.size() - 1);
    return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {quantile(.5), quantile(.25), quantile(.75), static_cast<int>(values.size())};
}

Summary Scaled(const Summary& summary, double factor) {
  return {factor * summary.median, factor * summary.low, factor * summary.high, summary.count};
}

Summary RateOf(double amount, const Summary& seconds) {
  return {amount / seconds.median, amount / seconds.high, amount / seconds.low, seconds.count};
}

int BenchMain(int argc, char** argv, const std::function<std::vector<BenchRow>(bool is_short)>& measure,
              const std::function<bool(absl::string_view argument)>& take) {
  UseBestBlasCore();
  const std::string program = std::filesystem::path(argv[0]).filename().string();
  std::string json;
  bool is_short = false;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--json=")) {
      json = std::string(argument);
    } else if (argument == "--short") {
      is_short = true;
    } else if (take == nullptr || !take(argument)) {
      std::cerr << program << ": unknown argument " << argument << "\n";
      return 2;
    }
  }
  if (json.empty()) {
    std::cerr << program << ": needs --json=FILE\n";
    return 2;
  }
  WriteRows(measure(is_short), json);
  return 0;
}

double ThreadSeconds() {
  timespec now;
  PRECONDOR_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Timed(const std::function<void()>& work) {
  const double begin = ThreadSeconds();
  work();
  return ThreadSeconds() - begin;
}

double ClockSeconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<std::vector<double>> TakeTurns(const std::vector<std::function<double()>>& measured, int turns) {
  std::vector<std::vector<double>> seconds(measured.size());
  for (int turn = -1; turn < turns; ++turn) {
    for (size_t i = 0; i < measured.size(); ++i) {
      const double time = measured[i]();
      if (turn >= 0) seconds[i].push_back(time);
    }
  }
  return seconds;
}

double MedianRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (size_t turn = 0; turn < above.size(); ++turn) ratios.push_back(above[turn] / below[turn]);
  return Median(ratios);
}

std::vector<float> Gaussian(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& element : out) element = normal(random);
  return out;
}

std::vector<double> DampedTimes(const std::vector<std::vector<float>>& vectors, double gamma, double damping,
                                const std::vector<double>& x) {
  const double d = static_cast<double>(x.size()), mass = 1 - std::pow(gamma, static_cast<double>(vectors.size()));
  std::vector<double> y(x.size());
  double trace = 0, weight = (1 - gamma) / mass;
  for (auto vector = vectors.rbegin(); vector != vectors.rend(); ++vector, weight *= gamma) {
    double product = 0, square = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      product += (*vector)[i] * x[i];
      square += static_cast<double>((*vector)[i]) * (*vector)[i];
    }
    for (size_t i = 0; i < x.size(); ++i) y[i] += weight * product * (*vector)[i];
    trace += weight * square;
  }
  for (size_t i = 0; i < x.size(); ++i) y[i] += damping * trace / d * x[i];
  return y;
}

void BlendRecursion::Update(const std::vector<float>& vector) {
  const double d = static_cast<double>(vector.size());
  double square = 0;
  for (const double element : vector) square += element * element;
  mass_ = 1 - gamma_ * (1 - mass_);
  mean_square_ = gamma_ * mean_square_ + (1 - gamma_) * square;
  const double scale = 1 / std::sqrt(damping_ * mean_square_ / mass_ / d);
  std::vector<double> v(vector.begin(), vector.end());
  for (double& element : v) element *= scale;
  identity_ = gamma_ * identity_ + 1 - gamma_;
  for (Term& term : terms_) term.weight *= gamma_;
  const std::vector<double> u = Times(v);
  double x = 0;
  for (size_t i = 0; i < v.size(); ++i) x += v[i] * u[i];
  terms_.push_back({-1 / (1 + x), u});
}

std::vector<double> BlendRecursion::Times(const std::vector<double>& v) const {
  std::vector<double> out = v;
  for (double& element : out) element *= identity_;
  for (const Term& term : terms_) {
    double product = 0;
    for (size_t i = 0; i < v.size(); ++i) product += term.vector[i] * v[i];
    for (size_t i = 0; i < v.size(); ++i) out[i] += term.weight * product * term.vector[i];
  }
  return out;
}

}  // namespace precondor
