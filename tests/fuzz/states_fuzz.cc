// SPDX-License-Identifier: Apache-2.0
// Factors that a client or a disk gives back (LayerState::Load), of every method: an input is its name, a newline and
// what was saved. The checksum is put right.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"
#include "kernels/methods/state_codec.h"
#include "tests/fuzz/fuzz.h"

namespace precondor::fuzz {
namespace {

const LayerSpec kLayer = {.name = "layer", .d_out = 2, .d_in = 3};
constexpr size_t kChecksumBytes = sizeof(uint64_t);

Backend& TheBackend() {
  static const std::unique_ptr<Backend> backend = MakeCpuBackend({}).value();
  return *backend;
}

std::unique_ptr<LayerState> StateOf(absl::string_view method) {
  MethodConfig config;
  config.name = std::string(method);
  // As long as this layer lives its factors do, and the method is not asked again.
  return MakeMethod(config).value()->MakeState(kLayer, TheBackend()).value();
}

// With whatever it has, an answer is there or an error.
absl::Status Answer(LayerState& state) {
  Backend& backend = TheBackend();
  auto d = backend.Allocate(2, 3).value();
  auto u = backend.Allocate(2, 3).value();
  const std::vector<float> gradient = {1, -2, 0.5f, 3, 0, 1};
  PRECONDOR_CHECK(backend.Upload(ConstMatrixView(gradient.data(), 2, 3), d.view()).ok());
  return state.Precondition(d.view(), u.view());
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const absl::string_view method : MethodNames()) {
    const auto state = StateOf(method);
    for (const bool after_a_gradient : {false, true}) {
      if (after_a_gradient) Answer(*state).IgnoreError();
      std::string saved = state->Save().value();
      saved.resize(saved.size() - kChecksumBytes);
      seeds.push_back(absl::StrCat(method, "\n", saved));
    }
  }
  return seeds;
}

void Run(absl::string_view input) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(input, absl::MaxSplits('\n', 1));
  const absl::string_view method = parts.first;
  const std::vector<absl::string_view> known = MethodNames();
  if (std::find(known.begin(), known.end(), method) == known.end()) return;
  const auto state = StateOf(method);
  const std::string before = state->Save().value();
  if (!state->Load(WithChecksum(std::string(parts.second))).ok()) {
    PRECONDOR_CHECK(state->Save().value() == before);
    return;
  }
  const auto saved = state->Save();
  PRECONDOR_CHECK(saved.ok() && StateOf(method)->Load(*saved).ok());
  Answer(*state).IgnoreError();
}

}  // namespace precondor::fuzz
