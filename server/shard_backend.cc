// SPDX-License-Identifier: Apache-2.0
#include "server/shard_backend.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_module.h"

namespace precondor {
namespace {

// In the data directory: the backend whose numbers its log and snapshots go on from.
constexpr char kFileName[] = "BACKEND";

absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(const ServerConfig& config) {
  CudaBackendOptions options;
  options.device = static_cast<int>(config.cuda_device);
  return LoadCudaBackend(options);
}

absl::StatusOr<std::unique_ptr<Backend>> Make(const std::string& name, const ServerConfig& config) {
  if (name == "cuda") return MakeCuda(config);
  return MakeCpuBackend(CpuBackendOptions());
}

// Asks for the driver first: without one, CUDA's libraries need not be loaded to learn that there is no device. With
// one, no backend is news to somebody.
absl::StatusOr<std::unique_ptr<Backend>> Find(const ServerConfig& config, Logger& logger) {
  absl::Status why = FindCudaDriver();
  const Severity severity = why.ok() ? Severity::kWarning : Severity::kInfo;
  if (why.ok()) {
    absl::StatusOr<std::unique_ptr<Backend>> cuda = MakeCuda(config);
    if (cuda.ok()) {
      logger.Log(Severity::kInfo, "backend", {{"backend", "cuda"}, {"device", config.cuda_device}});
      return cuda;
    }
    why = cuda.status();
  }
  logger.Log(severity, "backend", {{"backend", "cpu"}, {"reason", why.message()}});
  return Make("cpu", config);
}

// Empty where nothing has been written.
std::string Recorded(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string name;
  std::getline(in, name);
  return name;
}

// Whole or not at all.
absl::Status Record(const std::filesystem::path& file, absl::string_view name) {
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  const std::filesystem::path temporary = file.string() + ".tmp";
  if (!error) {
    std::ofstream out(temporary);
    out << std::string(name) << "\n";
    out.close();
    if (!out) error = std::error_code(errno, std::generic_category());
  }
  if (!error) std::filesystem::rename(temporary, file, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("data_dir: cannot write ", file.string(), ": ", error.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeShardBackend(const ServerConfig& config, Logger& logger) {
  if (config.data_dir.empty()) {
    return config.backend == "auto" ? Find(config, logger) : Make(config.backend, config);
  }
  const std::filesystem::path file = std::filesystem::path(config.data_dir) / kFileName;
  const std::string recorded = Recorded(file);
  if (!recorded.empty()) {
    if (config.backend != "auto" && config.backend != recorded) {
      return absl::FailedPreconditionError(absl::StrCat(
          "backend: ", file.string(), " says that what is stored there goes on from backend ", recorded, ", got ",
          config.backend, ", whose numbers differ in their last bits; remove that file to go on all the same"));
    }
    return Make(recorded, config);
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                             config.backend == "auto" ? Find(config, logger) : Make(config.backend, config));
  PRECONDOR_RETURN_IF_ERROR(Record(file, backend->name()));
  return backend;
}

}  // namespace precondor
