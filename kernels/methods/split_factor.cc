// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/split_factor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/decomposition_scratch.h"
#include "kernels/methods/deferred_factor.h"

namespace precondor {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

// Returns element i of floats without alignment.
float FloatAt(absl::string_view bytes, int64_t i) {
  float value;
  std::memcpy(&value, bytes.data() + i * kFloatBytes, sizeof(value));
  return value;
}

}  // namespace

SplitFactor::SplitFactor(const MkorConfig& config, int64_t d, DeviceGroup& group, int primary)
    : config_(config), d_(d), group_(group), primary_(primary) {}

absl::StatusOr<std::unique_ptr<Factor>> SplitFactor::Make(const MkorConfig& config, int64_t d, DeviceGroup& group,
                                                          int primary) {
  std::unique_ptr<SplitFactor> factor(new SplitFactor(config, d, group, primary));
  for (int rank = 0; rank < group.size(); ++rank) {
    PRECONDOR_ASSIGN_OR_RETURN(factor->factors_.emplace_back(),
                               RowSplitFactor::Make(d, rank, group.size(), group.backend(rank)));
  }
  factor->scalars_.diagonal.assign(d, 1.0);
  factor->scalars_.discard_next = config.rule == UpdateRule::kReference;
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t SplitFactor::ScratchBytes(const MkorConfig& config, int64_t d, int64_t k, int ranks) {
  // The vectors, their products and terms, what a block of them shares, and a backend's own scratch: f64 numbers per
  // column and a small decomposition. For a load: the deferred terms, twice.
  const int64_t padded = d + ranks, block = config.ShermanMorrisonBlock(k);
  const int64_t update = (2 * k * d + k * padded + block * k + 2 * block * block + 4 * padded) * kFloatBytes +
                         SymmetricEigenScratchBytes(block);
  return std::max(update, 2 * DeferredFactor::kDeferred * d * kFloatBytes);
}

int64_t SplitFactor::PreconditionScratchBytes(int64_t m, int64_t n, int ranks) {
  // d and one side's product, or the products of both.
  return 2 * (m + ranks) * (n + ranks) * kFloatBytes;
}

int64_t SplitFactor::bytes() const {
  int64_t sum = 0;
  for (const auto& factor : factors_) sum += factor->count() * d_ * kFloatBytes;
  return sum;
}

absl::Status SplitFactor::Prepare(ConstMatrixView vectors, absl::Span<const double>) {
  PRECONDOR_RETURN_IF_ERROR(lost_);
  next_ = scalars_;
  next_.discard_next = false;
  if (scalars_.discard_next) return absl::OkStatus();
  Backend& backend = group_.backend(primary_);
  PRECONDOR_ASSIGN_OR_RETURN(const double mean_square, MeanSquare(vectors, {}, backend));
  const int64_t k = vectors.rows;
  const double scale = VectorScale(config_, d_, k, mean_square, next_);
  const double decay = config_.gamma, shift = 1.0 - config_.gamma;
  std::vector<DeviceMatrix> terms(factors_.size());
  std::vector<double> squares(d_);
  PRECONDOR_RETURN_IF_ERROR(group_.Run(primary_, [&](const DeviceGroup::Rank& rank) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix v, rank.backend.AllocateScratch(k, d_));
    const MatrixView all = v.view();
    if (rank.rank == primary_) PRECONDOR_RETURN_IF_ERROR(rank.backend.Axpby(scale, vectors, 0.0, all));
    PRECONDOR_RETURN_IF_ERROR(rank.backend.Flush());
    PRECONDOR_RETURN_IF_ERROR(
        rank.ranks.Broadcast(DType::kF32, all.data, all.data, all.size(), primary_, rank.timeout));
    PRECONDOR_ASSIGN_OR_RETURN(
        terms[rank.rank], factors_[rank.rank]->Terms(rank, decay, shift, v.view(), config_.ShermanMorrisonBlock(k)));
    if (rank.rank != primary_) return absl::OkStatus();
    return rank.backend.ColumnSquaredNorms(terms[rank.rank].view(), absl::MakeSpan(squares));
  }));
  for (int64_t j = 0; j < d_; ++j) next_.diagonal[j] = decay * next_.diagonal[j] + shift - squares[j];
  PRECONDOR_RETURN_IF_ERROR(CheckDiagonal(next_.diagonal));
  change_.decay = decay;
  change_.shift = shift;
  change_.left = std::move(terms);
  return absl::OkStatus();
}

void SplitFactor::Commit() {
  std::swap(scalars_, next_);
  if (has_change()) lost_.Update(Apply(change_));
  Abandon();
}

void SplitFactor::Abandon() { change_ = Change(); }

// Runs on this thread for all devices, without communication: no device waits for another, and only a device can fail.
absl::Status SplitFactor::Apply(const Change& change) {
  for (size_t rank = 0; rank < factors_.size(); ++rank) {
    const absl::Status applied = Apply(change, *factors_[rank], rank);
    if (applied.ok()) continue;
    return absl::InternalError(absl::StrCat("factor of ", d_, " over ", factors_.size(), " devices: lost since rank ",
                                            rank, " failed in a change of it: ", applied.message()));
  }
  return absl::OkStatus();
}

absl::Status SplitFactor::Apply(const Change& change, RowSplitFactor& factor, size_t rank) const {
  if (!change.full.empty() || !change.tiles.empty()) {
    std::vector<float> host(std::min(kTileSide, factor.count()) * d_);
    for (int64_t row = 0; row < factor.count(); row += kTileSide) {
      const MatrixView rows(host.data(), std::min(kTileSide, factor.count() - row), d_);
      SavedRows(change, factor.begin() + row, rows);
      PRECONDOR_RETURN_IF_ERROR(factor.Upload(row, rows));
    }
  }
  if (change.left.empty()) return absl::OkStatus();
  const ConstMatrixView left = change.left[rank].view();
  return factor.Apply(change.decay, change.shift, left, change.right.empty() ? left : change.right[rank].view());
}

void SplitFactor::SavedRows(const Change& change, int64_t begin, MatrixView host) const {
  if (!change.full.empty()) {
    std::memcpy(host.data, change.full.data() + begin * d_ * kFloatBytes, host.size() * kFloatBytes);
    return;
  }
  for (int64_t i = 0; i < host.rows; ++i) {
    for (int64_t j = 0; j < d_; ++j) {
      const int64_t row = std::max(begin + i, j), column = std::min(begin + i, j);
      const int64_t place =
          TileOffset(d_, row / kTileSide, column / kTileSide) + row % kTileSide * kTileSide + column % kTileSide;
      host.at(i, j) = static_cast<float>(change.scale * FloatAt(change.tiles, place));
    }
  }
}

absl::Status SplitFactor::Save(StateWriter& out) const {
  PRECONDOR_RETURN_IF_ERROR(lost_);
  out.Text("dense");
  out.Integer(static_cast<uint64_t>(d_));
  out.Number(1);  // scale, used by earlier versions
  scalars_.Write(out);
  out.BeginMatrix(d_, d_);
  for (size_t rank = 0; rank < factors_.size(); ++rank) {
    PRECONDOR_RETURN_IF_ERROR(out.Rows(group_.backend(static_cast<int>(rank)), factors_[rank]->rows()));
  }
  return absl::OkStatus();
}

absl::Status SplitFactor::PrepareLoad(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(lost_);
  PRECONDOR_ASSIGN_OR_RETURN(const std::string representation, in.Text("representation"));
  if (representation == "dense") return LoadFull(in);
  if (representation == "tiles") return LoadTiles(in);
  return absl::FailedPreconditionError(
      absl::StrCat("layer state: representation: expected \"dense\" or \"tiles\", got \"", representation, "\""));
}

absl::Status SplitFactor::LoadFull(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d_)));
  PRECONDOR_RETURN_IF_ERROR(in.Number("scale").status());
  PRECONDOR_RETURN_IF_ERROR(next_.Read(in));
  PRECONDOR_ASSIGN_OR_RETURN(change_.full, in.MatrixBytes("inverse", d_, d_));
  next_.diagonal.resize(d_);
  for (int64_t i = 0; i < d_; ++i) next_.diagonal[i] = FloatAt(change_.full, i * (d_ + 1));
  return absl::OkStatus();
}

// J = e I + s M + sum_i w_i r_i r_i', where M is in tiles.
absl::Status SplitFactor::LoadTiles(StateReader& in) {
  PRECONDOR_ASSIGN_OR_RETURN(DeferredFactor::Scalars saved, DeferredFactor::ReadScalars(in, d_));
  const int64_t waiting = static_cast<int64_t>(saved.weights.size());
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view rows, in.MatrixBytes("terms", waiting, d_));
  std::vector<float> host(waiting * d_);
  if (waiting > 0) std::memcpy(host.data(), rows.data(), rows.size());
  for (double& weight : saved.weights) weight = -weight;
  std::vector<DeviceMatrix> left(factors_.size()), right(factors_.size());
  for (size_t rank = 0; rank < factors_.size(); ++rank) {
    Backend& backend = group_.backend(static_cast<int>(rank));
    PRECONDOR_ASSIGN_OR_RETURN(left[rank], backend.AllocateScratch(waiting, d_));
    PRECONDOR_ASSIGN_OR_RETURN(right[rank], backend.AllocateScratch(waiting, d_));
    PRECONDOR_RETURN_IF_ERROR(backend.Upload(ConstMatrixView(host.data(), waiting, d_), left[rank].view()));
    PRECONDOR_RETURN_IF_ERROR(backend.ScaleRows(saved.weights, left[rank].view(), right[rank].view()));
  }
  // Rows of 32 elements, like those of SymmetricMatrix::raw.
  PRECONDOR_ASSIGN_OR_RETURN(change_.tiles, in.MatrixBytes("matrix", TileElements(d_) / 32, 32));
  change_.scale = saved.scale;
  change_.shift = saved.identity;
  change_.left = std::move(left);
  change_.right = std::move(right);
  next_ = std::move(saved);
  return absl::OkStatus();
}

absl::StatusOr<FactorInverse> SplitFactor::Inverse() const {
  PRECONDOR_RETURN_IF_ERROR(lost_);
  FactorInverse out;
  out.dense = true;
  out.split = this;
  return out;
}

absl::Status SplitFactor::Precondition(const SplitFactor* out_side, const SplitFactor* in_side, ConstMatrixView d,
                                       MatrixView u) {
  // Checked here, because only the primary would detect it.
  if (u.rows != d.rows || u.cols != d.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("split factors: u: expected [", d.rows, ", ", d.cols, "], got [", u.rows, ", ", u.cols, "]"));
  }
  const SplitFactor& any = out_side != nullptr ? *out_side : *in_side;
  const int primary = any.primary_;
  return any.group_.Run(primary, [&](const DeviceGroup::Rank& rank) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, rank.backend.AllocateScratch(d.rows, d.cols));
    const MatrixView all = half.view();
    const bool answers = rank.rank == primary;
    if (answers) PRECONDOR_RETURN_IF_ERROR(rank.backend.Copy(d, all));
    PRECONDOR_RETURN_IF_ERROR(rank.backend.Flush());
    PRECONDOR_RETURN_IF_ERROR(rank.ranks.Broadcast(DType::kF32, all.data, all.data, all.size(), primary, rank.timeout));
    if (out_side != nullptr) {
      PRECONDOR_ASSIGN_OR_RETURN(half, out_side->factors_[rank.rank]->Left(rank, half.view()));
    }
    const ConstMatrixView of_out_side = half.view().RowRange(0, d.rows);
    if (in_side != nullptr) {
      return in_side->factors_[rank.rank]->Right(rank, of_out_side, answers ? u : MatrixView());
    }
    return answers ? rank.backend.Copy(of_out_side, u) : absl::OkStatus();
  });
}

}  // namespace precondor
