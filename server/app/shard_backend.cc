// SPDX-License-Identifier: Apache-2.0
#include "server/app/shard_backend.h"

#include <algorithm>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_module.h"
#include "kernels/grouping/grouping_backend.h"

namespace precondor {
namespace {

// File in the data directory that records the backend of its log and snapshots.
constexpr char kFileName[] = "BACKEND";

int Cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// Returns the number of threads of a CUDA device, at most config.threads. At least kFewest by default: while some wait
// for copies from the device, others compute.
int CudaThreads(const ServerConfig& config) {
  constexpr int kFewest = 4;
  const int threads = std::max(Cores(), kFewest);
  return config.threads > 0 ? std::min(threads, static_cast<int>(config.threads)) : threads;
}

// Returns the number of layers of a CUDA device that are in progress at once. They share launches.
int LayersAtOnce(const ServerConfig& config) {
  constexpr int kByDefault = 512;  // more than the number of layers of most models
  return config.threads > 0 ? static_cast<int>(config.threads) : kByDefault;
}

absl::StatusOr<DeviceBackend> Make(const std::string& name, const ServerConfig& config) {
  if (name != "cuda") {
    PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Backend> cpu, MakeCpuBackend(CpuBackendOptions()));
    return DeviceBackend{"cpu", std::move(cpu)};
  }
  // More threads do not pay: the work between launches is short compared with waking a thread.
  constexpr int kMostOfBackend = 8;
  GroupingOptions grouping;
  grouping.threads = std::min(CudaThreads(config), kMostOfBackend);
  grouping.most_tasks = LayersAtOnce(config);
  const int device = static_cast<int>(config.cuda_device);
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, LoadCudaBackend({.device = device}));
  return DeviceBackend{absl::StrCat("cuda:", device), MakeGroupingBackend(std::move(backend), grouping)};
}

// Looks for the driver first. Without a driver, CUDA's libraries need not be loaded to find that there is no device.
// With a driver, a missing backend is a warning for the operator.
absl::StatusOr<DeviceBackend> Find(const ServerConfig& config, Logger& logger) {
  absl::Status why = FindCudaDriver();
  const Severity severity = why.ok() ? Severity::kWarning : Severity::kInfo;
  if (why.ok()) {
    absl::StatusOr<DeviceBackend> cuda = Make("cuda", config);
    if (cuda.ok()) {
      logger.Log(Severity::kInfo, "backend", {{"backend", "cuda"}, {"device", cuda->name}});
      return cuda;
    }
    why = cuda.status();
  }
  logger.Log(severity, "backend", {{"backend", "cpu"}, {"reason", why.message()}});
  return Make("cpu", config);
}

// Returns the recorded backend, or an empty string if no shard has written data.
absl::StatusOr<std::string> Recorded(const std::string& data_dir, store::FileSystem& fs) {
  const absl::StatusOr<std::string> text = fs.ReadFile(store::JoinPath(data_dir, kFileName));
  if (absl::IsNotFound(text.status())) {
    if (!fs.List(store::JoinPath(data_dir, "shard")).ok()) return "";
    return absl::FailedPreconditionError(
        absl::StrCat("backend: ", data_dir, " has data of a shard and no file ", kFileName,
                     ", which says whether they go on from backend cpu or cuda: write that into it"));
  }
  PRECONDOR_RETURN_IF_ERROR(text.status());
  if (*text == "cpu\n" || *text == "cuda\n") return text->substr(0, text->size() - 1);
  return absl::DataLossError(absl::StrCat("backend: ", store::JoinPath(data_dir, kFileName),
                                          ": expected a line cpu or cuda, got ", text->size(), " other bytes"));
}

// Writes the record atomically.
absl::Status Record(const std::string& data_dir, absl::string_view name, store::FileSystem& fs) {
  const std::string file = store::JoinPath(data_dir, kFileName), unfinished = absl::StrCat(file, ".tmp");
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs, data_dir));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<store::WritableFile> out, fs.Create(unfinished));
  PRECONDOR_RETURN_IF_ERROR(out->Append(absl::StrCat(name, "\n")));
  PRECONDOR_RETURN_IF_ERROR(out->Sync());
  PRECONDOR_RETURN_IF_ERROR(out->Close());
  PRECONDOR_RETURN_IF_ERROR(fs.Rename(unfinished, file));
  return fs.SyncDir(data_dir);
}

}  // namespace

absl::StatusOr<DeviceBackend> MakeShardBackend(const ServerConfig& config, store::FileSystem& fs, Logger& logger) {
  if (config.data_dir.empty()) {
    return config.backend == "auto" ? Find(config, logger) : Make(config.backend, config);
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::string recorded, Recorded(config.data_dir, fs));
  if (!recorded.empty()) {
    if (config.backend != "auto" && config.backend != recorded) {
      return absl::FailedPreconditionError(
          absl::StrCat("backend: what is stored in ", config.data_dir, " goes on from backend ", recorded, ", got ",
                       config.backend, ", whose numbers differ in their last bits; to go on all the same, write ",
                       config.backend, " into ", store::JoinPath(config.data_dir, kFileName)));
    }
    return Make(recorded, config);
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceBackend device,
                             config.backend == "auto" ? Find(config, logger) : Make(config.backend, config));
  PRECONDOR_RETURN_IF_ERROR(Record(config.data_dir, device.backend->name(), fs));
  return device;
}

int64_t SessionCapacity(const ServerConfig& config, const DeviceBackend& device, Logger& logger) {
  const int64_t limit = device.backend->memory_limit_bytes();
  if (limit == std::numeric_limits<int64_t>::max()) return config.memory_limit_bytes;
  // Tasks may hold this much in addition to what sessions reserve.
  const int64_t there = std::max<int64_t>(limit - GroupingOptions().most_freed_bytes_in_all, 0);
  if (there >= config.memory_limit_bytes) return config.memory_limit_bytes;
  logger.Log(Severity::kWarning, "memory limit lowered to what the device has",
             {{"device", device.name}, {"memory_limit", config.memory_limit_bytes}, {"lowered_to", there}});
  return there;
}

DeviceParallelism ParallelismOf(const ServerConfig& config, const DeviceBackend& device) {
  const int asked = static_cast<int>(config.threads);
  if (device.backend->name() != "cuda") return {.threads = asked > 0 ? asked : Cores(), .layers = 0};
  return {.threads = CudaThreads(config), .layers = LayersAtOnce(config)};
}

}  // namespace precondor
