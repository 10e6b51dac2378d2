// SPDX-License-Identifier: Apache-2.0
// A layer's gradient and the memory for its answer, as Worker::Precondition takes them.
#pragma once

#include <cstdint>
#include <variant>

#include "absl/types/span.h"

#include "kernels/base/gradient_part.h"
#include "kernels/base/matrix_view.h"

namespace precondor {

// An f32 matrix in the memory of a CUDA device, row-major.
struct DeviceTensor {
  // Number of the CUDA device in this process. It is the first field, so that {data, rows, cols} always means a matrix
  // in host memory.
  int device = 0;
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;      // elements from one row to the next, at least cols
  void* stream = nullptr;  // cudaStream_t whose work produces or still uses the matrix; null: the default stream
};

// A gradient and the memory for its answer, in one of three forms. Holds views alone: the caller owns the memory.
class GradientBuffers {
 public:
  struct Matrix {
    ConstMatrixView gradient;
    MatrixView out;
  };
  struct Parts {
    absl::Span<const GradientPart> parts;
    ConstMatrixView gradient;
    MatrixView out;
  };
  struct DeviceMatrix {
    DeviceTensor gradient;
    DeviceTensor out;
  };
  using Form = std::variant<Matrix, Parts, DeviceMatrix>;

  // A whole gradient [d_out, d_in] in host memory. `out` has its shape, and may be its own memory.
  GradientBuffers(ConstMatrixView gradient, MatrixView out) : form_(Matrix{gradient, out}) {}

  // This rank's parts of the averaged gradient in exchange SHARDED, which every rank gives for every layer. `gradient`
  // is [1, SentElements(parts)] and `out` [1, ReceivedElements(parts)], with the elements of the parts one after the
  // other, each row by row. Either may be empty (0 columns). If the ranks' parts have more elements than the gradient,
  // the future of the last rank fails with INVALID_ARGUMENT, and the others wait for its parts; if they leave elements
  // out, all answers are kSkip. In first order `out` stays as it is: each rank has the averages of its parts.
  GradientBuffers(absl::Span<const GradientPart> parts, ConstMatrixView gradient, MatrixView out)
      : form_(Parts{parts, gradient, out}) {}

  // A whole gradient and `out` in the memory of one device. Requires libprecondor-cuda.so (docs/operate/cuda.md). The
  // work that the `stream` of each matrix has at the time of the call must produce the gradient and include the last
  // use of `out`. Once the future is ready, at the latest after result_timeout, any stream may read `out`. The answer
  // of a step must be ready before you send anything of a later step for the layer, because gradients wait in a queue
  // for their streams and statistics do not. The gradient stays on the device if the shard is on this host and device,
  // the worker dials it at a unix: address, and one rank sends the gradient in F32; otherwise it goes through the host.
  // The future fails with FAILED_PRECONDITION in REPLAY, PULL_FACTORS and SHARDED, and with UNAVAILABLE without the
  // library or the device.
  GradientBuffers(const DeviceTensor& gradient, const DeviceTensor& out) : form_(DeviceMatrix{gradient, out}) {}

  const Form& form() const { return form_; }

 private:
  Form form_;
};

}  // namespace precondor
