// SPDX-License-Identifier: Apache-2.0
// Names the ranks that others wait for, in errors of time-outs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/channel_security.h"

namespace precondor {

// Asks a shard which ranks a step waits for. A worker and its futures share one, because a future may outlive its
// worker. Thread-safe.
class MissingRanks {
 public:
  // `sender` has the session, the rank, the incarnation and the secret of the worker; `layers` are the layers' names.
  MissingRanks(v1::FrameHeader sender, std::vector<std::string> layers,
               std::shared_ptr<const wire::ChannelSecurity> security);

  // Returns "; layer NAME waits for ranks 1, 3", or "" if the shard names none. Waits 1 s at most. After a call without
  // an answer, calls of the next 5 s return "" at once.
  std::string Describe(const std::string& shard, uint64_t epoch, uint64_t step, uint32_t layer) const;

 private:
  const v1::FrameHeader sender_;
  const std::vector<std::string> layers_;
  const std::shared_ptr<const wire::ChannelSecurity> security_;
  mutable Mutex mu_;
  mutable absl::Time silent_until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace precondor
