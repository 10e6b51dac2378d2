// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/rate_search.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <utility>

#include "client/cpp/examples/in_process_exchange.h"
#include "client/cpp/examples/trainer.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

namespace precondor::digits {
namespace {

// One candidate's tried rates and what is still to try.
struct State {
  RateChoice choice;
  std::vector<double> next;
  int extensions = 0;
};

// Takes in the round's losses and plans the next round: nothing, or one rate beyond an end.
void Advance(State& state, const std::vector<double>& losses) {
  std::vector<std::pair<double, double>> all;
  for (size_t i = 0; i < state.choice.tried.size(); ++i)
    all.emplace_back(state.choice.tried[i], state.choice.losses[i]);
  for (size_t i = 0; i < state.next.size(); ++i) all.emplace_back(state.next[i], losses[i]);
  std::sort(all.begin(), all.end());
  state.choice.tried.clear();
  state.choice.losses.clear();
  for (const auto& [rate, loss] : all) {
    state.choice.tried.push_back(rate);
    state.choice.losses.push_back(loss);
  }
  const auto best = std::min_element(state.choice.losses.begin(), state.choice.losses.end());
  const auto index = best - state.choice.losses.begin();
  state.choice.learning_rate = state.choice.tried[static_cast<size_t>(index)];
  state.next.clear();
  if (state.extensions++ == kMaxGridExtensions) return;
  if (index == 0) {
    state.next = {state.choice.tried.front() / 2};
  } else if (best + 1 == state.choice.losses.end()) {
    state.next = {state.choice.tried.back() * 2};
  }
}

// Final losses of one round, [candidate][rate]: medians over the seeds.
absl::StatusOr<std::vector<std::vector<double>>> RunRound(const std::vector<Run>& runs, const RateSearch& search,
                                                          const std::vector<State>& states, const DigitsData& data,
                                                          const std::function<void()>& one_done) {
  std::vector<std::pair<size_t, Run>> work;
  for (size_t c = 0; c < runs.size(); ++c) {
    for (const double rate : states[c].next) {
      for (const uint64_t seed : search.seeds) {
        work.emplace_back(c, runs[c]);
        work.back().second.learning_rate = rate;
        work.back().second.seed = seed;
      }
    }
  }
  std::vector<double> losses(work.size());
  PRECONDOR_RETURN_IF_ERROR(ParallelFor(static_cast<int64_t>(work.size()), search.threads, [&](int64_t i) {
    const Run& run = work[static_cast<size_t>(i)].second;
    const absl::StatusOr<RunResult> result = TrainInProcess(run, data);
    if (!result.ok()) return result.status();
    losses[static_cast<size_t>(i)] = result->curve.back().held_out_loss;
    one_done();
    return absl::OkStatus();
  }));
  std::vector<std::vector<double>> medians(runs.size());
  const size_t seeds = search.seeds.size();
  for (size_t i = 0; i < work.size(); i += seeds) {
    const auto begin = losses.begin() + static_cast<std::ptrdiff_t>(i);
    medians[work[i].first].push_back(Median(std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(seeds))));
  }
  return medians;
}

}  // namespace

absl::StatusOr<RunResult> TrainInProcess(const Run& run, const DigitsData& data) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeCpuBackend(CpuBackendOptions{}));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<InProcessExchange> exchange,
                             InProcessExchange::Make(MakeSessionSpec(run, "in-process"), *backend));
  PRECONDOR_ASSIGN_OR_RETURN(TrainResult trained, Train(run, data, *exchange, TrainOptions()));
  RunResult result;
  result.curve = std::move(trained.curve);
  result.seconds = trained.seconds;
  result.steps = run.task.steps;
  result.weights_hash = HashWeights(trained.weights);
  return result;
}

double CriterionLoss(const Task& task, const CurvePoint& point) {
  return task.criterion == Criterion::kTrainingLoss ? point.training_loss : point.held_out_loss;
}

double Median(std::vector<double> values) {
  for (double& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  }
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

absl::Status ParallelFor(int64_t count, int threads, const std::function<absl::Status(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  std::vector<absl::Status> statuses(static_cast<size_t>(count));
  const auto loop = [&] {
    for (int64_t i = next++; i < count; i = next++) statuses[static_cast<size_t>(i)] = work(i);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(loop);
  loop();
  for (std::thread& other : others) other.join();
  for (const absl::Status& status : statuses) PRECONDOR_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RateChoice>> ChooseRates(const std::vector<Run>& runs, const RateSearch& search,
                                                    const DigitsData& data,
                                                    const std::function<void(int64_t, int64_t)>& progress) {
  std::vector<State> states(runs.size());
  for (State& state : states) state.next = search.grid;
  Mutex mu;
  int64_t done = 0;
  int64_t planned = 0;
  const auto one_done = [&] {
    MutexLock lock(mu);
    if (progress) progress(++done, planned);
  };
  for (;;) {
    int64_t round = 0;
    for (const State& state : states) round += static_cast<int64_t>(state.next.size() * search.seeds.size());
    if (round == 0) break;
    planned += round;
    PRECONDOR_ASSIGN_OR_RETURN(const auto losses, RunRound(runs, search, states, data, one_done));
    for (size_t c = 0; c < runs.size(); ++c) {
      if (!states[c].next.empty()) Advance(states[c], losses[c]);
    }
  }
  std::vector<RateChoice> choices;
  choices.reserve(states.size());
  for (State& state : states) choices.push_back(std::move(state.choice));
  return choices;
}

}  // namespace precondor::digits
