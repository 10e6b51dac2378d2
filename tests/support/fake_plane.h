// SPDX-License-Identifier: Apache-2.0
// A device plane whose device is the host's memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/payload_digest.h"
#include "kernels/device_plane.h"

namespace precondor {

class FakePlane final : public DevicePlane {
 public:
  explicit FakePlane(std::string device = "a device of tests") : device_(std::move(device)) {}

  using DevicePlane::Copy;
  using DevicePlane::Inspect;
  const std::string& device() const override { return device_; }

  absl::StatusOr<std::unique_ptr<SharedRegion>> Export(int64_t bytes) override {
    if (refuses) return absl::ResourceExhaustedError("told to refuse");
    return std::make_unique<Ring>(*this, std::make_unique<std::vector<float>>(bytes / 4));
  }
  absl::StatusOr<std::unique_ptr<SharedRegion>> Map(absl::string_view, int64_t bytes) override {
    if (maps) return Export(bytes);
    return absl::UnavailableError("no other process");
  }
  absl::StatusOr<std::unique_ptr<Mark>> Record(void*) override { return std::make_unique<Mark>(); }
  absl::StatusOr<bool> Reached(const Mark&) override { return !hangs; }
  absl::Status Copy(absl::Span<const RegionCopy> copies) override {
    copied.push_back(copies.size());
    for (const auto& [from, to] : copies) {
      for (int64_t i = 0; i < from.rows; ++i) std::memmove(to.row(i), from.row(i), from.cols * sizeof(float));
    }
    return refuses ? absl::InternalError("told to refuse") : absl::OkStatus();
  }
  absl::Status Upload(ConstMatrixView host, MatrixView device) override { return Copy(host, device); }
  absl::Status Download(ConstMatrixView device, MatrixView host) override { return Copy(device, host); }
  absl::StatusOr<std::vector<PayloadFacts>> Inspect(absl::Span<const ConstMatrixView> payloads) override {
    if (refuses) return absl::InternalError("told to refuse");
    inspected.push_back(payloads.size());
    std::vector<PayloadFacts> facts;
    for (const ConstMatrixView x : payloads) {
      std::vector<float> values;
      for (int64_t i = 0; i < x.rows; ++i) values.insert(values.end(), x.row(i), x.row(i) + x.cols);
      const bool finite = std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
      facts.push_back(
          {.digest = PayloadDigest(reinterpret_cast<const uint8_t*>(values.data()), x.size()), .finite = finite});
    }
    return facts;
  }

  bool refuses = false;
  bool maps = false;                // missing memory, as memory of its own
  std::atomic<bool> hangs = false;  // no mark is reached
  int rings = 0;                    // number of rings
  // The sizes of the calls of Copy and of Inspect: each is one wait.
  std::vector<size_t> copied, inspected;

 private:
  class Ring final : public SharedRegion {
   public:
    Ring(FakePlane& plane, std::unique_ptr<std::vector<float>> memory)
        : SharedRegion(memory->data(), static_cast<int64_t>(memory->size()) * 4, "handle"),
          plane_(plane),
          memory_(std::move(memory)) {
      ++plane_.rings;
    }
    ~Ring() override { --plane_.rings; }

   private:
    FakePlane& plane_;
    const std::unique_ptr<std::vector<float>> memory_;
  };
  const std::string device_;
};

}  // namespace precondor
