// SPDX-License-Identifier: Apache-2.0
// A Backend that counts the calls of Backend::RunTogether that reach the one it passes everything on to.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "kernels/grouping/forwarding_backend.h"

namespace precondor {

class CountingBackend final : public ForwardingBackend {
 public:
  // `calls` outlives it.
  CountingBackend(std::unique_ptr<Backend> device, std::atomic<int>& calls)
      : ForwardingBackend(*device), device_(std::move(device)), calls_(calls) {}

 private:
  void DoRunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    ++calls_;
    device_->RunTogether(operations, statuses);
  }

  const std::unique_ptr<Backend> device_;
  std::atomic<int>& calls_;
};

}  // namespace precondor
