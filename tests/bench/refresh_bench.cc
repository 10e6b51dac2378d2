// SPDX-License-Identifier: Apache-2.0
// What a statistic step waits for when kfac's decomposition is due: made at once, and deferred by a statistic step
// (refresh_lag 1) to a thread beside it. Time is the calling thread's processor time, the decomposition's its own
// thread's. Each answer of the one is compared to the bit with that of the other a statistic step before.
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/kfac.h"
#include "tests/bench/bench_rows.h"

namespace precondor {
namespace {

constexpr int64_t kVectors = 16;   // of a statistic step
constexpr uint64_t kInterval = 4;  // statistic steps from one decomposition to the next

// One layer [d, d].
class Layer {
 public:
  Layer(const std::string& form, double refresh_lag, int64_t d, Backend& backend)
      : d_(d), backend_(backend), gradient_(Upload(d, 1)) {
    const std::unique_ptr<Method> method = MakeKfac({"kfac",
                                                     {{"form", form},
                                                      {"refresh_lag", refresh_lag},
                                                      {"inv_update_steps", absl::StrCat(kInterval)},
                                                      {"stagger", false},
                                                      {"scaling", std::string("NONE")}}})
                                               .value();
    state_ = method->MakeState({"layer", d, d, false}, backend).value();
  }

  // Of the update of statistic step t.
  double Update(uint64_t t) {
    const DeviceMatrix a = Upload(kVectors, 2 * t), g = Upload(kVectors, 2 * t + 1);
    const double begin = ThreadSeconds();
    PRECONDOR_CHECK(state_->Update({a.view(), g.view()}).ok());
    return ThreadSeconds() - begin;
  }

  // What the update has deferred, on a thread of its own; 0 where that is nothing.
  double Deferred() {
    double seconds = 0;
    if (std::function<void()> work = state_->TakeDeferredWork()) {
      std::thread([&] {
        const double begin = ThreadSeconds();
        work();
        seconds = ThreadSeconds() - begin;
      }).join();
    }
    return seconds;
  }

  std::vector<float> Answer() {
    DeviceMatrix u = backend_.Allocate(d_, d_).value();
    PRECONDOR_CHECK(state_->Precondition(gradient_.view(), u.view()).ok());
    return std::vector<float>(u.view().data, u.view().data + u.view().size());
  }

 private:
  DeviceMatrix Upload(int64_t rows, uint64_t seed) {
    const std::vector<float> elements = Gaussian(rows * d_, seed);
    DeviceMatrix matrix = backend_.Allocate(rows, d_).value();
    PRECONDOR_CHECK(backend_.Upload(ConstMatrixView(elements.data(), rows, d_), matrix.view()).ok());
    return matrix;
  }

  const int64_t d_;
  Backend& backend_;
  DeviceMatrix gradient_;
  std::unique_ptr<LayerState> state_;
};

std::vector<BenchRow> Measure(bool is_short) {
  const int64_t d = is_short ? 128 : 1024;
  const uint64_t intervals = is_short ? 2 : 6;
  const std::unique_ptr<Backend> backend = MakeCpuBackend(CpuBackendOptions()).value();
  std::vector<BenchRow> rows;
  for (const char* form : {"EIGEN", "INVERSE"}) {
    Layer at_once(form, 0, d, *backend), deferred(form, 1, d, *backend);
    std::vector<double> plain, due_at_once, due_deferred, beside;
    std::vector<float> fresh;
    for (uint64_t t = 0; t <= intervals * kInterval + 1; ++t) {
      const double first = at_once.Update(t), second = deferred.Update(t);
      const double refresh = deferred.Deferred();
      if (t > 0 && t % kInterval == 1) PRECONDOR_CHECK(deferred.Answer() == fresh);
      if (t % kInterval == 0) fresh = at_once.Answer();
      if (t == 0) continue;
      if (t % kInterval == 0) {
        due_at_once.push_back(first);
        due_deferred.push_back(second);
        beside.push_back(refresh);
      } else {
        plain.push_back(first);
      }
    }
    const std::string of = absl::StrCat("/", form, "/d:", d);
    rows.push_back({absl::StrCat("refresh/update", of), Median(plain) * 1e3, "ms"});
    rows.push_back({absl::StrCat("refresh/update_due_at_once", of), Median(due_at_once) * 1e3, "ms"});
    rows.push_back({absl::StrCat("refresh/update_due_deferred", of), Median(due_deferred) * 1e3, "ms"});
    rows.push_back({absl::StrCat("refresh/beside", of), Median(beside) * 1e3, "ms"});
    rows.push_back({absl::StrCat("refresh/deferred_to_update", of), Median(due_deferred) / Median(plain), "x", 0,
                    is_short ? 0.0 : 2.0, true});
  }
  return rows;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::Measure); }
