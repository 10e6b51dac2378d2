// SPDX-License-Identifier: Apache-2.0
// A method whose factors lie by rows on the devices of a group, and whose answers a test can compute: U = M D with
// M = I + the sum of g g' over all vectors of its updates. Where there is no group one device has M.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"
#include "kernels/device_group.h"
#include "kernels/methods/method.h"
#include "kernels/methods/state_codec.h"
#include "tests/support/fake_method.h"

namespace precondor {

// Of backends whose memory is the host's.
class SplitMethodState final : public LayerState {
 public:
  // `group` may be null: `backend` has all rows.
  static absl::StatusOr<std::unique_ptr<LayerState>> Make(const LayerSpec& layer, DeviceGroup* group, int primary,
                                                          Backend& backend, std::shared_ptr<FakeMethodLog> log) {
    std::unique_ptr<SplitMethodState> state(new SplitMethodState(layer, group, primary, backend, std::move(log)));
    for (int rank = 0; rank < state->ranks(); ++rank) {
      const int64_t count = state->End(rank) - state->Begin(rank);
      PRECONDOR_ASSIGN_OR_RETURN(state->rows_.emplace_back(), state->BackendOf(rank).Allocate(count, layer.d_out));
    }
    std::vector<float> identity(static_cast<size_t>(layer.d_out * layer.d_out));
    for (int64_t i = 0; i < layer.d_out; ++i) identity[static_cast<size_t>(i * layer.d_out + i)] = 1;
    PRECONDOR_RETURN_IF_ERROR(state->Distribute(identity));
    return state;
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    PRECONDOR_RETURN_IF_ERROR(broken_);
    const ConstMatrixView g = statistics.g;
    FakeUpdate update{.layer = layer_.name, .version = version_, .k = g.rows, .a = {}, .g = {}};
    update.g.resize(static_cast<size_t>(g.size()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Download(g, MatrixView(update.g.data(), g.rows, g.cols)));
    // What some ranks have added and others have not is of no use.
    broken_ = Run([&](int rank, Backend& backend, Collective* ranks, absl::Duration timeout) -> absl::Status {
      PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix v, Gathered(rank, backend, ranks, timeout, g));
      const int64_t count = End(rank) - Begin(rank);
      const ConstMatrixView own(v.view().data + Begin(rank), g.rows, count, g.cols);
      return backend.Gemm(1, own, Transpose::kYes, v.view(), Transpose::kNo, 1, rows_[rank].view());
    });
    PRECONDOR_RETURN_IF_ERROR(broken_);
    log_->Add(std::move(update));
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(broken_);
    return Run([&](int rank, Backend& backend, Collective* ranks, absl::Duration timeout) -> absl::Status {
      PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix all, Gathered(rank, backend, ranks, timeout, d));
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix part, backend.AllocateScratch(block_, d.cols));
      const MatrixView own = part.view().RowRange(0, End(rank) - Begin(rank));
      PRECONDOR_RETURN_IF_ERROR(
          backend.Gemm(1, rows_[rank].view(), Transpose::kNo, all.view(), Transpose::kNo, 0, own));
      if (ranks == nullptr) return backend.Copy(own, u);
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix result, backend.AllocateScratch(block_ * this->ranks(), d.cols));
      PRECONDOR_RETURN_IF_ERROR(
          ranks->AllGather(DType::kF32, part.view().data, result.view().data, block_ * d.cols, timeout));
      return rank == primary_ ? backend.Copy(result.view().RowRange(0, d.rows), u) : absl::OkStatus();
    });
  }

  absl::StatusOr<std::string> Save() const override {
    std::vector<float> m(static_cast<size_t>(layer_.d_out * layer_.d_out));
    for (int rank = 0; rank < ranks(); ++rank) {
      PRECONDOR_RETURN_IF_ERROR(BackendOf(rank).Download(rows_[rank].view(), RowsIn(m, rank)));
    }
    StateWriter out("split");
    out.Integer(version_);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, ConstMatrixView(m.data(), layer_.d_out, layer_.d_out)));
    return out.Finish();
  }
  absl::Status Load(absl::string_view bytes) override {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin("split"));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    std::vector<float> m(static_cast<size_t>(layer_.d_out * layer_.d_out));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("M", backend_, MatrixView(m.data(), layer_.d_out, layer_.d_out)));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    version_ = version;
    return broken_ = Distribute(m);
  }
  bool ready() const override { return version_ > 0; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override {
    int64_t bytes = 0;
    for (const DeviceMatrix& rows : rows_) bytes += rows.view().size() * static_cast<int64_t>(sizeof(float));
    return bytes;
  }
  Summary summary() const override { return {}; }

  // Rows of each rank but the last.
  static int64_t Block(int64_t d, int ranks) { return (d + ranks - 1) / ranks; }

 private:
  using Work = absl::FunctionRef<absl::Status(int rank, Backend& backend, Collective* ranks, absl::Duration timeout)>;

  SplitMethodState(LayerSpec layer, DeviceGroup* group, int primary, Backend& backend,
                   std::shared_ptr<FakeMethodLog> log)
      : layer_(std::move(layer)),
        group_(group),
        primary_(primary),
        backend_(backend),
        block_(Block(layer_.d_out, ranks())),
        log_(std::move(log)) {}

  int ranks() const { return group_ == nullptr ? 1 : group_->size(); }
  Backend& BackendOf(int rank) const { return group_ == nullptr ? backend_ : group_->backend(rank); }
  int64_t Begin(int rank) const { return std::min(rank * block_, layer_.d_out); }
  int64_t End(int rank) const { return std::min((rank + 1) * block_, layer_.d_out); }
  MatrixView RowsIn(std::vector<float>& m, int rank) const {
    return {m.data() + Begin(rank) * layer_.d_out, End(rank) - Begin(rank), layer_.d_out};
  }
  absl::Status Run(Work work) {
    if (group_ == nullptr) return work(0, backend_, nullptr, absl::ZeroDuration());
    return group_->Run(primary_, [&](const DeviceGroup::Rank& rank) {
      return work(rank.rank, rank.backend, &rank.ranks, rank.timeout);
    });
  }
  // The primary's `x` on each rank.
  absl::StatusOr<DeviceMatrix> Gathered(int rank, Backend& backend, Collective* ranks, absl::Duration timeout,
                                        ConstMatrixView x) const {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix copy, backend.AllocateScratch(x.rows, x.cols));
    if (rank == primary_ || ranks == nullptr) PRECONDOR_RETURN_IF_ERROR(backend.Copy(x, copy.view()));
    if (ranks == nullptr) return copy;
    float* const data = copy.view().data;
    PRECONDOR_RETURN_IF_ERROR(
        ranks->Broadcast(DType::kF32, rank == primary_ ? data : nullptr, data, x.size(), primary_, timeout));
    return copy;
  }
  absl::Status Distribute(std::vector<float>& m) {
    for (int rank = 0; rank < ranks(); ++rank) {
      PRECONDOR_RETURN_IF_ERROR(BackendOf(rank).Upload(RowsIn(m, rank), rows_[rank].view()));
    }
    return absl::OkStatus();
  }

  const LayerSpec layer_;
  DeviceGroup* const group_;
  const int primary_;
  Backend& backend_;
  const int64_t block_;
  const std::shared_ptr<FakeMethodLog> log_;
  std::vector<DeviceMatrix> rows_;
  absl::Status broken_;
  uint64_t version_ = 0;
};

// Splits layers of `split_dim` outputs or more. An update has d_out floats for each vector, an answer some matrices.
class SplitMethod final : public Method {
 public:
  SplitMethod(std::shared_ptr<FakeMethodLog> log, int64_t split_dim) : log_(std::move(log)), split_dim_(split_dim) {}
  const MethodTraits& traits() const override {
    static constexpr MethodTraits kTraits = {.name = "split", .statistics = StatisticsForm::kVectors};
    return kTraits;
  }
  int64_t StateBytes(const LayerSpec& layer) const override { return 4 * layer.d_out * layer.d_out; }
  int64_t ScratchBytes(const LayerSpec& layer, int64_t vectors_per_step) const override {
    return SplitScratchBytes(layer, vectors_per_step, 1).primary;
  }
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    return static_cast<double>(layer.d_out * layer.d_out) * static_cast<double>(layer.d_in);
  }
  bool needs_global_scale() const override { return false; }
  std::vector<std::string> Warnings(int64_t) const override { return {}; }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    return SplitMethodState::Make(layer, nullptr, 0, backend, log_);
  }

  bool Splits(const LayerSpec& layer) const override { return layer.d_out >= split_dim_; }
  SplitBytes SplitStateBytes(const LayerSpec& layer, int ranks) const override {
    const int64_t bytes = 4 * SplitMethodState::Block(layer.d_out, ranks) * layer.d_out;
    return {.primary = bytes, .other = bytes};
  }
  SplitBytes SplitScratchBytes(const LayerSpec& layer, int64_t vectors_per_step, int ranks) const override {
    const int64_t block = SplitMethodState::Block(layer.d_out, ranks);
    const int64_t answer = (layer.d_out + block + block * ranks) * layer.d_in;
    const int64_t bytes = 4 * std::max(answer, vectors_per_step * layer.d_out);
    return {.primary = bytes, .other = bytes};
  }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeSplitState(const LayerSpec& layer, DeviceGroup& group,
                                                             int primary) const override {
    return SplitMethodState::Make(layer, &group, primary, group.backend(primary), log_);
  }

 private:
  const std::shared_ptr<FakeMethodLog> log_;
  const int64_t split_dim_;
};

}  // namespace precondor
