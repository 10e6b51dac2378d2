// SPDX-License-Identifier: Apache-2.0
#include "server/core/statistics_merge.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/status_macros.h"
#include "server/core/host_buffer.h"
#include "server/core/payload.h"
#include "server/core/reduction.h"

namespace precondor {
namespace {

// Merges one side of one step. For one use.
class SideMerge {
 public:
  SideMerge(const SessionSpec& spec, uint32_t layer, const std::vector<StagedContribution>& contributions, int side,
            Backend& backend)
      : spec_(spec),
        layer_(layer),
        contributions_(contributions),
        side_(side),
        d_(side == 0 ? spec.layers[layer].d_in : spec.layers[layer].d_out),
        backend_(backend) {
    for (const StagedContribution& contribution : contributions) samples_.push_back(contribution.samples);
  }

  absl::Status Mean(MatrixView out) {
    PRECONDOR_ASSIGN_OR_RETURN(WeightedSum sum, WeightedSum::Make(d_));
    PRECONDOR_ASSIGN_OR_RETURN(HostBuffer<float> mean, HostBuffer<float>::Make(d_));
    for (const StagedContribution& contribution : contributions_) {
      DecodeStatistics(spec_, layer_, contribution, side_, mean.span());
      sum.Add(contribution.samples, mean.span());
    }
    sum.Finish(mean.span());
    return backend_.Upload(ConstMatrixView(mean.span().data(), 1, d_), out);
  }

  // Stacks the rows of all contributions. `out` has the sum of their rows.
  absl::Status Stack(MatrixView out) {
    const std::vector<double> scales = StackingScales(samples_);
    int64_t done = 0;
    for (size_t i = 0; i < contributions_.size(); ++i) {
      const int64_t rows = SideOf(spec_, layer_, contributions_[i], side_).rows;
      // The update divides by the rows of all ranks. `share` corrects this, since each rank's own mean is meant.
      const double share =
          static_cast<double>(out.rows) / static_cast<double>(rows * static_cast<int64_t>(contributions_.size()));
      PRECONDOR_RETURN_IF_ERROR(
          UploadContribution(contributions_[i], scales[i] * std::sqrt(share), out.RowRange(done, rows)));
      done += rows;
    }
    return absl::OkStatus();
  }

  // Returns the rows of all contributions, or 0 if a contribution is a covariance.
  int64_t TotalRows() const {
    int64_t total = 0;
    for (const StagedContribution& contribution : contributions_) {
      if (contribution.rows[side_] == 0) return 0;
      total += contribution.rows[side_];
    }
    return total;
  }

  // Writes the mean covariance to `packed`. `came` has room for a contribution; `each` and `sum` are [d, d].
  absl::Status Covariance(MatrixView came, MatrixView each, MatrixView sum, MatrixView packed) {
    double total = 0;
    for (const uint64_t samples : samples_) total += static_cast<double>(samples);
    for (size_t i = 0; i < contributions_.size(); ++i) {
      const StatisticsSide side = SideOf(spec_, layer_, contributions_[i], side_);
      const MatrixView contribution(came.data, side.rows, side.cols);
      PRECONDOR_RETURN_IF_ERROR(UploadContribution(contributions_[i], 1.0, contribution));
      const double weight = static_cast<double>(samples_[i]) / total;
      const double before = i == 0 ? 0.0 : 1.0;
      if (side.packed) {
        PRECONDOR_RETURN_IF_ERROR(backend_.UnpackLower(contribution, each));
        PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(weight, each, before, sum));
      } else {
        PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(weight / static_cast<double>(side.rows), contribution, Transpose::kYes,
                                                contribution, Transpose::kNo, before, sum));
      }
    }
    return backend_.PackLower(sum, packed);
  }

 private:
  absl::Status UploadContribution(const StagedContribution& contribution, double scale, MatrixView out) {
    if (static_cast<int64_t>(decoded_.span().size()) < out.size()) {
      PRECONDOR_ASSIGN_OR_RETURN(decoded_, HostBuffer<float>::Make(out.size()));
    }
    const absl::Span<float> values = decoded_.span().first(static_cast<size_t>(out.size()));
    DecodeStatistics(spec_, layer_, contribution, side_, values);
    ScaleInPlace(scale, values);
    return backend_.Upload(ConstMatrixView(values.data(), out.rows, out.cols), out);
  }

  const SessionSpec& spec_;
  const uint32_t layer_;
  const std::vector<StagedContribution>& contributions_;
  const int side_;
  const int64_t d_;
  Backend& backend_;
  std::vector<uint64_t> samples_;
  HostBuffer<float> decoded_;  // decoded values of one contribution at a time
};

}  // namespace

absl::StatusOr<LayerStatistics> MergeStatistics(const SessionSpec& spec, uint32_t layer,
                                                const std::vector<StagedContribution>& contributions, Backend& backend,
                                                ScratchPool::Lease& scratch) {
  const LayerSpec& shape = spec.layers[layer];
  const StatisticsKind kind = StatisticsOf(spec, layer);
  const int64_t widest = std::max(shape.d_in, shape.d_out);
  LayerStatistics merged;
  int64_t offset = 0;
  for (const int s : {0, 1}) {
    SideMerge side(spec, layer, contributions, s, backend);
    const int64_t d = s == 0 ? shape.d_in : shape.d_out;
    ConstMatrixView& vectors = s == 0 ? merged.a : merged.g;
    if (kind != StatisticsKind::kCovariance) {
      const bool mean = kind == StatisticsKind::kMean;
      const int64_t k = mean ? 1 : static_cast<int64_t>(contributions.size()) * VectorsPerWorker(spec, layer);
      const MatrixView out = scratch.view(offset, k, d);
      PRECONDOR_RETURN_IF_ERROR(mean ? side.Mean(out) : side.Stack(out));
      vectors = out;
      offset += out.size();
      continue;
    }
    const int64_t rows = side.TotalRows();
    if (rows > 0 && rows <= MaxRows(d)) {
      const MatrixView out = scratch.view(offset, rows, d);
      PRECONDOR_RETURN_IF_ERROR(side.Stack(out));
      vectors = out;
    } else {
      const int64_t room = PackedElements(shape.d_in) + PackedElements(shape.d_out);
      const MatrixView out = scratch.view(offset, 1, PackedElements(d));
      const MatrixView came = scratch.view(room, 1, PackedElements(d));
      const MatrixView each = scratch.view(room + PackedElements(widest), d, d);
      const MatrixView sum = scratch.view(room + PackedElements(widest) + widest * widest, d, d);
      PRECONDOR_RETURN_IF_ERROR(side.Covariance(came, each, sum, out));
      (s == 0 ? merged.a_covariance : merged.g_covariance) = out;
    }
    offset += PackedElements(d);
  }
  return merged;
}

}  // namespace precondor
