// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/low_rank_factor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"

namespace precondor {
namespace {

// Eigenvalues below this share of the largest are rounding noise of an f32 Gram matrix.
constexpr double kNoiseFloor = 1e-6;
// Old columns whose share of the trace has decayed to this are replaced by new ones: a sliding window.
constexpr double kNegligibleShare = 1e-4;
constexpr int64_t kSmallRank = 64;

int64_t PackedSize(int64_t n) { return n * (n + 1) / 2; }
MatrixView FirstElements(MatrixView packed, int64_t count) { return MatrixView(packed.data, 1, count, packed.stride); }

int64_t Capacity(const MkorConfig& config, int64_t d) { return std::min(config.rank, d); }

// Whether columns may be dropped to save eigendecompositions. A small factor cannot afford to lose columns, and a
// factor of full rank recompresses without loss.
bool Truncates(int64_t capacity, int64_t d) { return capacity >= kSmallRank && capacity < d; }

// Whether S is kept. Computing S costs O(r^3) at each gradient that needs it, in addition to O(r d) per row of the
// gradient. Keeping it costs O(r^2) memory in addition to O(r d). That pays if d is not much longer than r.
bool KeepsCore(const MkorConfig& config, int64_t d) {
  constexpr int64_t kLongest = 8;
  return config.rule == UpdateRule::kExactDamped && d <= kLongest * Capacity(config, d);
}

// PUBLISHED: below this value the identity part of J is noise compared with its low-rank part. J stays positive
// definite.
constexpr double kSmallestIdentity = 1e-12;

double Sum(absl::Span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

void Decay(double factor, std::vector<double>& values) {
  for (double& value : values) value *= factor;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Factor>> LowRankFactor::Make(const MkorConfig& config, int64_t d, uint64_t phase,
                                                            Backend& backend) {
  std::unique_ptr<LowRankFactor> factor(new LowRankFactor(config, d, phase, backend));
  const int64_t r = Capacity(config, d);
  PRECONDOR_ASSIGN_OR_RETURN(factor->vectors_, backend.Allocate(r, d));
  PRECONDOR_ASSIGN_OR_RETURN(factor->gram_, backend.Allocate(1, PackedSize(r)));
  if (KeepsCore(config, d)) {
    PRECONDOR_ASSIGN_OR_RETURN(factor->core_, backend.Allocate(1, PackedSize(r)));
  }
  factor->roots_.reserve(r);
  factor->weights_.reserve(r);
  factor->staged_.weights.reserve(r);
  factor->discard_next_ = config.rule == UpdateRule::kReference;
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t LowRankFactor::StateBytes(const MkorConfig& config, int64_t d) {
  const int64_t r = Capacity(config, d);
  const int64_t kept = KeepsCore(config, d) ? PackedSize(r) : 0;
  return (r * d + PackedSize(r) + kept) * static_cast<int64_t>(sizeof(float));
}

int64_t LowRankFactor::ScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  const int64_t r = Capacity(config, d), chunk = std::min(k, r), n = r + chunk;
  // Terms and clamped vectors; then the larger of computing the terms and of a recompression, which may follow another
  // one in the same step.
  const int64_t terms = 2 * k * d, making = chunk * (d + r + 2 * chunk);
  const int64_t recompression = 3 * n * n + 2 * (r * d + PackedSize(r));
  return std::max(terms + std::max(making, recompression), r * r) * static_cast<int64_t>(sizeof(float)) +
         SymmetricEigenScratchBytes(n);
}

int64_t LowRankFactor::bytes() const { return StateBytes(config_, d_); }

double LowRankFactor::Trace() const { return Sum(weights_) + tail_; }

// mu of J = (M/mass + mu I)^-1.
double LowRankFactor::Damping() const {
  return mass_ > 0 ? (config_.damping * Trace() + tail_) / static_cast<double>(d_) / mass_ : 0.0;
}

double LowRankFactor::damping() const { return config_.rule == UpdateRule::kExactDamped ? Damping() : 0.0; }

void LowRankFactor::Abandon() {
  staged_.replaces = false;
  staged_.vectors = DeviceMatrix();
  staged_.gram = DeviceMatrix();
}

absl::Status LowRankFactor::Prepare(ConstMatrixView vectors, absl::Span<const double> squares) {
  Abandon();
  Staged& next = staged_;
  next.mass = mass_;
  next.mean_square = mean_square_;
  next.identity = identity_;
  next.tail = tail_;
  next.weights.assign(weights_.begin(), weights_.end());
  next.discard_next = false;
  next.recompressed = recompressed_;
  // The authors' package discards its first vector, the blend included.
  if (discard_next_) return absl::OkStatus();
  PerVector of_vectors(squares.begin(), squares.end());
  const bool needs_squares = config_.rule == UpdateRule::kExactDamped || config_.rule == UpdateRule::kBlend;
  if (of_vectors.empty() && needs_squares) {
    PRECONDOR_ASSIGN_OR_RETURN(of_vectors, SquaresOf(vectors));
  }
  switch (config_.rule) {
    case UpdateRule::kExactDamped:
      PRECONDOR_RETURN_IF_ERROR(UpdateExact(vectors, std::move(of_vectors), next));
      break;
    case UpdateRule::kReference:
    case UpdateRule::kBlend:
      PRECONDOR_RETURN_IF_ERROR(UpdateShermanMorrison(vectors, of_vectors, next));
      break;
    case UpdateRule::kPublished:
      PRECONDOR_RETURN_IF_ERROR(UpdatePublished(vectors, next));
      break;
  }
  RetireNegligible(vectors.rows, next);
  return absl::OkStatus();
}

void LowRankFactor::Commit() {
  core_kept_ = false;
  std::swap(weights_, staged_.weights);
  tail_ = staged_.tail;
  mass_ = staged_.mass;
  mean_square_ = staged_.mean_square;
  identity_ = staged_.identity;
  discard_next_ = staged_.discard_next;
  recompressed_ = staged_.recompressed;
  if (staged_.replaces) {
    std::swap(vectors_, staged_.vectors);
    std::swap(gram_, staged_.gram);
  }
  Abandon();
}

absl::Status LowRankFactor::Save(StateWriter& out) const {
  const int64_t n = rank();
  out.Text("low_rank");
  out.Integer(static_cast<uint64_t>(d_));
  out.Integer(static_cast<uint64_t>(vectors_.rows()));
  out.Integer(phase_);
  out.Numbers(weights_);
  out.Number(tail_);
  out.Number(mass_);
  out.Number(mean_square_);
  out.Number(identity_);
  out.Integer(discard_next_ ? 1 : 0);
  out.Integer(recompressed_ ? 1 : 0);
  PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, vectors_.view().RowRange(0, n)));
  return out.Matrix(backend_, ConstMatrixView(gram_.view().data, 1, PackedSize(n)));
}

absl::Status LowRankFactor::PrepareLoad(StateReader& in) {
  const int64_t capacity = vectors_.rows();
  PRECONDOR_RETURN_IF_ERROR(in.ExpectText("representation", "low_rank"));
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d_)));
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("capacity", static_cast<uint64_t>(capacity)));
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("phase", phase_));
  Staged next;
  PRECONDOR_ASSIGN_OR_RETURN(next.weights, in.Numbers("weights"));
  const int64_t n = static_cast<int64_t>(next.weights.size());
  if (n > capacity) {
    return absl::DataLossError(absl::StrCat("layer state: weights: expected at most ", capacity, ", got ", n));
  }
  PRECONDOR_ASSIGN_OR_RETURN(next.tail, in.Number("tail"));
  PRECONDOR_ASSIGN_OR_RETURN(next.mass, in.Number("mass"));
  PRECONDOR_ASSIGN_OR_RETURN(next.mean_square, in.Number("mean square"));
  PRECONDOR_ASSIGN_OR_RETURN(next.identity, in.Number("identity"));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t discard_next, in.Integer("discard next"));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t recompressed, in.Integer("recompressed"));
  next.discard_next = discard_next != 0;
  next.recompressed = recompressed != 0;
  next.replaces = true;
  PRECONDOR_ASSIGN_OR_RETURN(next.vectors, backend_.Allocate(capacity, d_));
  PRECONDOR_ASSIGN_OR_RETURN(next.gram, backend_.Allocate(1, PackedSize(capacity)));
  PRECONDOR_RETURN_IF_ERROR(in.Matrix("vectors", backend_, next.vectors.view().RowRange(0, n)));
  PRECONDOR_RETURN_IF_ERROR(in.Matrix("gram", backend_, FirstElements(next.gram.view(), PackedSize(n))));
  staged_ = std::move(next);
  return absl::OkStatus();
}

absl::Status LowRankFactor::UpdateExact(ConstMatrixView vectors, PerVector squares, Staged& next) {
  const int64_t k = vectors.rows;
  Decay(config_.gamma, next.weights);
  next.tail *= config_.gamma;
  next.mass = 1.0 - config_.gamma * (1.0 - mass_);
  return Add(vectors, std::move(squares), PerVector(k, (1.0 - config_.gamma) / static_cast<double>(k)), next);
}

absl::Status LowRankFactor::UpdateShermanMorrison(ConstMatrixView vectors, const PerVector& squares, Staged& next) {
  const int64_t k = vectors.rows, chunk = config_.ShermanMorrisonBlock(std::min(k, vectors_.rows()));
  double scale = 1.0 / std::sqrt(static_cast<double>(k));
  if (config_.rule == UpdateRule::kBlend) {
    next.mass = 1.0 - config_.gamma * (1.0 - mass_);
    next.mean_square = config_.gamma * mean_square_ + (1.0 - config_.gamma) * Sum(squares) / static_cast<double>(k);
    const double mean_square = next.mean_square / next.mass;
    scale = mean_square > 0 ? scale / std::sqrt(config_.damping * mean_square / static_cast<double>(d_)) : 0.0;
  }
  Decay(config_.gamma, next.weights);  // I - gamma M = gamma J + (1-gamma) I
  for (int64_t begin = 0; begin < k; begin += chunk) {
    const ConstMatrixView some = vectors.RowRange(begin, std::min(chunk, k - begin));
    PRECONDOR_ASSIGN_OR_RETURN(Terms terms, ShermanMorrisonTerms(some, scale, next));
    PRECONDOR_ASSIGN_OR_RETURN(PerVector of_terms, SquaresOf(terms.rows.view()));
    PRECONDOR_RETURN_IF_ERROR(Add(terms.rows.view(), std::move(of_terms), std::move(terms.weights), next));
  }
  return absl::OkStatus();
}

absl::Status LowRankFactor::Multiply(double alpha, double beta, ConstMatrixView v, Staged& next, MatrixView u) {
  const int64_t n = next.weights.size();
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(alpha, v, 0.0, u));
  if (n == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, backend_.AllocateScratch(n, v.rows));
  const ConstMatrixView rows = Vectors(next).RowRange(0, n);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, rows, Transpose::kNo, v, Transpose::kYes, 0.0, products.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(next.weights, products.view(), products.view()));
  return backend_.Gemm(beta, products.view(), Transpose::kYes, rows, Transpose::kNo, 1.0, u);
}

// k successive updates J <- J - J v v'J / (1 + v'J v) subtract U'(I + V U')^-1 U from H, with U = V H. With
// V H V' = Q diag(e) Q', the rows of Q'U have the weights 1 / (1 + e).
absl::StatusOr<LowRankFactor::Terms> LowRankFactor::ShermanMorrisonTerms(ConstMatrixView vectors, double scale,
                                                                         Staged& next) {
  const int64_t k = vectors.rows;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scaled, backend_.AllocateScratch(k, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.AllocateScratch(k, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(scale, vectors, 0.0, scaled.view()));
  PRECONDOR_RETURN_IF_ERROR(Multiply(1.0, -1.0, scaled.view(), next, u.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, backend_.AllocateScratch(k, k));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend_.AllocateScratch(k, k));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, scaled.view(), Transpose::kNo, u.view(), Transpose::kYes, 0.0, small.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(small.view()));
  PerVector values(k);
  PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricEigen(small.view(), absl::MakeSpan(values), q.view()));
  Terms terms;
  terms.rows = std::move(scaled);
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, q.view(), Transpose::kNo, u.view(), Transpose::kNo, 0.0, terms.rows.view()));
  for (double value : values) terms.weights.push_back(1.0 / (1.0 + std::max(value, 0.0)));
  return terms;
}

// Algorithm 1 of the paper, lines 5-10, and the hard cap. If a step has several vectors, the mean of their terms is
// added.
absl::Status LowRankFactor::UpdatePublished(ConstMatrixView vectors, Staged& next) {
  const int64_t k = vectors.rows;
  const double gamma = config_.gamma;
  PRECONDOR_ASSIGN_OR_RETURN(const double before, LargestDiagonal(next.identity, next.weights, next));
  if (before > config_.norm_threshold) {
    Decay(config_.zeta, next.weights);
    next.identity = config_.zeta * next.identity + 1.0 - config_.zeta;
  }
  Terms terms;
  PRECONDOR_ASSIGN_OR_RETURN(terms.rows, backend_.AllocateScratch(k, d_));
  PRECONDOR_RETURN_IF_ERROR(Multiply(next.identity, 1.0, vectors, next, terms.rows.view()));
  for (int64_t i = 0; i < k; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const double x, backend_.Dot(vectors.RowRange(i, 1), terms.rows.view().RowRange(i, 1)));
    terms.weights.push_back(PublishedWeight(gamma, x) / static_cast<double>(k));
  }
  Decay(gamma, next.weights);
  next.identity = std::max(gamma * next.identity, kSmallestIdentity);
  PRECONDOR_ASSIGN_OR_RETURN(PerVector squares, SquaresOf(terms.rows.view()));
  PRECONDOR_RETURN_IF_ERROR(Add(terms.rows.view(), std::move(squares), std::move(terms.weights), next));
  PRECONDOR_ASSIGN_OR_RETURN(const double after, LargestDiagonal(next.identity, next.weights, next));
  if (after > config_.clip) {
    Decay(config_.clip / after, next.weights);
    next.identity = std::max(next.identity * config_.clip / after, kSmallestIdentity);
  }
  return absl::OkStatus();
}

// Returns max_i (e + sum_j w_j c_ji^2), the largest element of an SPD J. Computed on the host, because this rule is for
// reproduction only.
absl::StatusOr<double> LowRankFactor::LargestDiagonal(double identity, const std::vector<double>& weights,
                                                      Staged& next) {
  const int64_t n = weights.size();
  std::vector<float> rows(n * d_);
  PRECONDOR_RETURN_IF_ERROR(backend_.Download(Vectors(next).RowRange(0, n), MatrixView(rows.data(), n, d_)));
  std::vector<double> diagonal(d_, identity);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < d_; ++i) diagonal[i] += weights[j] * std::pow(rows[j * d_ + i], 2);
  }
  const double largest = *std::max_element(diagonal.begin(), diagonal.end());
  if (std::isfinite(largest)) return largest;
  return absl::FailedPreconditionError("factor: expected a finite diagonal after the update");
}

absl::StatusOr<PerVector> LowRankFactor::SquaresOf(ConstMatrixView rows) const {
  PerVector squares(rows.rows);
  PRECONDOR_RETURN_IF_ERROR(backend_.RowSquaredNorms(rows, absl::MakeSpan(squares)));
  return squares;
}

// Moves each row's length into its weight (a zero row keeps weight 0) and appends unit vectors.
absl::Status LowRankFactor::Add(ConstMatrixView rows, PerVector squares, PerVector weights, Staged& next) {
  PerVector& scales = squares;  // shares the memory of `squares`
  for (size_t i = 0; i < scales.size(); ++i) {
    if (!std::isfinite(scales[i])) {
      return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
    }
    weights[i] *= scales[i];
    scales[i] = scales[i] > 0 ? 1.0 / std::sqrt(scales[i]) : 0.0;
  }
  const int64_t chunk = vectors_.rows();
  for (int64_t begin = 0; begin < rows.rows; begin += chunk) {
    const int64_t count = std::min(chunk, rows.rows - begin);
    PRECONDOR_RETURN_IF_ERROR(Append(rows.RowRange(begin, count), absl::MakeConstSpan(scales).subspan(begin, count),
                                     absl::MakeConstSpan(weights).subspan(begin, count), next));
  }
  return absl::OkStatus();
}

MatrixView LowRankFactor::Gram(Staged& next, int64_t n) {
  return FirstElements(next.replaces ? next.gram.view() : gram_.view(), PackedSize(n));
}

absl::Status LowRankFactor::GramRows(ConstMatrixView old_rows, ConstMatrixView new_rows, MatrixView rows) const {
  const int64_t n = old_rows.rows, k = new_rows.rows;
  const MatrixView beside(rows.data, k, n, rows.stride), corner(rows.data + n, k, k, rows.stride);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, new_rows, Transpose::kNo, old_rows, Transpose::kYes, 0.0, beside));
  return backend_.Gemm(1.0, new_rows, Transpose::kNo, new_rows, Transpose::kYes, 0.0, corner);
}

// A row may be written where neither J nor the next J has a weight, because no code reads such rows before Commit.
LowRankFactor::Slots LowRankFactor::FreeSlots(int64_t k, const Staged& next) const {
  const int64_t n = next.weights.size(), live = next.replaces ? 0 : static_cast<int64_t>(weights_.size());
  Slots slots;
  for (int64_t i = 0; i < n && static_cast<int64_t>(slots.size()) < k; ++i) {
    if (next.weights[i] == 0 && (i >= live || weights_[i] == 0)) slots.push_back(i);
  }
  for (int64_t i = n; i < vectors_.rows() && static_cast<int64_t>(slots.size()) < k; ++i) slots.push_back(i);
  return slots;
}

absl::Status LowRankFactor::Append(ConstMatrixView rows, absl::Span<const double> scales,
                                   absl::Span<const double> weights, Staged& next) {
  const int64_t k = rows.rows;
  const Slots slots = FreeSlots(k, next);
  if (static_cast<int64_t>(slots.size()) < k) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix unit, backend_.AllocateScratch(k, d_));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(scales, rows, unit.view()));
    return Recompress(unit.view(), weights, next);
  }
  const int64_t n = std::max<int64_t>(next.weights.size(), slots.back() + 1);
  PRECONDOR_RETURN_IF_ERROR(backend_.LowRankAppend(scales, rows, slots, Vectors(next).RowRange(0, n), Gram(next, n)));
  next.weights.resize(n);
  for (int64_t i = 0; i < k; ++i) next.weights[slots[i]] = weights[i];
  return absl::OkStatus();
}

// Frees the rows that k vectors of the next step will need, if the weights in them have decayed to nothing: the window
// slides, and no eigendecomposition is needed.
void LowRankFactor::RetireNegligible(int64_t k, Staged& next) const {
  const int64_t capacity = vectors_.rows(), n = next.weights.size();
  if (!Truncates(capacity, d_)) return;
  int64_t missing = k - (capacity - n) - std::count(next.weights.begin(), next.weights.end(), 0.0);
  const double most = kNegligibleShare * Sum(next.weights);
  double sum = 0, bound = 0;  // each missing row has a weight of at most `bound`
  for (; missing > 0; --missing) {
    double lightest = std::numeric_limits<double>::infinity();
    for (const double weight : next.weights) {
      if (weight > bound) lightest = std::min(lightest, weight);
    }
    bound = lightest;
    sum += lightest * static_cast<double>(std::count(next.weights.begin(), next.weights.end(), lightest));
    if (!(sum <= most)) return;
  }
  for (double& weight : next.weights) {
    if (weight > bound) continue;
    next.tail += weight;
    weight = 0;
  }
}

// Returns how many columns are kept if k arrive per step. It leaves space for whole further steps in at most a quarter
// of the capacity, so that an eigendecomposition serves several steps. The first recompression leaves space for fewer
// steps, by phase, so that factors that started together do not recompress together.
int64_t LowRankFactor::RetainedRank(int64_t k, const Staged& next) const {
  const int64_t capacity = vectors_.rows(), steps = capacity / 4 / k;
  if (!Truncates(capacity, d_) || steps == 0) return capacity;
  const int64_t room = next.recompressed ? steps : 1 + static_cast<int64_t>(phase_ % static_cast<uint64_t>(steps));
  return capacity - k * room;
}

absl::Status LowRankFactor::Recompress(ConstMatrixView new_rows, absl::Span<const double> new_weights, Staged& next) {
  const int64_t n = next.weights.size(), k = new_rows.rows, all = n + k, capacity = vectors_.rows();
  const ConstMatrixView old_rows = Vectors(next).RowRange(0, n);
  // Only its lower triangle is written and read.
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gram, backend_.AllocateScratch(all, all));
  PRECONDOR_RETURN_IF_ERROR(backend_.UnpackLower(Gram(next, n), gram.view().Corner(n, n)));
  PRECONDOR_RETURN_IF_ERROR(GramRows(old_rows, new_rows, gram.view().RowRange(n, k)));

  std::vector<double>&weights = all_weights_, &roots = all_roots_, &values = all_values_;
  weights.assign(next.weights.begin(), next.weights.end());
  weights.insert(weights.end(), new_weights.begin(), new_weights.end());
  const double largest = *std::max_element(weights.begin(), weights.end());
  roots.resize(all);  // relative to the largest, so that values stay in f32's range
  for (int64_t i = 0; i < all; ++i) roots[i] = largest > 0 ? std::sqrt(weights[i] / largest) : 0.0;
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBothSides(roots, gram.view(), gram.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend_.AllocateScratch(all, all));
  values.resize(all);
  PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricEigen(gram.view(), absl::MakeSpan(values), q.view()));

  // The eigenvalues ascend, so the last rows of q are kept.
  const double floor = kNoiseFloor * std::max(values.back(), 0.0);
  const int64_t wanted = std::min(all, RetainedRank(k, next));
  int64_t kept = 0;
  while (kept < wanted && values[all - 1 - kept] > floor) ++kept;
  kept_values_.assign(values.end() - kept, values.end());
  kept_scales_.clear();
  for (double value : kept_values_) kept_scales_.push_back(1.0 / std::sqrt(value));
  // c_new = T c with T = diag(value^-1/2) Q diag(roots) is orthonormal up to rounding, so the new Gram matrix is I.
  const MatrixView kept_q = q.view().RowRange(all - kept, kept);
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(kept_scales_, kept_q, kept_q));
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleColumns(roots, kept_q, kept_q));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix vectors, backend_.Allocate(capacity, d_));
  const MatrixView kept_rows = vectors.view().RowRange(0, kept);
  const ConstMatrixView of_old(kept_q.data, kept, n, all), of_new(kept_q.data + n, kept, k, all);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, of_old, Transpose::kNo, old_rows, Transpose::kNo, 0.0, kept_rows));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, of_new, Transpose::kNo, new_rows, Transpose::kNo, 1.0, kept_rows));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix identity, backend_.Allocate(kept, kept));
  PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, identity.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix packed, backend_.Allocate(1, gram_.cols()));
  PRECONDOR_RETURN_IF_ERROR(backend_.PackLower(identity.view(), FirstElements(packed.view(), PackedSize(kept))));
  next.recompressed = true;
  next.tail += std::max(Sum(weights) - largest * Sum(kept_values_), 0.0);
  next.weights = kept_values_;
  Decay(largest, next.weights);
  next.vectors = std::move(vectors);
  next.gram = std::move(packed);
  next.replaces = true;
  return absl::OkStatus();
}

// S = s (I + s G s)^-1 s with s = (w / (mass mu))^1/2: the inverted matrix has eigenvalues from 1 to 1 + d / lambda. S
// is symmetric to the bit, so half of it suffices.
absl::Status LowRankFactor::MakeCore(double mu, MatrixView core) const {
  const int64_t n = rank();
  if (core_kept_) return backend_.UnpackLower(ConstMatrixView(core_.view().data, 1, PackedSize(n)), core);
  roots_.resize(n);
  for (int64_t i = 0; i < n; ++i) roots_[i] = std::sqrt(weights_[i] / (mass_ * mu));
  const MatrixView kept = core_.empty() ? MatrixView() : FirstElements(core_.view(), PackedSize(n));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.LowRankCore(roots_, ConstMatrixView(gram_.view().data, 1, PackedSize(n)), core, kept));
  core_kept_ = !core_.empty();
  return absl::OkStatus();
}

absl::StatusOr<FactorInverse> LowRankFactor::Inverse() const {
  const int64_t n = rank();
  FactorInverse out;
  const bool damped = config_.rule == UpdateRule::kExactDamped;
  const bool published = config_.rule == UpdateRule::kPublished;
  const double mu = Damping();
  if (damped && mu > 0) out.c = 1.0 / mu;
  if (published) out.c = identity_;
  if (n == 0 || (damped && !(mu > 0))) return out;
  if (damped) {
    PRECONDOR_ASSIGN_OR_RETURN(out.owned, backend_.AllocateScratch(n, n));
    PRECONDOR_RETURN_IF_ERROR(MakeCore(mu, out.owned.view()));
    out.low_rank.roots = roots_;
  } else {
    // I - M, or e (I + M/e).
    PRECONDOR_ASSIGN_OR_RETURN(out.owned, backend_.Allocate(n, n));
    roots_.assign(weights_.begin(), weights_.end());
    if (published) Decay(-1.0 / identity_, roots_);
    PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, out.owned.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(roots_, out.owned.view(), out.owned.view()));
  }
  out.low_rank.vectors = vectors_.view().RowRange(0, n);
  out.low_rank.core = out.owned.view();
  return out;
}

}  // namespace precondor
