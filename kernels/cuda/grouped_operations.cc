// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/grouped_operations.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/packed_upload.h"
#include "kernels/cuda/products.h"
#include "kernels/cuda/reductions.h"
#include "kernels/cuda/sherman_morrison.h"
#include "kernels/cuda/spd_inverses.h"
#include "kernels/cuda/symmetric_tiles.h"

namespace precondor::cuda {
namespace {

// Products of at least this size fill the device alone, and are worth a launch of cuBLAS.
constexpr double kFlopsOfLargeProduct = 5e8;
// Longer rows take more than one warp each if a matrix has few of them.
constexpr int64_t kLongRow = 1 << 16;

// Sends the numbers of all operations to the device, one operation's after another's.
template <typename Number = double, typename Operations, typename NumbersOf>
absl::StatusOr<DeviceArray<Number>> SendNumbers(Device& device, const Operations& operations, NumbersOf numbers_of) {
  std::vector<Number> numbers;
  for (const auto* operation : operations) {
    const absl::Span<const Number> own = numbers_of(*operation);
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  return device.Send(absl::MakeConstSpan(numbers));
}

template <typename Job>
absl::StatusOr<DeviceArray<Job>> SendJobs(Device& device, const std::vector<Job>& jobs) {
  return device.Send(absl::MakeConstSpan(jobs));
}

cublasOperation_t Blas(Transpose transpose) { return transpose == Transpose::kYes ? CUBLAS_OP_T : CUBLAS_OP_N; }

int64_t InnerSize(const operation::Gemm& gemm) {
  return gemm.transpose_a == Transpose::kYes ? gemm.a.rows : gemm.a.cols;
}

// cuBLAS requires that matrices in TF32 begin at multiples of 16 bytes, and may choose another kernel where they do not
// begin at multiples of 256, as all scratch does. Products of others are f32.
bool TakesTf32(const operation::Gemm& gemm) {
  const auto aligned = [](ConstMatrixView x) { return reinterpret_cast<uintptr_t>(x.data) % 256 == 0; };
  return gemm.precision == ProductPrecision::kTf32 && aligned(gemm.a) && aligned(gemm.b) && aligned(gemm.c);
}

ProductShape ShapeOf(const operation::Gemm& gemm) {
  return {.rows = gemm.c.rows,
          .cols = gemm.c.cols,
          .inner = InnerSize(gemm),
          .stride_a = gemm.a.stride,
          .stride_b = gemm.b.stride,
          .stride_c = gemm.c.stride,
          .alpha = static_cast<float>(gemm.alpha),
          .beta = static_cast<float>(gemm.beta),
          .transpose_a = gemm.transpose_a == Transpose::kYes,
          .transpose_b = gemm.transpose_b == Transpose::kYes};
}

// cuBLAS expects column-major matrices, for which a row-major matrix is its transpose: the factors of a product swap.
absl::Status RunLargeProduct(Device& device, const operation::Gemm& gemm) {
  const float alpha = static_cast<float>(gemm.alpha), beta = static_cast<float>(gemm.beta);
  return device.RunBlas("Gemm", [&](cublasHandle_t blas) {
    return cublasSgemm_64(blas, Blas(gemm.transpose_b), Blas(gemm.transpose_a), gemm.c.cols, gemm.c.rows,
                          InnerSize(gemm), &alpha, gemm.b.data, gemm.b.stride, gemm.a.data, gemm.a.stride, &beta,
                          gemm.c.data, gemm.c.stride);
  });
}

// Replaces ResourceExhausted once a product has run. kernels/grouping runs a group again after ResourceExhausted, but a
// product must not run twice: it may add to its result.
absl::Status MakeMemoryErrorNotRetryable(bool has_run, absl::Status status) {
  if (!has_run || !absl::IsResourceExhausted(status)) return status;
  return absl::InternalError(absl::StrCat(status.message(), ", when other products of the group had run"));
}

bool IsLong(ConstMatrixView x) { return x.cols > kLongRow && x.rows < 64; }

template <typename Reduction>
absl::Status RunDotJobs(Device& device, absl::string_view what, Reduction reduction, const std::vector<DotJob>& jobs,
                        absl::Span<double> out) {
  const int64_t count = static_cast<int64_t>(jobs.size());
  const int64_t pieces = jobs.back().first + ReductionPartials(jobs.back().x);
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<DotJob> sent, SendJobs(device, jobs));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device.Array<double>(count + pieces));
  PRECONDOR_RETURN_IF_ERROR(device.Run(what, [&](cudaStream_t stream) {
    return reduction(stream, sent.data(), static_cast<int>(count), pieces, memory.data() + count, memory.data());
  }));
  return device.Receive(memory, out);
}

// Sets the operations' numbers to the results of their jobs.
template <typename Reduction, typename Operations>
absl::Status RunForNumbers(Device& device, absl::string_view what, Reduction reduction, const std::vector<DotJob>& jobs,
                           const Operations& operations) {
  std::vector<double> out(jobs.size());
  PRECONDOR_RETURN_IF_ERROR(RunDotJobs(device, what, reduction, jobs, absl::MakeSpan(out)));
  for (size_t i = 0; i < out.size(); ++i) *operations[i]->out = out[i];
  return absl::OkStatus();
}

absl::Status RunInverseJobs(Device& device, std::vector<SpdInverseJob>& jobs, absl::Span<absl::Status> statuses) {
  int64_t work = 0, most_rows = 0;
  for (const SpdInverseJob& job : jobs) {
    work += SpdInverseWork(job.x.rows);
    most_rows = std::max(most_rows, job.x.rows);
  }
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device.Array<double>(work));
  double* next = memory.data();
  for (SpdInverseJob& job : jobs) {
    job.work = next;
    next += SpdInverseWork(job.x.rows);
  }
  const int count = static_cast<int>(jobs.size());
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<SpdInverseJob> sent, SendJobs(device, jobs));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int> device_infos, device.Array<int>(count));
  PRECONDOR_RETURN_IF_ERROR(device.Run("SpdInverse", [&](cudaStream_t stream) {
    return SpdInverses(stream, sent.data(), count, most_rows, device_infos.data());
  }));
  std::vector<int> infos(count);
  PRECONDOR_RETURN_IF_ERROR(device.Receive(device_infos, absl::MakeSpan(infos)));
  for (int i = 0; i < count; ++i) statuses[i] = InverseStatus(infos[i], jobs[i].x.rows);
  return absl::OkStatus();
}

void AddDot(ConstMatrixView x, ConstMatrixView y, std::vector<DotJob>& jobs) {
  const int64_t first = jobs.empty() ? 0 : jobs.back().first + ReductionPartials(jobs.back().x);
  jobs.push_back({x, y, first});
}

}  // namespace

absl::Status RunTogether(Device& device, absl::Span<const operation::Elementwise* const> operations) {
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> scales,
                             SendNumbers(device, operations, [](const auto& e) { return e.scales; }));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> column_scales,
                             SendNumbers(device, operations, [](const auto& e) { return e.column_scales; }));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int64_t> rows,
                             SendNumbers<int64_t>(device, operations, [](const auto& e) { return e.rows; }));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int64_t> columns,
                             SendNumbers<int64_t>(device, operations, [](const auto& e) { return e.columns; }));
  const double *next_scale = scales.data(), *next_column_scale = column_scales.data();
  const int64_t *next_row = rows.data(), *next_column = columns.data();
  std::vector<ElementwiseJob> jobs;
  int64_t blocks = 0;
  for (const operation::Elementwise* e : operations) {
    ElementwiseJob& job = jobs.emplace_back();
    job = {.kind = e->kind, .alpha = e->alpha, .beta = e->beta, .row = e->row, .x = e->x, .v = e->v, .y = e->y};
    if (!e->scales.empty()) job.scales = std::exchange(next_scale, next_scale + e->scales.size());
    if (!e->column_scales.empty())
      job.column_scales = std::exchange(next_column_scale, next_column_scale + e->column_scales.size());
    if (!e->rows.empty()) job.rows = std::exchange(next_row, next_row + e->rows.size());
    if (!e->columns.empty()) job.columns = std::exchange(next_column, next_column + e->columns.size());
    job.first = std::exchange(blocks, blocks + ElementwiseBlocks(job));
  }
  if (jobs.size() == 1) {
    return device.Run("Elementwise", [&](cudaStream_t stream) { return Elementwise(stream, jobs[0]); });
  }
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<ElementwiseJob> sent, SendJobs(device, jobs));
  return device.Run("Elementwise", [&](cudaStream_t stream) {
    return Elementwise(stream, sent.data(), static_cast<int>(jobs.size()), blocks);
  });
}

bool IsLarge(const operation::Gemm& gemm) {
  return 2.0 * static_cast<double>(gemm.c.size()) * static_cast<double>(InnerSize(gemm)) >= kFlopsOfLargeProduct;
}

absl::Status RunTogether(Device& device, absl::Span<const operation::Gemm* const> operations) {
  std::vector<ProductJob> jobs;
  std::vector<const operation::Gemm*> large;
  FixedBatches in_tf32(1);
  int64_t blocks = 0;
  for (const operation::Gemm* gemm : operations) {
    if (TakesTf32(*gemm)) {
      in_tf32.Add(0, ShapeOf(*gemm), gemm->a.data, gemm->b.data, gemm->c.data);
      continue;
    }
    if (IsLarge(*gemm)) {
      large.push_back(gemm);
      continue;
    }
    const ProductJob job = {.alpha = static_cast<float>(gemm->alpha),
                            .beta = static_cast<float>(gemm->beta),
                            .transpose_a = gemm->transpose_a == Transpose::kYes,
                            .transpose_b = gemm->transpose_b == Transpose::kYes,
                            .a = gemm->a,
                            .b = gemm->b,
                            .c = gemm->c,
                            .inner = InnerSize(*gemm),
                            .first = blocks};
    jobs.push_back(job);
    blocks += ProductBlocks(job);
  }
  // Allocates before the first launch.
  DeviceArray<ProductJob> sent;
  if (jobs.size() > 1) {
    PRECONDOR_ASSIGN_OR_RETURN(sent, SendJobs(device, jobs));
  }
  PRECONDOR_RETURN_IF_ERROR(in_tf32.Open(device, sizeof(float)));
  bool has_run = !in_tf32.empty();  // some of them, where the next line fails
  PRECONDOR_RETURN_IF_ERROR(MakeMemoryErrorNotRetryable(has_run, in_tf32.Run(device, "Gemm", 0, kInTf32)));
  for (const operation::Gemm* gemm : large) {
    PRECONDOR_RETURN_IF_ERROR(MakeMemoryErrorNotRetryable(has_run, RunLargeProduct(device, *gemm)));
    has_run = true;
  }
  if (jobs.empty()) return absl::OkStatus();
  return MakeMemoryErrorNotRetryable(has_run, device.Run("Gemm", [&](cudaStream_t stream) {
    return jobs.size() == 1 ? Product(stream, jobs[0])
                            : Products(stream, sent.data(), static_cast<int>(jobs.size()), blocks);
  }));
}

absl::Status RunTogether(Device& device, absl::Span<const operation::SymmetricUpdateMultiply* const> operations) {
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> weights,
                             SendNumbers(device, operations, [](const auto& s) { return s.weights; }));
  int64_t partials = 0;
  for (const auto* s : operations) partials += PartialElements(s->n, s->v.rows);
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<float> memory, device.Array<float>(partials));
  std::vector<SymmetricJob> jobs;
  int64_t tiles = 0, weight = 0, partial = 0, segments = 0;
  bool updates = false;
  for (const auto* s : operations) {
    SymmetricJob job;
    job.tiles = s->raw.data;
    job.n = s->n;
    job.storage = s->storage;
    job.scale = static_cast<float>(s->scale);
    job.shift = s->shift;
    job.weights = weights.data() + weight;
    job.rows = s->rows;
    job.v = s->v;
    job.y = s->y;
    job.partials = memory.data() + partial;
    job.first = tiles;
    jobs.push_back(job);
    updates = updates || job.updates();
    tiles += TileCount(s->n);
    weight += static_cast<int64_t>(s->weights.size());
    partial += PartialElements(s->n, s->v.rows);
    segments = std::max(segments, TileRows(s->n) * s->v.rows);
  }
  const int count = static_cast<int>(jobs.size());
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<SymmetricJob> sent, SendJobs(device, jobs));
  PRECONDOR_RETURN_IF_ERROR(device.Run("SymmetricUpdateMultiply", [&](cudaStream_t stream) {
    return SymmetricUpdateMultiply(stream, sent.data(), count, tiles);
  }));
  if (segments == 0) return absl::OkStatus();
  const auto sum = [&](cudaStream_t stream) { return SymmetricSumPartials(stream, sent.data(), count, segments); };
  // Matrices have changed, so an error from here on must not look like one that left them unchanged.
  return updates ? device.RunOrMarkLost("SymmetricUpdateMultiply", sum) : device.Run("SymmetricUpdateMultiply", sum);
}

absl::Status RunTogether(Device& device, absl::Span<const operation::RowSquaredNorms* const> operations) {
  std::vector<RowNormsJob> jobs;
  std::vector<DotJob> long_rows;
  int64_t rows = 0;
  for (const auto* norms : operations) {
    if (IsLong(norms->x)) {
      for (int64_t i = 0; i < norms->x.rows; ++i) AddDot(norms->x.RowRange(i, 1), norms->x.RowRange(i, 1), long_rows);
    } else {
      jobs.push_back({norms->x, rows});
      rows += norms->x.rows;
    }
  }
  std::vector<double> of_rows(rows), of_long_rows(long_rows.size());
  if (!long_rows.empty())
    PRECONDOR_RETURN_IF_ERROR(RunDotJobs(device, "RowSquaredNorms", Dots, long_rows, absl::MakeSpan(of_long_rows)));
  if (!jobs.empty()) {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<RowNormsJob> sent, SendJobs(device, jobs));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device.Array<double>(rows));
    PRECONDOR_RETURN_IF_ERROR(device.Run("RowSquaredNorms", [&](cudaStream_t stream) {
      return RowSquaredNorms(stream, sent.data(), static_cast<int>(jobs.size()), rows, memory.data());
    }));
    PRECONDOR_RETURN_IF_ERROR(device.Receive(memory, absl::MakeSpan(of_rows)));
  }
  auto next = of_rows.begin(), next_long = of_long_rows.begin();
  for (const auto* norms : operations) {
    auto& from = IsLong(norms->x) ? next_long : next;
    std::copy_n(from, norms->x.rows, norms->out.begin());
    from += norms->x.rows;
  }
  return absl::OkStatus();
}

absl::Status RunTogether(Device& device, absl::Span<const operation::ColumnSquaredNorms* const> operations) {
  std::vector<ColumnNormsJob> jobs;
  int64_t partials = 0, columns = 0, blocks = 0;
  for (const auto* norms : operations) partials += ColumnPartials(norms->x);
  for (const auto* norms : operations) columns += norms->x.cols;
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device.Array<double>(columns + partials));
  double *out = memory.data(), *next = memory.data() + columns;
  bool in_pieces = false;
  for (const auto* norms : operations) {
    jobs.push_back({norms->x, next, out, blocks});
    blocks += ColumnNormsBlocks(norms->x);
    next += ColumnPartials(norms->x);
    out += norms->x.cols;
    in_pieces = in_pieces || ColumnPartials(norms->x) > 0;
  }
  const int count = static_cast<int>(jobs.size());
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<ColumnNormsJob> sent, SendJobs(device, jobs));
  PRECONDOR_RETURN_IF_ERROR(device.Run("ColumnSquaredNorms", [&](cudaStream_t stream) {
    return ColumnSquaredNorms(stream, sent.data(), count, blocks);
  }));
  if (in_pieces) {
    PRECONDOR_RETURN_IF_ERROR(device.Run(
        "ColumnSquaredNorms", [&](cudaStream_t stream) { return ColumnSumPartials(stream, sent.data(), count); }));
  }
  std::vector<double> known(columns);
  PRECONDOR_RETURN_IF_ERROR(device.Receive(memory, absl::MakeSpan(known)));
  auto from = known.begin();
  for (const auto* norms : operations) {
    std::copy_n(from, norms->x.cols, norms->out.begin());
    from += norms->x.cols;
  }
  return absl::OkStatus();
}

absl::Status RunTogether(Device& device, absl::Span<const operation::Dot* const> operations) {
  std::vector<DotJob> jobs;
  for (const operation::Dot* dot : operations) AddDot(dot->x, dot->y, jobs);
  return RunForNumbers(device, "Dot", Dots, jobs, operations);
}

absl::Status RunTogether(Device& device, absl::Span<const operation::AbsoluteSum* const> operations) {
  std::vector<DotJob> jobs;
  for (const auto* of : operations) AddDot(of->x, of->x, jobs);
  return RunForNumbers(device, "AbsoluteSum", AbsoluteSums, jobs, operations);
}

absl::Status RunTogether(Device& device, absl::Span<const operation::AbsoluteMaximum* const> operations) {
  std::vector<DotJob> jobs;
  for (const auto* of : operations) AddDot(of->x, of->x, jobs);
  return RunForNumbers(device, "AbsoluteMaximum", AbsoluteMaxima, jobs, operations);
}

absl::Status RunSmall(Device& device, absl::Span<const operation::ShermanMorrisonTerms* const> operations,
                      absl::Span<absl::Status> statuses) {
  static_assert(kMostVectorsOfTerms == operation::ShermanMorrisonTerms::kMostVectors &&
                kMostRowsOfTerms == operation::ShermanMorrisonTerms::kMostRows);
  const size_t count = operations.size();
  size_t weights = 0, asked = 0;
  for (const auto* terms : operations) {
    weights += terms->h.weights.size();
    asked += terms->squares.size();
  }
  PackedUpload upload;
  const auto jobs = upload.Add<ShermanMorrisonJob>(count);
  const auto all_weights = upload.Add<double>(weights);
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  // All numbers that the host receives, in one array: the squares, then whether products are infinite.
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory,
                             device.Array<double>(static_cast<int64_t>(asked + count)));
  size_t weight = 0, square = 0;
  for (size_t i = 0; i < count; ++i) {
    const operation::ShermanMorrisonTerms& terms = *operations[i];
    std::copy(terms.h.weights.begin(), terms.h.weights.end(), upload.OnHost(all_weights).begin() + weight);
    ShermanMorrisonJob& job = upload.OnHost(jobs)[i];
    job.scale = terms.h.scale;
    job.shift = terms.h.shift;
    job.factor = terms.factor;
    job.weights = upload.OnDevice(all_weights) + weight;
    job.rows = terms.h.rows;
    job.v = terms.v;
    job.y = terms.y;
    job.terms = terms.terms;
    job.squares = terms.squares.empty() ? nullptr : memory.data() + square;
    job.infinite = memory.data() + asked + i;
    weight += terms.h.weights.size();
    square += terms.squares.size();
  }
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  PRECONDOR_RETURN_IF_ERROR(device.Run("ShermanMorrisonTerms", [&](cudaStream_t stream) {
    return ShermanMorrisonTerms(stream, upload.OnDevice(jobs), static_cast<int>(count));
  }));
  const auto known = std::make_unique_for_overwrite<double[]>(asked + count);  // not zeroed: it may have megabytes
  PRECONDOR_RETURN_IF_ERROR(device.Receive(memory, absl::MakeSpan(known.get(), asked + count)));
  const double* next = known.get();
  for (const auto* terms : operations) {
    std::copy_n(next, terms->squares.size(), terms->squares.begin());
    next += terms->squares.size();
  }
  for (absl::Status& status : statuses) {
    if (*next++ == 0) continue;
    status = absl::FailedPreconditionError("ShermanMorrisonTerms: v: expected a finite product with the matrix");
  }
  return absl::OkStatus();
}

absl::Status InverseStatus(int info, int64_t n) {
  if (info == 0) return absl::OkStatus();
  if (info < 0) return absl::FailedPreconditionError("SpdInverse: a: expected finite elements");
  return absl::FailedPreconditionError(
      absl::StrCat("SpdInverse: a: expected positive definite, but leading minor ", info, " of ", n, " is not"));
}

absl::Status RunSmall(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                      absl::Span<absl::Status> statuses) {
  std::vector<SpdInverseJob> jobs;
  for (const auto* inverse : operations) jobs.push_back({.a = inverse->a, .x = inverse->x});
  return RunInverseJobs(device, jobs, statuses);
}

absl::Status RunSmall(Device& device, absl::Span<const operation::LowRankCore* const> operations,
                      absl::Span<absl::Status> statuses) {
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> roots,
                             SendNumbers(device, operations, [](const auto& c) { return c.roots; }));
  std::vector<SpdInverseJob> jobs;
  int64_t root = 0;
  for (const auto* core : operations) {
    jobs.push_back({.a = core->gram, .roots = roots.data() + root, .x = core->core, .packed = core->packed.data});
    root += static_cast<int64_t>(core->roots.size());
  }
  return RunInverseJobs(device, jobs, statuses);
}

}  // namespace precondor::cuda
