// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/tensor.h"

#include <functional>
#include <numeric>
#include <utility>

namespace precondor::reference {

namespace {

// From one element to the next along the mode.
int64_t StepOf(const std::vector<int64_t>& dims, size_t mode) {
  return std::accumulate(dims.begin() + static_cast<int64_t>(mode) + 1, dims.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

Tensor::Tensor(std::vector<int64_t> dims) : dims(std::move(dims)) {
  data.resize(std::accumulate(this->dims.begin(), this->dims.end(), int64_t{1}, std::multiplies<>()));
}

Tensor ModeProduct(const Dense& q, size_t mode, const Tensor& x) {
  const int64_t size = x.dims[mode], step = StepOf(x.dims, mode);
  Tensor out(x.dims);
  for (int64_t n = 0; n < static_cast<int64_t>(x.data.size()); ++n) {
    const int64_t i = n / step % size;
    for (int64_t j = 0; j < size; ++j) out.data[n] += q.at(i, j) * x.data[n + (j - i) * step];
  }
  return out;
}

Dense ModeGram(const Tensor& x, size_t mode) {
  const int64_t size = x.dims[mode], step = StepOf(x.dims, mode);
  Dense gram(size, size);
  for (int64_t n = 0; n < static_cast<int64_t>(x.data.size()); ++n) {
    const int64_t i = n / step % size;
    for (int64_t j = 0; j < size; ++j) gram.at(i, j) += x.data[n] * x.data[n + (j - i) * step];
  }
  return gram;
}

Tensor ModeReordered(const std::vector<int64_t>& order, size_t mode, const Tensor& x) {
  const int64_t size = x.dims[mode], step = StepOf(x.dims, mode);
  Tensor out(x.dims);
  for (int64_t n = 0; n < static_cast<int64_t>(x.data.size()); ++n) {
    const int64_t i = n / step % size;
    out.data[n] = x.data[n + (order[i] - i) * step];
  }
  return out;
}

}  // namespace precondor::reference
