// SPDX-License-Identifier: Apache-2.0
// The only file that includes oneDNN.
#include "kernels/cpu/onednn.h"

#ifdef PRECONDOR_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>

#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
// OpenMP's own interface, declared here because clang 14 lacks its header.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int count);
}
#endif

namespace precondor::onednn {
namespace {

// Sets this thread's OpenMP team to one thread. OpenMP keeps the number per thread, so neither other threads nor later
// regions of this one see the change.
class OneThread {
 public:
#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
  static constexpr bool kPossible = true;
  OneThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }

 private:
  const int before_;
#else
  static constexpr bool kPossible = DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_SEQ;
  OneThread() {}
  ~OneThread() {}
#endif
};

Isa FindIsa() {
  if (!OneThread::kPossible) return Isa::kNone;
  const int isa = dnnl_get_effective_cpu_isa();
  if ((isa & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core) return Isa::kAvx512;
  return (isa & dnnl_cpu_isa_avx2) == dnnl_cpu_isa_avx2 ? Isa::kAvx2 : Isa::kNone;
}

char Letter(Transpose transpose) { return transpose == Transpose::kYes ? 'T' : 'N'; }

}  // namespace

Isa ProcessorIsa() {
  static const Isa kIsa = FindIsa();
  return kIsa;
}

bool Sgemm(float alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, float beta,
           MatrixView c) {
  if (ProcessorIsa() == Isa::kNone) return false;
  const int64_t inner = transpose_a == Transpose::kYes ? a.rows : a.cols;
  const OneThread one;
  return dnnl_sgemm(Letter(transpose_a), Letter(transpose_b), c.rows, c.cols, inner, alpha, a.data, a.stride, b.data,
                    b.stride, beta, c.data, c.stride) == dnnl_success;
}

}  // namespace precondor::onednn

#else

namespace precondor::onednn {

Isa ProcessorIsa() { return Isa::kNone; }

bool Sgemm(float, ConstMatrixView, Transpose, ConstMatrixView, Transpose, float, MatrixView) { return false; }

}  // namespace precondor::onednn

#endif
