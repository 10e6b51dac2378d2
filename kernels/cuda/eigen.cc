// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/decompositions.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/packed_upload.h"

namespace precondor::cuda {
namespace {

// Largest number of matrices in a call, so that its f64 copies stay below 2^31 bytes at any size up to
// kMostRowsOfSymmetricEigens.
constexpr size_t kMostOfACall = 1000;

// Matrices of one size, whose f64 copies and eigenvalues are contiguous.
struct Batch {
  int64_t n = 0;
  size_t first = 0;
  size_t count = 0;
  double* wide = nullptr;
  double* values = nullptr;
  size_t device_bytes = 0, host_bytes = 0;  // cuSOLVER's work space
};

class SolverParameters {
 public:
  SolverParameters() = default;
  SolverParameters(const SolverParameters&) = delete;
  SolverParameters& operator=(const SolverParameters&) = delete;
  ~SolverParameters() {
    if (params_ != nullptr) cusolverDnDestroyParams(params_);
  }
  cusolverStatus_t Open() { return cusolverDnCreateParams(&params_); }
  cusolverDnParams_t get() const { return params_; }

 private:
  cusolverDnParams_t params_ = nullptr;
};

// Divides the matrices into batches. Precondition: `sizes` ascend.
std::vector<Batch> BatchesOf(const std::vector<int64_t>& sizes, double* values, double* wide) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (batches.empty() || batches.back().n != sizes[i] || batches.back().count == kMostOfACall) {
      batches.push_back({.n = sizes[i], .first = i, .wide = wide, .values = values});
    }
    ++batches.back().count;
    values += sizes[i];
    wide += sizes[i] * sizes[i];
  }
  return batches;
}

// A row-major lower triangle is a column-major upper one. The matrices have both triangles.
constexpr cublasFillMode_t kTriangle = CUBLAS_FILL_MODE_UPPER;

absl::Status AskForWorkspace(Device& device, const SolverParameters& parameters, Batch& batch) {
  return device.QuerySolver("SymmetricEigen", [&](cusolverDnHandle_t solver) {
    return cusolverDnXsyevBatched_bufferSize(solver, parameters.get(), CUSOLVER_EIG_MODE_VECTOR, kTriangle, batch.n,
                                             CUDA_R_64F, batch.wide, batch.n, CUDA_R_64F, batch.values, CUDA_R_64F,
                                             &batch.device_bytes, &batch.host_bytes, static_cast<int64_t>(batch.count));
  });
}

absl::Status Decompose(Device& device, const SolverParameters& parameters, const Batch& batch, void* on_device,
                       void* on_host, int* infos) {
  return device.RunSolver("SymmetricEigen", [&](cusolverDnHandle_t solver) {
    return cusolverDnXsyevBatched(solver, parameters.get(), CUSOLVER_EIG_MODE_VECTOR, kTriangle, batch.n, CUDA_R_64F,
                                  batch.wide, batch.n, CUDA_R_64F, batch.values, CUDA_R_64F, on_device,
                                  batch.device_bytes, on_host, batch.host_bytes, infos + batch.first,
                                  static_cast<int64_t>(batch.count));
  });
}

}  // namespace

absl::Status EigenStatus(int info) {
  if (info == 0) return absl::OkStatus();
  if (info < 0) return absl::FailedPreconditionError("SymmetricEigen: a: expected finite elements");
  return absl::FailedPreconditionError(absl::StrCat("SymmetricEigen: no convergence, cuSOLVER says ", info));
}

absl::Status RunSmall(Device& device, absl::Span<const operation::SymmetricEigen* const> operations,
                      absl::Span<absl::Status> statuses) {
  const size_t count = operations.size();
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t i, size_t j) { return operations[i]->a.rows < operations[j]->a.rows; });
  std::vector<int64_t> sizes;
  int64_t rows = 0, elements = 0;
  for (const size_t i : order) {
    sizes.push_back(operations[i]->a.rows);
    rows += sizes.back();
    elements += sizes.back() * sizes.back();
  }
  // All eigenvalues and outcomes, which the host receives, followed by the matrices.
  const int64_t learnt = rows + static_cast<int64_t>(count);
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device.Array<double>(learnt + elements));
  std::vector<Batch> batches = BatchesOf(sizes, memory.data(), memory.data() + learnt);

  SolverParameters parameters;
  PRECONDOR_RETURN_IF_ERROR(
      device.QuerySolver("SymmetricEigen", [&](cusolverDnHandle_t) { return parameters.Open(); }));
  size_t device_bytes = 0, host_bytes = 0;
  for (Batch& batch : batches) {
    PRECONDOR_RETURN_IF_ERROR(AskForWorkspace(device, parameters, batch));
    device_bytes = std::max(device_bytes, batch.device_bytes);
    host_bytes += batch.host_bytes;
  }
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<char> on_device, device.Array<char>(static_cast<int64_t>(device_bytes)));
  std::vector<char> on_host(host_bytes);  // each batch has its own part, until all batches are done

  PackedUpload upload;
  const auto jobs = upload.Add<DecompositionJob>(count);
  const auto infos = upload.Add<int>(count);
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  double* wide = memory.data() + learnt;
  for (size_t i = 0; i < count; ++i) {
    const operation::SymmetricEigen& eigen = *operations[order[i]];
    upload.OnHost(jobs)[i] = {.a = eigen.a, .wide = wide, .info = upload.OnDevice(infos) + i, .x = eigen.q};
    wide += sizes[i] * sizes[i];
  }
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  const DecompositionJob* const sent = upload.OnDevice(jobs);
  double* const outcomes = memory.data() + rows;
  PRECONDOR_RETURN_IF_ERROR(device.Run("SymmetricEigen", [&](cudaStream_t stream) {
    return WidenSymmetric(stream, sent, static_cast<int>(count), outcomes);
  }));
  char* host = on_host.data();
  absl::Status decomposed;
  for (const Batch& batch : batches) {
    if (decomposed.ok())
      decomposed = Decompose(device, parameters, batch, on_device.data(), host, upload.OnDevice(infos));
    host += batch.host_bytes;
  }
  if (decomposed.ok()) {
    decomposed = device.Run("SymmetricEigen", [&](cudaStream_t stream) {
      return NarrowResults(stream, sent, static_cast<int>(count), outcomes);
    });
  }
  std::vector<double> known(static_cast<size_t>(learnt));
  // Waits for the stream also after a failure: earlier batches may still use the work space on the host.
  const absl::Status received = device.Receive(memory, absl::MakeSpan(known));
  PRECONDOR_RETURN_IF_ERROR(decomposed);
  PRECONDOR_RETURN_IF_ERROR(received);
  auto values = known.begin();
  for (size_t i = 0; i < count; ++i) {
    absl::Status& status = statuses[order[i]] = EigenStatus(static_cast<int>(known[rows + i]));
    if (status.ok()) std::copy_n(values, sizes[i], operations[order[i]]->values.begin());
    values += sizes[i];
  }
  return absl::OkStatus();
}

}  // namespace precondor::cuda
