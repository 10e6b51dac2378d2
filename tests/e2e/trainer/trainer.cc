// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"

#include "client/cpp/tools/flags.h"
#include "kernels/base/byte_codec.h"
#include "kernels/base/check.h"
#include "kernels/base/session_spec.h"
#include "kernels/base/status_macros.h"
#include "precondor/statistics.h"
#include "tests/e2e/trainer/model.h"

namespace precondor::digits {
namespace {

constexpr double kMomentum = 0.9, kBeta1 = 0.9, kBeta2 = 0.999;

// b = momentum b + g, which is g at first; w -= lr b.
void Sgd(int64_t n, float momentum, float rate, const float* __restrict g, float* __restrict b, float* __restrict w) {
  for (int64_t j = 0; j < n; ++j) {
    b[j] = momentum * b[j] + g[j];
    w[j] -= rate * b[j];
  }
}

void AdamW(int64_t n, int64_t step, float rate, const float* __restrict g, float* __restrict m, float* __restrict v,
           float* __restrict w) {
  const float beta1 = kBeta1, beta2 = kBeta2, epsilon = 1e-8f;
  const float rest1 = static_cast<float>(1.0 - kBeta1), rest2 = static_cast<float>(1.0 - kBeta2);
  const auto correction1 = static_cast<float>(1.0 - std::pow(kBeta1, static_cast<double>(step)));
  const auto correction2 = static_cast<float>(1.0 - std::pow(kBeta2, static_cast<double>(step)));
  for (int64_t j = 0; j < n; ++j) {
    m[j] = beta1 * m[j] + rest1 * g[j];
    v[j] = beta2 * v[j] + rest2 * g[j] * g[j];
    w[j] -= rate * ((m[j] / correction1) / (std::sqrt(v[j] / correction2) + epsilon));
  }
}

bool SetRate(absl::string_view text, double& out) { return absl::SimpleAtod(text, &out) && out > 0 && out <= 1e6; }

// Settings for runs of a few hundred steps.
bool SetFallback(absl::string_view name, FallbackConfig& config) {
  config = {
      .policy = FallbackPolicy::kLossRate, .rate_decay = 0.98, .min_steps = 60, .beta = 0.04, .patience_steps = 20};
  return name == "loss-rate";
}

// True and false are flags, numbers are numbers, the rest is text.
bool AddMethodOption(absl::string_view text, MethodConfig& method) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
  if (text.find('=') == absl::string_view::npos || parts.first.empty()) return false;
  OptionValue& value = method.options[parts.first];
  double number = 0;
  if (parts.second == "true" || parts.second == "false") {
    value = parts.second == "true";
  } else if (absl::SimpleAtod(parts.second, &number)) {
    value = number;
  } else {
    value = parts.second;
  }
  return true;
}

std::vector<Flag> Flags(Options& o) {
  Run& run = o.run;
  SessionSpec& session = run.session;
  const auto set_task = [&run](absl::string_view v) { return SetTask(v, run); };
  const auto add_option = [&session](absl::string_view v) { return AddMethodOption(v, session.method); };
  const auto set_optimizer = [&run](absl::string_view v) {
    return Optimizer::Make(run.optimizer = std::string(v)).ok();
  };
  const auto set_rate = [&run](absl::string_view v) { return SetRate(v, run.learning_rate); };
  const auto set_fallback = [&session](absl::string_view v) { return SetFallback(v, session.fallback); };
  return {
      {"coordinator", Text(o.coordinator), "HOST:PORT"},
      {"task", set_task, "autoencoder or classifier"},
      {"steps", Integer(o.steps, 1, 1000000), "1 ... 1000000"},
      {"method", Text(session.method.name), "NAME"},  // identity is the optimizer alone
      {"option", add_option, "NAME=VALUE"},           // of the method; may be repeated
      {"statistics", Choice(session.statistics, StatisticsKind::kCovariance, StatisticsKindName),
       "signed, mean, per_worker_mean or covariance"},
      {"optimizer", set_optimizer, "adamw, sgd or plain"},
      {"learning-rate", set_rate, "RATE"},  // at the first step; it falls linearly to zero
      {"fallback", set_fallback, "loss-rate"},
      // DIRECT: the shards average the gradients, otherwise the workers do.
      {"exchange", Choice(session.exchange, ExchangeMode::kReplay, ExchangeModeName),
       "direct, delegate, replay or pull_factors"},
      {"workers", Integer(session.world_size, 1, kBatchSize), "1 ... 128"},  // threads of this process
      {"seed", Integer(session.seed, 0, 1 << 30), "0 ... 2^30"},             // of weights, batches and sketches
      {"data", Text(o.data_path), "FILE"},
      {"csv", Text(o.csv_path), "FILE"},  // a line for each worker and step
  };
}

}  // namespace

absl::StatusOr<Optimizer> Optimizer::Make(absl::string_view name) {
  for (const char* one : {"adamw", "sgd", "plain"}) {
    if (name == one) return Optimizer(name);
  }
  return absl::NotFoundError(absl::StrCat("no optimizer ", name));
}

void Optimizer::Step(absl::Span<const Parameter> parameters, double learning_rate) {
  moments_.resize(parameters.size());
  ++step_;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    PRECONDOR_CHECK(p.weight.stride == p.weight.cols && p.gradient.stride == p.weight.cols);
    const int64_t n = p.weight.size();
    moments_[i].resize(static_cast<size_t>(2 * n));
    float *m = moments_[i].data(), *v = m + n;
    const float rate = static_cast<float>(learning_rate);
    if (name_ == "adamw") {
      AdamW(n, step_, rate, p.gradient.data, m, v, p.weight.data);
    } else {
      Sgd(n, name_ == "sgd" ? static_cast<float>(kMomentum) : 0.0f, rate, p.gradient.data, m, p.weight.data);
    }
  }
}

std::string Optimizer::SaveState() const {
  std::string out;
  PutU64(out, static_cast<uint64_t>(step_));
  for (const std::vector<float>& moments : moments_) {
    PutBytes(out, absl::string_view(reinterpret_cast<const char*>(moments.data()), moments.size() * sizeof(float)));
  }
  return out;
}

absl::Status Optimizer::LoadState(absl::string_view state) {
  Decoder in(state);
  step_ = static_cast<int64_t>(in.U64());
  for (moments_.clear(); in.ok() && !in.done();) {
    const absl::string_view bytes = in.Bytes();
    std::vector<float>& moments = moments_.emplace_back(bytes.size() / sizeof(float));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(moments.data()));
  }
  return in.done() ? absl::OkStatus() : absl::DataLossError("the optimizer's state is cut short");
}

bool SetTask(absl::string_view name, Run& run) {
  run.task = std::string(name);
  run.steps = name == "classifier" ? 300 : 600;
  run.model = name == "classifier" ? MlpSpec{{64, 64, 64, 10}, Objective::kClassify}
                                   : MlpSpec{{64, 48, 24, 8, 24, 48, 64}, Objective::kReconstruct};
  run.session.layers = LayersOf(run.model);
  return name == "classifier" || name == "autoencoder";
}

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments, absl::string_view default_data_path) {
  Options options;
  options.data_path = std::string(default_data_path);
  SetTask("autoencoder", options.run);
  PRECONDOR_ASSIGN_OR_RETURN(const ParsedOptions flags, ParseFlags(arguments, Flags(options)));
  if (flags.help) return absl::InvalidArgumentError("tests/e2e/trainer/trainer.cc has the flags");
  if (options.steps > 0) options.run.steps = options.steps;
  return options;
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const Run& run, const DigitsData& data) {
  PRECONDOR_ASSIGN_OR_RETURN(Optimizer optimizer, Optimizer::Make(run.optimizer));
  return std::unique_ptr<Trainer>(new Trainer(run, data, std::move(optimizer)));
}

Trainer::Trainer(const Run& run, const DigitsData& data, Optimizer optimizer)
    : run_(run), data_(data), optimizer_(std::move(optimizer)), model_(run.model, run.session.seed) {}

absl::Status Trainer::Step(GradientExchange& exchange) {
  const auto step = static_cast<uint64_t>(step_);
  const std::vector<int32_t> rows = BatchRows(data_.train.size(), kBatchSize, run_.session.seed, step);
  const RowRange own = exchange.Rows(kBatchSize);
  const Examples batch = Select(
      data_.train, absl::MakeConstSpan(rows).subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.count)));
  PRECONDOR_ASSIGN_OR_RETURN(
      const double loss, model_.Backward(batch, [&](const LayerTap& tap) { return exchange.LayerReady(step, tap); }));
  const double learning_rate =
      run_.learning_rate * (1.0 - static_cast<double>(step_) / static_cast<double>(run_.steps));
  PRECONDOR_ASSIGN_OR_RETURN(const bool apply, exchange.Finish(step, loss, learning_rate));
  if (apply) {
    std::vector<Parameter> parameters;
    for (int64_t l = 0; l < model_.num_layers(); ++l) {
      parameters.push_back(Parameter{model_.weights()[static_cast<size_t>(l)].view(), model_.gradient(l)});
    }
    optimizer_.Step(parameters, learning_rate);
  } else {
    ++skipped_steps_;
  }
  ++step_;
  return absl::OkStatus();
}

uint64_t HashWeights(const std::vector<HostMatrix>& weights) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const HostMatrix& weight : weights) {
    for (const float value : weight.data()) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((bits >> shift) & 0xFF)) * 0x100000001B3ull;
    }
  }
  return hash;
}

RowRange ServiceExchange::Rows(int64_t batch_size) const {
  return RowsOfRank(batch_size, worker_.session().spec.world_size, worker_.session().rank);
}

absl::Status ServiceExchange::SendStatistics(uint64_t step, const LayerTap& tap) {
  const SessionSpec& spec = worker_.session().spec;
  // One side's statistics. The output gradients are those of a mean over the rows: row_scale undoes its division.
  const auto statistics = [&](Side side, ConstMatrixView rows, double row_scale) -> absl::StatusOr<HostMatrix> {
    const StatisticsShape shape = ShapeOfStatistics(spec, tap.layer, rows.cols, rows.rows);
    HostMatrix out(shape.rows, shape.cols);
    const SketchKey key{spec.seed, step, static_cast<uint32_t>(tap.layer), side, worker_.session().rank};
    PRECONDOR_RETURN_IF_ERROR(ComputeStatistics(spec, key, rows, row_scale, out.view()));
    return out;
  };
  PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix a, statistics(Side::kInput, tap.inputs, 1.0));
  PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix g, statistics(Side::kOutput, tap.output_gradients,
                                                            static_cast<double>(tap.output_gradients.rows)));
  return worker_.SendStatistics(step, tap.layer, a.view(), g.view(), samples_);
}

absl::Status ServiceExchange::LayerReady(uint64_t step, const LayerTap& tap) {
  samples_ = static_cast<uint64_t>(tap.inputs.rows);
  if (worker_.NeedsStatistics(step, tap.layer)) PRECONDOR_RETURN_IF_ERROR(SendStatistics(step, tap));
  if (worker_.session().spec.exchange != ExchangeMode::kDirect) {
    reducer_->WeightedMean(static_cast<int32_t>(worker_.session().rank), static_cast<double>(samples_), tap.gradient);
  }
  Pending pending{tap.layer, tap.gradient, PreconditionFuture()};
  // The answer is written to the gradient's own memory.
  if (worker_.SendsGradient(tap.layer)) {
    pending.future = worker_.Precondition(step, tap.layer, {tap.gradient, tap.gradient}, samples_);
  }
  pending_.push_back(std::move(pending));
  return absl::OkStatus();
}

bool ServiceExchange::ShareAnswers(bool apply) {
  const auto rank = static_cast<int32_t>(worker_.session().rank);
  for (const Pending& pending : pending_) {
    reducer_->Broadcast(rank, DelegateRank(worker_.session().spec, pending.layer), pending.gradient);
  }
  float skipped_share = apply ? 0.0f : 1.0f;
  reducer_->WeightedMean(rank, 1.0, MatrixView(&skipped_share, 1, 1));
  return skipped_share == 0.0f;
}

absl::StatusOr<bool> ServiceExchange::Finish(uint64_t step, double loss, double learning_rate) {
  bool apply = true;
  for (const Pending& pending : pending_) {
    if (!worker_.SendsGradient(pending.layer)) continue;
    PRECONDOR_ASSIGN_OR_RETURN(const Preconditioned answer, pending.future.Wait());
    if (answer.decision == Decision::kSkip) apply = false;
  }
  if (worker_.session().spec.exchange == ExchangeMode::kDelegate) apply = ShareAnswers(apply);
  pending_.clear();
  PRECONDOR_RETURN_IF_ERROR(worker_.ReportStep(step, loss, samples_, true, learning_rate).Wait().status());
  for (const auto& [layer, updates] : worker_.status().lost_updates) {
    const uint64_t before = std::exchange(lost_updates_[layer], updates);
    if (updates == before) continue;
    std::cerr << absl::StrCat("training: rank ", worker_.session().rank, " step ", step, ": a shard has lost ",
                              updates - before, " updates of layer ", layer, "; training goes on with older factors\n");
  }
  return apply;
}

}  // namespace precondor::digits
