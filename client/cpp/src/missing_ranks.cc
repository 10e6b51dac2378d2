// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/missing_ranks.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/control.h"
#include "kernels/base/clock.h"

namespace precondor {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);
constexpr absl::Duration kSilence = absl::Seconds(5);

}  // namespace

MissingRanks::MissingRanks(v1::FrameHeader sender, std::vector<std::string> layers,
                           std::shared_ptr<const wire::ChannelSecurity> security)
    : sender_(std::move(sender)), layers_(std::move(layers)), security_(std::move(security)) {}

std::string MissingRanks::Describe(const std::string& shard, uint64_t epoch, uint64_t step, uint32_t layer) const {
  {
    MutexLock lock(mu_);
    if (MonotonicNow() < silent_until_) return "";
  }
  v1::ListMissingRanksRequest request;
  *request.mutable_key() = sender_;
  request.mutable_key()->set_epoch(epoch);
  request.mutable_key()->set_step(step);
  request.mutable_key()->set_layer(layer);
  Canceller canceller;
  const auto missing =
      ControlClient(shard, kPatience, security_, "").Call<v1::ListMissingRanksResponse>(request, canceller);
  if (missing.ok()) return RanksText(absl::StrCat("; layer ", layers_[layer], " waits for "), missing->ranks());
  MutexLock lock(mu_);
  silent_until_ = MonotonicNow() + kSilence;
  return "";
}

}  // namespace precondor
