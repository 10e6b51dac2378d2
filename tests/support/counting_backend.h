// SPDX-License-Identifier: Apache-2.0
// A Backend that counts the calls that have the one it passes everything on to work, for one layer or for several.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "kernels/grouping/forwarding_backend.h"

namespace precondor {

class CountingBackend final : public ForwardingBackend {
 public:
  using SeesTogether = std::function<void(absl::Span<const Operation* const>)>;
  // `calls` outlives it. `sees` gets what runs together, before it runs.
  CountingBackend(std::unique_ptr<Backend> device, std::atomic<int>& calls, SeesTogether sees = nullptr)
      : ForwardingBackend(*device), device_(std::move(device)), calls_(calls), sees_(std::move(sees)) {}

 private:
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    ++calls_;
    if (sees_) sees_(operations);
    device_->Run(operations, statuses);
  }
  bool DoSupportsPrecision(ProductPrecision precision) const override { return device_->SupportsPrecision(precision); }

  const std::unique_ptr<Backend> device_;
  std::atomic<int>& calls_;
  const SeesTogether sees_;
};

}  // namespace precondor
