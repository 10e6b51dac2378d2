// SPDX-License-Identifier: Apache-2.0
// A shard of one rank with its store on a disk; its process ends and comes back.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/clock.h"
#include "server/recovery/shard_store.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor::recovery {

class StoredShardFixture : public ShardFixture {
 protected:
  StoredShardFixture() {
    spec.world_size = 1;
    spec.method.name = "mkor";
    options.make_method = MakeMethod;
    options.snapshot_interval_steps = 4;
    log_options.sync_interval = log_options.reopen_interval = absl::Milliseconds(1);
    log_options.log.segment_bytes = 2000;
  }
  ~StoredShardFixture() override { EndProcess(); }

  void EndProcess() {
    shard.reset();
    store.reset();
  }
  // Another process, on the files below `data`.
  absl::Status Reopen(store::FileSystem& files, const Clock& of_store) {
    EndProcess();
    store = std::make_unique<ShardStore>(files, data, log_options, of_store, logger, observer);
    options.journal = store.get();
    MakeShard().replay().Begin();
    return store->Restore(*shard);
  }
  // Both layers' answers of the step, after which they have had `updates`; by default one in each step.
  std::vector<float> Step(uint64_t step) { return Step(step, step + 1); }
  std::vector<float> Step(uint64_t step, uint64_t updates) {
    std::vector<float> answers;
    for (uint32_t layer : {0, 1}) {
      for (ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
        const ContributionHeader header = Header(kind, step, 0, layer);
        const std::shared_ptr<Reply> reply =
            SendFilled(header, 1.0f + 0.25f * static_cast<float>((step * 7 + layer) % 11));
        EXPECT_TRUE(reply->accepted()) << "step " << step << ": " << reply->ack->status();
        if (kind == ContributionKind::kStatistics || !reply->accepted()) continue;
        EXPECT_EQ(reply->version(), updates) << step;
        for (float value : reply->values()) answers.push_back(value);
      }
    }
    return answers;
  }
  std::vector<std::vector<float>> Steps(uint64_t begin, uint64_t end) {
    std::vector<std::vector<float>> answers;
    for (uint64_t step = begin; step < end; ++step) answers.push_back(Step(step));
    return answers;
  }

  TempDir dir;
  std::string data = dir.path() + "/data";
  FailingFileSystem fs;
  ShardLogOptions log_options;
  RealClock real_clock;
  std::unique_ptr<ShardStore> store;
};

}  // namespace precondor::recovery
