// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/matrix_passes.h"
#include "kernels/cuda/packed_upload.h"
#include "kernels/cuda/symmetric_tiles.h"

namespace precondor::cuda {
namespace {

using Operations = std::vector<const operation::DensePrecondition*>;
using Bf16 = __nv_bfloat16;

template <typename T>
T* Take(T*& next, int64_t count) {
  return std::exchange(next, next + count);
}

template <typename Kind>
std::vector<const Kind*> AllOf(const std::vector<Kind>& operations) {
  std::vector<const Kind*> all;
  all.reserve(operations.size());
  for (const Kind& operation : operations) all.push_back(&operation);
  return all;
}

int64_t Padded(int64_t cols) { return PaddedStride<Bf16>(cols); }
int64_t PaddedInF32(int64_t cols) { return PaddedStride<float>(cols); }
bool IsAligned(ConstMatrixView x) {
  return reinterpret_cast<uintptr_t>(x.data) % 256 == 0 && x.stride == PaddedInF32(x.stride);
}

// half = l d, then u = half r, in calls of cuBLAS for the operations of one shape. A single call for all shapes, which
// cuBLAS also offers, takes twice as long (docs/develop/adr/0025-measured-on-a-gpu.md).
class ProductPair {
 public:
  template <typename T>
  void Add(BasicMatrixView<const T> l, BasicMatrixView<const T> d, BasicMatrixView<T> half, BasicMatrixView<const T> r,
           BasicMatrixView<T> u) {
    const int64_t m = d.rows, n = d.cols;
    batches_.Add(0, {m, n, m, l.stride, d.stride, half.stride}, l.data, d.data, half.data);
    batches_.Add(1, {m, n, n, half.stride, r.stride, u.stride}, half.data, r.data, u.data);
  }
  // Call it when all pairs have been added.
  absl::Status Open(Device& device, size_t element_bytes) { return batches_.Open(device, element_bytes); }
  absl::Status Run(Device& device, const Arithmetic& in) const {
    PRECONDOR_RETURN_IF_ERROR(batches_.Run(device, "DensePrecondition", 0, in));
    return batches_.Run(device, "DensePrecondition", 1, in);
  }

 private:
  FixedBatches batches_{2};
};

// Expands, in one launch, the factors l and r of all operations that are stored in tiles.
class Expansions {
 public:
  void Ask(PackedUpload& upload, const Operations& operations) {
    size_t count = 0, weights = 0;
    for (const auto* operation : operations) {
      for (const SymmetricForm* form : {&operation->l, &operation->r}) {
        count += form->is_explicit() ? 0 : 1;
        weights += form->is_explicit() ? 0 : form->rows.rows;
      }
    }
    jobs_ = upload.Add<ExpandJob>(count);
    weights_ = upload.Add<double>(weights);
  }
  // Adds the expansion of `form` to x [n, n], whose rows have `stride` elements of f32 or bf16.
  void Add(PackedUpload& upload, const SymmetricForm& form, void* x, int64_t stride, bool in_bf16) {
    std::copy(form.weights.begin(), form.weights.end(), upload.OnHost(weights_).begin() + weight_);
    ExpandJob job;
    job.m = JobOfForm(form, upload.OnDevice(weights_) + weight_);
    job.x = x;
    job.stride = stride;
    job.in_bf16 = in_bf16;
    job.first = tiles_;
    upload.OnHost(jobs_)[count_++] = job;
    weight_ += form.weights.size();
    tiles_ += TileCount(form.n);
  }
  absl::Status Run(Device& device, const PackedUpload& upload) const {
    if (count_ == 0) return absl::OkStatus();
    return device.Run("SymmetricExpand", [&](cudaStream_t stream) {
      return SymmetricExpand(stream, upload.OnDevice(jobs_), static_cast<int>(count_), tiles_);
    });
  }

 private:
  PackedUpload::Part<ExpandJob> jobs_;
  PackedUpload::Part<double> weights_;
  size_t count_ = 0, weight_ = 0;
  int64_t tiles_ = 0;
};

// Runs operations in bf16: expansions, roundings, two calls of cuBLAS for each shape, and a kernel that converts the
// answers to f32 and computes their lengths.
class Bf16Plan {
 public:
  explicit Bf16Plan(const Operations& operations) : operations_(operations) {}

  absl::Status Open(Device& device) {
    int64_t elements = 0, blocks = 0;
    size_t there = 0, asked = 0;
    for (const auto* operation : operations_) {
      elements += RoundedElements(*operation);
      there += (operation->l.is_explicit() ? 1 : 0) + (operation->r.is_explicit() ? 1 : 0);
      if (operation->squares.empty()) continue;
      ++asked;
      blocks += ScaledCopyBlocks(operation->d.rows, operation->d.cols);
    }
    PRECONDOR_ASSIGN_OR_RETURN(memory_, device.Array<Bf16>(elements));
    PRECONDOR_ASSIGN_OR_RETURN(squares_, device.Array<double>(2 * (static_cast<int64_t>(asked) + blocks)));
    expansions_.Ask(upload_, operations_);
    roundings_ = upload_.Add<ScaledCopyJob<float, Bf16>>(operations_.size() + there);
    answers_ = upload_.Add<ScaledCopyJob<Bf16, float>>(operations_.size());
    const auto counters = upload_.Add<unsigned>(2 * asked);
    PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
    next_ = memory_.data();
    next_squares_ = squares_.data();
    next_partials_ = squares_.data() + 2 * asked;
    next_counter_ = upload_.OnDevice(counters);
    for (const auto* operation : operations_) Add(*operation);
    PRECONDOR_RETURN_IF_ERROR(products_.Open(device, sizeof(Bf16)));
    return upload_.Send(device);
  }

  absl::Status Run(Device& device) const {
    PRECONDOR_RETURN_IF_ERROR(expansions_.Run(device, upload_));
    PRECONDOR_RETURN_IF_ERROR(device.Run("DensePrecondition", [&](cudaStream_t stream) {
      return ScaledCopies(stream, upload_.OnDevice(roundings_), static_cast<int>(rounded_), blocks_);
    }));
    PRECONDOR_RETURN_IF_ERROR(products_.Run(device, kInBf16));
    PRECONDOR_RETURN_IF_ERROR(device.Run("DensePrecondition", [&](cudaStream_t stream) {
      return ScaledCopies(stream, upload_.OnDevice(answers_), static_cast<int>(answered_), answer_blocks_);
    }));
    return ReceiveSquares(device, squares_, operations_);
  }

 private:
  // Counts l, r, d and l d in bf16. l d is as large as d, and the answer overwrites d.
  static int64_t RoundedElements(const operation::DensePrecondition& operation) {
    const int64_t m = operation.d.rows, n = operation.d.cols;
    return PaddedElements<Bf16>(m * Padded(m)) + PaddedElements<Bf16>(n * Padded(n)) +
           2 * PaddedElements<Bf16>(m * Padded(n));
  }

  void Add(const operation::DensePrecondition& operation) {
    const int64_t m = operation.d.rows, n = operation.d.cols, stride = Padded(n);
    const Bf16* const l = Factor(operation.l, m);
    const Bf16* const r = Factor(operation.r, n);
    Bf16* const d = Take(next_, PaddedElements<Bf16>(m * stride));
    Bf16* const half = Take(next_, PaddedElements<Bf16>(m * stride));
    SumOfParts of_d, of_u;
    if (!operation.squares.empty()) {
      for (SumOfParts* of : {&of_d, &of_u}) {
        *of = {Take(next_squares_, 1), Take(next_partials_, ScaledCopyBlocks(m, n)), Take(next_counter_, 1)};
      }
    }
    Round(operation.d, d, stride, of_d);
    upload_.OnHost(answers_)[answered_++] = {
        .from = {d, m, n, stride}, .to = operation.u, .square = of_u, .first = answer_blocks_};
    answer_blocks_ += ScaledCopyBlocks(m, n);
    const BasicMatrixView<Bf16> answer(d, m, n, stride);  // overwrites d
    products_.Add<Bf16>({l, m, m, Padded(m)}, answer, {half, m, n, stride}, {r, n, n, Padded(n)}, answer);
  }

  const Bf16* Factor(const SymmetricForm& form, int64_t n) {
    Bf16* const x = Take(next_, PaddedElements<Bf16>(n * Padded(n)));
    if (form.is_explicit()) {
      Round(form.matrix, x, Padded(n), {});
    } else {
      expansions_.Add(upload_, form, x, Padded(n), /*in_bf16=*/true);
    }
    return x;
  }

  void Round(ConstMatrixView from, Bf16* to, int64_t stride, const SumOfParts& square) {
    upload_.OnHost(roundings_)[rounded_++] = {
        .from = from, .to = {to, from.rows, from.cols, stride}, .square = square, .first = blocks_};
    blocks_ += ScaledCopyBlocks(from.rows, from.cols);
  }

  const Operations& operations_;
  DeviceArray<Bf16> memory_;
  DeviceArray<double> squares_;
  PackedUpload upload_;
  Expansions expansions_;
  ProductPair products_;
  PackedUpload::Part<ScaledCopyJob<float, Bf16>> roundings_;  // of each d, and of each l and r that is a matrix
  PackedUpload::Part<ScaledCopyJob<Bf16, float>> answers_;    // from the memory of d
  size_t rounded_ = 0, answered_ = 0;
  int64_t blocks_ = 0, answer_blocks_ = 0;
  Bf16* next_ = nullptr;
  double *next_squares_ = nullptr, *next_partials_ = nullptr;
  unsigned* next_counter_ = nullptr;
};

absl::Status RunInBf16(Device& device, const Operations& operations) {
  Bf16Plan plan(operations);
  PRECONDOR_RETURN_IF_ERROR(plan.Open(device));
  return plan.Run(device);
}

// In TF32 cuBLAS requires matrices whose data begin at multiples of 16 bytes, and is faster if rows do. All begin at
// multiples of 256 bytes. Others are replaced by copies that do: d, l and r before the products, and u after them.
class AlignedCopies {
 public:
  static int64_t Elements(ConstMatrixView x) {
    return IsAligned(x) ? 0 : PaddedElements<float>(x.rows * PaddedInF32(x.cols));
  }

  ConstMatrixView Of(ConstMatrixView x, float*& next) {
    if (IsAligned(x)) return x;
    const MatrixView copy = Taken(x, next);
    before_.push_back({.alpha = 1, .x = x, .y = copy});
    return copy;
  }
  MatrixView Of(MatrixView u, float*& next) {
    if (IsAligned(u)) return u;
    const MatrixView copy = Taken(u, next);
    after_.push_back({.alpha = 1, .x = copy, .y = u});
    return copy;
  }
  absl::Status RunBefore(Device& device) const { return Run(device, before_); }
  absl::Status RunAfter(Device& device) const { return Run(device, after_); }

 private:
  static MatrixView Taken(ConstMatrixView x, float*& next) {
    const int64_t stride = PaddedInF32(x.cols);
    return MatrixView(Take(next, PaddedElements<float>(x.rows * stride)), x.rows, x.cols, stride);
  }
  static absl::Status Run(Device& device, const std::vector<operation::Elementwise>& copies) {
    return copies.empty() ? absl::OkStatus() : RunTogether(device, AllOf(copies));
  }

  std::vector<operation::Elementwise> before_, after_;
};

// Runs operations on f32 matrices. In TF32 cuBLAS makes all products. In F32 cuBLAS makes the large ones, and our own
// kernel the small ones, whose results do not depend on the other operations.
absl::Status RunInF32(Device& device, const Operations& operations, bool in_tf32) {
  PackedUpload upload;
  Expansions expansions;
  expansions.Ask(upload, operations);
  ProductPair of_cublas;
  const auto stride_of = [in_tf32](int64_t cols) { return in_tf32 ? PaddedInF32(cols) : cols; };
  const auto copied = [in_tf32](ConstMatrixView x) { return in_tf32 ? AlignedCopies::Elements(x) : 0; };
  int64_t elements = 0;
  for (const auto* operation : operations) {
    elements += PaddedElements<float>(operation->d.rows * stride_of(operation->d.cols)) + copied(operation->d) +
                copied(operation->u);
    for (const SymmetricForm* form : {&operation->l, &operation->r}) {
      elements += form->is_explicit() ? copied(form->matrix) : PaddedElements<float>(form->n * stride_of(form->n));
    }
  }
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<float> memory, device.Array<float>(elements));
  float* next = memory.data();
  AlignedCopies copies;
  const auto factor = [&](const SymmetricForm& form) {
    if (form.is_explicit()) return in_tf32 ? copies.Of(form.matrix, next) : form.matrix;
    const int64_t stride = stride_of(form.n);
    float* const x = Take(next, PaddedElements<float>(form.n * stride));
    expansions.Add(upload, form, x, stride, /*in_bf16=*/false);
    return ConstMatrixView(x, form.n, form.n, stride);
  };
  std::array<std::vector<operation::Gemm>, 2> small;
  std::vector<operation::Dot> dots;
  for (const auto* operation : operations) {
    const ConstMatrixView l = factor(operation->l);
    const ConstMatrixView r = factor(operation->r);
    const ConstMatrixView d = in_tf32 ? copies.Of(operation->d, next) : operation->d;
    const MatrixView u = in_tf32 ? copies.Of(operation->u, next) : operation->u;
    const int64_t stride = stride_of(d.cols);
    const MatrixView half(Take(next, PaddedElements<float>(d.rows * stride)), d.rows, d.cols, stride);
    const operation::Gemm first{.a = l, .b = d, .c = half}, second{.a = half, .b = r, .c = u};
    if (in_tf32 || IsLarge(first) || IsLarge(second)) {
      of_cublas.Add<float>(l, d, half, r, u);
    } else {
      small[0].push_back(first);
      small[1].push_back(second);
    }
    if (operation->squares.empty()) continue;
    dots.push_back({operation->d, operation->d, &operation->squares[0]});
    dots.push_back({operation->u, operation->u, &operation->squares[1]});
  }
  PRECONDOR_RETURN_IF_ERROR(of_cublas.Open(device, sizeof(float)));
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  PRECONDOR_RETURN_IF_ERROR(copies.RunBefore(device));
  PRECONDOR_RETURN_IF_ERROR(expansions.Run(device, upload));
  PRECONDOR_RETURN_IF_ERROR(of_cublas.Run(device, in_tf32 ? kInTf32 : kInF32));
  PRECONDOR_RETURN_IF_ERROR(copies.RunAfter(device));
  for (const std::vector<operation::Gemm>& some : small) {
    if (!some.empty()) PRECONDOR_RETURN_IF_ERROR(RunTogether(device, AllOf(some)));
  }
  return dots.empty() ? absl::OkStatus() : RunTogether(device, AllOf(dots));
}

}  // namespace

SymmetricJob JobOfForm(const SymmetricForm& form, const double* weights) {
  SymmetricJob job;
  job.tiles = const_cast<float*>(form.raw.data);  // only read: SymmetricJob also describes updates
  job.n = form.n;
  job.storage = form.storage;
  job.scale = static_cast<float>(form.scale);
  job.shift = form.shift;
  job.weights = weights;
  job.rows = form.rows;
  return job;
}

absl::Status RunTogether(Device& device, absl::Span<const operation::DensePrecondition* const> operations) {
  Operations in_bf16, in_tf32, in_f32;
  for (const auto* operation : operations) {
    const bool bf16 = operation->precision == ProductPrecision::kBf16;
    const bool tf32 = operation->precision == ProductPrecision::kTf32;
    (bf16 ? in_bf16 : tf32 ? in_tf32 : in_f32).push_back(operation);
  }
  if (!in_bf16.empty()) PRECONDOR_RETURN_IF_ERROR(RunInBf16(device, in_bf16));
  if (!in_tf32.empty()) PRECONDOR_RETURN_IF_ERROR(RunInF32(device, in_tf32, /*in_tf32=*/true));
  return in_f32.empty() ? absl::OkStatus() : RunInF32(device, in_f32, /*in_tf32=*/false);
}

}  // namespace precondor::cuda
