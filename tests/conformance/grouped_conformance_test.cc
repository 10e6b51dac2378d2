// SPDX-License-Identifier: Apache-2.0
// Operations run together give to the bit what each gives alone, whatever they are run with; and so do methods whose
// layers run in step (kernels/grouping/grouping_backend.h), in a number of calls that does not grow with the layers.
// On CUDA this holds for all but batched eigendecompositions of cuSOLVER, whose documentation promises no bits in
// company: those are held to their accuracy, and a line says how many bits differed. Products by cuBLAS, Newton-Schulz
// and orthogonal iteration have batches of a fixed size instead (docs/develop/adr/0031, 0032 and 0034).
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/casts.h"

#include "kernels/grouping/forwarding_backend.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "kernels/operation.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/counting_backend.h"
#include "tests/support/method_driver.h"
#include "tests/support/task_group.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

bool SameBits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

double Distance(const reference::Dense& x, const reference::Dense& y) {
  return reference::FrobeniusNorm(reference::Combination(1, x, -1, y));
}

// Whether the backend promises the operation the same bits in whatever company (docs/develop/adr/0014).
bool PromisesBits(const Backend& backend, const Operation& operation) {
  const auto* const eigen = operation.As<operation::SymmetricEigen>();
  return backend.name() != "cuda" || eigen == nullptr || eigen->q.rows > 512;
}

// One operation with operands of its own, which it can be given anew.
class Case {
 public:
  Case(Backend& backend, size_t kind, std::mt19937_64& random) : backend_(backend), random_(random) {
    (this->*kMakers[kind])(Size(), Size());
    EXPECT_EQ(operation_.kind(), kind);
  }
  static constexpr size_t kKinds = std::variant_size_v<decltype(Operation::what)>;

  const Operation& operation() const { return operation_; }

  // Before the first run, and between two.
  void Restore() {
    for (size_t i = 0; i < matrices_.size(); ++i) Upload(hosts_[i], matrices_[i].view());
    if (!symmetric_.empty()) {
      const MatrixView raw = symmetric_.raw();
      Upload(std::vector<float>(raw.size(), 0.0f), raw);
    }
    std::fill(numbers_.begin(), numbers_.end(), -1.0);
    std::fill(ranks_.begin(), ranks_.end(), -1);
  }
  // All that it may have changed.
  std::vector<float> Outcome() {
    std::vector<float> all;
    for (const DeviceMatrix& x : matrices_) Append(x.view(), all);
    if (!symmetric_.empty()) Append(symmetric_.raw(), all);
    all.insert(all.end(), ranks_.begin(), ranks_.end());
    for (const double number : numbers_) {
      const auto halves = absl::bit_cast<std::array<float, 2>>(number);
      all.insert(all.end(), halves.begin(), halves.end());
    }
    return all;
  }
  // In place of the same bits as alone: the accuracy that either answer has, as in backend_conformance_test.
  void ExpectAccurate() {
    const auto& eigen = std::get<operation::SymmetricEigen>(operation_.what);
    const int64_t n = eigen.q.rows;
    const auto read = [&](ConstMatrixView x) {
      std::vector<float> host;
      Append(x, host);
      reference::Dense dense(n, n);
      std::copy(host.begin(), host.end(), dense.data.begin());
      return dense;
    };
    reference::Dense a = read(eigen.a), q = read(eigen.q), scaled = q;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        if (j > i) a.at(i, j) = a.at(j, i);
        scaled.at(i, j) *= eigen.values[i];
      }
    }
    const double tolerance = 2.0 * static_cast<double>(n) * std::numeric_limits<float>::epsilon();
    EXPECT_LE(Distance(reference::Product(reference::Transposed(q), scaled), a),
              tolerance * (1 + reference::FrobeniusNorm(a)));
    EXPECT_LE(Distance(reference::Product(q, reference::Transposed(q)), reference::Identity(n)), tolerance);
  }

 private:
  // In the order of Operation's kinds, for sizes m and n.
  using Maker = void (Case::*)(int64_t m, int64_t n);
  static const std::array<Maker, kKinds> kMakers;

  void MakeElementwise(int64_t m, int64_t n) {
    const auto kind = static_cast<ElementwiseKind>(random_() % 13);
    if (kind == ElementwiseKind::kGather) {
      int64_t rows = Size(), columns = Size();
      operation_.what = operation::Elementwise{.kind = kind,
                                               .rows = MaybeIndices(rows, m),
                                               .columns = MaybeIndices(columns, n),
                                               .x = Add(m, n),
                                               .y = Add(rows, columns)};
      return;
    }
    operation::Elementwise e{.kind = kind, .alpha = Number(), .beta = MaybeZero()};
    switch (kind) {
      case ElementwiseKind::kScaleRows:
        e.scales = Numbers(m);
        break;
      case ElementwiseKind::kScaleColumns:
        e.scales = Numbers(n);
        break;
      case ElementwiseKind::kScaleBothSides:
        m = n;
        e.scales = Numbers(n);
        break;
      case ElementwiseKind::kPackRow:
        e.row = static_cast<int64_t>(random_() % n);
        m = 1;
        break;
      case ElementwiseKind::kDivideByOuter:
        e.scales = Numbers(m);
        e.column_scales = Numbers(n);
        e.beta = 100.0;
        break;
      case ElementwiseKind::kDivideByRoot:
        e.beta = 1e-3;
        [[fallthrough]];
      case ElementwiseKind::kAxpby:
      case ElementwiseKind::kMultiply: {
        const MatrixView v = Add(m, n);
        EXPECT_TRUE(backend_.MultiplyElements(1.0, v, v, 0.0, v).ok());
        Remember(v);
        e.v = v;
        break;
      }
      default:
        m = n;
    }
    const int64_t packed = n * (n + 1) / 2;
    const bool packs = kind == ElementwiseKind::kPackLower || kind == ElementwiseKind::kPackRow;
    e.x = kind == ElementwiseKind::kUnpackLower ? Add(1, packed) : Add(m, n);
    e.y = packs ? Add(1, packed) : Add(m, n);
    operation_.what = e;
  }
  void MakeFillNormal(int64_t m, int64_t n) {
    operation_.what = operation::FillNormal{CounterRandom({random_()}), Add(m, n)};
  }
  void MakeDot(int64_t m, int64_t n) { operation_.what = operation::Dot{Add(m, n), Add(m, n), Out(1).data()}; }
  void MakeAbsoluteSum(int64_t m, int64_t n) { operation_.what = operation::AbsoluteSum{Add(m, n), Out(1).data()}; }
  void MakeAbsoluteMaximum(int64_t m, int64_t n) {
    operation_.what = operation::AbsoluteMaximum{Add(m, n), Out(1).data()};
  }
  void MakeDiagonal(int64_t m, int64_t) { operation_.what = operation::Diagonal{Add(m, m), Out(m)}; }
  void MakeRowSquaredNorms(int64_t m, int64_t n) { operation_.what = operation::RowSquaredNorms{Add(m, n), Out(m)}; }
  void MakeColumnSquaredNorms(int64_t m, int64_t n) {
    const int64_t rows = random_() % 4 == 0 ? 600 + m : m;  // in several pieces
    operation_.what = operation::ColumnSquaredNorms{Add(rows, n), Out(n)};
  }
  void MakeGemm(int64_t m, int64_t n) {
    const int64_t inner = Size();
    const Transpose ta = MaybeTransposed(), tb = MaybeTransposed();
    const MatrixView a = ta == Transpose::kYes ? Add(inner, m) : Add(m, inner);
    const MatrixView b = tb == Transpose::kYes ? Add(n, inner) : Add(inner, n);
    const ProductPrecision precision = static_cast<ProductPrecision>(random_() % 4);
    operation_.what = operation::Gemm{Number(), a, ta, b, tb, MaybeZero(), Add(m, n), precision};
  }
  void MakeTriangularMultiply(int64_t m, int64_t n) {
    const From side = random_() % 2 == 0 ? From::kLeft : From::kRight;
    const int64_t of = side == From::kLeft ? m : n;
    operation_.what = operation::TriangularMultiply{side, Add(of, of), MaybeTransposed(), Add(m, n)};
  }
  void MakeTriangularSolve(int64_t m, int64_t n) {
    const From side = random_() % 2 == 0 ? From::kLeft : From::kRight;
    const int64_t of = side == From::kLeft ? m : n;
    const MatrixView a = Add(of, of);
    EXPECT_TRUE(backend_.AddDiagonal(100.0, a).ok());
    Remember(a);
    operation_.what = operation::TriangularSolve{side, a, MaybeTransposed(), Add(m, n)};
  }
  void MakeSpdInverse(int64_t m, int64_t) {
    const MatrixView x = Add(m, m), a = Add(m, m);
    // Not every one has an inverse.
    EXPECT_TRUE(backend_.Gemm(1.0, x, Transpose::kNo, x, Transpose::kYes, 0.0, a).ok());
    EXPECT_TRUE(backend_.AddDiagonal(random_() % 4 == 0 ? -1e6 : 1.0, a).ok());
    Remember(a);
    operation_.what = operation::SpdInverse{a, a};
  }
  void MakeSymmetricEigen(int64_t, int64_t) {
    // The sizes are few, so that some are alike, and one is none of a batch's; not every matrix is finite.
    const std::array<int64_t, 4> sizes = {1, 7, 33, 515};
    const int64_t of_large = random_() % 8 == 0 ? 4 : 3, size = sizes[random_() % static_cast<uint64_t>(of_large)];
    const MatrixView a = Add(size, size), q = Add(size, size);
    if (random_() % 5 == 0) {
      hosts_[0][random_() % 2 == 0 ? 0 : hosts_[0].size() - 1] = random_() % 2 == 0 ? NAN : INFINITY;
    }
    operation_.what = operation::SymmetricEigen{a, Out(size), q};
  }
  void MakeOrthonormalizeRows(int64_t m, int64_t n) {
    const MatrixView a = Add(std::min(m, n), std::max(m, n)), q = Add(a.rows, a.cols);
    if (random_() % 5 == 0) hosts_[0][0] = NAN;
    operation_.what = operation::OrthonormalizeRows{a, q};
  }
  void MakeSymmetricUpdateMultiply(int64_t, int64_t n) {
    const int64_t p = random_() % 3, k = random_() % 4;
    symmetric_ = backend_.AllocateSymmetric(n, SymmetricStorage::kF32).value();
    const MatrixView rows = Add(p, n), v = Add(k, n), y = Add(k, n);
    operation_.what = operation::SymmetricUpdateMultiply{
        0.5 + 0.1 * Number(), 0.25, Numbers(p), rows, symmetric_.raw(), n, SymmetricStorage::kF32, v, y};
  }
  void MakeSymmetricExpand(int64_t, int64_t n) {
    const MatrixView x = Add(n, n);
    operation_.what = operation::SymmetricExpand{InTiles(n, left_), x};
  }
  void MakeLowRankCore(int64_t m, int64_t) {
    const MatrixView gram = Add(1, m * (m + 1) / 2), core = Add(m, m);
    const MatrixView packed = random_() % 2 == 0 ? Add(1, m * (m + 1) / 2) : MatrixView();
    // I + s G s is positive definite for small roots; for others mostly not.
    std::vector<double>& roots = kept_.emplace_back();
    for (int64_t i = 0; i < m; ++i) roots.push_back((random_() % 8 == 0 ? 3 : .02) * std::abs(Number()));
    operation_.what = operation::LowRankCore{roots, gram, core, packed};
  }
  void MakeLowRankAppend(int64_t, int64_t n) {
    const int64_t d = Size(), k = 1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(std::min<int64_t>(n, 9)));
    const MatrixView rows = Add(k, d), vectors = Add(n, d), gram = Add(1, n * (n + 1) / 2);
    std::vector<int64_t>& slots = indices_.emplace_back();
    for (int64_t slot = 0; slot < n; ++slot) {  // k of n
      const int64_t wanted = k - static_cast<int64_t>(slots.size());
      if (static_cast<int64_t>(random_() % static_cast<uint64_t>(n - slot)) < wanted) slots.push_back(slot);
    }
    operation_.what = operation::LowRankAppend{Numbers(k), rows, slots, vectors, gram};
  }
  void MakeLowRankPrecondition(int64_t m, int64_t n) {
    // Long enough, now and then, for products in several parts.
    const int64_t inner = Size(), rows = random_() % 4 == 0 ? 300 + m : m;
    const int64_t p = static_cast<int64_t>(random_() % 3) * n / 4, q = static_cast<int64_t>(random_() % 3) * 5;
    operation::LowRankPrecondition product{
        {Number(), Add(p, rows), Add(p, p)}, {Number(), Add(q, inner), Add(q, q)}, Add(rows, inner), Add(rows, inner)};
    product.precision = static_cast<ProductPrecision>(random_() % 3);
    if (random_() % 3 != 0) product.squares = Out(2);
    operation_.what = product;
  }
  void MakeDensePrecondition(int64_t m, int64_t n) {
    operation::DensePrecondition product;
    product.l = random_() % 2 == 0 ? SymmetricForm(Add(m, m)) : InTiles(m, left_);
    product.r = random_() % 2 == 0 ? SymmetricForm(Add(n, n)) : InTiles(n, right_);
    product.d = Add(m, n);
    product.u = Add(m, n);
    const ProductPrecision precision = static_cast<ProductPrecision>(random_() % 3);
    if (backend_.SupportsPrecision(precision)) product.precision = precision;
    if (random_() % 3 != 0) product.squares = Out(2);
    operation_.what = product;
  }
  void MakeNewtonSchulz(int64_t m, int64_t n) {
    operation::NewtonSchulz step;
    step.d = Add(m, n);
    if (random_() % 3 != 0) {
      step.momentum = Add(m, n);
      step.beta = 0.9;
      step.next = Add(m, n);
      if (random_() % 2 == 0) step.lookahead = Add(m, n);
    }
    step.steps = 1 + static_cast<int64_t>(random_() % 3);
    step.epsilon = 1e-7;
    step.scale = std::abs(Number());
    step.u = Add(m, n);
    step.precision = static_cast<ProductPrecision>(random_() % 3);
    step.squares = Out(3);
    operation_.what = step;
  }
  void MakeOrthogonalIteration(int64_t, int64_t n) {
    // The sizes are few, so that some are alike. A matrix without full rank has some beyond f32; not every matrix is
    // finite.
    n = random_() % 2 == 0 ? 7 : n;
    const MatrixView x = Add(n, n), a = Add(n, n), q = Add(n, n), next = Add(n, n);
    const int64_t rank = random_() % 3 == 0 ? (n + 1) / 2 : n;
    EXPECT_TRUE(
        backend_.Gemm(1.0, x.RowRange(0, rank), Transpose::kYes, x.RowRange(0, rank), Transpose::kNo, 0.0, a).ok());
    EXPECT_TRUE(backend_.OrthonormalizeRows(q, q).ok());
    Remember(a);
    Remember(q);
    if (random_() % 5 == 0) hosts_[1][0] = NAN;
    ranks_.resize(static_cast<size_t>(n));
    operation_.what = operation::OrthogonalIteration{a, q, next, absl::MakeSpan(ranks_)};
  }
  void MakeShermanMorrisonTerms(int64_t, int64_t n) {
    // Some have more vectors or rows than a device may take in one; not every product is finite.
    const int64_t p = random_() % 5 == 0 ? 40 : static_cast<int64_t>(random_() % 17);
    const int64_t k = 1 + static_cast<int64_t>(random_() % (random_() % 3 == 0 ? 20 : 2));
    std::vector<double>& weights = kept_.emplace_back();
    for (int64_t i = 0; i < p; ++i) weights.push_back(std::abs(Number()));
    operation::ShermanMorrisonTerms terms;
    terms.h = SymmetricForm(Number(), 3 + Number(), weights, Add(p, n));
    terms.factor = Number();
    terms.v = Add(k, n);
    terms.y = Add(k, n);
    terms.terms = Add(k, n);
    if (random_() % 5 == 0) hosts_[1][0] = INFINITY;
    if (random_() % 3 != 0) terms.squares = Out(n);
    operation_.what = terms;
  }

  // Zeros in tiles with a shift and terms.
  SymmetricForm InTiles(int64_t n, SymmetricMatrix& tiles) {
    const SymmetricStorage storage =
        backend_.AllocateSymmetric(n, SymmetricStorage::kF16).ok() ? SymmetricStorage::kF16 : SymmetricStorage::kF32;
    tiles = backend_.AllocateSymmetric(n, storage).value();
    const MatrixView rows = Add(static_cast<int64_t>(random_() % 4), n);
    return SymmetricForm(Number(), Number(), Numbers(rows.rows), rows, tiles);
  }
  double MaybeZero() { return random_() % 2 == 0 ? 0.0 : Number(); }
  Transpose MaybeTransposed() { return random_() % 2 == 0 ? Transpose::kYes : Transpose::kNo; }
  absl::Span<const double> Numbers(int64_t count) {
    std::vector<double>& numbers = kept_.emplace_back();
    for (int64_t i = 0; i < count; ++i) numbers.push_back(Number());
    return numbers;
  }
  // Sets `count` to `end` if it returns none, which stand for all.
  absl::Span<const int64_t> MaybeIndices(int64_t& count, int64_t end) {
    std::vector<int64_t>& indices = indices_.emplace_back();
    if (random_() % 3 == 0) count = end;
    if (count == end) return indices;
    for (int64_t i = 0; i < count; ++i) indices.push_back(static_cast<int64_t>(random_() % static_cast<uint64_t>(end)));
    return indices;
  }
  // Returns memory for the host's numbers.
  absl::Span<double> Out(int64_t count) {
    numbers_.resize(count);
    return absl::MakeSpan(numbers_);
  }
  int64_t Size() { return 1 + static_cast<int64_t>(random_() % (random_() % 4 == 0 ? 150 : 20)); }
  double Number() { return std::normal_distribution<double>()(random_); }
  MatrixView Add(int64_t rows, int64_t cols) {
    std::vector<float> host(rows * cols);
    for (float& x : host) x = static_cast<float>(Number());
    matrices_.push_back(backend_.Allocate(rows, cols).value());
    hosts_.push_back(std::move(host));
    Upload(hosts_.back(), matrices_.back().view());
    return matrices_.back().view();
  }
  // Keeps the present values, which each run is given anew.
  void Remember(ConstMatrixView x) {
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].view().data != x.data) continue;
      hosts_[i].clear();
      Append(x, hosts_[i]);
    }
  }
  void Upload(const std::vector<float>& host, MatrixView x) {
    EXPECT_TRUE(backend_.Upload(ConstMatrixView(host.data(), x.rows, x.cols), x).ok());
  }
  void Append(ConstMatrixView x, std::vector<float>& to) {
    const size_t begin = to.size();
    to.resize(begin + x.size());
    EXPECT_TRUE(backend_.Download(x, MatrixView(to.data() + begin, x.rows, x.cols)).ok());
  }

  Backend& backend_;
  std::mt19937_64& random_;
  std::vector<DeviceMatrix> matrices_;
  std::vector<std::vector<float>> hosts_;
  SymmetricMatrix symmetric_, left_, right_;
  std::vector<double> numbers_;
  std::vector<int64_t> ranks_;
  std::deque<std::vector<double>> kept_;  // numbers that the operation takes
  std::deque<std::vector<int64_t>> indices_;
  Operation operation_;
};

const std::array<Case::Maker, Case::kKinds> Case::kMakers = {
    &Case::MakeElementwise,         &Case::MakeFillNormal,          &Case::MakeDot,
    &Case::MakeAbsoluteSum,         &Case::MakeAbsoluteMaximum,     &Case::MakeDiagonal,
    &Case::MakeRowSquaredNorms,     &Case::MakeColumnSquaredNorms,  &Case::MakeGemm,
    &Case::MakeTriangularMultiply,  &Case::MakeTriangularSolve,     &Case::MakeSpdInverse,
    &Case::MakeSymmetricEigen,      &Case::MakeOrthonormalizeRows,  &Case::MakeSymmetricUpdateMultiply,
    &Case::MakeSymmetricExpand,     &Case::MakeLowRankCore,         &Case::MakeLowRankAppend,
    &Case::MakeLowRankPrecondition, &Case::MakeDensePrecondition,   &Case::MakeNewtonSchulz,
    &Case::MakeOrthogonalIteration, &Case::MakeShermanMorrisonTerms};

class GroupedConformanceTest : public testing::TestWithParam<size_t> {};

TEST_P(GroupedConformanceTest, GiveWhatEachGivesAlone) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  std::mt19937_64 random(7 + GetParam());
  for (const int count : {1, 2, 13}) {
    std::vector<std::unique_ptr<Case>> cases;
    std::vector<const Operation*> operations;
    std::vector<std::vector<float>> alone;
    std::vector<absl::StatusCode> codes;
    for (int i = 0; i < count; ++i) {
      cases.push_back(std::make_unique<Case>(*backend, GetParam(), random));
      operations.push_back(&cases.back()->operation());
      cases.back()->Restore();
      absl::Status status;
      backend->Run({&operations.back(), 1}, {&status, 1});
      codes.push_back(status.code());
      alone.push_back(cases.back()->Outcome());
      cases.back()->Restore();
    }
    std::vector<absl::Status> statuses(count);
    backend->Run(operations, absl::MakeSpan(statuses));
    int differ = 0;
    for (int i = 0; i < count; ++i) {
      EXPECT_EQ(statuses[i].code(), codes[i]) << statuses[i];
      if (SameBits(cases[i]->Outcome(), alone[i])) continue;
      SCOPED_TRACE(testing::Message() << i << " of " << count);
      EXPECT_TRUE(statuses[i].ok() && !PromisesBits(*backend, *operations[i])) << "promised the same bits";
      if (!PromisesBits(*backend, *operations[i])) cases[i]->ExpectAccurate();
      ++differ;
    }
    if (differ > 0) std::printf("kind %zu: %d of %d have other bits in company\n", GetParam(), differ, count);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupedConformanceTest, testing::Range<size_t>(0, Case::kKinds));

// --- methods
// ----------------------------------------------------------------------------------------------------------

// Layers of one method, of one shape or of as many as they are.
class Company {
 public:
  Company(const MethodConfig& config, int layers, bool alike = false) : method_(MakeMethod(config).value()) {
    std::unique_ptr<Backend> device = MakeTestBackend();
    const auto sees = [this, &backend = *device](absl::Span<const Operation* const> together) {
      for (const Operation* operation : together) {
        if (together.size() > 1 && !PromisesBits(backend, *operation)) promises_bits_ = false;
      }
    };
    backend_ = MakeGroupingBackend(std::make_unique<CountingBackend>(std::move(device), calls_, sees), {});
    tasks_ = std::make_unique<TaskGroup>(*backend_);
    for (int i = 0; i < layers; ++i) {
      const LayerSpec layer =
          alike ? LayerSpec{"any", 11, 17, false} : LayerSpec{"any", 5 + 3 * i, 9 + 2 * i, i % 2 == 0};
      layers_.push_back(std::make_unique<Layer>(layer, *method_, *backend_));
    }
  }

  // An update and a gradient of each layer, all in tasks at the same time, or one after the other.
  void StepTogether() {
    tasks_->Run(static_cast<int>(layers_.size()), [&](int layer) { layers_[static_cast<size_t>(layer)]->Step(); });
  }
  void StepAlone() {
    for (const auto& layer : layers_) layer->Step();
  }

  int TakeCalls() { return calls_.exchange(0); }
  // Whether the backend promises all that has run together the bits that it gives alone.
  bool promises_bits() const { return promises_bits_; }
  std::vector<reference::Vector> Answers() const {
    std::vector<reference::Vector> all;
    for (const auto& layer : layers_) all.insert(all.end(), layer->answers.begin(), layer->answers.end());
    return all;
  }
  std::vector<std::string> States() {
    std::vector<std::string> all;
    for (const auto& layer : layers_) all.push_back(layer->driver.state().Save().value());
    return all;
  }

 private:
  struct Layer {
    Layer(const LayerSpec& spec, const Method& method, Backend& backend)
        : spec(spec),
          statistics(method.needs_statistics()),
          driver(method, spec, backend),
          a(Stream::kCorrelated, spec.d_in, 1),
          g(Stream::kHeavyTailed, spec.d_out, 2) {}
    void Step() {
      if (statistics) {
        const absl::Status status = driver.Update(a.Next(2), g.Next(2));
        EXPECT_TRUE(status.ok()) << status;
      }
      answers.push_back(driver.Precondition(a.Gaussian(spec.d_out * spec.d_in)).value());
    }
    const LayerSpec spec;
    const bool statistics;
    LayerDriver driver;
    VectorStream a, g;
    std::vector<reference::Vector> answers;
  };

  std::atomic<int> calls_ = 0;
  std::atomic<bool> promises_bits_ = true;
  const std::unique_ptr<Method> method_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<TaskGroup> tasks_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

class MethodsInCompanyTest : public testing::TestWithParam<MethodConfig> {};

TEST_P(MethodsInCompanyTest, GiveTheBitsThatTheyGiveAlone) {
  constexpr int kLayers = 4, kSteps = 20;  // terms of two vectors a step have moved into the matrix twice
  Company together(GetParam(), kLayers), alone(GetParam(), kLayers);
  for (int step = 0; step < kSteps; ++step) {
    together.StepTogether();
    alone.StepAlone();
  }
  const std::vector<reference::Vector> answers = together.Answers(), expected = alone.Answers();
  if (together.promises_bits()) {
    EXPECT_EQ(answers, expected);
    EXPECT_EQ(together.States(), alone.States());
    return;
  }
  // Eigenvectors with other last bits, 20 times one after the other, in the worst direction.
  double worst = 0;
  ASSERT_EQ(answers.size(), expected.size());
  for (size_t i = 0; i < answers.size(); ++i) worst = std::max(worst, RelativeDifference(answers[i], expected[i]));
  std::printf("%s: bits are not promised in company; answers differ by %.2g\n", GetParam().name.c_str(), worst);
  EXPECT_LE(worst, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Methods, MethodsInCompanyTest,
    testing::Values(
        MethodConfig{"mkor", {{"rank", 4.0}}}, MethodConfig{"mkor", {{"rank", 64.0}}},
        MethodConfig{"mkor", {{"rule", std::string("BLEND")}, {"rank", 4.0}}},
        MethodConfig{"mkor", {{"rule", std::string("BLEND")}, {"representation", std::string("DENSE")}}},
        MethodConfig{"mkor", {{"rule", std::string("REFERENCE")}, {"representation", std::string("DENSE")}}},
        MethodConfig{"mkor", {{"rule", std::string("PUBLISHED")}, {"representation", std::string("DENSE")}}},
        MethodConfig{"mkor", {{"representation", std::string("DENSE")}}}, MethodConfig{"eva", {}},
        MethodConfig{"kfac", {{"inv_update_steps", std::string("2")}}}, MethodConfig{"kron", {}},
        MethodConfig{"soap", {}}, MethodConfig{"muon", {}},
        MethodConfig{"muon", {{"input_factor", true}, {"refresh_interval", 3.0}}}));

// Has no terms of vectors of this length while it is told so.
class RefusesTerms final : public ForwardingBackend {
 public:
  RefusesTerms(Backend& inner, int64_t n, const bool& refuses) : ForwardingBackend(inner), n_(n), refuses_(refuses) {}

 private:
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    ForwardingBackend::DoRun(operations, statuses);
    for (size_t i = 0; i < operations.size(); ++i) {
      const auto* const terms = operations[i]->As<operation::ShermanMorrisonTerms>();
      if (refuses_ && terms != nullptr && terms->v.cols == n_) statuses[i] = absl::FailedPreconditionError("refused");
    }
  }

  const int64_t n_;
  const bool& refuses_;
};

// Both sides of a layer ask together: where one has no terms neither changes, and the next update gives the bits of a
// layer that never failed.
TEST(MethodsInCompany, ASideWithoutTermsLeavesBothAlone) {
  const LayerSpec layer{"any", 24, 40, false};
  const MethodConfig config{"mkor", {{"rule", std::string("BLEND")}, {"representation", std::string("DENSE")}}};
  const std::unique_ptr<Method> method = MakeMethod(config).value();
  const std::unique_ptr<Backend> device = MakeTestBackend();
  for (const int64_t without : {layer.d_in, layer.d_out}) {
    for (const int64_t k : {1, 3, 16}) {
      SCOPED_TRACE(testing::Message() << k << " vectors, none of " << without);
      bool refuses = false;
      const std::unique_ptr<Backend> backend =
          MakeGroupingBackend(std::make_unique<RefusesTerms>(*device, without, refuses), {});
      LayerDriver healthy(*method, layer, *backend), troubled(*method, layer, *backend);
      VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
      const int steps = 16 / k + 2;  // the sixteenth term moves all of them into the matrix
      for (int step = 0; step < steps; ++step) {
        const reference::Vectors va = a.Next(k), vg = g.Next(k);
        const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
        Backend::Task task(*backend);
        const reference::Vector before = troubled.Precondition(d).value();
        refuses = true;
        EXPECT_FALSE(troubled.Update(va, vg).ok());
        refuses = false;
        EXPECT_LE(RelativeDifference(*troubled.Precondition(d), before), 1e-6);  // terms may have moved
        ASSERT_TRUE(healthy.Update(va, vg).ok());
        ASSERT_TRUE(troubled.Update(va, vg).ok());
        ASSERT_EQ(*troubled.Precondition(d), *healthy.Precondition(d)) << step;
      }
    }
  }
}

TEST(MethodsInCompany, CallsDoNotGrowWithTheLayers) {
  const auto calls = [](double rank, int layers, bool alike) {
    Company company({"mkor", {{"representation", std::string("LOW_RANK")}, {"rank", rank}}}, layers, alike);
    for (int step = 0; step < 3; ++step) company.StepTogether();
    company.TakeCalls();
    company.StepTogether();
    return company.TakeCalls();
  };
  // A steady step: both sides' lengths, their new columns, cores, products, scale; and three that make room for what
  // the test puts there.
  EXPECT_EQ(calls(64, 1, true), 5 + 3);
  EXPECT_EQ(calls(64, 9, true), 5 + 3);
  // One that recompresses.
  const int of_one = calls(4, 1, true);
  EXPECT_GT(of_one, 5 + 3);
  EXPECT_EQ(calls(4, 9, true), of_one);
  // Other methods recompress at other steps, or have all columns.
  EXPECT_LE(calls(4, 9, false), 3 * of_one);
}

}  // namespace
}  // namespace precondor
