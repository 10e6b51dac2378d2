// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/deferred_factor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_inputs.h"

namespace precondor {
namespace {

// Returns a power of two near 1/d for f16 storage, at least 2^-15: elements of J - I are at most 1, and the greatest
// power of two in f16 is 2^15.
double Unit(const MkorConfig& config, int64_t d) {
  if (config.storage == SymmetricStorage::kF32) return 1.0;
  return std::exp2(-std::min(15.0, std::floor(std::log2(static_cast<double>(d)))));
}

}  // namespace

void RuleScalars::Write(StateWriter& out) const {
  out.Number(mass);
  out.Number(mean_square);
  out.Integer(discard_next ? 1 : 0);
}

absl::Status RuleScalars::Read(StateReader& in) {
  PRECONDOR_ASSIGN_OR_RETURN(mass, in.Number("mass"));
  PRECONDOR_ASSIGN_OR_RETURN(mean_square, in.Number("mean square"));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t discard, in.Integer("discard next"));
  discard_next = discard != 0;
  return absl::OkStatus();
}

absl::Status CheckDiagonal(const std::vector<double>& diagonal) {
  // A sum of comparisons is vectorised; a branch or a maximum is not.
  int wrong = 0;
  for (const double value : diagonal) wrong += value >= 0 && value <= std::numeric_limits<double>::max() ? 0 : 1;
  if (wrong == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("factor: expected a finite positive diagonal after the update");
}

absl::StatusOr<double> MeanSquare(ConstMatrixView vectors, absl::Span<const double> squares, Backend& backend) {
  PerVector all(squares.begin(), squares.end());
  if (all.empty()) {
    all.resize(vectors.rows);
    PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(vectors, absl::MakeSpan(all)));
  }
  const double mean = std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(vectors.rows);
  if (std::isfinite(mean)) return mean;
  return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
}

double VectorScale(const MkorConfig& config, int64_t d, int64_t k, double mean_square, RuleScalars& scalars) {
  const double count = static_cast<double>(k);
  if (config.rule == UpdateRule::kReference) return 1.0 / std::sqrt(count);
  scalars.mass = 1.0 - config.gamma * (1.0 - scalars.mass);
  scalars.mean_square = config.gamma * scalars.mean_square + (1.0 - config.gamma) * mean_square;
  const double variance = config.damping * scalars.mean_square / scalars.mass / static_cast<double>(d);
  return variance > 0 ? 1.0 / std::sqrt(count * variance) : 0.0;
}

DeferredFactor::DeferredFactor(const MkorConfig& config, int64_t d, Backend& backend)
    : config_(config), d_(d), unit_(Unit(config, d)), backend_(backend) {}

absl::StatusOr<std::unique_ptr<Factor>> DeferredFactor::Make(const MkorConfig& config, int64_t d, Backend& backend) {
  std::unique_ptr<DeferredFactor> factor(new DeferredFactor(config, d, backend));
  PRECONDOR_ASSIGN_OR_RETURN(factor->matrix_, backend.AllocateSymmetric(d, config.storage));
  PRECONDOR_ASSIGN_OR_RETURN(factor->rows_, backend.Allocate(kDeferred, d));
  factor->scalars_.scale = factor->unit_;
  factor->scalars_.diagonal.assign(d, 1.0);
  factor->scalars_.discard_next = config.rule == UpdateRule::kReference;
  factor->squares_.resize(d);
  for (Scalars* scalars : {&factor->scalars_, &factor->next_}) scalars->weights.reserve(kDeferred);
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t DeferredFactor::StateBytes(const MkorConfig& config, int64_t d) {
  return TileBytes(d, config.storage) + kDeferred * d * static_cast<int64_t>(sizeof(float));
}

int64_t DeferredFactor::ScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  // An update: scaled v, u, the terms if they cannot be deferred at once, small products and their decomposition, the
  // padded rows and vectors that a backend copies (twice), and the copy of the state that a step of many vectors or a
  // backend without kernels makes. An inverse: the full matrix, and one more tile.
  const int64_t padded = TileRows(d) * kTileSide, float_bytes = static_cast<int64_t>(sizeof(float));
  const int64_t wide = std::max(k, kDeferred);
  const int64_t update =
      (3 * k * d + 2 * k * k + wide * k + 2 * (wide + k) * padded + k * kTileSide * 16) * float_bytes +
      SymmetricEigenScratchBytes(config.ShermanMorrisonBlock(k)) + (k > kDeferred ? 2 : 1) * StateBytes(config, d);
  const int64_t inverse = (d * d + 2 * kDeferred * padded + kTileSide * kTileSide) * float_bytes;
  return std::max(update, inverse);
}

ConstMatrixView DeferredFactor::Waiting(const Scalars& scalars) const {
  return (has_next() ? next_rows_ : rows_).view().RowRange(0, static_cast<int64_t>(scalars.weights.size()));
}

absl::Status DeferredFactor::AllocateNext() {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rows, backend_.Allocate(kDeferred, d_));
  PRECONDOR_ASSIGN_OR_RETURN(next_matrix_, backend_.AllocateSymmetric(d_, config_.storage));
  next_rows_ = std::move(rows);
  return absl::OkStatus();
}

absl::Status DeferredFactor::Prepare(ConstMatrixView vectors, absl::Span<const double> squares) {
  next_ = scalars_;
  next_.discard_next = false;
  concluded_ = true;
  if (scalars_.discard_next) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(const double mean_square, MeanSquare(vectors, squares, backend_));
  if (vectors.rows > kDeferred) {
    PRECONDOR_RETURN_IF_ERROR(AllocateNext());
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(matrix_.raw(), next_matrix_.raw()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(rows_.view(), next_rows_.view()));
  }
  if (config_.rule == UpdateRule::kPublished) return Published(vectors);
  return ShermanMorrison(vectors, VectorScale(config_, d_, vectors.rows, mean_square, next_));
}

// Such a Prepare is one product with J whose terms fit beside M, and no result from the device decides how it
// continues.
bool DeferredFactor::PreparesInBatch(int64_t k) const {
  return config_.rule != UpdateRule::kPublished && k <= kDeferred && config_.ShermanMorrisonBlock(k) == k;
}

absl::Status DeferredFactor::Conclude() {
  if (std::exchange(concluded_, true)) return absl::OkStatus();
  for (int64_t j = 0; j < d_; ++j) next_.diagonal[j] -= squares_[j];
  return CheckDiagonal(next_.diagonal);
}

void DeferredFactor::Commit() {
  std::swap(scalars_, next_);
  if (has_next()) {
    std::swap(matrix_, next_matrix_);
    std::swap(rows_, next_rows_);
  }
  Abandon();
}

void DeferredFactor::Abandon() {
  next_matrix_ = SymmetricMatrix();
  next_rows_ = DeviceMatrix();
  concluded_ = true;
}

absl::StatusOr<FactorInverse> DeferredFactor::Inverse() const {
  FactorInverse out;
  out.dense = true;
  out.form = SymmetricForm(scalars_.scale, scalars_.identity, scalars_.weights, Waiting(scalars_), matrix_);
  return out;
}

SymmetricForm DeferredFactor::Form() const {
  return SymmetricForm(next_.scale, next_.identity, next_.weights, Waiting(next_));
}

// J = H - sum of rank-1 terms, H = gamma J + (1-gamma) I.
absl::Status DeferredFactor::ShermanMorrison(ConstMatrixView vectors, double scale) {
  const int64_t block = config_.ShermanMorrisonBlock(vectors.rows);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.AllocateScratch(block, d_));
  for (int64_t begin = 0; begin < vectors.rows; begin += block) {
    const ConstMatrixView some = vectors.RowRange(begin, block);
    PRECONDOR_RETURN_IF_ERROR(Conclude());
    PRECONDOR_RETURN_IF_ERROR(MultiplyStored(some, has_next() ? block : vectors.rows - begin, u.view()));
    if (begin == 0) Blend(config_.gamma, 1.0 - config_.gamma);
    if (block > kDeferred) {
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix terms, backend_.AllocateScratch(block, d_));
      PRECONDOR_RETURN_IF_ERROR(backend_.ShermanMorrisonTerms(Form(), scale, some, u.view(), terms.view(), {}));
      PRECONDOR_RETURN_IF_ERROR(Append(-1.0, terms.view()));
      PRECONDOR_RETURN_IF_ERROR(CheckDiagonal(next_.diagonal));
      continue;
    }
    // Writes the terms beside M, where MultiplyStored has made space.
    const int64_t used = static_cast<int64_t>(next_.weights.size());
    PRECONDOR_RETURN_IF_ERROR(backend_.ShermanMorrisonTerms(Form(), scale, some, u.view(), rows().RowRange(used, block),
                                                            absl::MakeSpan(squares_)));
    next_.weights.insert(next_.weights.end(), block, -1.0);
    concluded_ = false;
  }
  return absl::OkStatus();
}

// Algorithm 1 of the paper, lines 5-10. If a step has several vectors, the mean of their terms is added. Capping the
// diagonal caps all elements of a positive definite J. Scaling keeps J positive definite; clamping its elements would
// not.
absl::Status DeferredFactor::Published(ConstMatrixView vectors) {
  const int64_t k = vectors.rows;
  const double gamma = config_.gamma;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.AllocateScratch(k, d_));
  PRECONDOR_RETURN_IF_ERROR(MultiplyStored(vectors, has_next() ? 0 : k, u.view()));
  if (*std::max_element(next_.diagonal.begin(), next_.diagonal.end()) > config_.norm_threshold) {
    Blend(config_.zeta, 1.0 - config_.zeta);
  }
  PRECONDOR_RETURN_IF_ERROR(ApplyImplicitTerms(backend_, Form(), next_.scale, vectors, u.view()));
  PerVector roots(k);
  for (int64_t i = 0; i < k; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const double x, backend_.Dot(vectors.RowRange(i, 1), u.view().RowRange(i, 1)));
    roots[i] = std::sqrt(PublishedWeight(gamma, x) / static_cast<double>(k));
  }
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(roots, u.view(), u.view()));
  Blend(gamma, 0.0);
  PRECONDOR_RETURN_IF_ERROR(Append(1.0, u.view()));
  PRECONDOR_RETURN_IF_ERROR(CheckDiagonal(next_.diagonal));
  const double largest = *std::max_element(next_.diagonal.begin(), next_.diagonal.end());
  if (largest > config_.clip) Blend(config_.clip / largest, 0.0);
  return absl::OkStatus();
}

absl::Status DeferredFactor::MultiplyStored(ConstMatrixView v, int64_t room, MatrixView u) {
  const ConstMatrixView waiting = Waiting(next_);
  if (waiting.rows == 0 || waiting.rows + std::min(room, kDeferred) <= kDeferred) {
    return backend_.SymmetricUpdateMultiply(1.0, 0.0, {}, waiting.RowRange(0, 0), matrix(), v, u);
  }
  PerVector weights(next_.weights.begin(), next_.weights.end());
  for (double& weight : weights) weight /= unit_;
  double identity = next_.identity;
  // The smaller the elements of M, the smaller its rounding errors.
  if (config_.storage == SymmetricStorage::kF16) {
    identity = std::accumulate(next_.diagonal.begin(), next_.diagonal.end(), 0.0) / static_cast<double>(d_);
  }
  PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricUpdateMultiply(next_.scale / unit_, (next_.identity - identity) / unit_,
                                                             weights, waiting, matrix(), v, u));
  for (Scalars* scalars : {&next_, &scalars_}) {
    // Without a next matrix the product has changed M itself, which both sets of scalars describe.
    if (scalars == &scalars_ && has_next()) continue;
    scalars->identity = identity;
    scalars->scale = unit_;
    scalars->weights.clear();
  }
  return absl::OkStatus();
}

void DeferredFactor::Blend(double decay, double shift) {
  next_.identity = decay * next_.identity + shift;
  next_.scale *= decay;
  for (double& weight : next_.weights) weight *= decay;
  for (double& element : next_.diagonal) element = decay * element + shift;
}

absl::Status DeferredFactor::Append(double sign, ConstMatrixView terms) {
  PRECONDOR_RETURN_IF_ERROR(backend_.ColumnSquaredNorms(terms, absl::MakeSpan(squares_)));
  for (int64_t j = 0; j < d_; ++j) next_.diagonal[j] += sign * squares_[j];
  for (int64_t begin = 0; begin < terms.rows;) {
    if (static_cast<int64_t>(next_.weights.size()) == kDeferred) {
      const ConstMatrixView none = terms.RowRange(0, 0);
      PRECONDOR_RETURN_IF_ERROR(MultiplyStored(none, 1, MatrixView(nullptr, 0, d_)));
    }
    const int64_t used = static_cast<int64_t>(next_.weights.size());
    const int64_t count = std::min(terms.rows - begin, kDeferred - used);
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(terms.RowRange(begin, count), rows().RowRange(used, count)));
    next_.weights.insert(next_.weights.end(), count, sign);
    begin += count;
  }
  return absl::OkStatus();
}

absl::Status DeferredFactor::Save(StateWriter& out) const {
  out.Text("tiles");
  out.Integer(static_cast<uint64_t>(d_));
  scalars_.Write(out);
  out.Number(scalars_.identity);
  out.Number(scalars_.scale);
  out.Numbers(scalars_.weights);
  out.Numbers(scalars_.diagonal);
  PRECONDOR_RETURN_IF_ERROR(
      out.Matrix(backend_, rows_.view().RowRange(0, static_cast<int64_t>(scalars_.weights.size()))));
  return out.Matrix(backend_, matrix_.raw());
}

absl::StatusOr<DeferredFactor::Scalars> DeferredFactor::ReadScalars(StateReader& in, int64_t d) {
  Scalars out;
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d)));
  PRECONDOR_RETURN_IF_ERROR(out.Read(in));
  PRECONDOR_ASSIGN_OR_RETURN(out.identity, in.Number("identity"));
  PRECONDOR_ASSIGN_OR_RETURN(out.scale, in.Number("scale"));
  PRECONDOR_ASSIGN_OR_RETURN(out.weights, in.Numbers("weights"));
  PRECONDOR_ASSIGN_OR_RETURN(out.diagonal, in.Numbers("diagonal"));
  if (static_cast<int64_t>(out.weights.size()) > kDeferred || static_cast<int64_t>(out.diagonal.size()) != d) {
    return absl::DataLossError(absl::StrCat("layer state: expected at most ", kDeferred, " weights and a diagonal of ",
                                            d, ", got ", out.weights.size(), " and ", out.diagonal.size()));
  }
  return out;
}

absl::Status DeferredFactor::PrepareLoad(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(AllocateNext());
  PRECONDOR_ASSIGN_OR_RETURN(const std::string representation, in.Text("representation"));
  if (representation != "tiles") {
    return absl::FailedPreconditionError(
        absl::StrCat("layer state: representation: expected \"tiles\", got \"", representation, "\""));
  }
  PRECONDOR_ASSIGN_OR_RETURN(next_, ReadScalars(in, d_));
  const int64_t waiting = static_cast<int64_t>(next_.weights.size());
  PRECONDOR_RETURN_IF_ERROR(in.Matrix("terms", backend_, rows().RowRange(0, waiting)));
  return in.Matrix("matrix", backend_, next_matrix_.raw());
}

}  // namespace precondor
