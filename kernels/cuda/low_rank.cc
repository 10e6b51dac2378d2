// SPDX-License-Identifier: Apache-2.0
// With V = P'S, W = Q'T, X = D'P' and Y = D Q',
//   J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - V X' - Y W',
// if the longer side's product with D, Y for a wide D and X for others, is corrected first: Y -= V K for K = P Y, or
// X -= W K for K = Q X. V and Y lie beside each other in a matrix `left`, X and W in `right`, so that one product
// left right' makes what D loses. Along its sum both of its factors are contiguous, where cuBLAS is fastest. A pass
// subtracts it from D and sums up both squared lengths.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cuda_bf16.h>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/low_rank_appends.h"
#include "kernels/cuda/matrix_passes.h"
#include "kernels/cuda/packed_upload.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda {
namespace {

using Operations = std::vector<const operation::LowRankPrecondition*>;

constexpr absl::string_view kName = "LowRankPrecondition";

// V, W, X and Y; K; the correction; and what D loses.
enum Stage : size_t { kFirst, kSmall, kCorrection, kLast, kStages };

// Whether a product of f32 is too small for a call of cuBLAS. Our own kernel makes all such products of a stage in one
// launch, whatever their shapes.
bool IsSmall(int64_t rows, int64_t cols, int64_t inner) {
  constexpr int64_t kMostInner = 1024, kMultiplications = int64_t{1} << 22;
  return inner <= kMostInner && rows * cols * inner < kMultiplications;
}

// Layers have as many vectors as they have taken in. Padding with vectors of zeros gives most of them one shape.
int64_t PaddedRank(int64_t rank) { return (rank + 31) / 32 * 32; }

template <typename T>
BasicMatrixView<T> Columns(const BasicMatrixView<T>& x, int64_t begin, int64_t count) {
  return BasicMatrixView<T>(x.data + begin, x.rows, count, x.stride);
}

// Whether cuBLAS can use the matrix where it lies. All matrices of a shape have one stride and one alignment, because
// cuBLAS may choose another kernel for others.
bool IsAligned(ConstMatrixView x) {
  return reinterpret_cast<uintptr_t>(x.data) % 256 == 0 && x.stride == PaddedStride<float>(x.cols);
}

// Hands out matrices of one array. Each begins at a multiple of 256 bytes. Without an array it only counts elements.
template <typename T>
class ScratchAllocator {
 public:
  explicit ScratchAllocator(T* begin = nullptr) : begin_(begin) {}
  BasicMatrixView<T> Take(int64_t rows, int64_t cols) {
    const int64_t stride = PaddedStride<T>(cols);
    const int64_t at = std::exchange(used_, used_ + PaddedElements<T>(rows * stride));
    return BasicMatrixView<T>(begin_ == nullptr ? nullptr : begin_ + at, rows, cols, stride);
  }
  int64_t used() const { return used_; }

 private:
  T* const begin_;
  int64_t used_ = 0;
};

// Scratch of one operation, for its ranks p and q as padded.
template <typename T>
struct Operands {
  Operands(const operation::LowRankPrecondition& operation, ScratchAllocator<T>& elements,
           ScratchAllocator<float>& floats) {
    const int64_t m = operation.d.rows, n = operation.d.cols;
    const int64_t p = PaddedRank(operation.out_side.vectors.rows), q = PaddedRank(operation.in_side.vectors.rows);
    of_out = elements.Take(p, m);
    of_in = elements.Take(q, n);
    out_core = elements.Take(p, p);
    in_core = elements.Take(q, q);
    left = elements.Take(m, p + q);
    right = elements.Take(n, p + q);
    k = m < n ? elements.Take(p, q) : elements.Take(q, p);
    if (p + q == 0) return;
    constexpr bool kIsF32 = std::is_same_v<T, float>;
    if (!kIsF32 || !IsAligned(operation.d)) d = elements.Take(m, n);
    product = operation.u;
    if (IsAligned(operation.u)) return;
    if constexpr (kIsF32) product = d;  // which has been read when the product is written
    if (product.size() == 0 || !kIsF32) product = floats.Take(m, n);
  }

  BasicMatrixView<T> of_out, of_in;  // P [p, m], Q [q, n]
  BasicMatrixView<T> out_core, in_core, left, right, k;
  BasicMatrixView<T> d;  // a copy; has no elements if D serves
  MatrixView product;    // left right': u, or a copy
};

// Products of all operations in one precision, on factors of type T.
template <typename T>
class Plan {
 public:
  Plan(Operations operations, Arithmetic in) : operations_(std::move(operations)), in_(in) {}

  // Allocates all memory.
  absl::Status Open(Device& device) {
    if (operations_.empty()) return absl::OkStatus();
    const size_t count = operations_.size();
    ScratchAllocator<T> elements;
    ScratchAllocator<float> floats;
    int64_t blocks = 0;
    for (const auto* operation : operations_) {
      const Operands<T> counted(*operation, elements, floats);
      blocks += ScaledCopyBlocks(operation->d.rows, operation->d.cols);
    }
    PRECONDOR_ASSIGN_OR_RETURN(elements_, device.Array<T>(elements.used()));
    PRECONDOR_ASSIGN_OR_RETURN(floats_, device.Array<float>(floats.used()));
    PRECONDOR_ASSIGN_OR_RETURN(squares_, device.Array<double>(2 * (static_cast<int64_t>(count) + blocks)));
    ScratchAllocator<T> placed_elements(elements_.data());
    ScratchAllocator<float> placed_floats(floats_.data());
    for (const auto* operation : operations_) Add(*operation, Operands<T>(*operation, placed_elements, placed_floats));
    PRECONDOR_RETURN_IF_ERROR(products_.Open(device, sizeof(float)));
    const auto copies = copies_on_device_ = upload_.Add<ScaledCopyJob<float, T>>(copies_.size());
    const auto answers = answers_on_device_ = upload_.Add<MomentumJob>(count);
    const auto arrived = upload_.Add<unsigned>(count);
    for (ProductJobs& small : small_) small.on_device = upload_.Add<ProductJob>(small.jobs.size());
    PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
    std::copy(copies_.begin(), copies_.end(), upload_.OnHost(copies).begin());
    for (const ProductJobs& small : small_) {
      std::copy(small.jobs.begin(), small.jobs.end(), upload_.OnHost(small.on_device).begin());
    }
    for (size_t i = 0; i < count; ++i) answers_[i].squares.arrived = upload_.OnDevice(arrived) + i;
    PlaceSquares();
    std::copy(answers_.begin(), answers_.end(), upload_.OnHost(answers).begin());
    return upload_.Send(device);
  }

  absl::Status Run(Device& device) const {
    if (operations_.empty()) return absl::OkStatus();
    if (!copies_.empty()) {
      PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
        return ScaledCopies(stream, upload_.OnDevice(copies_on_device_), static_cast<int>(copies_.size()),
                            copy_blocks_);
      }));
    }
    for (size_t stage = 0; stage < kStages; ++stage) {
      const Arithmetic in{in_.type, in_.compute, stage == kLast ? CUDA_R_32F : in_.type};
      PRECONDOR_RETURN_IF_ERROR(products_.Run(device, kName, stage, in));
      const ProductJobs& small = small_[stage];
      if (small.jobs.empty()) continue;
      PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
        return Products(stream, upload_.OnDevice(small.on_device), static_cast<int>(small.jobs.size()), small.blocks);
      }));
    }
    PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
      return AddMomentum(stream, upload_.OnDevice(answers_on_device_), static_cast<int>(answers_.size()),
                         answer_blocks_);
    }));
    return ReceiveSquares(device, squares_, operations_);
  }

 private:
  using View = BasicMatrixView<T>;
  using ConstView = BasicMatrixView<const T>;

  void Add(const operation::LowRankPrecondition& operation, const Operands<T>& x) {
    const int64_t p = x.of_out.rows, q = x.of_in.rows;
    const View v = Columns(x.left, 0, p), y = Columns(x.left, p, q), x_of_d = Columns(x.right, 0, p),
               w = Columns(x.right, p, q);
    const ConstView d = D(operation.d, x);
    AddSide(operation.out_side, x.of_out, x.out_core, v);
    AddSide(operation.in_side, x.of_in, x.in_core, w);
    Multiply(kFirst, 1, d, Transpose::kYes, x.of_out, Transpose::kYes, 0, x_of_d);
    Multiply(kFirst, 1, d, Transpose::kNo, x.of_in, Transpose::kYes, 0, y);
    const bool wide = operation.d.rows < operation.d.cols;
    const View corrected = wide ? y : x_of_d;
    Multiply(kSmall, 1, wide ? x.of_out : x.of_in, Transpose::kNo, corrected, Transpose::kNo, 0, x.k);
    Multiply(kCorrection, -1, wide ? v : w, Transpose::kNo, x.k, Transpose::kNo, 1, corrected);
    Multiply(kLast, 1, x.left, Transpose::kNo, x.right, Transpose::kYes, 0, x.product);
    const auto scale = static_cast<float>(operation.out_side.c * operation.in_side.c);
    const bool unchanged = p + q == 0;
    answers_.push_back({.alpha = scale,
                        .d = operation.d,
                        .momentum = unchanged ? operation.d : x.product,
                        .beta = unchanged ? 0 : -scale,
                        .next = operation.u,
                        .first = answer_blocks_});
    answer_blocks_ += ScaledCopyBlocks(operation.d.rows, operation.d.cols);
  }

  void AddSide(const LowRankInverse& side, View vectors, View core, View product) {
    if (vectors.rows == 0) return;
    Copy(side.vectors, vectors);
    Copy(side.core, core);
    Multiply(kFirst, 1, vectors, Transpose::kYes, core, Transpose::kNo, 0, product);
  }

  ConstView D(ConstMatrixView d, const Operands<T>& x) {
    if constexpr (std::is_same_v<T, float>) {
      if (x.d.size() == 0) return d;
    }
    if (x.d.size() > 0) Copy(d, x.d);
    return x.d;
  }

  void Copy(ConstMatrixView from, View to) {
    copies_.push_back({.from = from, .to = to, .first = copy_blocks_});
    copy_blocks_ += ScaledCopyBlocks(to.rows, to.cols);
  }

  template <typename Result>
  void Multiply(size_t stage, float alpha, ConstView a, Transpose transpose_a, ConstView b, Transpose transpose_b,
                float beta, BasicMatrixView<Result> c) {
    const bool turn_a = transpose_a == Transpose::kYes, turn_b = transpose_b == Transpose::kYes;
    const int64_t inner = turn_a ? a.rows : a.cols;
    if (c.size() == 0 || inner == 0) return;
    if constexpr (std::is_same_v<T, float>) {
      if (IsSmall(c.rows, c.cols, inner)) return small_[stage].Add({alpha, beta, turn_a, turn_b, a, b, c, inner});
    }
    products_.Add(stage, {c.rows, c.cols, inner, a.stride, b.stride, c.stride, alpha, beta, turn_a, turn_b}, a.data,
                  b.data, c.data);
  }

  // The squares of operations that ask for them come first, as ReceiveSquares expects.
  void PlaceSquares() {
    double* next = squares_.data();
    for (const bool asks : {true, false}) {
      for (size_t i = 0; i < answers_.size(); ++i) {
        if (operations_[i]->squares.empty() != asks) answers_[i].squares.totals = std::exchange(next, next + 2);
      }
    }
    for (MomentumJob& answer : answers_) answer.squares.partials = next + 2 * answer.first;
  }

  // Products of a stage by our own kernel.
  struct ProductJobs {
    void Add(ProductJob job) {
      job.first = blocks;
      blocks += ProductBlocks(job);
      jobs.push_back(job);
    }
    std::vector<ProductJob> jobs;
    PackedUpload::Part<ProductJob> on_device;
    int64_t blocks = 0;
  };

  const Operations operations_;
  const Arithmetic in_;
  DeviceArray<T> elements_;
  DeviceArray<float> floats_;
  DeviceArray<double> squares_;
  PackedUpload upload_;
  std::vector<ScaledCopyJob<float, T>> copies_;
  std::vector<MomentumJob> answers_;
  PackedUpload::Part<ScaledCopyJob<float, T>> copies_on_device_;
  PackedUpload::Part<MomentumJob> answers_on_device_;
  int64_t copy_blocks_ = 0, answer_blocks_ = 0;
  FixedBatches products_{kStages};
  std::array<ProductJobs, kStages> small_;
};

}  // namespace

absl::Status RunTogether(Device& device, absl::Span<const operation::LowRankAppend* const> operations) {
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

absl::Status RunTogether(Device& device, absl::Span<const operation::LowRankPrecondition* const> operations) {
  Operations in_f32, in_tf32, in_bf16;
  for (const auto* operation : operations) {
    const bool bf16 = operation->precision == ProductPrecision::kBf16;
    const bool tf32 = operation->precision == ProductPrecision::kTf32;
    (bf16 ? in_bf16 : tf32 ? in_tf32 : in_f32).push_back(operation);
  }
  Plan<float> f32(std::move(in_f32), kInF32), tf32(std::move(in_tf32), kInTf32);
  Plan<__nv_bfloat16> bf16(std::move(in_bf16), kInBf16);
  PRECONDOR_RETURN_IF_ERROR(f32.Open(device));
  PRECONDOR_RETURN_IF_ERROR(tf32.Open(device));
  PRECONDOR_RETURN_IF_ERROR(bf16.Open(device));
  PRECONDOR_RETURN_IF_ERROR(f32.Run(device));
  PRECONDOR_RETURN_IF_ERROR(tf32.Run(device));
  return bf16.Run(device);
}

}  // namespace precondor::cuda
