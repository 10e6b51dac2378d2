// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/soap.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

// The matrices of one side of a layer: the gradients' second moment along it, and the basis or root that is computed
// from it (docs/use/methods/soap.md). Tensors are [sizes[0], the rest], contiguous. One thread at a time. A side
// without factor has two empty matrices and acts as the identity.
struct SoapSide {
  DeviceMatrix covariance;  // running average L of G_(k) G_(k)', with G_(k) the gradient with this dimension as rows
  DeviceMatrix factor;      // SOAP: eigenvectors as rows, by descending eigenvalue; SHAMPOO: the inverse root

  bool present() const { return !covariance.empty(); }
};

// Maps x along each mode for which `wanted` returns true: map(mode, side, from, to) fills the new tensor's matrix `to`
// from the old tensor's matrix `from`.
template <typename Wanted, typename Map>
absl::Status MapModes(absl::Span<const int64_t> sizes, DeviceMatrix& x, Backend& backend, Wanted wanted, Map map) {
  DeviceMatrix next;
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    if (!wanted(mode)) continue;
    if (next.empty()) {
      PRECONDOR_ASSIGN_OR_RETURN(next, backend.AllocateScratch(x.rows(), x.cols()));
    }
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix from, ModeMatrix::Of(sizes, mode, x.view(), backend));
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix to, ModeMatrix::ToFill(sizes, mode, next.view(), backend));
    PRECONDOR_RETURN_IF_ERROR(map(mode, from.side(), from.view(), to.view()));
    PRECONDOR_RETURN_IF_ERROR(to.WriteBack(backend));
    std::swap(x, next);
  }
  return absl::OkStatus();
}

absl::StatusOr<SoapSide> MakeSoapSide(int64_t size, bool has_factor, Backend& backend) {
  SoapSide side;
  if (!has_factor) return side;
  PRECONDOR_ASSIGN_OR_RETURN(side.covariance, backend.Allocate(size, size));
  PRECONDOR_ASSIGN_OR_RETURN(side.factor, backend.Allocate(size, size));
  return side;
}

absl::StatusOr<DeviceMatrix> CloneMatrix(ConstMatrixView from, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix copy, backend.AllocateScratch(from.rows, from.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(from, copy.view()));
  return copy;
}

// Returns decay L + (1 - decay) G_(k) G_(k)' in new memory.
absl::StatusOr<DeviceMatrix> NextCovariance(const SoapSide& side, ModeMatrix& gradient, double decay,
                                            ProductPrecision precision, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix next, CloneMatrix(side.covariance.view(), backend));
  const ConstMatrixView g = gradient.view();
  const bool left = gradient.side() == From::kLeft;
  PRECONDOR_RETURN_IF_ERROR(
      backend.SymmetricGemm(1 - decay, g, Transpose(!left), g, Transpose(left), decay, next.view(), precision));
  return next;
}

// Returns the eigenvectors of `covariance` as rows, by descending eigenvalue. Errors: those of SymmetricEigen.
absl::StatusOr<DeviceMatrix> Eigenbasis(ConstMatrixView covariance, Backend& backend) {
  const int64_t n = covariance.rows;
  std::vector<double> values(n);
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = n - 1 - i;  // SymmetricEigen's order is ascending
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix ascending, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(covariance, absl::MakeSpan(values), ascending.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix basis, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.Gather(order, {}, ascending.view(), basis.view()));
  return basis;
}

// Returns (scale L + epsilon |scale L| I)^-power, or I for L = 0.
absl::StatusOr<DeviceMatrix> InverseRoot(ConstMatrixView covariance, double scale, double epsilon, double power,
                                         Backend& backend) {
  const int64_t n = covariance.rows;
  std::vector<double> values(n);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix root, backend.Allocate(n, n));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix vectors, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(covariance, absl::MakeSpan(values), vectors.view()));
  const double largest = scale * values.back();
  if (!(largest > 0)) {
    PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, root.view()));
    return root;
  }
  // With half of the power on either side of Q, the root is symmetric except for the product's rounding.
  for (double& value : values) {
    value = std::pow(std::max(scale * value, 0.0) + epsilon * largest, -power / 2);
  }
  PRECONDOR_RETURN_IF_ERROR(backend.ScaleRows(values, vectors.view(), vectors.view()));
  PRECONDOR_RETURN_IF_ERROR(
      backend.SymmetricGemm(1.0, vectors.view(), Transpose::kYes, vectors.view(), Transpose::kNo, 0.0, root.view()));
  return root;
}

// x = op(F_k) x along each mode k whose factor is not empty. Scratch: ModeScratchElements.
absl::Status ApplyFactors(absl::Span<const int64_t> sizes, absl::Span<const ConstMatrixView> factors,
                          Transpose transpose, ProductPrecision precision, DeviceMatrix& x, Backend& backend) {
  return MapModes(
      sizes, x, backend, [&](size_t mode) { return factors[mode].rows > 0; },
      [&](size_t mode, From side, ConstMatrixView from, MatrixView to) {
        const Transpose other = Transpose(transpose == Transpose::kNo);
        return side == From::kLeft
                   ? backend.Gemm(1.0, factors[mode], transpose, from, Transpose::kNo, 0.0, to, precision)
                   : backend.Gemm(1.0, from, Transpose::kNo, factors[mode], other, 0.0, to, precision);
      });
}

// Permutes x along each mode by the mode's order; an empty order leaves the mode unchanged. Scratch:
// ModeScratchElements.
absl::Status Reorder(absl::Span<const int64_t> sizes, absl::Span<const std::vector<int64_t>> orders, DeviceMatrix& x,
                     Backend& backend) {
  return MapModes(
      sizes, x, backend, [&](size_t mode) { return !orders[mode].empty(); },
      [&](size_t mode, From side, ConstMatrixView from, MatrixView to) {
        if (side == From::kLeft) return backend.Gather(orders[mode], {}, from, to);
        return backend.Gather({}, orders[mode], from, to);
      });
}

// Upper bound of the elements that ApplyFactors and Reorder allocate: a tensor and, for a mode between others, two
// copies as matrices.
int64_t ModeScratchElements(absl::Span<const int64_t> sizes) { return (sizes.size() > 2 ? 3 : 1) * ElementsOf(sizes); }

// Text of the options, on all of which answers depend. The sides are omitted for a layer whose sides are d_out and
// d_in. The default precision is the backend's, and a state may move to another one.
std::string StateText(const SoapConfig& c, const LayerSpec& layer, const SoapSides& sides) {
  const bool is_matrix = sides.sizes == std::vector<int64_t>{layer.d_out, layer.d_in};
  return absl::StrFormat(
      "%srule %d momentum %.17g second_moment_decay %.17g covariance_decay %.17g epsilon %.17g refresh_interval %d "
      "max_factor_dim %d%s",
      is_matrix ? "" : absl::StrCat("sides ", sides.Text(), " "), static_cast<int>(c.rule), c.momentum,
      c.second_moment_decay, c.covariance_decay, c.epsilon, c.refresh_interval, c.max_factor_dim,
      c.precision ? absl::StrCat(" precision ", static_cast<int>(*c.precision)) : "");
}

class SoapState final : public LayerState {
 public:
  SoapState(const SoapConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config),
        layer_(layer),
        sides_(config.Sides(layer)),
        precision_(config.PrecisionOn(backend)),
        backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(held_, MakeParts());
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method soap: expected no statistics");
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    // Works on copies, so that a failure leaves the state unchanged. An empty matrix in `next` stands for the held one.
    Parts next = Unchanged();
    if (config_.rule == SoapRule::kSoap && version_ > 0) {
      PRECONDOR_RETURN_IF_ERROR(SoapStep(d, next, u));
    } else {
      PRECONDOR_RETURN_IF_ERROR(ExpectLearnableGradient(layer_, d, backend_));
      PRECONDOR_RETURN_IF_ERROR(config_.rule == SoapRule::kSoap ? FirstStep(d, next) : ShampooStep(d, next));
      PRECONDOR_RETURN_IF_ERROR(FiniteAnswer(next, version_ + 1, u));
    }
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      Take(next.sides[mode].covariance, held_.sides[mode].covariance);
      Take(next.sides[mode].factor, held_.sides[mode].factor);
    }
    Take(next.momentum, held_.momentum);
    Take(next.second, held_.second);
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    return FiniteAnswer(Unchanged(), version_, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kSoapTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText(config_, layer_, sides_));
    out.Integer(version_);
    for (const DeviceMatrix* matrix : held_.All()) PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, matrix->view()));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override { return OfLayer(layer_, TakeOver(bytes)); }

  bool ready() const override { return true; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override {
    int64_t sum = 0;
    for (const DeviceMatrix* matrix : held_.All()) sum += matrix->view().size() * kElementBytes;
    return sum;
  }
  Summary summary() const override {
    const std::vector<bool>& dense = sides_.has_factor;
    Summary summary;
    summary.input_representation =
        std::find(dense.begin() + (dense.size() > 1 ? 1 : 0), dense.end(), true) != dense.end() ? "dense" : "none";
    summary.output_representation = dense.front() ? "dense" : "none";
    return summary;
  }

 private:
  struct Parts {
    std::vector<SoapSide> sides;
    DeviceMatrix momentum;  // SOAP: in the eigenbasis
    DeviceMatrix second;    // SOAP: Adam's second moment, in the eigenbasis

    std::vector<const DeviceMatrix*> All() const {
      std::vector<const DeviceMatrix*> all;
      for (const SoapSide& side : sides) all.insert(all.end(), {&side.covariance, &side.factor});
      all.insert(all.end(), {&momentum, &second});
      return all;
    }
  };

  Parts Unchanged() const {
    Parts parts;
    parts.sides.resize(sides_.sizes.size());
    return parts;
  }
  static void Take(DeviceMatrix& from, DeviceMatrix& to) {
    if (!from.empty()) to = std::move(from);
  }
  // Returns the matrix that is held once `next` is adopted.
  static const DeviceMatrix& Of(const DeviceMatrix& next, const DeviceMatrix& held) {
    return next.empty() ? held : next;
  }
  std::vector<ConstMatrixView> Factors(const Parts& next) const {
    std::vector<ConstMatrixView> factors;
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      factors.push_back(Of(next.sides[mode].factor, held_.sides[mode].factor).view());
    }
    return factors;
  }

  absl::StatusOr<DeviceMatrix> AllocateTensor() const {
    return backend_.AllocateScratch(sides_.sizes[0], sides_.elements() / sides_.sizes[0]);
  }
  MatrixView AsMatrix(DeviceMatrix& tensor) const { return MatrixView(tensor.view().data, layer_.d_out, layer_.d_in); }

  absl::StatusOr<Parts> MakeParts() const {
    Parts parts;
    for (size_t mode = 0; mode < sides_.sizes.size(); ++mode) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.sides.emplace_back(),
                                 MakeSoapSide(sides_.sizes[mode], sides_.has_factor[mode], backend_));
    }
    const int64_t rows = sides_.sizes[0], cols = sides_.elements() / rows;
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, backend_.Allocate(rows, cols));
    if (config_.rule == SoapRule::kSoap) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.second, backend_.Allocate(rows, cols));
    }
    return parts;
  }

  // Returns the gradient as a tensor, and computes the covariances that include it.
  absl::StatusOr<DeviceMatrix> TakeIn(ConstMatrixView d, Parts& next) const {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, AllocateTensor());
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(d, AsMatrix(x)));
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      const SoapSide& held = held_.sides[mode];
      if (!held.present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix along, ModeMatrix::Of(sides_.sizes, mode, x.view(), backend_));
      PRECONDOR_ASSIGN_OR_RETURN(next.sides[mode].covariance,
                                 NextCovariance(held, along, config_.covariance_decay, precision_, backend_));
    }
    return x;
  }

  // The first gradient only makes the bases, so that no gradient is projected on a basis that it is part of. The
  // published code refreshes the bases after the step at which this is due. Here the refresh runs before the next step,
  // so that an answer is a function of the state that it leaves.
  absl::Status FirstStep(ConstMatrixView d, Parts& next) const {
    PRECONDOR_RETURN_IF_ERROR(TakeIn(d, next).status());
    for (SoapSide& side : next.sides) {
      if (!side.present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(side.factor, Eigenbasis(side.covariance.view(), backend_));
    }
    return absl::OkStatus();
  }

  // Requests |d|^2 and |u|^2 together at its end: a gradient that is refused changes nothing but copies and u.
  absl::Status SoapStep(ConstMatrixView d, Parts& next, MatrixView u) const {
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, CloneMatrix(held_.momentum.view(), backend_));
    PRECONDOR_ASSIGN_OR_RETURN(next.second, CloneMatrix(held_.second.view(), backend_));
    const uint64_t steps = version_ - 1;
    if (steps > 0 && steps % static_cast<uint64_t>(config_.refresh_interval) == 0)
      PRECONDOR_RETURN_IF_ERROR(Refresh(next));
    double of_d = 0, of_u = 0;
    Backend::Batch batch(backend_);
    PRECONDOR_RETURN_IF_ERROR(UpdateMoments(d, next));
    PRECONDOR_RETURN_IF_ERROR(Answer(next, version_ + 1, u));
    PRECONDOR_RETURN_IF_ERROR(backend_.SquaredNorm(d, &of_d));
    PRECONDOR_RETURN_IF_ERROR(backend_.SquaredNorm(u, &of_u));
    PRECONDOR_RETURN_IF_ERROR(batch.Finish());
    PRECONDOR_RETURN_IF_ERROR(ExpectLearnableNorm(layer_, of_d));
    return ExpectFinite(of_u);
  }

  // Updates the covariances too.
  absl::Status UpdateMoments(ConstMatrixView d, Parts& next) const {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, TakeIn(d, next));
    PRECONDOR_RETURN_IF_ERROR(ApplyFactors(sides_.sizes, Factors(next), Transpose::kNo, precision_, x, backend_));
    const double beta1 = config_.momentum, beta2 = config_.second_moment_decay;
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 - beta1, x.view(), beta1, next.momentum.view()));
    return backend_.MultiplyElements(1 - beta2, x.view(), x.view(), beta2, next.second.view());
  }

  // Refreshes all bases by one step of orthogonal iteration each. The momentum is transformed to the new bases; the
  // second moment is only reordered, as in the published code.
  absl::Status Refresh(Parts& next) const {
    std::vector<std::vector<int64_t>> orders(next.sides.size());
    Backend::Batch batch(backend_);
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      const SoapSide& held = held_.sides[mode];
      if (!held.present()) continue;
      orders[mode].resize(static_cast<size_t>(sides_.sizes[mode]));
      PRECONDOR_ASSIGN_OR_RETURN(next.sides[mode].factor,
                                 backend_.AllocateScratch(sides_.sizes[mode], sides_.sizes[mode]));
      PRECONDOR_RETURN_IF_ERROR(backend_.OrthogonalIteration(
          held.covariance.view(), held.factor.view(), next.sides[mode].factor.view(), absl::MakeSpan(orders[mode])));
    }
    PRECONDOR_RETURN_IF_ERROR(batch.Finish());
    PRECONDOR_RETURN_IF_ERROR(
        ApplyFactors(sides_.sizes, Factors(Unchanged()), Transpose::kYes, precision_, next.momentum, backend_));
    PRECONDOR_RETURN_IF_ERROR(
        ApplyFactors(sides_.sizes, Factors(next), Transpose::kNo, precision_, next.momentum, backend_));
    return Reorder(sides_.sizes, orders, next.second, backend_);
  }

  absl::Status ShampooStep(ConstMatrixView d, Parts& next) const {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix x, TakeIn(d, next));
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, backend_.AllocateScratch(x.rows(), x.cols()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Combine(1 - config_.momentum, x.view(), config_.momentum, held_.momentum.view(),
                                               next.momentum.view()));
    if (version_ % static_cast<uint64_t>(config_.refresh_interval) != 0) return absl::OkStatus();
    const auto factors = static_cast<double>(std::count(sides_.has_factor.begin(), sides_.has_factor.end(), true));
    for (SoapSide& side : next.sides) {
      if (!side.present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(side.factor,
                                 InverseRoot(side.covariance.view(), 1 / Debias(config_.covariance_decay, version_ + 1),
                                             config_.epsilon, 1 / (2 * factors), backend_));
    }
    return absl::OkStatus();
  }

  static double Debias(double decay, uint64_t n) { return 1 - std::pow(decay, static_cast<double>(n)); }

  // Computes the answer to the n-th gradient from the state that `next` makes, which includes that gradient.
  absl::Status Answer(const Parts& next, uint64_t n, MatrixView u) const {
    const bool soap = config_.rule == SoapRule::kSoap;
    if (soap && n == 1) return backend_.Axpby(0.0, u, 0.0, u);
    const ConstMatrixView momentum = Of(next.momentum, held_.momentum).view();
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, AllocateTensor());
    if (soap) {
      const double scale = std::sqrt(Debias(config_.second_moment_decay, n - 1)) / Debias(config_.momentum, n - 1);
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DivideByRoot(scale, momentum, Of(next.second, held_.second).view(), config_.epsilon, x.view()));
    } else {
      PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 / Debias(config_.momentum, n), momentum, 0.0, x.view()));
    }
    const Transpose back = soap ? Transpose::kYes : Transpose::kNo;  // roots are symmetric
    PRECONDOR_RETURN_IF_ERROR(ApplyFactors(sides_.sizes, Factors(next), back, precision_, x, backend_));
    return backend_.Copy(AsMatrix(x), u);
  }

  // Computes the answer. Returns FailedPrecondition if it is not finite.
  absl::Status FiniteAnswer(const Parts& next, uint64_t n, MatrixView u) const {
    PRECONDOR_RETURN_IF_ERROR(Answer(next, n, u));
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(u, u));
    return ExpectFinite(square);
  }
  absl::Status ExpectFinite(double square) const {
    if (std::isfinite(square)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer_.name, ": expected |U| within f32, got NaN or infinity"));
  }

  absl::Status TakeOver(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kSoapTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_, layer_, sides_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(Parts parts, MakeParts());
    for (size_t mode = 0; mode < parts.sides.size(); ++mode) {
      SoapSide& side = parts.sides[mode];
      PRECONDOR_RETURN_IF_ERROR(in.Matrix(absl::StrCat("covariance ", mode), backend_, side.covariance.view()));
      PRECONDOR_RETURN_IF_ERROR(in.Matrix(absl::StrCat("factor ", mode), backend_, side.factor.view()));
    }
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, parts.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("second moment", backend_, parts.second.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    held_ = std::move(parts);
    version_ = version;
    return absl::OkStatus();
  }

  const SoapConfig config_;
  const LayerSpec layer_;
  const SoapSides sides_;
  const ProductPrecision precision_;
  Backend& backend_;
  Parts held_;
  uint64_t version_ = 0;  // gradients that have updated the state
};

class Soap final : public Method {
 public:
  explicit Soap(const SoapConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kSoapTraits; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    const SoapSides sides = config_.Sides(layer);
    return (Moments() * sides.elements() + 2 * sides.FactorElements()) * kElementBytes;
  }

  // Copies of moments, covariances and factors; the gradient or the answer as a tensor; the scratch of its products.
  // Besides, one after the other: two matrices of a decomposition and its scratch; two of each factor for a refresh in
  // batches, and two more that unused places share (RunOrthogonalIterations); the result of unused places
  // in batches of products.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const SoapSides sides = config_.Sides(layer);
    int64_t longest = 0;
    for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
      if (sides.has_factor[mode]) longest = std::max(longest, sides.sizes[mode]);
    }
    const int64_t elements = sides.elements(), square = longest * longest;
    const int64_t most = std::max({2 * square * kElementBytes + SymmetricEigenScratchBytes(longest),
                                   2 * (sides.FactorElements() + square) * kElementBytes, elements * kElementBytes});
    return ((Moments() + 1) * elements + ModeScratchElements(sides.sizes) + 2 * sides.FactorElements()) *
               kElementBytes +
           most;
  }

  // Per gradient two products per side and two covariances, and a share of the refresh: three products, and a
  // decomposition that costs about nine.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const SoapSides sides = config_.Sides(layer);
    const auto elements = static_cast<double>(sides.elements());
    double flops = 8 * elements;
    for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
      if (!sides.has_factor[mode]) continue;
      const auto d = static_cast<double>(sides.sizes[mode]);
      flops += (config_.rule == SoapRule::kSoap ? 6 : 4) * elements * d +
               12 * d * d * d / static_cast<double>(config_.refresh_interval);
    }
    return flops;
  }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    return InitState<SoapState>(config_, layer, backend);
  }

 private:
  int64_t Moments() const { return config_.rule == SoapRule::kSoap ? 2 : 1; }

  const SoapConfig config_;
};

}  // namespace

int64_t SoapSides::FactorElements() const {
  int64_t sum = 0;
  for (size_t mode = 0; mode < sizes.size(); ++mode) sum += has_factor[mode] ? sizes[mode] * sizes[mode] : 0;
  return sum;
}

std::string SoapSides::Text() const {
  std::string text;
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    absl::StrAppend(&text, mode > 0 ? ", " : "", sizes[mode], has_factor[mode] ? "" : " without factor");
  }
  return text;
}

SoapSides SoapConfig::Sides(const LayerSpec& layer) const {
  const bool any = precondition_1d || TensorDims(layer).size() > 1;
  SoapSides sides;
  sides.sizes = merging.Sides(layer, max_factor_dim);
  for (const int64_t size : sides.sizes) sides.has_factor.push_back(any && size > 1 && size <= max_factor_dim);
  return sides;
}

absl::StatusOr<std::unique_ptr<Method>> MakeSoap(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const SoapConfig parsed, ParseOptions(config, ReadSoapConfig));
  return std::unique_ptr<Method>(std::make_unique<Soap>(parsed));
}

}  // namespace precondor
