// SPDX-License-Identifier: Apache-2.0
// Assembles and checks the answer of a shard to a PULL (one step's statistics) or a FETCH (whole factors).
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

// Content of the answer: the vectors of one update, or whole factors.
struct FactorUpdate {
  Decision decision = Decision::kIdentity;  // kIdentity: the step changed nothing, or there are no factors
  uint64_t factor_version = 0;              // version of the factors after the update
  std::string reason;
  std::array<int64_t, 2> rows = {0, 0};  // rows of a and of g; 0: `bytes` are from LayerState::Save
  std::string bytes;                     // a [rows, d_in], then g [rows, d_out], in f32 as on the wire; or the factors
};

// Receives one answer. Thread-safe; calls `done` once, without holding its lock.
class FactorUpdateSink final : public AnswerSink {
 public:
  struct Limits {
    std::array<int64_t, 2> dims = {0, 0};  // d_in, d_out
    int64_t most_rows = 0;                 // limit for vectors; 0: no vectors are expected
    int64_t most_bytes = 0;                // limit for factors
  };
  using Done = std::function<void(absl::StatusOr<FactorUpdate> update)>;

  // `what` begins the messages of errors.
  FactorUpdateSink(std::string what, const Limits& limits, Done done);

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override;

 private:
  // Returns the rows of a and g according to `tensors`; {0, 0} for factors.
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
