// SPDX-License-Identifier: Apache-2.0
// Operations run together give to the bit what each gives alone, whatever they are run with; and so do methods whose
// layers run in step (kernels/grouping/grouping_backend.h), in a number of calls that does not grow with the layers.
// On CUDA this holds for all but grouped products of cuBLAS and batched eigendecompositions of cuSOLVER, whose
// documentation promises no bits in company: those are held to their accuracy, and a line says how many bits differed.
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <random>
#include <string>
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

// Whether the backend promises the operation the same bits in whatever company: docs/adr/0014 and 0015 say of which it
// does not. F32's dense products here are too small for cuBLAS.
bool PromisesBits(const Backend& backend, const Operation& operation) {
  if (backend.name() != "cuda") return true;
  if (const auto* eigen = std::get_if<Operation::SymmetricEigen>(&operation.what)) return eigen->q.rows > 512;
  const auto* const product = std::get_if<Operation::DensePrecondition>(&operation.what);
  return product == nullptr ||
         (product->precision != ProductPrecision::kBf16 && product->precision != ProductPrecision::kTf32);
}

// One operation with operands of its own, which it can be given anew.
class Case {
 public:
  Case(Backend& backend, size_t kind, std::mt19937_64& random) : backend_(backend), random_(random) {
    const int64_t m = Size(), n = Size(), inner = Size();
    switch (kind) {
      case 0:
        MakeElementwise(static_cast<ElementwiseKind>(random() % 9), m, n);
        break;
      case 1: {
        const bool ta = random() % 2 == 0, tb = random() % 2 == 0;
        const MatrixView a = ta ? Add(inner, m) : Add(m, inner), b = tb ? Add(n, inner) : Add(inner, n), c = Add(m, n);
        operation_.what = Operation::Gemm{Number(),
                                          a,
                                          ta ? Transpose::kYes : Transpose::kNo,
                                          b,
                                          tb ? Transpose::kYes : Transpose::kNo,
                                          random() % 2 == 0 ? 0.0 : Number(),
                                          c};
        break;
      }
      case 2: {
        const int64_t p = random() % 3, k = random() % 4;
        symmetric_ = backend.AllocateSymmetric(n, SymmetricStorage::kF32).value();
        const MatrixView rows = Add(p, n), v = Add(k, n), y = Add(k, n);
        Operation::SymmetricUpdateMultiply update{0.5 + 0.1 * Number(),   0.25, {}, rows, symmetric_.raw(), n,
                                                  SymmetricStorage::kF32, v,    y};
        for (int64_t i = 0; i < p; ++i) update.weights.push_back(Number());
        operation_.what = std::move(update);
        break;
      }
      case 3:
        numbers_.resize(m);
        operation_.what = Operation::RowSquaredNorms{Add(m, n), absl::MakeSpan(numbers_)};
        break;
      case 4: {
        numbers_.resize(1);
        const MatrixView x = Add(m, n), y = Add(m, n);
        operation_.what = Operation::Dot{x, y, numbers_.data()};
        break;
      }
      case 6: {
        const MatrixView gram = Add(1, m * (m + 1) / 2), core = Add(m, m);
        Operation::LowRankCore what{{}, gram, core};
        if (random() % 2 == 0) what.packed = Add(1, m * (m + 1) / 2);
        // I + s G s is positive definite for small roots; for others mostly not.
        for (int64_t i = 0; i < m; ++i) what.roots.push_back((random() % 8 == 0 ? 3 : .02) * std::abs(Number()));
        operation_.what = std::move(what);
        break;
      }
      case 7: {
        const int64_t d = inner,
                      k = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(std::min<int64_t>(n, 9)));
        const MatrixView rows = Add(k, d), vectors = Add(n, d), gram = Add(1, n * (n + 1) / 2);
        Operation::LowRankAppend append{{}, rows, {}, vectors, gram};
        for (int64_t slot = 0; slot < n; ++slot) {  // k of n
          const int64_t wanted = k - static_cast<int64_t>(append.slots.size());
          if (static_cast<int64_t>(random() % static_cast<uint64_t>(n - slot)) < wanted) append.slots.push_back(slot);
        }
        for (int64_t i = 0; i < k; ++i) append.scales.push_back(Number());
        operation_.what = std::move(append);
        break;
      }
      case 8: {
        // Long enough, now and then, for products in several parts.
        const int64_t rows = random() % 4 == 0 ? 300 + m : m, p = static_cast<int64_t>(random() % 3) * n / 4;
        const int64_t q = static_cast<int64_t>(random() % 3) * 5;
        Operation::LowRankPrecondition product{{Number(), Add(p, rows), Add(p, p)},
                                               {Number(), Add(q, inner), Add(q, q)},
                                               Add(rows, inner),
                                               Add(rows, inner)};
        product.precision = static_cast<ProductPrecision>(random() % 4);
        if (random() % 3 != 0) {
          numbers_.resize(2);
          product.squares = absl::MakeSpan(numbers_);
        }
        operation_.what = product;
        break;
      }
      case 9: {
        // Of a few sizes, so that some are alike, and one that is none of a batch's; not every one is finite.
        const std::array<int64_t, 4> sizes = {1, 7, 33, 515};
        const int64_t of_large = random() % 8 == 0 ? 4 : 3, size = sizes[random() % static_cast<uint64_t>(of_large)];
        const MatrixView a = Add(size, size), q = Add(size, size);
        numbers_.resize(size);
        if (random() % 5 == 0) {
          hosts_[0][random() % 2 == 0 ? 0 : hosts_[0].size() - 1] = random() % 2 == 0 ? NAN : INFINITY;
        }
        operation_.what = Operation::SymmetricEigen{a, absl::MakeSpan(numbers_), q};
        break;
      }
      case 10: {
        const int64_t rows = random() % 4 == 0 ? 600 + m : m;  // in several pieces
        numbers_.resize(n);
        operation_.what = Operation::ColumnSquaredNorms{Add(rows, n), absl::MakeSpan(numbers_)};
        break;
      }
      case 11: {
        Operation::DensePrecondition product;
        product.l = Form(m, left_, product.l_weights);
        product.r = Form(n, right_, product.r_weights);
        product.d = Add(m, n);
        product.u = Add(m, n);
        const ProductPrecision precision = static_cast<ProductPrecision>(random() % 4);
        if (backend.KnowsProducts(precision)) product.precision = precision;
        if (random() % 3 != 0) {
          numbers_.resize(2);
          product.squares = absl::MakeSpan(numbers_);
        }
        operation_.what = std::move(product);
        break;
      }
      case 12: {
        // Of more vectors or rows than a device may take in one, now and then; not every product is finite.
        const int64_t p = random() % 5 == 0 ? 40 : static_cast<int64_t>(random() % 17);
        const int64_t k = 1 + static_cast<int64_t>(random() % (random() % 3 == 0 ? 20 : 2));
        Operation::ShermanMorrisonTerms terms;
        terms.h = SymmetricForm(Number(), 3 + Number(), {}, Add(p, n));
        for (int64_t i = 0; i < p; ++i) terms.weights.push_back(std::abs(Number()));
        terms.factor = Number();
        terms.v = Add(k, n);
        terms.y = Add(k, n);
        terms.terms = Add(k, n);
        if (random() % 5 == 0) hosts_[1][0] = INFINITY;
        if (random() % 3 != 0) {
          numbers_.resize(n);
          terms.squares = absl::MakeSpan(numbers_);
        }
        operation_.what = std::move(terms);
        break;
      }
      default: {
        const MatrixView x = Add(m, m), a = Add(m, m);
        // Not every one has an inverse.
        EXPECT_TRUE(backend.Gemm(1.0, x, Transpose::kNo, x, Transpose::kYes, 0.0, a).ok());
        EXPECT_TRUE(backend.AddDiagonal(random() % 4 == 0 ? -1e6 : 1.0, a).ok());
        Remember(a);
        operation_.what = Operation::SpdInverse{a, a};
        break;
      }
    }
  }

  const Operation& operation() const { return operation_; }

  // Before the first run, and between two.
  void Restore() {
    for (size_t i = 0; i < matrices_.size(); ++i) Upload(hosts_[i], matrices_[i].view());
    if (!symmetric_.empty()) {
      const MatrixView raw = symmetric_.raw();
      Upload(std::vector<float>(raw.size(), 0.0f), raw);
    }
    std::fill(numbers_.begin(), numbers_.end(), -1.0);
  }
  // All that it may have changed.
  std::vector<float> Outcome() {
    std::vector<float> all;
    for (const DeviceMatrix& x : matrices_) Append(x.view(), all);
    if (!symmetric_.empty()) Append(symmetric_.raw(), all);
    for (const double number : numbers_) {
      const auto halves = absl::bit_cast<std::array<float, 2>>(number);
      all.insert(all.end(), halves.begin(), halves.end());
    }
    return all;
  }
  // In place of the same bits as `alone`: the accuracy that either answer has.
  void ExpectAccurate(const std::vector<float>& alone) {
    if (const auto* eigen = std::get_if<Operation::SymmetricEigen>(&operation_.what)) return ExpectDecomposes(*eigen);
    const auto& product = std::get<Operation::DensePrecondition>(operation_.what);
    // Each answer has five roundings of an element, to bf16 or to TF32, which may be cut off.
    const double tolerance = 2 * 5 * (product.precision == ProductPrecision::kBf16 ? 0x1p-9 : 0x1p-10);
    const std::vector<float> together = Outcome();
    const auto end = static_cast<std::ptrdiff_t>(together.size() - 2 * numbers_.size());
    const auto begin = end - static_cast<std::ptrdiff_t>(product.u.size());  // the last matrix is the answer
    EXPECT_LE(RelativeDifference({together.begin() + begin, together.begin() + end},
                                 {alone.begin() + begin, alone.begin() + end}),
              tolerance);
    if (numbers_.empty()) return;
    double squares[2];
    std::memcpy(squares, alone.data() + end, sizeof(squares));
    EXPECT_EQ(numbers_[0], squares[0]) << "of d, which is no product";
    EXPECT_NEAR(numbers_[1], squares[1], 2 * tolerance * squares[1]);
  }

 private:
  // As in backend_conformance_test.
  void ExpectDecomposes(const Operation::SymmetricEigen& eigen) {
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

  void MakeElementwise(ElementwiseKind kind, int64_t m, int64_t n) {
    Operation::Elementwise e{.kind = kind, .alpha = Number(), .beta = random_() % 2 == 0 ? 0.0 : Number()};
    size_t scales = 0;
    switch (kind) {
      case ElementwiseKind::kScaleRows:
        scales = m;
        break;
      case ElementwiseKind::kScaleColumns:
        scales = n;
        break;
      case ElementwiseKind::kScaleBothSides:
        scales = m = n;
        break;
      case ElementwiseKind::kPackRow:
        e.row = static_cast<int64_t>(random_() % n);
        m = 1;
        break;
      case ElementwiseKind::kAxpby:
        break;
      default:
        m = n;
    }
    const int64_t packed = n * (n + 1) / 2;
    const bool packs = kind == ElementwiseKind::kPackLower || kind == ElementwiseKind::kPackRow;
    e.x = kind == ElementwiseKind::kUnpackLower ? Add(1, packed) : Add(m, n);
    e.y = packs ? Add(1, packed) : Add(m, n);
    for (size_t i = 0; i < scales; ++i) e.scales.push_back(Number());
    operation_.what = std::move(e);
  }

  // One that is there, or zeros in tiles with a shift and terms.
  SymmetricForm Form(int64_t n, SymmetricMatrix& tiles, Operation::Numbers& weights) {
    if (random_() % 2 == 0) return Add(n, n);
    const SymmetricStorage storage =
        backend_.AllocateSymmetric(n, SymmetricStorage::kF16).ok() ? SymmetricStorage::kF16 : SymmetricStorage::kF32;
    tiles = backend_.AllocateSymmetric(n, storage).value();
    const MatrixView rows = Add(static_cast<int64_t>(random_() % 4), n);
    for (int64_t i = 0; i < rows.rows; ++i) weights.push_back(Number());
    return SymmetricForm(Number(), Number(), weights, rows, tiles);
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
  // What lies there now is what it is given anew.
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
  Operation operation_;
};

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
      backend->RunTogether({&operations.back(), 1}, {&status, 1});
      codes.push_back(status.code());
      alone.push_back(cases.back()->Outcome());
      cases.back()->Restore();
    }
    std::vector<absl::Status> statuses(count);
    backend->RunTogether(operations, absl::MakeSpan(statuses));
    int differ = 0;
    for (int i = 0; i < count; ++i) {
      EXPECT_EQ(statuses[i].code(), codes[i]) << statuses[i];
      if (SameBits(cases[i]->Outcome(), alone[i])) continue;
      SCOPED_TRACE(testing::Message() << i << " of " << count);
      EXPECT_TRUE(statuses[i].ok() && !PromisesBits(*backend, *operations[i])) << "promised the same bits";
      if (!PromisesBits(*backend, *operations[i])) cases[i]->ExpectAccurate(alone[i]);
      ++differ;
    }
    if (differ > 0) std::printf("kind %zu: %d of %d have other bits in company\n", GetParam(), differ, count);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupedConformanceTest, testing::Range<size_t>(0, 13));

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
        MethodConfig{"soap", {}}));

// Has no terms of vectors of this length while it is told so.
class RefusesTerms final : public ForwardingBackend {
 public:
  RefusesTerms(Backend& inner, int64_t n, const bool& refuses) : ForwardingBackend(inner), n_(n), refuses_(refuses) {}

 private:
  void DoRunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    ForwardingBackend::DoRunTogether(operations, statuses);
    for (size_t i = 0; i < operations.size(); ++i) {
      const auto* const terms = std::get_if<Operation::ShermanMorrisonTerms>(&operations[i]->what);
      if (refuses_ && terms != nullptr && terms->v.cols == n_) statuses[i] = absl::FailedPreconditionError("refused");
    }
  }

  const int64_t n_;
  const bool& refuses_;
};

// Both sides of a layer ask together: where one has no terms neither changes, and the next update gives the bits of a
// layer that never failed.
TEST(MethodsInCompany, ASideWithoutTermsLeavesBothAlone) {
  const LayerSpec layer{"any", 40, 70, false};
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
      for (int step = 0; step < 40; ++step) {
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
  // Others recompress at other steps, or have all the columns that there are.
  EXPECT_LE(calls(4, 9, false), 3 * of_one);
}

}  // namespace
}  // namespace precondor
