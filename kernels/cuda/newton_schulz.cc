// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cuda_bf16.h>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/matrix_passes.h"
#include "kernels/cuda/packed_upload.h"

namespace precondor::cuda {
namespace {

using operation::kNewtonSchulzCubic, operation::kNewtonSchulzLinear, operation::kNewtonSchulzQuintic;

constexpr absl::string_view kName = "NewtonSchulz";

// A layer's operation, and where on the device its squares are.
struct Layer {
  const operation::NewtonSchulz* step;
  double* squares;

  int64_t rows() const { return step->d.rows; }
  int64_t cols() const { return step->d.cols; }
  int64_t side() const { return std::min(rows(), cols()); }
  ConstMatrixView direction() const {
    return step->lookahead.size() > 0 ? step->lookahead : step->next.size() > 0 ? step->next : step->d;
  }
  // Layers with most iterations come first, so that those that go on are a prefix.
  auto Key() const { return std::tuple(-step->steps, rows(), cols()); }
};

// The three products of an iteration: a = x x' or x'x; p = r a a + q p for p = a + p / q I; y = p x or x p.
enum Product : size_t { kGram, kPolynomial, kNext, kProducts };

template <typename T>
ProductShape ShapeOf(const Layer& layer, Product product) {
  const int64_t m = layer.rows(), n = layer.cols(), k = layer.side();
  const int64_t of_x = PaddedStride<T>(n), of_a = PaddedStride<T>(k);
  const bool wide = m <= n;
  switch (product) {
    case kGram:
      return {k, k, std::max(m, n), of_x, of_x, of_a, 1, 0, /*transpose_a=*/!wide, /*transpose_b=*/wide};
    case kPolynomial:
      return {
          k, k, k, of_a, of_a, of_a, static_cast<float>(kNewtonSchulzQuintic), static_cast<float>(kNewtonSchulzCubic)};
    default:
      return {m, n, k, wide ? of_a : of_x, wide ? of_x : of_a, of_x};
  }
}

// The iterations of layers in one precision, on elements of type T.
template <typename T>
class Iterations {
 public:
  Iterations(std::vector<Layer> layers, Arithmetic in, int64_t most_scratch_bytes)
      : layers_(std::move(layers)), in_(in), most_scratch_bytes_(most_scratch_bytes) {}

  // Allocates all memory.
  absl::Status Open(Device& device) {
    if (layers_.empty()) return absl::OkStatus();
    std::stable_sort(layers_.begin(), layers_.end(), [](const Layer& a, const Layer& b) { return a.Key() < b.Key(); });
    int64_t elements = 0, blocks = 0;
    Divide(elements);
    for (const Layer& layer : layers_) blocks += ScaledCopyBlocks(layer.rows(), layer.cols());
    starts_ = upload_.Add<ScaledCopyJob<float, T>>(layers_.size());
    shifts_ = upload_.Add<ScaledCopyJob<T, T>>(layers_.size());
    ends_ = upload_.Add<ScaledCopyJob<T, float>>(layers_.size());
    const auto arrived = upload_.Add<unsigned>(layers_.size());
    for (PackedUpload::Part<void*>* part : {&x_, &y_, &a_, &p_}) *part = upload_.Add<void*>(places_);
    PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
    PRECONDOR_ASSIGN_OR_RETURN(memory_, device.Array<T>(elements));
    PRECONDOR_ASSIGN_OR_RETURN(partials_, device.Array<double>(blocks));
    next_partials_ = partials_.data();
    next_arrived_ = upload_.OnDevice(arrived);
    for (Part& part : parts_) Fill(part);
    return upload_.Send(device);
  }

  absl::Status Run(Device& device) const {
    for (const Part& part : parts_) {
      PRECONDOR_RETURN_IF_ERROR(Copy(device, starts_, part.begin, part.end, part.blocks));
      for (int64_t step = 0; step < layers_[part.begin].step->steps; ++step) {
        PRECONDOR_RETURN_IF_ERROR(Iterate(device, part, step));
      }
      PRECONDOR_RETURN_IF_ERROR(Copy(device, ends_, part.begin, part.end, part.blocks));
    }
    return absl::OkStatus();
  }

 private:
  // Layers [begin, end) of one shape, in the arrays of addresses from `place` on.
  struct Batch {
    size_t begin, end, place, places;
  };
  // Layers [begin, end) that run at the same time.
  struct Part {
    size_t begin, end;
    std::vector<Batch> batches;
    int64_t blocks = 0;
  };

  // Numbers of elements of x or y, and of a or p.
  static int64_t Large(const Layer& layer) { return PaddedElements<T>(layer.rows() * PaddedStride<T>(layer.cols())); }
  static int64_t Small(const Layer& layer) { return PaddedElements<T>(layer.side() * PaddedStride<T>(layer.side())); }
  static int64_t SizeOf(const Layer& layer, Product product) {
    const ProductShape shape = ShapeOf<T>(layer, product);
    return BatchSize(shape.rows, shape.cols, shape.inner);
  }

  // Makes parts and their batches. Sets `elements` to the largest number that a part takes.
  void Divide(int64_t& elements) {
    int64_t used = 0, unused = 0;  // by the part's layers, and by its unused places
    for (size_t i = 0; i < layers_.size(); ++i) {
      const int64_t own = Large(layers_[i]) + Small(layers_[i]);
      const bool opens = parts_.empty() || (used + 2 * own) * static_cast<int64_t>(sizeof(T)) > most_scratch_bytes_;
      if (opens) {
        parts_.push_back({i, i, {}});
        used = unused = 0;
      }
      std::vector<Batch>& batches = parts_.back().batches;
      if (batches.empty() || layers_[i].Key() != layers_[batches.back().begin].Key()) batches.push_back({i, i, 0, 0});
      parts_.back().end = batches.back().end = i + 1;
      used += 2 * own;
      unused = std::max(unused, own);
      elements = std::max(elements, used + unused);
    }
    for (Part& part : parts_) {
      for (Batch& batch : part.batches) {
        for (const Product product : {kGram, kPolynomial, kNext}) {
          const int64_t size = SizeOf(layers_[batch.begin], product);
          batch.places = std::max(batch.places, PlacesOf(batch.end - batch.begin, size));
        }
        batch.place = std::exchange(places_, places_ + batch.places);
      }
    }
  }

  void Fill(Part& part) {
    T* next = memory_.data();
    int64_t shift_blocks = 0;
    for (const Batch& batch : part.batches) {
      for (size_t i = batch.begin; i < batch.end; ++i) {
        const size_t place = batch.place + (i - batch.begin);
        const Layer& layer = layers_[i];
        T* const x = Set(x_, place, std::exchange(next, next + Large(layer)));
        T* const y = Set(y_, place, std::exchange(next, next + Large(layer)));
        T* const a = Set(a_, place, std::exchange(next, next + Small(layer)));
        T* const p = Set(p_, place, std::exchange(next, next + Small(layer)));
        AddJobs(i, x, layer.step->steps % 2 == 0 ? x : y, a, p, part.blocks, shift_blocks);
      }
    }
    // All unused places have the same operands, whose contents are unspecified.
    for (const Batch& batch : part.batches) {
      for (size_t i = batch.end - batch.begin; i < batch.places; ++i) {
        for (const auto& large : {x_, y_}) Set(large, batch.place + i, next);
        for (const auto& small : {a_, p_}) Set(small, batch.place + i, next + Large(layers_[batch.begin]));
      }
    }
  }

  void AddJobs(size_t i, T* x, T* last, T* a, T* p, int64_t& blocks, int64_t& shift_blocks) {
    const Layer& layer = layers_[i];
    const int64_t m = layer.rows(), n = layer.cols(), k = layer.side();
    const int64_t of_x = PaddedStride<T>(n), of_a = PaddedStride<T>(k);
    upload_.OnHost(starts_)[i] = {.from = layer.direction(),
                                  .to = {x, m, n, of_x},
                                  .norm = layer.squares + 1,
                                  .epsilon = layer.step->epsilon,
                                  .first = blocks};
    upload_.OnHost(shifts_)[i] = {.from = {a, k, k, of_a},
                                  .to = {p, k, k, of_a},
                                  .shift = kNewtonSchulzLinear / kNewtonSchulzCubic,
                                  .first = shift_blocks};
    upload_.OnHost(ends_)[i] = {.from = {last, m, n, of_x},
                                .to = layer.step->u,
                                .factor = layer.step->scale,
                                .square = {layer.squares + 2, next_partials_, next_arrived_++},
                                .first = blocks};
    next_partials_ += ScaledCopyBlocks(m, n);
    blocks += ScaledCopyBlocks(m, n);
    shift_blocks += ScaledCopyBlocks(k, k);
  }

  T* Set(PackedUpload::Part<void*> addresses, size_t place, T* x) {
    upload_.OnHost(addresses)[place] = x;
    return x;
  }

  template <typename Job>
  absl::Status Copy(Device& device, PackedUpload::Part<Job> jobs, size_t begin, size_t end, int64_t blocks) const {
    return device.Run(kName, [&](cudaStream_t stream) {
      return ScaledCopies(stream, upload_.OnDevice(jobs) + begin, static_cast<int>(end - begin), blocks);
    });
  }

  // x and y alternate as input and output of an iteration.
  absl::Status Iterate(Device& device, const Part& part, int64_t step) const {
    size_t end = part.begin;
    int64_t blocks = 0;
    while (end < part.end && layers_[end].step->steps > step) {
      const int64_t side = layers_[end++].side();
      blocks += ScaledCopyBlocks(side, side);
    }
    const auto x = step % 2 == 0 ? x_ : y_, y = step % 2 == 0 ? y_ : x_;
    PRECONDOR_RETURN_IF_ERROR(Multiply(device, part, end, kGram, {x, x, a_}));
    PRECONDOR_RETURN_IF_ERROR(Copy(device, shifts_, part.begin, end, blocks));
    PRECONDOR_RETURN_IF_ERROR(Multiply(device, part, end, kPolynomial, {a_, a_, p_}));
    for (const Batch& batch : part.batches) {
      const Layer& layer = layers_[batch.begin];
      const Pointers factors = layer.rows() <= layer.cols() ? Pointers{p_, x, y} : Pointers{x, p_, y};
      PRECONDOR_RETURN_IF_ERROR(Multiply(device, batch, end, kNext, factors));
    }
    return absl::OkStatus();
  }
  absl::Status Multiply(Device& device, const Part& part, size_t end, Product product, const Pointers& of) const {
    for (const Batch& batch : part.batches) PRECONDOR_RETURN_IF_ERROR(Multiply(device, batch, end, product, of));
    return absl::OkStatus();
  }
  absl::Status Multiply(Device& device, const Batch& batch, size_t end, Product product, const Pointers& of) const {
    if (batch.begin >= end) return absl::OkStatus();
    const Layer& layer = layers_[batch.begin];
    const size_t size = static_cast<size_t>(SizeOf(layer, product));
    for (size_t i = 0; i < batch.end - batch.begin; i += size) {
      PRECONDOR_RETURN_IF_ERROR(RunBatch(device, kName, ShapeOf<T>(layer, product), in_, upload_, of, batch.place + i,
                                         batch.place + i + size));
    }
    return absl::OkStatus();
  }

  std::vector<Layer> layers_;
  const Arithmetic in_;
  const int64_t most_scratch_bytes_;
  std::vector<Part> parts_;
  size_t places_ = 0;
  PackedUpload upload_;
  PackedUpload::Part<ScaledCopyJob<float, T>> starts_;
  PackedUpload::Part<ScaledCopyJob<T, T>> shifts_;
  PackedUpload::Part<ScaledCopyJob<T, float>> ends_;
  PackedUpload::Part<void*> x_, y_, a_, p_;
  DeviceArray<T> memory_;
  DeviceArray<double> partials_;
  double* next_partials_ = nullptr;
  unsigned* next_arrived_ = nullptr;
};

}  // namespace

absl::Status RunTogether(Device& device, absl::Span<const operation::NewtonSchulz* const> operations,
                         int64_t most_scratch_bytes) {
  const size_t count = operations.size();
  int64_t blocks = 0;
  for (const auto* step : operations) blocks += ScaledCopyBlocks(step->d.rows, step->d.cols);
  PackedUpload upload;
  const auto jobs = upload.Add<MomentumJob>(count);
  const auto arrived = upload.Add<unsigned>(count);
  PRECONDOR_RETURN_IF_ERROR(upload.Open(device));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> squares, device.Array<double>(3 * static_cast<int64_t>(count)));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> partials, device.Array<double>(2 * blocks));
  std::vector<Layer> in_f32, in_tf32, in_bf16;
  int64_t block = 0;
  for (size_t i = 0; i < count; ++i) {
    const operation::NewtonSchulz& step = *operations[i];
    double* const of_step = squares.data() + 3 * i;
    upload.OnHost(jobs)[i] = {.d = step.d,
                              .momentum = step.momentum,
                              .beta = static_cast<float>(step.beta),
                              .next = step.next,
                              .lookahead = step.lookahead,
                              .squares = {of_step, partials.data() + 2 * block, upload.OnDevice(arrived) + i},
                              .first = block};
    block += ScaledCopyBlocks(step.d.rows, step.d.cols);
    const bool bf16 = step.precision == ProductPrecision::kBf16, tf32 = step.precision == ProductPrecision::kTf32;
    (bf16 ? in_bf16 : tf32 ? in_tf32 : in_f32).push_back({&step, of_step});
  }
  Iterations<float> f32(std::move(in_f32), kInF32, most_scratch_bytes);
  Iterations<float> tf32(std::move(in_tf32), kInTf32, most_scratch_bytes);
  Iterations<__nv_bfloat16> bf16(std::move(in_bf16), kInBf16, most_scratch_bytes);
  PRECONDOR_RETURN_IF_ERROR(f32.Open(device));
  PRECONDOR_RETURN_IF_ERROR(tf32.Open(device));
  PRECONDOR_RETURN_IF_ERROR(bf16.Open(device));
  PRECONDOR_RETURN_IF_ERROR(upload.Send(device));
  PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
    return AddMomentum(stream, upload.OnDevice(jobs), static_cast<int>(count), blocks);
  }));
  PRECONDOR_RETURN_IF_ERROR(f32.Run(device));
  PRECONDOR_RETURN_IF_ERROR(tf32.Run(device));
  PRECONDOR_RETURN_IF_ERROR(bf16.Run(device));
  std::vector<double> known(3 * count);
  PRECONDOR_RETURN_IF_ERROR(device.Receive(squares, absl::MakeSpan(known)));
  for (size_t i = 0; i < count; ++i) std::copy_n(known.begin() + 3 * i, 3, operations[i]->squares.begin());
  return absl::OkStatus();
}

}  // namespace precondor::cuda
