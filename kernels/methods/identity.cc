// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/identity.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/options.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

class IdentityState final : public LayerState {
 public:
  explicit IdentityState(Backend& backend) : backend_(backend) {}
  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method identity: expected no statistics");
  }
  absl::Status Precondition(ConstMatrixView d, MatrixView u) override { return backend_.Copy(d, u); }
  absl::StatusOr<std::string> Save() const override { return StateWriter(kIdentityTraits.name).Finish(); }
  absl::Status Load(absl::string_view bytes) override {
    StateReader reader(bytes);
    PRECONDOR_RETURN_IF_ERROR(reader.Begin(kIdentityTraits.name));
    return reader.Finish();
  }
  bool ready() const override { return false; }
  uint64_t version() const override { return 0; }
  int64_t bytes() const override { return 0; }
  Summary summary() const override { return Summary(); }

 private:
  Backend& backend_;
};

class Identity final : public Method {
 public:
  const MethodTraits& traits() const override { return kIdentityTraits; }
  int64_t StateBytes(const LayerSpec&) const override { return 0; }
  int64_t ScratchBytes(const LayerSpec&, int64_t) const override { return 0; }
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    return static_cast<double>(layer.d_out) * static_cast<double>(layer.d_in);
  }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec&, Backend& backend) const override {
    return std::unique_ptr<LayerState>(std::make_unique<IdentityState>(backend));
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeIdentity(const MethodConfig& config) {
  PRECONDOR_RETURN_IF_ERROR(OptionReader(config).Finish());
  return std::unique_ptr<Method>(std::make_unique<Identity>());
}

}  // namespace precondor
