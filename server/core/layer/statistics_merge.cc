// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/statistics_merge.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/status_macros.h"
#include "server/core/layer/admission.h"
#include "server/core/layer/reduction.h"
#include "server/core/resources/memory_pools.h"

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

  // Writes the mean vector to `out`, host memory.
  absl::Status Mean(absl::Span<float> out) {
    PRECONDOR_ASSIGN_OR_RETURN(WeightedSum sum, WeightedSum::Make(d_));
    for (const StagedContribution& contribution : contributions_) {
      DecodeStatistics(spec_, layer_, contribution, side_, out);
      sum.Add(contribution.samples, out);
    }
    sum.Finish(out);
    return absl::OkStatus();
  }

  // Writes the rows of all contributions to `out`, host memory.
  void Stack(absl::Span<float> out) {
    const std::vector<double> scales = StackingScales(samples_);
    const int64_t all_rows = static_cast<int64_t>(out.size()) / d_;
    for (size_t i = 0; i < contributions_.size(); ++i) {
      const int64_t rows = SideOf(spec_, layer_, contributions_[i], side_).rows;
      // The update divides by the rows of all ranks. `share` corrects this, since each rank's own mean is meant.
      const double share =
          static_cast<double>(all_rows) / static_cast<double>(rows * static_cast<int64_t>(contributions_.size()));
      const absl::Span<float> of_rank = out.first(static_cast<size_t>(rows * d_));
      DecodeStatistics(spec_, layer_, contributions_[i], side_, of_rank);
      ScaleInPlace(scales[i] * std::sqrt(share), of_rank);
      out.remove_prefix(of_rank.size());
    }
  }

  // Returns the number of rows that the side is merged to, or 0 if it is merged to a covariance.
  int64_t MergedRows() const {
    const StatisticsKind kind = StatisticsOf(spec_, layer_);
    if (kind == StatisticsKind::kMean) return 1;
    if (kind != StatisticsKind::kCovariance) {
      return static_cast<int64_t>(contributions_.size()) * VectorsPerWorker(spec_, layer_);
    }
    int64_t total = 0;
    for (const StagedContribution& contribution : contributions_) {
      if (contribution.rows[side_] == 0) return 0;
      total += contribution.rows[side_];
    }
    return total <= MaxRows(d_) ? total : 0;
  }

  // Writes the mean covariance to `packed`. `came` has room for a contribution; `each` and `sum` are [d, d].
  absl::Status Covariance(MatrixView came, MatrixView each, MatrixView sum, MatrixView packed) {
    double total = 0;
    for (const uint64_t samples : samples_) total += static_cast<double>(samples);
    for (size_t i = 0; i < contributions_.size(); ++i) {
      const StatisticsSide side = SideOf(spec_, layer_, contributions_[i], side_);
      const MatrixView contribution(came.data, side.rows, side.cols);
      PRECONDOR_RETURN_IF_ERROR(UploadContribution(contributions_[i], contribution));
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
  absl::Status UploadContribution(const StagedContribution& contribution, MatrixView out) {
    if (static_cast<int64_t>(decoded_.span().size()) < out.size()) {
      PRECONDOR_ASSIGN_OR_RETURN(decoded_, HostBuffer<float>::Make(out.size()));
    }
    const absl::Span<float> values = decoded_.span().first(static_cast<size_t>(out.size()));
    DecodeStatistics(spec_, layer_, contribution, side_, values);
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
  const bool mean = StatisticsOf(spec, layer) == StatisticsKind::kMean;
  const int64_t d[] = {shape.d_in, shape.d_out}, widest = std::max(shape.d_in, shape.d_out);
  SideMerge sides[] = {{spec, layer, contributions, 0, backend}, {spec, layer, contributions, 1, backend}};
  const int64_t rows[] = {sides[0].MergedRows(), sides[1].MergedRows()};
  LayerStatistics merged;
  // The vectors of both sides lie one after the other, and one upload takes them.
  const int64_t elements = rows[0] * d[0] + rows[1] * d[1];
  PRECONDOR_ASSIGN_OR_RETURN(HostBuffer<float> host, HostBuffer<float>::Make(elements));
  int64_t offset = 0;
  for (const int s : {0, 1}) {
    if (rows[s] == 0) continue;
    const int64_t size = rows[s] * d[s];
    const absl::Span<float> values = host.span().subspan(static_cast<size_t>(offset), static_cast<size_t>(size));
    if (mean) {
      PRECONDOR_RETURN_IF_ERROR(sides[s].Mean(values));
    } else {
      sides[s].Stack(values);
    }
    (s == 0 ? merged.a : merged.g) = scratch.view(offset, rows[s], d[s]);
    offset += size;
  }
  if (elements > 0) {
    PRECONDOR_RETURN_IF_ERROR(
        backend.Upload(ConstMatrixView(host.span().data(), 1, elements), scratch.view(0, 1, elements)));
  }
  // A side's covariance takes as much as its vectors at most would, and the rest of the scratch memory follows both.
  const int64_t room = PackedElements(shape.d_in) + PackedElements(shape.d_out);
  for (const int s : {0, 1}) {
    if (rows[s] > 0) continue;
    const MatrixView out = scratch.view(offset, 1, PackedElements(d[s]));
    const MatrixView came = scratch.view(room, 1, PackedElements(widest));
    const MatrixView each = scratch.view(room + PackedElements(widest), d[s], d[s]);
    const MatrixView sum = scratch.view(room + PackedElements(widest) + widest * widest, d[s], d[s]);
    PRECONDOR_RETURN_IF_ERROR(sides[s].Covariance(came, each, sum, out));
    (s == 0 ? merged.a_covariance : merged.g_covariance) = out;
    offset += PackedElements(d[s]);
  }
  return merged;
}

}  // namespace precondor
