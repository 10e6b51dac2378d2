// SPDX-License-Identifier: Apache-2.0
// The answer of a shard to a PULL (one step's statistics) or a FETCH (whole factors), assembled from its chunks and
// checked before it is used.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "client/cpp/src/answer_sink.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"

namespace precondor {

struct FactorUpdate {
  Decision decision = Decision::kIdentity;  // kIdentity: a step that has changed nothing, or no factors
  uint64_t factor_version = 0;              // after it
  std::string reason;
  std::array<int64_t, 2> rows = {0, 0};  // of a and g; 0: `bytes` are LayerState::Save's
  std::string bytes;                     // a [rows, d_in], then g [rows, d_out], f32 as on the wire; or the factors
};

// Receives one answer. Thread-safe; calls `done` once, without holding its lock.
class FactorUpdateSink final : public AnswerSink {
 public:
  struct Limits {
    std::array<int64_t, 2> dims = {0, 0};  // d_in, d_out
    int64_t most_rows = 0;                 // of vectors; 0: none are due
    int64_t most_bytes = 0;                // of factors
  };
  using Done = std::function<void(absl::StatusOr<FactorUpdate> update)>;

  // `what`: for messages.
  FactorUpdateSink(std::string what, const Limits& limits, Done done);

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override;

 private:
  // The rows that the tensors say, {0, 0} for factors.
  absl::StatusOr<std::array<int64_t, 2>> RowsOf(absl::Span<const wire::TensorFormat> tensors,
                                                uint64_t payload_bytes) const;

  const std::string what_;
  const Limits limits_;
  const Done done_;

  mutable Mutex mu_;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t expected_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  FactorUpdate update_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
