// SPDX-License-Identifier: Apache-2.0
// A Backend over another one that remembers the peak of its memory and fails on demand. It makes composites of
// primitives, so that their scratch is seen too.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"

#include "kernels/grouping/forwarding_backend.h"

namespace precondor {

// One thread at a time. `inner` outlives it.
class FaultyBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  int64_t peak_bytes() const { return peak_bytes_; }
  void ResetPeak() { peak_bytes_ = live_bytes_; }
  // Counts operations that may fail (everything but Free) from here on; the n-th (from 0) fails with Internal.
  void FailAt(int64_t n) {
    operations_ = 0;
    fail_at_ = n;
  }
  void NeverFail() { fail_at_ = -1; }
  // From here on each of them does.
  void FailAlways() { fail_always_ = true; }
  // From here on SpdInverse, or SymmetricEigen, finds no decomposition.
  void RefuseInverses(bool refuse) { refuse_inverses_ = refuse; }
  void RefuseEigen(bool refuse) { refuse_eigen_ = refuse; }
  absl::Status fault() const override { return fail_always_ ? Injected() : ForwardingBackend::fault(); }
  int trims() const { return trims_; }
  bool failed() const { return fail_at_ >= 0 && operations_ > fail_at_; }

 private:
  void DoTrim() override {
    ++trims_;
    ForwardingBackend::DoTrim();
  }
  static absl::Status Injected() { return absl::InternalError("injected fault"); }
  absl::Status Before() override { return fail_always_ || operations_++ == fail_at_ ? Injected() : absl::OkStatus(); }
  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    absl::StatusOr<float*> data = ForwardingBackend::DoAllocate(elements);
    if (!data.ok()) return data;
    live_bytes_ += elements * static_cast<int64_t>(sizeof(float));
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    return data;
  }
  // Spoilt, so that a read before the first write is found.
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    absl::StatusOr<float*> data = DoAllocate(elements);
    if (!data.ok()) return data;
    std::vector<float> spoilt(elements, std::numeric_limits<float>::quiet_NaN());
    const absl::Status spoiled = inner().Upload(MatrixView(spoilt.data(), 1, elements), MatrixView(*data, 1, elements));
    if (spoiled.ok()) return data;
    DoFree(*data, elements);
    return spoiled;
  }
  void DoFree(float* data, int64_t elements) override {
    ForwardingBackend::DoFree(data, elements);
    live_bytes_ -= elements * static_cast<int64_t>(sizeof(float));
  }
  int64_t DoAllocatedBytes() const override { return live_bytes_; }
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    for (size_t i = 0; i < operations.size(); ++i) {
      statuses[i] = std::visit([&](const auto& kind) { return RunOne(kind, *operations[i]); }, operations[i]->what);
    }
  }
  template <typename Kind>
  absl::Status RunOne(const Kind& kind, const Operation& operation) {
    if constexpr (operation::Composite<Kind>) {
      return RunByPrimitives(kind);
    } else {
      const bool refused = (refuse_inverses_ && std::is_same_v<Kind, operation::SpdInverse>) ||
                           (refuse_eigen_ && std::is_same_v<Kind, operation::SymmetricEigen>);
      if (refused) return absl::FailedPreconditionError("refused");
      const Operation* const alone = &operation;
      absl::Status status;
      ForwardingBackend::DoRun({&alone, 1}, {&status, 1});
      return status;
    }
  }

  int trims_ = 0;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t operations_ = 0;
  int64_t fail_at_ = -1;
  bool fail_always_ = false;
  bool refuse_inverses_ = false;
  bool refuse_eigen_ = false;
};

}  // namespace precondor
