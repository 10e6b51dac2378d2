// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_method.h"

#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/methods/state_codec.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {
namespace {

uint64_t Accumulate(uint64_t digest, const std::vector<float>& values) {
  digest = Mix(digest ^ values.size());
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    digest = Mix(digest ^ bits);
  }
  return digest;
}

struct Saved {
  MethodState state;
  std::vector<double> last;
};

absl::StatusOr<Saved> Decode(absl::string_view bytes) {
  StateReader in(bytes);
  PRECONDOR_RETURN_IF_ERROR(in.Begin("sim"));
  Saved saved;
  PRECONDOR_ASSIGN_OR_RETURN(saved.state.version, in.Integer("version"));
  PRECONDOR_ASSIGN_OR_RETURN(saved.state.digest, in.Integer("digest"));
  PRECONDOR_ASSIGN_OR_RETURN(saved.last, in.Numbers("last"));
  PRECONDOR_RETURN_IF_ERROR(in.Finish());
  return saved;
}

class SimState final : public LayerState {
 public:
  SimState(LayerSpec layer, Backend& backend, const MethodEvents& events, bool learns)
      : layer_(std::move(layer)), backend_(backend), events_(events), learns_(learns) {
    events_.made(layer_.name);
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    Stacked update{.a = std::vector<float>(statistics.a.size()), .g = std::vector<float>(statistics.g.size())};
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Download(statistics.a, MatrixView(update.a.data(), statistics.a.rows, statistics.a.cols)));
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Download(statistics.g, MatrixView(update.g.data(), statistics.g.rows, statistics.g.cols)));
    TakeIn(update);
    return absl::OkStatus();
  }
  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    if (!learns_) return backend_.Axpby(GainOf(state_), d, 0, u);
    Stacked update{.a = std::vector<float>(d.size()), .g = {}};
    PRECONDOR_RETURN_IF_ERROR(backend_.Download(d, MatrixView(update.a.data(), d.rows, d.cols)));
    TakeIn(update);
    last_ = {update.a.begin(), update.a.end()};
    return Repeat(u);
  }
  absl::Status Repeat(MatrixView u) override {
    if (last_.empty()) return absl::FailedPreconditionError("no gradient yet");
    std::vector<float> out;
    for (const double value : last_) out.push_back(static_cast<float>(GainOf(state_) * value));
    return backend_.Upload(ConstMatrixView(out.data(), u.rows, u.cols), u);
  }
  absl::StatusOr<std::string> Save() const override {
    StateWriter out("sim");
    out.Integer(state_.version);
    out.Integer(state_.digest);
    out.Numbers(last_);
    return out.Finish();
  }
  absl::Status Load(absl::string_view bytes) override {
    PRECONDOR_ASSIGN_OR_RETURN(const Saved saved, Decode(bytes));
    state_ = saved.state;
    last_ = saved.last;
    events_.loaded(layer_.name, state_);
    return absl::OkStatus();
  }
  bool ready() const override { return learns_ || state_.version > 0; }
  uint64_t version() const override { return state_.version; }
  int64_t bytes() const override { return 0; }
  Summary summary() const override { return {}; }

 private:
  void TakeIn(const Stacked& update) {
    for (int times = events_.doubles_updates ? 2 : 1; times > 0; --times) {
      state_ = After(state_, update);
      events_.updated(layer_.name, update, state_);
    }
  }

  const LayerSpec layer_;
  Backend& backend_;
  const MethodEvents& events_;
  const bool learns_;
  MethodState state_;
  std::vector<double> last_;  // the last gradient that it took in
};

}  // namespace

absl::StatusOr<MethodState> DecodeState(absl::string_view bytes) {
  PRECONDOR_ASSIGN_OR_RETURN(const Saved saved, Decode(bytes));
  return saved.state;
}

MethodState After(const MethodState& before, const Stacked& update) {
  return {.version = before.version + 1, .digest = Accumulate(Accumulate(before.digest, update.a), update.g)};
}

double GainOf(const MethodState& state) { return static_cast<double>(1 + state.digest % 255); }

absl::StatusOr<std::unique_ptr<LayerState>> SimMethod::MakeState(const LayerSpec& layer, Backend& backend) const {
  return std::make_unique<SimState>(layer, backend, events_, learns_);
}

}  // namespace precondor::sim
