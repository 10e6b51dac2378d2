// SPDX-License-Identifier: Apache-2.0
// A whole step of BERT-Large's 144 linear layers: an update of every layer's factors by one vector a side, and the
// precondition of every layer's gradient, on one thread or several. tests/bench/step_rows.py runs it beside others, in
// turns, by commands on its standard input, each answered by one line:
//   check NAME     the larger error of two layers' answers against the definition in doubles
//   make NAME      bytes of all factors as the library computes them, as allocated, and what the process grew by
//   feed NAME N    updates of N steps
//   step NAME N    the seconds of a step on N threads: of processor time for one thread, by the clock for several
// NAME is low_rank_R (EXACT_DAMPED, rank R), dense_f32 or dense_f16 (BLEND in tiles). --blocks=N takes the layers of N
// of the 24 blocks.
#include <algorithm>
#include <atomic>
#include <cblas.h>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"
#include "tests/bench/bench_rows.h"

namespace precondor {
namespace {

constexpr int64_t kHidden = 1024, kInner = 4096;
constexpr int64_t kVectors = 512;  // that steps take in turns
constexpr double kGamma = 0.95, kDamping = 1.0;

std::vector<LayerSpec> Layers(int64_t blocks) {
  std::vector<LayerSpec> layers;
  for (int64_t block = 0; block < blocks; ++block) {
    for (const char* name : {"query", "key", "value", "output"}) {
      layers.push_back({absl::StrCat("block", block, ".", name), kHidden, kHidden, false});
    }
    layers.push_back({absl::StrCat("block", block, ".up"), kInner, kHidden, false});
    layers.push_back({absl::StrCat("block", block, ".down"), kHidden, kInner, false});
  }
  return layers;
}

MethodConfig Config(const std::string& name) {
  MethodConfig config;
  config.options["gamma"] = kGamma;
  config.options["damping"] = kDamping;
  int64_t rank = 0;
  absl::string_view text = name;
  if (absl::ConsumePrefix(&text, "low_rank_") && absl::SimpleAtoi(text, &rank)) {
    config.options["representation"] = std::string("LOW_RANK");
    config.options["rank"] = static_cast<double>(rank);
    return config;
  }
  PRECONDOR_CHECK(name == "dense_f32" || name == "dense_f16");
  config.options["rule"] = std::string("BLEND");
  config.options["representation"] = std::string("DENSE");
  config.options["storage"] = std::string(name == "dense_f32" ? "F32" : "F16");
  return config;
}

bool IsLowRank(const std::string& name) { return absl::StartsWith(name, "low_rank_"); }

int64_t ResidentBytes() {
  int64_t pages = 0;
  std::ifstream in("/proc/self/statm");
  in >> pages >> pages;
  PRECONDOR_CHECK(in.good());
  return pages * sysconf(_SC_PAGESIZE);
}

// The inputs of all models: layer l takes vector (step + 7 l) for its inputs, 3 further on for its outputs.
struct Inputs {
  std::vector<LayerSpec> layers;
  DeviceMatrix vectors;                 // [kVectors, kInner]; shorter sides take the first elements
  std::vector<DeviceMatrix> gradients;  // of each layer

  ConstMatrixView Vector(int64_t step, size_t layer, int64_t d, int64_t shift) const {
    const int64_t row = (step + 7 * static_cast<int64_t>(layer) + shift) % kVectors;
    return ConstMatrixView(vectors.view().row(row), 1, d);
  }
  LayerStatistics Statistics(int64_t step, size_t layer) const {
    return {Vector(step, layer, layers[layer].d_in, 0), Vector(step, layer, layers[layer].d_out, 3)};
  }
};

Inputs MakeInputs(int64_t blocks, Backend& backend) {
  Inputs inputs;
  inputs.layers = Layers(blocks);
  inputs.vectors = backend.Allocate(kVectors, kInner).value();
  const std::vector<float> noise = Gaussian(kVectors * kInner, 1);
  std::copy(noise.begin(), noise.end(), inputs.vectors.view().data);
  for (size_t i = 0; i < inputs.layers.size(); ++i) {
    inputs.gradients.push_back(backend.Allocate(inputs.layers[i].d_out, inputs.layers[i].d_in).value());
    const MatrixView gradient = inputs.gradients.back().view();
    for (int64_t at = 0; at < gradient.size(); ++at) {
      gradient.data[at] = noise[(at + 977 * static_cast<int64_t>(i)) % static_cast<int64_t>(noise.size())];
    }
  }
  return inputs;
}

class Model {
 public:
  Model(const std::string& name, const Inputs& inputs, Backend& backend) : inputs_(inputs), backend_(backend) {
    method_ = MakeMethod(Config(name)).value();
    backend.Trim();  // what the check left would hide growth
    const int64_t allocated = backend.allocated_bytes(), resident = ResidentBytes();
    for (const LayerSpec& layer : inputs.layers) {
      states_.push_back(method_->MakeState(layer, backend).value());
      computed_ += method_->StateBytes(layer);
    }
    allocated_ = backend.allocated_bytes() - allocated;
    grown_ = ResidentBytes() - resident;
    // Longest first, so that threads end together.
    order_.resize(states_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [this](size_t a, size_t b) {
      return method_->StepFlops(inputs_.layers[a], 1) > method_->StepFlops(inputs_.layers[b], 1);
    });
  }

  int64_t computed() const { return computed_; }
  int64_t allocated() const { return allocated_; }
  int64_t grown() const { return grown_; }
  void Update(size_t layer, int64_t step) {
    PRECONDOR_CHECK(states_[layer]->Update(inputs_.Statistics(step, layer)).ok());
  }
  void Precondition(size_t layer, MatrixView u) {
    PRECONDOR_CHECK(states_[layer]->Precondition(inputs_.gradients[layer].view(), u).ok());
  }
  // Updates alone.
  void Feed(int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, ++step_) {
      for (size_t layer = 0; layer < states_.size(); ++layer) Update(layer, step_);
    }
  }

  double StepSeconds(int threads) {
    std::vector<DeviceMatrix> answers;
    for (int i = 0; i < threads; ++i) answers.push_back(backend_.Allocate(1, kHidden * kInner).value());
    const auto begin = std::chrono::steady_clock::now();
    const double begin_thread = ThreadSeconds();
    std::atomic<size_t> next = 0;
    const auto work = [&](float* answer) {
      for (size_t i = next++; i < order_.size(); i = next++) {
        const LayerSpec& layer = inputs_.layers[order_[i]];
        Update(order_[i], step_);
        Precondition(order_[i], MatrixView(answer, layer.d_out, layer.d_in));
      }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, answers[i].view().data);
    work(answers[0].view().data);
    for (std::thread& thread : others) thread.join();
    ++step_;
    if (threads == 1) return ThreadSeconds() - begin_thread;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  const Inputs& inputs_;
  Backend& backend_;
  std::unique_ptr<Method> method_;
  std::vector<std::unique_ptr<LayerState>> states_;
  std::vector<size_t> order_;
  int64_t step_ = 0, computed_ = 0, allocated_ = 0, grown_ = 0;
};

std::vector<double> Times(ConstMatrixView matrix, const std::vector<double>& x) {
  std::vector<double> y(matrix.rows);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) y[i] += matrix.at(i, j) * x[j];
  }
  return y;
}

double Norm(const std::vector<double>& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

double FrobeniusNorm(ConstMatrixView x) {
  double squares = 0;
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) squares += static_cast<double>(x.at(i, j)) * x.at(i, j);
  }
  return std::sqrt(squares);
}

// |got - s want| / |got| for the s that fits best: an answer's length is NORM_RESCALE's.
double DirectionError(const std::vector<double>& got, const std::vector<double>& want) {
  const double scale = std::inner_product(got.begin(), got.end(), want.begin(), 0.0) / std::pow(Norm(want), 2);
  std::vector<double> rest = got;
  for (size_t i = 0; i < rest.size(); ++i) rest[i] -= scale * want[i];
  return Norm(rest) / Norm(got);
}

// After `steps` updates the answer U to a layer's gradient D, times a random w: EXACT_DAMPED's A U B w is in D w's
// direction for the damped averages A and B, BLEND's U w in that of J_out D J_in w; |U| = |D|.
double AnswerError(const std::string& name, const Inputs& inputs, size_t layer, Backend& backend) {
  constexpr int64_t kSteps = 33;  // within the rank, and more than twice what may wait beside tiles
  const LayerSpec& spec = inputs.layers[layer];
  const std::unique_ptr<Method> method = MakeMethod(Config(name)).value();
  const std::unique_ptr<LayerState> state = method->MakeState(spec, backend).value();
  std::vector<std::vector<float>> in, out;
  BlendRecursion blend_in(kGamma, kDamping), blend_out(kGamma, kDamping);
  for (int64_t step = 0; step < kSteps; ++step) {
    const LayerStatistics statistics = inputs.Statistics(step, layer);
    PRECONDOR_CHECK(state->Update(statistics).ok());
    in.emplace_back(statistics.a.data, statistics.a.data + spec.d_in);
    out.emplace_back(statistics.g.data, statistics.g.data + spec.d_out);
    blend_in.Update(in.back());
    blend_out.Update(out.back());
  }
  const ConstMatrixView gradient = inputs.gradients[layer].view();
  DeviceMatrix answer = backend.Allocate(spec.d_out, spec.d_in).value();
  PRECONDOR_CHECK(state->Precondition(gradient, answer.view()).ok());
  const std::vector<float> random = Gaussian(spec.d_in, 3);
  const std::vector<double> w(random.begin(), random.end());
  const ConstMatrixView u = std::as_const(answer).view();
  const double length = std::fabs(FrobeniusNorm(u) / FrobeniusNorm(gradient) - 1);
  if (!IsLowRank(name)) {
    return std::max(length, DirectionError(Times(u, w), blend_out.Times(Times(gradient, blend_in.Times(w)))));
  }
  const std::vector<double> back = DampedTimes(out, kGamma, kDamping, Times(u, DampedTimes(in, kGamma, kDamping, w)));
  return std::max(length, DirectionError(back, Times(gradient, w)));
}

int Main(int argc, char** argv) {
  int64_t blocks = 24;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--blocks=") || !absl::SimpleAtoi(argument, &blocks) || blocks < 1) {
      std::cerr << "step_bench: unknown argument " << argv[i] << "\n";
      return 2;
    }
  }
  openblas_set_num_threads(1);  // layers are what threads share
  const std::unique_ptr<Backend> backend = MakeCpuBackend(CpuBackendOptions()).value();
  const Inputs inputs = MakeInputs(blocks, *backend);
  std::map<std::string, std::unique_ptr<Model>> models;
  std::string command, name;
  while (std::cin >> command >> name) {
    if (command == "check") {
      std::cout << std::max(AnswerError(name, inputs, 0, *backend), AnswerError(name, inputs, 4, *backend));
    } else if (command == "make") {
      models[name] = std::make_unique<Model>(name, inputs, *backend);
      const Model& model = *models[name];
      std::cout << model.computed() << " " << model.allocated() << " " << model.grown();
    } else if (command == "feed" || command == "step") {
      int count = 0;
      std::cin >> count;
      PRECONDOR_CHECK(models.contains(name) && count > 0);
      if (command == "feed") {
        models[name]->Feed(count);
        std::cout << "fed";
      } else {
        std::cout << models[name]->StepSeconds(count);
      }
    } else {
      std::cerr << "step_bench: unknown command " << command << "\n";
      return 2;
    }
    std::cout << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::Main(argc, argv); }
