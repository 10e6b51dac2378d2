// SPDX-License-Identifier: Apache-2.0
// Data directories of other shards, read by one that is given their layers. Nothing in them is changed, no lock is
// taken: the owner may be gone, stopped for a while, or alive with other layers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/peer_factors.h"
#include "server/store/file_system.h"

namespace precondor::recovery {

struct PeerStoresOptions {
  // Where they lie: paths whose components may have the wildcards of fnmatch, each naming data directories or what they
  // lie in side by side.
  std::vector<std::string> patterns;
  std::string own_data_dir;  // is left out; may be empty
  bool background = true;    // false: nothing happens but in Work
};

// The data directories that `pattern` names, sorted; what cannot be listed is left out.
std::vector<std::string> ExpandDataDirs(store::FileSystem& fs, const std::string& pattern);

// Thread-safe.
class PeerStores final : public PeerFactors {
 public:
  // References outlive it.
  PeerStores(store::FileSystem& fs, PeerStoresOptions options, Logger& logger);
  ~PeerStores() override { Stop(); }

  void Post(std::function<void()> job) override;
  bool stopping() const override;
  std::vector<std::unique_ptr<PeerJournal>> Find(uint64_t session_id, const std::set<uint32_t>& layers) override;

  // Returns when no job runs any more; none will.
  void Stop();
  // Runs the next job; false when there is none.
  bool Work();

 private:
  std::vector<std::string> DataDirs() const;
  void Loop();

  store::FileSystem& fs_;
  const PeerStoresOptions options_;
  Logger& logger_;

  mutable Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace precondor::recovery
