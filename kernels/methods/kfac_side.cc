// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac_side.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/fiber.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"

namespace precondor {
namespace {

// Returns an option's text as it was given, or the default's text if the option is left out.
std::string Text(const MethodConfig& config, absl::string_view name, absl::string_view fallback) {
  const auto it = config.options.find(std::string(name));
  if (it == config.options.end()) return std::string(fallback);
  if (const auto* text = std::get_if<std::string>(&it->second)) return *text;
  if (const auto* flag = std::get_if<bool>(&it->second)) return *flag ? "true" : "false";
  return Schedule::Text(std::get<double>(it->second));
}

struct Default {
  absl::string_view name;
  absl::string_view text;
};
// Defaults of the options that the state depends on, except refresh_lag.
constexpr Default kDefaults[] = {
    {"form", "EIGEN"},           {"prediv", "false"},      {"pi_split", "false"},        {"stagger", "true"},
    {"damping", "0.001"},        {"factor_decay", "0.95"}, {"factor_update_steps", "1"}, {"inv_update_steps", "1"},
    {"accumulation_steps", "1"}, {"row_scale", "1"}};

using Side = KfacDecomposition::Side;

// Returns the mean of the diagonal of a packed matrix.
absl::StatusOr<double> MeanDiagonal(ConstMatrixView factor, int64_t d, Backend& backend) {
  std::vector<int64_t> at(d);
  for (int64_t i = 0; i < d; ++i) at[i] = i * (i + 3) / 2;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix diagonal, backend.Allocate(1, d));
  PRECONDOR_RETURN_IF_ERROR(backend.Gather({}, at, factor, diagonal.view()));
  std::vector<float> host(d);
  PRECONDOR_RETURN_IF_ERROR(backend.Download(diagonal.view(), MatrixView(host.data(), 1, d)));
  return std::accumulate(host.begin(), host.end(), 0.0) / static_cast<double>(d);
}

absl::Status Eigen(ConstMatrixView factor, Side& side, Backend& backend) {
  const int64_t d = side.basis.rows();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend.Allocate(d, d));
  PRECONDOR_RETURN_IF_ERROR(backend.UnpackLower(factor, work.view()));
  side.values.resize(d);
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(work.view(), absl::MakeSpan(side.values), side.basis.view()));
  for (double& value : side.values) value = std::max(value, 0.0);
  return absl::OkStatus();
}

// Inverts the damped matrix `j` in place. An eigenvalue of `j` below `floor` belongs to a negative eigenvalue of F.
absl::Status InvertByEigenvalues(double floor, MatrixView j, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend.Allocate(j.rows, j.cols));
  std::vector<double> values(j.rows);
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(j, absl::MakeSpan(values), q.view()));
  for (double& value : values) value = 1.0 / std::sqrt(std::max(value, floor));
  PRECONDOR_RETURN_IF_ERROR(backend.ScaleRows(values, q.view(), q.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, q.view(), Transpose::kYes, q.view(), Transpose::kNo, 0.0, j));
  return backend.Symmetrize(j);
}

// Inverts F + damping I in units of its mean eigenvalue, so that the inverse fits f32 whatever the statistics' units
// are.
absl::Status Inverse(ConstMatrixView factor, double damping, Side& side, Backend& backend) {
  const MatrixView j = side.basis.view();
  PRECONDOR_ASSIGN_OR_RETURN(const double mean, MeanDiagonal(factor, j.rows, backend));
  side.scale = std::max(mean, 0.0) + damping;
  PRECONDOR_RETURN_IF_ERROR(backend.UnpackLower(factor, j));
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1.0 / side.scale, j, 0.0, j));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(damping / side.scale, j));
  absl::Status status = backend.SpdInverse(j, j);
  return absl::IsFailedPrecondition(status) ? InvertByEigenvalues(damping / side.scale, j, backend) : status;
}

absl::Status MakeReciprocals(const KfacConfig& config, double damping, KfacDecomposition& made, Backend& backend) {
  KfacDivisors divisors;
  divisors.Assign(config, made, damping);
  const MatrixView all = made.reciprocals.view();
  const std::vector<float> ones(std::max(all.rows, all.cols), 1.0f);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix down, backend.Allocate(all.rows, 1));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix across, backend.Allocate(1, all.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.Upload(ConstMatrixView(ones.data(), all.rows, 1), down.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Upload(ConstMatrixView(ones.data(), 1, all.cols), across.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, down.view(), Transpose::kNo, across.view(), Transpose::kNo, 0.0, all));
  made.reciprocal_scale = divisors.smallest();
  return backend.DivideByOuter(made.reciprocal_scale, divisors.rows, divisors.columns, divisors.shift, all, all);
}

}  // namespace

uint64_t KfacConfig::Interval(const Schedule& schedule, uint64_t t) {
  return static_cast<uint64_t>(std::max(1.0, std::floor(schedule.At(t))));
}

absl::StatusOr<KfacConfig> ParseKfacConfig(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(KfacConfig out, ParseOptions(config, ReadKfacConfig));
  if (out.prediv && out.form == KfacForm::kInverse) {
    return absl::InvalidArgumentError("method kfac: option prediv: expected form EIGEN, got INVERSE");
  }
  for (const auto& [name, text] : kDefaults) {
    absl::StrAppend(&out.state_text, out.state_text.empty() ? "" : "; ", name, " ", Text(config, name, text));
  }
  // Omitted if 0, as in states that were saved before the option existed.
  if (out.refresh_lag > 0) absl::StrAppend(&out.state_text, "; refresh_lag ", out.refresh_lag);
  return out;
}

KfacDamping SplitDamping(const KfacConfig& config, double damping, double split) {
  if (!config.pi_split) return {damping, damping};
  return {std::sqrt(damping) * split, std::sqrt(damping) / split};
}

absl::StatusOr<KfacDecomposition> KfacDecomposition::Allocate(const KfacConfig& config, const LayerSpec& layer,
                                                              Backend& backend) {
  KfacDecomposition made;
  PRECONDOR_ASSIGN_OR_RETURN(made.in.basis, backend.Allocate(layer.d_in, layer.d_in));
  PRECONDOR_ASSIGN_OR_RETURN(made.out.basis, backend.Allocate(layer.d_out, layer.d_out));
  if (config.prediv) {
    PRECONDOR_ASSIGN_OR_RETURN(made.reciprocals, backend.Allocate(layer.d_out, layer.d_in));
  }
  return made;
}

int64_t KfacDecomposition::Bytes(const KfacConfig& config, const LayerSpec& layer) {
  const int64_t reciprocals = config.prediv ? layer.d_in * layer.d_out : 0;
  return (layer.d_in * layer.d_in + layer.d_out * layer.d_out + reciprocals) * static_cast<int64_t>(sizeof(float));
}

int64_t KfacDecomposition::ScratchBytes(const LayerSpec& layer) {
  const int64_t widest = std::max(layer.d_in, layer.d_out);
  // If an inverse fails, eigenvectors are computed instead.
  return (widest * widest + layer.d_in + layer.d_out) * static_cast<int64_t>(sizeof(float)) +
         SymmetricEigenScratchBytes(widest);
}

absl::Status KfacDecomposition::Decompose(const KfacConfig& config, double damping, ConstMatrixView in_factor,
                                          ConstMatrixView out_factor, Backend& backend) {
  if (config.pi_split) {
    PRECONDOR_ASSIGN_OR_RETURN(const double in_mean, MeanDiagonal(in_factor, in.basis.rows(), backend));
    PRECONDOR_ASSIGN_OR_RETURN(const double out_mean, MeanDiagonal(out_factor, out.basis.rows(), backend));
    split = in_mean > 0 && out_mean > 0 ? std::sqrt(in_mean / out_mean) : 1.0;
  }
  if (config.form == KfacForm::kInverse) {
    const KfacDamping sides = SplitDamping(config, damping, split);
    PRECONDOR_RETURN_IF_ERROR(Inverse(in_factor, sides.in, in, backend));
    return Inverse(out_factor, sides.out, out, backend);
  }
  PRECONDOR_RETURN_IF_ERROR(Eigen(in_factor, in, backend));
  PRECONDOR_RETURN_IF_ERROR(Eigen(out_factor, out, backend));
  return config.prediv ? MakeReciprocals(config, damping, *this, backend) : absl::OkStatus();
}

void KfacDivisors::Assign(const KfacConfig& config, const KfacDecomposition& decomposition, double damping) {
  rows = decomposition.out.values;
  columns = decomposition.in.values;
  shift = damping;
  if (!config.pi_split) return;
  const KfacDamping sides = SplitDamping(config, damping, decomposition.split);
  for (double& value : rows) value += sides.out;
  for (double& value : columns) value += sides.in;
  shift = 0;
}

absl::StatusOr<KfacSide> KfacSide::Make(int64_t d, Backend& backend) {
  KfacSide side(d, backend);
  PRECONDOR_RETURN_IF_ERROR(side.PrepareReset());
  side.Commit();
  return side;
}

absl::Status KfacSide::PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add) {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
  const MatrixView next = next_factor_.view();
  if (vectors.rows > 0) {
    // Only the lower triangle is kept, so F is symmetric to the bit.
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
    PRECONDOR_RETURN_IF_ERROR(backend_->UnpackLower(factor_.view(), work.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_->SymmetricGemm(add / static_cast<double>(vectors.rows), vectors, Transpose::kYes,
                                                      vectors, Transpose::kNo, keep, work.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_->PackLower(work.view(), next));
  } else {
    PRECONDOR_RETURN_IF_ERROR(backend_->Copy(factor_.view(), next));
    PRECONDOR_RETURN_IF_ERROR(backend_->Axpby(add, covariance, keep, next));
  }
  double square = 0;
  PRECONDOR_RETURN_IF_ERROR(backend_->RowSquaredNorms(next, absl::MakeSpan(&square, 1)));
  if (std::isfinite(square)) return absl::OkStatus();
  return absl::InvalidArgumentError("expected a second moment within f32, got NaN or infinity");
}

absl::Status KfacSide::PrepareReset() {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_->AddDiagonal(1.0, work.view()));
  return backend_->PackLower(work.view(), next_factor_.view());
}

void KfacSide::Commit() {
  if (!next_factor_.empty()) factor_ = std::exchange(next_factor_, DeviceMatrix());
}

absl::Status KfacSide::PrepareLoad(StateReader& in) {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
  return in.Matrix("factor", *backend_, next_factor_.view());
}

absl::StatusOr<std::shared_ptr<KfacRefresh>> KfacRefresh::Make(const KfacConfig& config, const LayerSpec& layer,
                                                               double damping, Backend& backend) {
  std::shared_ptr<KfacRefresh> refresh(new KfacRefresh(config, damping, backend));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->in_, backend.Allocate(1, KfacSide::PackedElements(layer.d_in)));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->out_, backend.Allocate(1, KfacSide::PackedElements(layer.d_out)));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->made_, KfacDecomposition::Allocate(config, layer, backend));
  return refresh;
}

int64_t KfacRefresh::Bytes(const KfacConfig& config, const LayerSpec& layer) {
  return KfacSide::StateBytes(layer.d_in) + KfacSide::StateBytes(layer.d_out) + KfacDecomposition::Bytes(config, layer);
}

void KfacRefresh::AwaitOther() {
  MutexLock lock(mu_);
  while (runs_) ran_.wait(mu_);
}

bool KfacRefresh::Runs() {
  MutexLock lock(mu_);
  return runs_;
}

absl::Status KfacRefresh::Run() {
  // Lets the device's other layers continue while this one waits for another thread.
  if (Runs()) RunBlocking([this] { AwaitOther(); });
  MutexLock lock(mu_);
  while (runs_) ran_.wait(mu_);
  if (outcome_.has_value()) return *outcome_;
  runs_ = true;
  mu_.Unlock();
  absl::Status status = made_.Decompose(config_, damping_, in_.view(), out_.view(), backend_);
  mu_.Lock();
  runs_ = false;
  if (status.ok() || absl::IsFailedPrecondition(status)) outcome_ = status;
  ran_.notify_all();
  return status;
}

}  // namespace precondor
