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

#if DNNL_VERSION_MAJOR == 2
using Tag = dnnl::memory::format_tag;
using Type = dnnl::memory::data_type;

// oneDNN caches the code that it has generated for a shape. Creating the description again costs about 20 us.
bool MultiplyBf16(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b,
                  const dnnl::memory::desc& c_form, void* c) {
  static const dnnl::engine kEngine(dnnl::engine::kind::cpu, 0);
  const OneThread one;
  try {
    const dnnl::memory::desc a_form({m, k}, Type::bf16, Tag::ab), b_form({k, n}, Type::bf16, Tag::BA16a64b2a);
    const dnnl::matmul product(dnnl::matmul::primitive_desc({a_form, b_form, c_form}, kEngine));
    dnnl::stream stream(kEngine);
    product.execute(stream, {{DNNL_ARG_SRC, dnnl::memory(a_form, kEngine, const_cast<uint16_t*>(a))},
                             {DNNL_ARG_WEIGHTS, dnnl::memory(b_form, kEngine, const_cast<uint16_t*>(packed_b))},
                             {DNNL_ARG_DST, dnnl::memory(c_form, kEngine, c)}});
    stream.wait();
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}
#endif

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

#if DNNL_VERSION_MAJOR == 2
bool ProcessorHasBf16() {
  static const bool kHas =
      ProcessorIsa() == Isa::kAvx512 &&
      (static_cast<int>(dnnl_get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
  return kHas;
}

bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, uint16_t* c) {
  return ProcessorHasBf16() && MultiplyBf16(m, n, k, a, packed_b, {{m, n}, Type::bf16, Tag::ab}, c);
}

bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, MatrixView c) {
  return ProcessorHasBf16() &&
         MultiplyBf16(m, n, k, a, packed_b, {{m, n}, Type::f32, dnnl::memory::dims{c.stride, 1}}, c.data);
}
#endif

}  // namespace precondor::onednn

#else

namespace precondor::onednn {

Isa ProcessorIsa() { return Isa::kNone; }

bool Sgemm(float, ConstMatrixView, Transpose, ConstMatrixView, Transpose, float, MatrixView) { return false; }

}  // namespace precondor::onednn

#endif

#if !defined(PRECONDOR_HAVE_ONEDNN) || DNNL_VERSION_MAJOR != 2
namespace precondor::onednn {

bool ProcessorHasBf16() { return false; }

bool Bf16Product(int64_t, int64_t, int64_t, const uint16_t*, const uint16_t*, uint16_t*) { return false; }

bool Bf16Product(int64_t, int64_t, int64_t, const uint16_t*, const uint16_t*, MatrixView) { return false; }

}  // namespace precondor::onednn
#endif
