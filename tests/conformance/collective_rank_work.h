// SPDX-License-Identifier: Apache-2.0
// One of every operation, so that ranks in threads and in processes can be compared bit for bit.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/dtype.h"
#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/collective.h"

namespace precondor {

// FNV-1a.
inline uint64_t Checksum(absl::string_view bytes) {
  uint64_t sum = 14695981039346656037u;
  for (const char byte : bytes) sum = (sum ^ static_cast<uint8_t>(byte)) * 1099511628211u;
  return sum;
}

// A line for each operation in each dtype, on normal numbers that each rank has its own of.
inline absl::Status RankWork(Collective& ranks, absl::Duration timeout, std::ostream& out) {
  constexpr int64_t kCount = 70001;
  const int size = ranks.size(), root = size - 1;
  std::vector<float> values(kCount * size);
  CounterRandom({static_cast<uint64_t>(ranks.rank())}).Normals(0, absl::MakeSpan(values));
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const size_t row = kCount * ByteSize(dtype);
    std::string in(row * size, '\0');
    EncodeElements(dtype, values, 1.0f, in.data());
    std::string sum(row, '\0'), reduced(row, '\0'), scattered(row, '\0'), received(row, '\0'), rows(row * size, '\0');
    PRECONDOR_RETURN_IF_ERROR(ranks.AllReduce(dtype, in.data(), sum.data(), kCount, timeout));
    PRECONDOR_RETURN_IF_ERROR(ranks.Reduce(dtype, in.data(), reduced.data(), kCount, root, timeout));
    PRECONDOR_RETURN_IF_ERROR(ranks.ReduceScatter(dtype, in.data(), scattered.data(), kCount, timeout));
    PRECONDOR_RETURN_IF_ERROR(ranks.Broadcast(dtype, in.data(), received.data(), kCount, root, timeout));
    PRECONDOR_RETURN_IF_ERROR(ranks.AllGather(dtype, in.data(), rows.data(), kCount, timeout));
    for (const std::string* result : {&sum, &reduced, &scattered, &received, &rows}) {
      out << DTypeName(dtype) << " " << Checksum(*result) << "\n";
    }
  }
  return ranks.Barrier(timeout);
}

}  // namespace precondor
