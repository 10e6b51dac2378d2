// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/mkor.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/deferred_factor.h"
#include "kernels/methods/dense_factor.h"
#include "kernels/methods/factor.h"
#include "kernels/methods/low_rank_factor.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

// One factor of a side. A side has one factor, or one per diagonal block if it is longer than max_factor_dim.
struct Block {
  int64_t begin = 0;
  int64_t size = 0;
  std::unique_ptr<Factor> factor;
};

// Inverses of a side's blocks, of which there is usually one.
using Inverses = absl::InlinedVector<FactorInverse, 1>;

// Text of the options that the factors depend on; scaling affects only answers.
std::string StateText(const MkorConfig& config) {
  const std::string text =
      absl::StrFormat("rule %d rank %d gamma %.17g damping %.17g clip %.17g zeta %.17g norm_threshold %.17g",
                      static_cast<int>(config.rule), config.rank, config.gamma, config.damping, config.clip,
                      config.zeta, config.norm_threshold);
  // F32 is not written, as in states from before the option existed.
  return config.storage == SymmetricStorage::kF32 ? text : text + " storage F16";
}

// Returns the lengths of equal blocks (the last ones may be one shorter) that cover d.
std::vector<int64_t> BlockSizes(int64_t d, int64_t max_factor_dim) {
  const int64_t count = (d + max_factor_dim - 1) / max_factor_dim;
  std::vector<int64_t> sizes(count, d / count);
  for (int64_t i = 0; i < d % count; ++i) ++sizes[i];
  return sizes;
}

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}
ConstMatrixView Columns(ConstMatrixView x, int64_t begin, int64_t count) {
  return ConstMatrixView(x.data + begin, x.rows, count, x.stride);
}

// Returns a factor's inverse divided by the scalar that all blocks of its side share.
LowRankInverse UnitForm(const FactorInverse& inverse, double shared) {
  LowRankInverse form = inverse.low_rank;
  form.c = inverse.c / shared;
  return form;
}

// Returns the scalar to divide all blocks of a side by, so that no block scales up.
double LargestScale(const Inverses& inverses) {
  double largest = 0;
  for (const FactorInverse& inverse : inverses) largest = std::max(largest, inverse.c);
  return largest;
}

class MkorState final : public LayerState {
 public:
  MkorState(const MkorConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_RETURN_IF_ERROR(InitSide(layer_.d_in, in_));
    return InitSide(layer_.d_out, out_);
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectVectors(layer_, statistics));
    PRECONDOR_ASSIGN_OR_RETURN(const SquaredNorms squares, FiniteSquaredNorms(layer_, statistics, backend_));
    absl::Status prepared = PrepareSides(statistics, squares);
    for (std::vector<Block>* side : {&in_, &out_}) {
      for (Block& block : *side) prepared.ok() ? block.factor->Commit() : block.factor->Abandon();
    }
    if (!prepared.ok()) return prepared;
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    if (!ready()) return backend_.Copy(d, u);
    Inverses in, out;
    PRECONDOR_RETURN_IF_ERROR(InvertSides(in, out));
    // Scalars are factored out so that the products stay in f32's range. Rescale and ScaleOf apply them again.
    const double in_scale = LargestScale(in), out_scale = LargestScale(out);
    const bool alike = out_.size() == 1 && in_.size() == 1 && out[0].dense == in[0].dense;
    if (alike && HasJointNorm(config_.scaling, layer_)) {
      const auto rule = [&](double d_length, double u_length) {
        return ScaleOf(config_.scaling, layer_, out_scale * in_scale, u.size(), d_length, u_length);
      };
      if (out[0].dense) return backend_.DensePrecondition(out[0].form, in[0].form, d, rule, u, config_.products);
      return backend_.LowRankPrecondition(UnitForm(out[0], out_scale), UnitForm(in[0], in_scale), d, rule, u,
                                          config_.products);
    }
    for (size_t i = 0; i < out_.size(); ++i) {
      for (size_t j = 0; j < in_.size(); ++j) {
        const ConstMatrixView tile = Columns(d.RowRange(out_[i].begin, out_[i].size), in_[j].begin, in_[j].size);
        const MatrixView result = Columns(u.RowRange(out_[i].begin, out_[i].size), in_[j].begin, in_[j].size);
        PRECONDOR_RETURN_IF_ERROR(PreconditionTile(out[i], out_scale, in[j], in_scale, tile, result));
      }
    }
    return Rescale(config_.scaling, layer_, backend_, out_scale * in_scale, d, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kMkorTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText(config_));
    out.Integer(version_);
    for (const std::vector<Block>* side : {&in_, &out_}) {
      out.Integer(side->size());
      for (const Block& block : *side) PRECONDOR_RETURN_IF_ERROR(block.factor->Save(out));
    }
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override {
    uint64_t version = 0;
    const absl::Status prepared = PrepareLoad(bytes, version);
    for (std::vector<Block>* side : {&in_, &out_}) {
      for (Block& block : *side) prepared.ok() ? block.factor->Commit() : block.factor->Abandon();
    }
    if (prepared.ok()) version_ = version;
    return OfLayer(layer_, prepared);
  }

  bool ready() const override { return version_ > 0; }
  uint64_t version() const override { return version_; }

  int64_t bytes() const override {
    int64_t sum = 0;
    for (const Block& block : in_) sum += block.factor->bytes();
    for (const Block& block : out_) sum += block.factor->bytes();
    return sum;
  }

  Summary summary() const override {
    Summary summary;
    summary.input_representation = in_[0].factor->low_rank() ? "low_rank" : "dense";
    summary.output_representation = out_[0].factor->low_rank() ? "low_rank" : "dense";
    summary.input_rank = in_[0].factor->rank();
    summary.output_rank = out_[0].factor->rank();
    summary.input_damping = in_[0].factor->damping();
    summary.output_damping = out_[0].factor->damping();
    return summary;
  }

 private:
  absl::Status InitSide(int64_t d, std::vector<Block>& side) {
    int64_t begin = 0;
    for (int64_t size : BlockSizes(d, config_.max_factor_dim)) {
      PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Factor> factor,
                                 MakeFactor(config_, size, Phase(side, begin), backend_));
      side.push_back({begin, size, std::move(factor)});
      begin += size;
    }
    return absl::OkStatus();
  }

  absl::Status PrepareLoad(absl::string_view bytes, uint64_t& version) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kMkorTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_)));
    PRECONDOR_ASSIGN_OR_RETURN(version, in.Integer("version"));
    for (std::vector<Block>* side : {&in_, &out_}) {
      PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("blocks", side->size()));
      for (Block& block : *side) PRECONDOR_RETURN_IF_ERROR(block.factor->PrepareLoad(in));
    }
    return in.Finish();
  }

  // Returns a number that differs between factors and is equal on every machine.
  uint64_t Phase(const std::vector<Block>& side, int64_t begin) const {
    std::vector<uint64_t> words(layer_.name.begin(), layer_.name.end());
    words.push_back(&side == &in_ ? 0 : 1);
    return CounterRandom(words).Bits(static_cast<uint64_t>(begin));
  }

  absl::Status PrepareSides(const LayerStatistics& statistics, const SquaredNorms& squares) {
    if (PreparesInBatch(statistics.a, squares.a, in_) && PreparesInBatch(statistics.g, squares.g, out_)) {
      Backend::Batch both(backend_);
      PRECONDOR_RETURN_IF_ERROR(PrepareSide(statistics.a, squares.a, in_));
      PRECONDOR_RETURN_IF_ERROR(PrepareSide(statistics.g, squares.g, out_));
      PRECONDOR_RETURN_IF_ERROR(both.Finish());
    } else {
      PRECONDOR_RETURN_IF_ERROR(PrepareSide(statistics.a, squares.a, in_));
      PRECONDOR_RETURN_IF_ERROR(PrepareSide(statistics.g, squares.g, out_));
    }
    for (std::vector<Block>* side : {&in_, &out_}) {
      for (Block& block : *side) PRECONDOR_RETURN_IF_ERROR(block.factor->Conclude());
    }
    return absl::OkStatus();
  }

  // Whether the side is one factor, which takes the vectors unchanged.
  bool PreparesWhole(const PerVector& squares, const std::vector<Block>& side) const {
    return side.size() == 1 && !Clamps(squares);
  }
  bool PreparesInBatch(ConstMatrixView vectors, const PerVector& squares, const std::vector<Block>& side) const {
    return PreparesWhole(squares, side) && side[0].factor->PreparesInBatch(vectors.rows);
  }

  bool Clamps(const PerVector& squares) const {
    return config_.rule == UpdateRule::kReference && std::any_of(squares.begin(), squares.end(), [this](double square) {
             return square > config_.clip * config_.clip;
           });
  }

  absl::Status PrepareSide(ConstMatrixView vectors, const PerVector& squares, std::vector<Block>& side) {
    if (PreparesWhole(squares, side)) return side[0].factor->Prepare(vectors, squares);
    DeviceMatrix clamped;
    if (Clamps(squares)) {
      PRECONDOR_ASSIGN_OR_RETURN(clamped, Clamp(vectors));
      vectors = clamped.view();
    }
    for (Block& block : side) {
      PRECONDOR_RETURN_IF_ERROR(block.factor->Prepare(Columns(vectors, block.begin, block.size)));
    }
    return absl::OkStatus();
  }

  // REFERENCE: clamps elements to +-clip, as the authors' package does. This is rare, so it runs on the host.
  absl::StatusOr<DeviceMatrix> Clamp(ConstMatrixView vectors) {
    std::vector<float> elements(vectors.size());
    const MatrixView host(elements.data(), vectors.rows, vectors.cols);
    PRECONDOR_RETURN_IF_ERROR(backend_.Download(vectors, host));
    const float clip = static_cast<float>(config_.clip);
    for (float& element : elements) element = std::clamp(element, -clip, clip);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix clamped, backend_.AllocateScratch(vectors.rows, vectors.cols));
    PRECONDOR_RETURN_IF_ERROR(backend_.Upload(host, clamped.view()));
    return clamped;
  }

  absl::Status InvertSides(Inverses& in, Inverses& out) {
    Backend::Batch both(backend_);
    absl::Status inverted = InvertSide(in_, in);
    if (inverted.ok()) inverted = InvertSide(out_, out);
    inverted.Update(both.Finish());
    if (inverted.ok()) return absl::OkStatus();
    for (std::vector<Block>* side : {&in_, &out_}) {
      for (Block& block : *side) block.factor->ForgetInverse();
    }
    return inverted;
  }

  static absl::Status InvertSide(const std::vector<Block>& side, Inverses& inverses) {
    for (const Block& block : side) {
      PRECONDOR_ASSIGN_OR_RETURN(FactorInverse inverse, block.factor->Inverse());
      inverses.push_back(std::move(inverse));
    }
    return absl::OkStatus();
  }

  // Computes u = J_out d J_in / (out_scale in_scale) for any pair of forms of the two factors.
  absl::Status PreconditionTile(const FactorInverse& out, double out_scale, const FactorInverse& in, double in_scale,
                                ConstMatrixView d, MatrixView u) {
    if (!out.dense && !in.dense) {
      return backend_.LowRankPrecondition(UnitForm(out, out_scale), UnitForm(in, in_scale), d, u, config_.products);
    }
    const double scale = (out.dense ? out.c / out_scale : 1.0) * (in.dense ? in.c / in_scale : 1.0);
    if (out.dense && in.dense) {
      PRECONDOR_RETURN_IF_ERROR(backend_.DensePrecondition(out.form, in.form, d, u, config_.products));
      return scale == 1.0 ? absl::OkStatus() : backend_.Axpby(scale, u, 0.0, u);
    }
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, backend_.AllocateScratch(d.rows, d.cols));
    if (out.dense) {
      PRECONDOR_RETURN_IF_ERROR(MultiplyRight(in, in_scale, 1.0, d, half.view()));
      return MultiplyLeft(out, out_scale, scale, half.view(), u);
    }
    PRECONDOR_RETURN_IF_ERROR(MultiplyLeft(out, out_scale, 1.0, d, half.view()));
    return MultiplyRight(in, in_scale, scale, half.view(), u);
  }

  // Low-rank form: u = J_out d / shared. Dense form: u = scale times J_out's matrix times d.
  absl::Status MultiplyLeft(const FactorInverse& out, double shared, double scale, ConstMatrixView d, MatrixView u) {
    if (!out.dense) return backend_.LowRankPrecondition(UnitForm(out, shared), {}, d, u, config_.products);
    DeviceMatrix made;
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView matrix, Expanded(backend_, out.form, made));
    return backend_.Gemm(scale, matrix, Transpose::kNo, d, Transpose::kNo, 0.0, u);
  }
  absl::Status MultiplyRight(const FactorInverse& in, double shared, double scale, ConstMatrixView d, MatrixView u) {
    if (!in.dense) return backend_.LowRankPrecondition({}, UnitForm(in, shared), d, u, config_.products);
    DeviceMatrix made;
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView matrix, Expanded(backend_, in.form, made));
    return backend_.Gemm(scale, d, Transpose::kNo, matrix, Transpose::kNo, 0.0, u);
  }

  const MkorConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  std::vector<Block> in_;
  std::vector<Block> out_;
  uint64_t version_ = 0;
};

class Mkor final : public Method {
 public:
  explicit Mkor(const MkorConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kMkorTraits; }
  bool needs_global_scale() const override { return config_.scaling.kind == Scaling::kKlClip; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    int64_t bytes = 0;
    for (int64_t d : AllBlocks(layer)) bytes += FactorStateBytes(config_, d);
    return bytes;
  }

  // An update holds the prepared state of every block of both sides. Preconditioning holds the cores of all blocks and
  // a few matrices of a tile's size.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t vectors_per_step) const override {
    int64_t update = 0;
    for (int64_t d : AllBlocks(layer)) update += FactorScratchBytes(config_, d, vectors_per_step);
    return update + TileBytesOf(layer);
  }

  double StepFlops(const LayerSpec& layer, int64_t vectors_per_step) const override {
    const double m = static_cast<double>(layer.d_out), n = static_cast<double>(layer.d_in);
    const double k = static_cast<double>(vectors_per_step);
    double flops = 0;
    for (const auto& [d, other] : {std::pair(m, n), std::pair(n, m)}) {
      const bool low_rank = config_.UsesLowRank(static_cast<int64_t>(d));
      const double r = std::min(static_cast<double>(config_.rank), d);
      flops += low_rank ? 4 * r * m * n + 2 * r * k * d : 2 * d * d * other + 2 * k * d * d;
    }
    return flops;
  }

  std::vector<std::string> Warnings(int64_t vectors_per_step) const override {
    std::vector<std::string> warnings;
    if (config_.rule == UpdateRule::kPublished) {
      warnings.push_back(
          "rule PUBLISHED is not Sherman-Morrison and diverges in practice; use it for reproduction only");
    }
    if (config_.scaling.kind == Scaling::kKlClip && vectors_per_step == 1) {
      warnings.push_back("scaling KL_CLIP with one vector a step trains badly; NORM_RESCALE is the default");
    }
    return warnings;
  }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    if (!backend.SupportsPrecision(config_.products)) {
      return absl::UnimplementedError(
          absl::StrCat("method mkor: option products: expected F32, as this machine's ", backend.name(),
                       " backend has no products of bf16 (docs/use/methods/mkor.md), got BF16"));
    }
    return InitState<MkorState>(config_, layer, backend);
  }

 private:
  // Scratch of preconditioning in addition to the factors' inverses.
  int64_t TileBytesOf(const LayerSpec& layer) const {
    // A device pads ranks to multiples of 32, and writes one result more than it needs.
    const int64_t m = layer.d_out, n = layer.d_in, rank = (std::min(config_.rank, std::max(m, n)) + 31) / 32 * 32;
    const int64_t result = LowRank(layer) ? 0 : m * (n + 4);
    const int64_t tile = result + std::max(m * n, 2 * rank * std::max(m, n)) + 4 * rank * (m + n) + 6 * rank * rank;
    return (tile + CopiedElements(layer)) * static_cast<int64_t>(sizeof(float));
  }

  // Size in floats of what a device copies. In bf16 it copies both factors and two matrices of a tile's size, padded to
  // whole blocks; otherwise those whose rows do not begin at multiples of 16 bytes, and tiles.
  int64_t CopiedElements(const LayerSpec& layer) const {
    const bool bf16 = config_.products == ProductPrecision::kBf16;
    const int64_t fill = bf16 ? 64 : 4, m = layer.d_out + fill, n = layer.d_in + fill;
    if (bf16) return (m * m + 2 * m * n + n * n) / 2;
    if (layer.d_in % 4 == 0 && layer.d_out % 4 == 0 && AllBlocks(layer).size() == 2) return 0;
    if (LowRank(layer)) return m * n;
    return config_.products == ProductPrecision::kF32 ? m * n : m * m + 2 * m * n + n * n;
  }

  // Whether both sides are in low-rank form.
  bool LowRank(const LayerSpec& layer) const {
    return config_.UsesLowRank(layer.d_in) && config_.UsesLowRank(layer.d_out);
  }

  std::vector<int64_t> AllBlocks(const LayerSpec& layer) const {
    std::vector<int64_t> sizes = BlockSizes(layer.d_in, config_.max_factor_dim);
    for (int64_t size : BlockSizes(layer.d_out, config_.max_factor_dim)) sizes.push_back(size);
    return sizes;
  }

  const MkorConfig config_;
};

}  // namespace

absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(MkorConfig out, ParseOptions(config, ReadMkorConfig));
  if (out.storage == SymmetricStorage::kF16 &&
      (out.rule == UpdateRule::kExactDamped || out.rule == UpdateRule::kPublished)) {
    return absl::InvalidArgumentError(
        "method mkor: option storage: expected F32 with the rules EXACT_DAMPED and PUBLISHED, got F16");
  }
  return out;
}

absl::StatusOr<std::unique_ptr<Method>> MakeMkor(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const MkorConfig parsed, ParseMkorConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Mkor>(parsed));
}

absl::StatusOr<std::unique_ptr<Factor>> MakeFactor(const MkorConfig& config, int64_t d, uint64_t phase,
                                                   Backend& backend) {
  if (config.UsesLowRank(d)) return LowRankFactor::Make(config, d, phase, backend);
  if (config.UsesDeferred()) return DeferredFactor::Make(config, d, backend);
  return DenseFactor::Make(config, d, backend);
}

int64_t FactorStateBytes(const MkorConfig& config, int64_t d) {
  if (config.UsesLowRank(d)) return LowRankFactor::StateBytes(config, d);
  return config.UsesDeferred() ? DeferredFactor::StateBytes(config, d) : DenseFactor::StateBytes(d);
}

int64_t FactorScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  if (config.UsesLowRank(d)) return LowRankFactor::ScratchBytes(config, d, k);
  return config.UsesDeferred() ? DeferredFactor::ScratchBytes(config, d, k) : DenseFactor::ScratchBytes(d, k);
}

}  // namespace precondor
