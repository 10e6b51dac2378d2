// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kron.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/kron_block.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

// A box of the gradient: its first index in each dimension, and its sides.
struct KronTile {
  std::vector<int64_t> first;
  KronSides sides;
};

// The sides and tiles of a gradient. Plain values; immutable after construction.
struct KronDivision {
  KronDivision(const KronConfig& config, const LayerSpec& layer);

  KronSides sides;              // of the whole gradient; either all tiles of a side are diagonal or none is
  std::vector<KronTile> tiles;  // row-major
  // Whether the sides are d_out and d_in, so that a tile is a rectangle of the gradient [d_out, d_in]. Otherwise the
  // gradient must be contiguous.
  bool is_matrix = true;

  // Returns the tile's rectangle in the gradient x. Precondition: is_matrix.
  static MatrixView Rectangle(const KronTile& tile, MatrixView x);
  // Copies the tile's elements out of the gradient x, or into it. `part` is contiguous and has tile.sides.elements()
  // elements.
  absl::Status CopyOut(const KronTile& tile, MatrixView x, MatrixView part, Backend& backend) const;
  absl::Status CopyIn(const KronTile& tile, MatrixView part, MatrixView x, Backend& backend) const;

  // Returns a text such as "64 576d": sizes, and "d" for a diagonal side.
  std::string Text() const;

 private:
  absl::Status Move(const KronTile& tile, bool out, MatrixView x, MatrixView part, Backend& backend) const;
};

KronDivision::KronDivision(const KronConfig& config, const LayerSpec& layer) {
  sides.sizes = config.Sides(layer);
  sides.diagonal = config.Diagonal(sides.sizes, TensorDims(layer).size());
  is_matrix = sides.sizes == std::vector<int64_t>{layer.d_out, layer.d_in};
  tiles = {{.first = {}, .sides = {.sizes = {}, .diagonal = sides.diagonal}}};
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    std::vector<KronTile> longer;
    for (const KronTile& tile : tiles) {
      int64_t at = 0;
      for (const int64_t size : config.Blocks(sides.sizes[mode], sides.diagonal[mode])) {
        longer.push_back(tile);
        longer.back().first.push_back(at);
        longer.back().sides.sizes.push_back(size);
        at += size;
      }
    }
    tiles = std::move(longer);
  }
}

MatrixView KronDivision::Rectangle(const KronTile& tile, MatrixView x) {
  return MatrixView(x.row(tile.first[0]) + tile.first[1], tile.sides.sizes[0], tile.sides.sizes[1], x.stride);
}

absl::Status KronDivision::CopyOut(const KronTile& tile, MatrixView x, MatrixView part, Backend& backend) const {
  return Move(tile, true, x, part, backend);
}

absl::Status KronDivision::CopyIn(const KronTile& tile, MatrixView part, MatrixView x, Backend& backend) const {
  return Move(tile, false, x, part, backend);
}

// Copies the tile as a series of matrices. Their columns are the last side of which the tile is a part, together with
// all sides after it; their rows are the side before that. There is one matrix for each index in the earlier sides.
absl::Status KronDivision::Move(const KronTile& tile, bool out, MatrixView x, MatrixView part, Backend& backend) const {
  size_t last = sides.sizes.size() - 1;
  while (last > 0 && tile.sides.sizes[last] == sides.sizes[last]) --last;
  const absl::Span<const int64_t> whole = sides.sizes, own = tile.sides.sizes;
  const int64_t inner = ElementsOf(whole.subspan(last + 1)), cols = own[last] * inner;
  const int64_t stride = whole[last] * inner;
  const size_t before = last == 0 ? 0 : last - 1;  // sides over whose indices the loop runs
  const int64_t rows = last == 0 ? 1 : own[last - 1];
  const int64_t count = ElementsOf(own.first(before));
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = last == 0 ? 0 : tile.first[last - 1], scale = last == 0 ? 1 : whole[last - 1], rest = i;
    for (size_t mode = before; mode-- > 0; rest /= own[mode], scale *= whole[mode]) {
      place += (tile.first[mode] + rest % own[mode]) * scale;
    }
    const MatrixView there(x.data + place * stride + tile.first[last] * inner, rows, cols, stride);
    const MatrixView here(part.data + i * rows * cols, rows, cols);
    PRECONDOR_RETURN_IF_ERROR(out ? backend.Copy(there, here) : backend.Copy(here, there));
  }
  return absl::OkStatus();
}

std::string KronDivision::Text() const {
  std::string text;
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    absl::StrAppend(&text, mode > 0 ? " " : "", sides.sizes[mode], sides.diagonal[mode] ? "d" : "");
  }
  return text;
}

// Text of the options that the factors depend on; rms_clip affects only answers. Variant 0 is TRIANGULAR, the only one
// that remains.
std::string StateText(const KronConfig& c, const LayerSpec& layer, const KronDivision& division) {
  return absl::StrFormat(
      "%svariant 0 momentum %.17g precondition_lr %.17g init_scale %.17g update %.17g %.17g %.17g %.17g balance %.17g "
      "max_size_triangular %d memory_save_mode %d block_size %d seed %d",
      layer.shape.empty() ? "" : absl::StrCat("sides ", division.Text(), " "), c.momentum, c.precondition_lr,
      c.init_scale, c.max_update_probability, c.min_update_probability, c.update_decay, c.update_flat_steps,
      c.balance_probability, c.max_size_triangular, static_cast<int>(c.memory_save_mode), c.block_size, c.seed);
}

class KronState final : public LayerState {
 public:
  KronState(const KronConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), division_(config, layer), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(momentum_, backend_.Allocate(layer_.d_out, layer_.d_in));
    PRECONDOR_ASSIGN_OR_RETURN(blocks_, MakeBlocks());
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method kron: expected no statistics");
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectLearnableGradient(layer_, d, backend_));
    // Works on copies, so that a failure leaves the state unchanged.
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix momentum, backend_.AllocateScratch(d.rows, d.cols));
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Combine(1 - config_.momentum, d, config_.momentum, momentum_.view(), momentum.view()));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, Contiguous(u));
    const MatrixView x = work.empty() ? u : work.view();
    const uint64_t n = version_ + 1;
    PRECONDOR_RETURN_IF_ERROR(Debias(momentum.view(), n, x));
    const bool due = static_cast<double>(since_update_ + 1) >= 1 / config_.UpdateProbability(n);
    PRECONDOR_ASSIGN_OR_RETURN(const double mean, Mean(x));
    std::vector<KronBlock> blocks;
    // Factors of a layer whose gradient is zero would only grow.
    const bool updated = due && mean > 0;
    if (updated) {
      PRECONDOR_ASSIGN_OR_RETURN(blocks, UpdatedBlocks(mean, x));
    }
    PRECONDOR_RETURN_IF_ERROR(Answer(updated ? blocks : blocks_, x));
    if (!work.empty()) PRECONDOR_RETURN_IF_ERROR(backend_.Copy(x, u));
    momentum_ = std::move(momentum);
    version_ = n;
    since_update_ = due ? 0 : since_update_ + 1;
    if (updated) {
      blocks_ = std::move(blocks);
      ++updates_;
    }
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, Contiguous(u));
    const MatrixView x = work.empty() ? u : work.view();
    PRECONDOR_RETURN_IF_ERROR(Debias(momentum_.view(), version_, x));
    PRECONDOR_RETURN_IF_ERROR(Answer(blocks_, x));
    return work.empty() ? absl::OkStatus() : backend_.Copy(x, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kKronTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText(config_, layer_, division_));
    out.Integer(version_);
    out.Integer(updates_);
    out.Integer(since_update_);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, momentum_.view()));
    out.Integer(blocks_.size());
    for (const KronBlock& block : blocks_) PRECONDOR_RETURN_IF_ERROR(block.Save(backend_, out));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override { return OfLayer(layer_, TakeOver(bytes)); }

  bool ready() const override { return true; }
  uint64_t version() const override { return version_; }

  int64_t bytes() const override {
    int64_t sum = momentum_.view().size() * kElementBytes;
    for (const KronBlock& block : blocks_) sum += block.bytes();
    return sum;
  }

  Summary summary() const override {
    Summary summary;
    const std::vector<bool>& diagonal = division_.sides.diagonal;
    summary.input_representation =
        std::all_of(diagonal.begin() + (diagonal.size() > 1 ? 1 : 0), diagonal.end(), [](bool side) { return side; })
            ? "diagonal"
            : "triangular";
    summary.output_representation = diagonal.front() ? "diagonal" : "triangular";
    return summary;
  }

 private:
  absl::StatusOr<std::vector<KronBlock>> MakeBlocks() const {
    std::vector<KronBlock> blocks;
    for (const KronTile& tile : division_.tiles) {
      PRECONDOR_ASSIGN_OR_RETURN(KronBlock block, KronBlock::Make(config_, tile.sides, backend_));
      blocks.push_back(std::move(block));
    }
    return blocks;
  }

  // Returns memory for the answer if u is not contiguous and must be, and an empty matrix otherwise.
  absl::StatusOr<DeviceMatrix> Contiguous(ConstMatrixView u) const {
    if (division_.is_matrix || u.contiguous()) return DeviceMatrix();
    return backend_.Allocate(u.rows, u.cols);
  }

  // Allocates memory for the tile's elements in the layout that its block takes.
  absl::StatusOr<DeviceMatrix> AllocateTile(const KronTile& tile) const {
    const int64_t rows = tile.sides.sizes[0];
    return backend_.Allocate(rows, tile.sides.elements() / rows);
  }

  // u = the bias-corrected momentum of n gradients.
  absl::Status Debias(ConstMatrixView momentum, uint64_t n, MatrixView u) const {
    return backend_.Axpby(1 / (1 - std::pow(config_.momentum, static_cast<double>(n))), momentum, 0.0, u);
  }

  absl::StatusOr<double> Mean(ConstMatrixView x) const {
    PRECONDOR_ASSIGN_OR_RETURN(const double sum, backend_.AbsoluteSum(x));
    return sum / static_cast<double>(x.size());
  }

  // Returns the key words of the random numbers of update `updates_`.
  std::vector<uint64_t> Key(uint64_t purpose, uint64_t block) const {
    std::vector<uint64_t> words = {purpose, config_.seed, updates_, block};
    words.insert(words.end(), layer_.name.begin(), layer_.name.end());
    return words;
  }

  bool DrawsBalance() const {
    const uint64_t bits = CounterRandom(Key(kBalance, 0)).Bits(0);
    return static_cast<double>(bits >> 11) * 0x1p-53 < config_.balance_probability;
  }

  // Returns the blocks after an update with the gradient u; `mean` is the mean of u's absolute elements.
  absl::StatusOr<std::vector<KronBlock>> UpdatedBlocks(double mean, MatrixView u) const {
    const double damping = std::sqrt(std::numeric_limits<float>::epsilon()) * mean;
    const bool balance = DrawsBalance();
    std::vector<KronBlock> blocks;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const KronTile& tile = division_.tiles[i];
      PRECONDOR_ASSIGN_OR_RETURN(KronBlock block, blocks_[i].Clone(backend_));
      if (balance) PRECONDOR_RETURN_IF_ERROR(block.Balance(backend_));
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix v, AllocateTile(tile));
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix g, AllocateTile(tile));
      PRECONDOR_RETURN_IF_ERROR(backend_.FillNormal(CounterRandom(Key(kProbe, i)), v.view()));
      PRECONDOR_RETURN_IF_ERROR(division_.is_matrix ? backend_.Copy(KronDivision::Rectangle(tile, u), g.view())
                                                    : division_.CopyOut(tile, u, g.view(), backend_));
      PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(damping, v.view(), 1.0, g.view()));
      PRECONDOR_RETURN_IF_ERROR(block.Update(config_.precondition_lr, backend_, g.view(), v.view()));
      blocks.push_back(std::move(block));
    }
    return blocks;
  }

  // Replaces the momentum in u by the answer.
  absl::Status Answer(const std::vector<KronBlock>& blocks, MatrixView u) const {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const KronTile& tile = division_.tiles[i];
      if (division_.is_matrix) {
        PRECONDOR_RETURN_IF_ERROR(blocks[i].Apply(backend_, KronDivision::Rectangle(tile, u)));
        continue;
      }
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix part, AllocateTile(tile));
      PRECONDOR_RETURN_IF_ERROR(division_.CopyOut(tile, u, part.view(), backend_));
      PRECONDOR_RETURN_IF_ERROR(blocks[i].Apply(backend_, part.view()));
      PRECONDOR_RETURN_IF_ERROR(division_.CopyIn(tile, part.view(), u, backend_));
    }
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(u, u));
    if (!std::isfinite(square)) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", layer_.name, ": expected |U| within f32, got NaN or infinity"));
    }
    const double rms = std::sqrt(square / static_cast<double>(u.size()));
    return rms > config_.rms_clip ? backend_.Axpby(config_.rms_clip / rms, u, 0.0, u) : absl::OkStatus();
  }

  absl::Status TakeOver(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kKronTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_, layer_, division_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t updates, in.Integer("updates"));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t since_update, in.Integer("since_update"));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix momentum, backend_.Allocate(layer_.d_out, layer_.d_in));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, momentum.view()));
    PRECONDOR_ASSIGN_OR_RETURN(std::vector<KronBlock> blocks, MakeBlocks());
    PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("blocks", blocks.size()));
    for (KronBlock& block : blocks) PRECONDOR_RETURN_IF_ERROR(block.Load(backend_, in));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    momentum_ = std::move(momentum);
    blocks_ = std::move(blocks);
    version_ = version;
    updates_ = updates;
    since_update_ = since_update;
    return absl::OkStatus();
  }

  static constexpr uint64_t kProbe = 0, kBalance = 1;  // purposes of random numbers

  const KronConfig config_;
  const LayerSpec layer_;
  const KronDivision division_;
  Backend& backend_;
  DeviceMatrix momentum_;
  std::vector<KronBlock> blocks_;
  uint64_t version_ = 0;  // gradients that have updated the momentum
  uint64_t updates_ = 0;
  uint64_t since_update_ = 0;  // gradients since the last update
};

class Kron final : public Method {
 public:
  explicit Kron(const KronConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kKronTraits; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    return (layer.d_out * layer.d_in + FactorElements(KronDivision(config_, layer))) * kElementBytes;
  }

  // A copy of the momentum and of the factors, a tile's gradient and probe, and the scratch of the update of its
  // factors; for a tensor also memory for the answer.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const KronDivision division(config_, layer);
    int64_t largest = 0;
    for (const KronTile& tile : division.tiles) {
      largest = std::max(largest, 2 * tile.sides.elements() + KronBlock::ScratchElements(tile.sides));
    }
    const int64_t answers = division.is_matrix ? 1 : 2;
    return (answers * layer.d_out * layer.d_in + FactorElements(division) + largest) * kElementBytes;
  }

  // Two products per side for each answer. An update, at its final rate, takes three more, and two Gram matrices per
  // side.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const KronDivision division(config_, layer);
    double flops = 0;
    for (const KronTile& tile : division.tiles) {
      double sides = 0;
      for (size_t mode = 0; mode < tile.sides.sizes.size(); ++mode) {
        sides += tile.sides.diagonal[mode] ? 1 : static_cast<double>(tile.sides.sizes[mode]);
      }
      const double product = static_cast<double>(tile.sides.elements()) * sides;
      flops += (2 + config_.min_update_probability * 7) * product;
    }
    return flops;
  }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    return InitState<KronState>(config_, layer, backend);
  }

 private:
  static int64_t FactorElements(const KronDivision& division) {
    int64_t sum = 0;
    for (const KronTile& tile : division.tiles) sum += KronBlock::StateElements(tile.sides);
    return sum;
  }

  const KronConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeKron(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const KronConfig parsed, ParseKronConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Kron>(parsed));
}

}  // namespace precondor
