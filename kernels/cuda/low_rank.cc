// SPDX-License-Identifier: Apache-2.0
// With V = S P, W = T Q, X = P D, Y = D Q',
//   J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - V' X - (Y - V' K) W,  K = P Y,
//                                                         = D - V' (X - K W) - Y W,   K = X Q'.
// This takes four products of D and the vectors; K, along D's shorter side; the correction of Y or X by K; and one
// product of inner size p + q, which reads D once more, writes the answer and sums up both squared lengths.
#include "kernels/cuda/low_rank.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/answer_lengths.h"
#include "kernels/cuda/low_rank_appends.h"
#include "kernels/cuda/packed_upload.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda {
namespace {

constexpr size_t kStages = 4;
// Each stage has a launch in f32 and one on tensor cores.
constexpr size_t kLaunches = 2 * kStages;

// Returns `size` rounded up so that rows, and parts of rows, begin at multiples of 16 bytes.
constexpr int64_t Padded(int64_t size) { return (size + 3) / 4 * 4; }

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}

// Sizes of one operation: d is [m, n], and the ranks are p and q.
struct Extents {
  explicit Extents(const operation::LowRankPrecondition& operation)
      : m(operation.d.rows),
        n(operation.d.cols),
        p(operation.out_side.vectors.rows),
        q(operation.in_side.vectors.rows) {}
  int64_t m, n, p, q;

  bool both() const { return p > 0 && q > 0; }
  size_t jobs() const { return (p > 0 ? 2 : 0) + (q > 0 ? 2 : 0) + (both() ? 2 : 0) + 1; }
  // Shapes of X (with its rows of zeros), Y and K.
  std::array<ConstMatrixView, 3> sums() const {
    return {ConstMatrixView(nullptr, Padded(p), n), ConstMatrixView(nullptr, m, q), ConstMatrixView(nullptr, p, q)};
  }
  std::array<int64_t, 3> inner_of_sums() const { return {m, n, std::min(m, n)}; }
  // Returns the number of rows of X and W together, and of columns of V and Y. Up to three zeros lie between the two.
  int64_t together() const { return Padded(p) + Padded(q); }
  int64_t floats() const {
    int64_t count = together() * (m + Padded(n)) + p * Padded(q);
    for (size_t i = 0; i < 3; ++i) count += ProductPartials(sums()[i], inner_of_sums()[i]);
    return count;
  }
  int64_t counters() const {
    int64_t count = 1;
    for (const ConstMatrixView& sum : sums()) count += ProductTiles(sum);
    return count;
  }
};

template <typename T>
T* Take(T*& next, int64_t count) {
  T* const taken = next;
  next += count;
  return taken;
}

// Collects the products of all operations, by stage.
class Plan {
 public:
  // The arguments point to memory of the sizes that the Extents of `count` operations say; tile_squares has 2 numbers
  // for each tile of an answer whose squared lengths are requested.
  Plan(size_t count, float* floats, double* tile_squares, unsigned* counters)
      : floats_(floats), tile_squares_(tile_squares), counters_(counters) {
    for (size_t launch = 0; launch < kLaunches; ++launch) launches_[launch].reserve(launch < 2 ? 4 * count : count);
  }

  // Adds the products of an operation. `squares` [2] may be null.
  void Add(const operation::LowRankPrecondition& operation, double* squares) {
    const LowRankInverse &out = operation.out_side, &in = operation.in_side;
    const ConstMatrixView d = operation.d;
    const Extents extents(operation);
    precision_ = operation.precision;
    const int64_t m = extents.m, n = extents.n, p = extents.p, q = extents.q;
    const int64_t both = extents.together(), at = Padded(p);  // where Y and W begin
    const MatrixView left(Take(floats_, m * both), m, at + q, both);
    const MatrixView right(Take(floats_, both * Padded(n)), at + q, n, Padded(n));
    const MatrixView v = Columns(left, 0, p), y = Columns(left, at, q),
                     k(Take(floats_, p * Padded(q)), p, q, Padded(q));
    const MatrixView x = right.RowRange(0, p), w = right.RowRange(at, q);
    // V and X include the zeros: a product is zero beyond its operands.
    const MatrixView v_and_zeros = Columns(left, 0, at), x_and_zeros = right.RowRange(0, at);
    constexpr Transpose kNo = Transpose::kNo, kYes = Transpose::kYes;
    if (p > 0) {
      Put(0, Product(1, out.vectors, kYes, out.core, kNo, v_and_zeros));
      Put(0, InParts(Product(1, out.vectors, kNo, d, kNo, x_and_zeros)));
    }
    if (q > 0) {
      Put(0, Product(1, in.core, kNo, in.vectors, kNo, w));
      Put(0, InParts(Product(1, d, kNo, in.vectors, kYes, y)));
    }
    if (extents.both()) {
      Put(1, InParts(m < n ? Product(1, out.vectors, kNo, y, kNo, k) : Product(1, x, kNo, in.vectors, kYes, k)));
      ProductJob rest = m < n ? Product(-1, v, kNo, k, kNo, y) : Product(-1, k, kNo, w, kNo, x);
      rest.beta = 1;
      Put(2, rest);
    }
    const float scale = static_cast<float>(out.c * in.c);
    ProductJob last = Product(-scale, left, kNo, right, kNo, operation.u);
    last.beta = scale;
    last.source = d;
    if (squares != nullptr) {
      last.squares = squares;
      last.tile_squares = Take(tile_squares_, 2 * ProductTiles(d));
      last.squares_arrived = Take(counters_, 1);
    }
    Put(3, last);
  }

  // Jobs of each launch, in the order in which the launches must run.
  const std::array<std::vector<ProductJob>, kLaunches>& launches() const { return launches_; }
  const std::array<int64_t, kLaunches>& blocks() const { return blocks_; }
  static bool OnTensorCores(size_t launch) { return launch % 2 == 1; }

 private:
  static ProductJob Product(float alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
                            Transpose transpose_b, MatrixView c) {
    ProductJob job;
    job.alpha = alpha;
    job.transpose_a = transpose_a == Transpose::kYes;
    job.transpose_b = transpose_b == Transpose::kYes;
    job.a = a;
    job.b = b;
    job.c = c;
    job.source = c;
    job.inner = job.transpose_a ? a.rows : a.cols;
    return job;
  }

  ProductJob InParts(ProductJob job) {
    job.parts = ProductParts(job.c, job.inner);
    job.partials = Take(floats_, ProductPartials(job.c, job.inner));
    job.arrived = Take(counters_, ProductTiles(job.c));
    return job;
  }

  void Put(size_t stage, ProductJob job) {
    job.in_two_terms = precision_ == ProductPrecision::kBf16x3;
    const bool tensor_cores = job.in_two_terms || precision_ == ProductPrecision::kBf16;
    const size_t launch = 2 * stage + (tensor_cores ? 1 : 0);
    job.first = blocks_[launch];
    blocks_[launch] += tensor_cores ? TensorProductBlocks(job) : ProductBlocks(job);
    launches_[launch].push_back(job);
  }

  float* floats_;
  double* tile_squares_;
  unsigned* counters_;
  ProductPrecision precision_ = ProductPrecision::kF32;  // of the operation that Add is adding
  std::array<std::vector<ProductJob>, kLaunches> launches_;
  std::array<int64_t, kLaunches> blocks_ = {};
};

}  // namespace

absl::Status RunLowRankAppends(Device& device, absl::Span<const operation::LowRankAppend* const> operations) {
  size_t rows = 0;
  for (const auto* append : operations) rows += append->slots.size();
  PackedUpload upload;
  const auto jobs = upload.Add<LowRankAppendJob>(operations.size());
  const auto scales = upload.Add<double>(rows);
  const auto slots = upload.Add<int64_t>(rows);
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  int64_t blocks = 0;
  size_t row = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    const operation::LowRankAppend& append = *operations[i];
    std::copy(append.scales.begin(), append.scales.end(), upload.OnHost(scales).begin() + row);
    std::copy(append.slots.begin(), append.slots.end(), upload.OnHost(slots).begin() + row);
    LowRankAppendJob& job = upload.OnHost(jobs)[i];
    job = {append.rows, upload.OnDevice(scales) + row, upload.OnDevice(slots) + row, append.vectors, append.gram.data,
           blocks};
    blocks += LowRankAppendBlocks(job);
    row += append.slots.size();
  }
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  return device.Run("LowRankAppend", [&](cudaStream_t stream) {
    return LowRankAppends(stream, upload.OnDevice(jobs), static_cast<int>(operations.size()), blocks);
  });
}

absl::Status RunLowRankPreconditions(Device& device,
                                     absl::Span<const operation::LowRankPrecondition* const> operations) {
  size_t job_count = 0, asked = 0;
  int64_t float_count = 0, counter_count = 0, tiles = 0;
  for (const auto* operation : operations) {
    const Extents extents(*operation);
    job_count += extents.jobs();
    float_count += extents.floats();
    counter_count += extents.counters();
    if (operation->squares.empty()) continue;
    ++asked;
    tiles += ProductTiles(operation->d);
  }
  PackedUpload upload;
  const auto jobs = upload.Add<ProductJob>(job_count);
  const auto counters = upload.Add<unsigned>(static_cast<size_t>(counter_count));
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<float> floats, device.Array<float>(float_count));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> squares,
                             device.Array<double>(2 * (static_cast<int64_t>(asked) + tiles)));
  Plan plan(operations.size(), floats.data(), squares.data() + 2 * asked, upload.OnDevice(counters));
  double* next = squares.data();
  for (const auto* operation : operations) plan.Add(*operation, operation->squares.empty() ? nullptr : Take(next, 2));
  auto to = upload.OnHost(jobs).begin();
  for (const auto& launch : plan.launches()) to = std::copy(launch.begin(), launch.end(), to);
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  const ProductJob* from = upload.OnDevice(jobs);
  for (size_t launch = 0; launch < kLaunches; ++launch) {
    const int count = static_cast<int>(plan.launches()[launch].size());
    if (count == 0) continue;
    PRECONDOR_RETURN_IF_ERROR(device.Run("LowRankPrecondition", [&](cudaStream_t stream) {
      return (Plan::OnTensorCores(launch) ? TensorProducts : Products)(stream, from, count, plan.blocks()[launch]);
    }));
    from += count;
  }
  return ReceiveSquares(device, squares, operations);
}

}  // namespace precondor::cuda
