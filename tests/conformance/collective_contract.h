// SPDX-License-Identifier: Apache-2.0
// One suite over every Collective. A world makes the ranks of one implementation; the suite's sources are linked with
// each world into a program of its own.
#pragma once

#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "kernels/base/dtype.h"
#include "kernels/collective.h"

namespace precondor {

class CollectiveWorld {
 public:
  virtual ~CollectiveWorld() = default;
  // Why `size` ranks cannot be here; empty when they can.
  virtual std::string Lacks(int size) const = 0;
  virtual absl::StatusOr<std::string> NewId() = 0;
  virtual absl::StatusOr<std::unique_ptr<Collective>> Join(const std::string& id, int rank, int size,
                                                           absl::Duration timeout) = 0;
  // Memory of the device that `rank` has, and copies between it and the host.
  virtual void* Allocate(int rank, size_t bytes) = 0;
  virtual void Free(int rank, void* memory) = 0;
  virtual void Upload(int rank, const std::string& host, void* memory) = 0;
  virtual void Download(int rank, const void* memory, std::string& host) = 0;
  // What only some implementations promise: sums in rank order in f32; ranks named in errors, also where calls differ.
  virtual bool sums_in_rank_order() const = 0;
  virtual bool names_ranks() const = 0;
};

// One whose ranks' memory is the host's.
class HostMemoryWorld : public CollectiveWorld {
 public:
  std::string Lacks(int size) const override { return {}; }
  void* Allocate(int rank, size_t bytes) override { return ::operator new(bytes); }
  void Free(int rank, void* memory) override { ::operator delete(memory); }
  void Upload(int rank, const std::string& host, void* memory) override {
    std::memcpy(memory, host.data(), host.size());
  }
  void Download(int rank, const void* memory, std::string& host) override {
    std::memcpy(host.data(), memory, host.size());
  }
};

// The world that this program tests.
CollectiveWorld& World();

// Longer than anything takes that does not hang.
inline constexpr absl::Duration kAmple = absl::Seconds(100);

// Bytes in the memory of a rank's device, between zones that no operation may write to.
class DeviceBytes {
 public:
  DeviceBytes(int rank, const std::string& bytes) : rank_(rank), bytes_(bytes.size()) {
    memory_ = World().Allocate(rank, bytes_ + 2 * kGuard);
    World().Upload(rank, std::string(kGuard, kMark) + bytes + std::string(kGuard, kMark), memory_);
  }
  DeviceBytes(int rank, size_t bytes) : DeviceBytes(rank, std::string(bytes, kMark)) {}
  ~DeviceBytes() {
    const std::string all = All();
    EXPECT_EQ(all.substr(0, kGuard), std::string(kGuard, kMark)) << "written before the buffer of rank " << rank_;
    EXPECT_EQ(all.substr(kGuard + bytes_), std::string(kGuard, kMark)) << "written behind the buffer of rank " << rank_;
    World().Free(rank_, memory_);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* data() const { return static_cast<char*>(memory_) + kGuard; }
  std::string Read() const { return All().substr(kGuard, bytes_); }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr char kMark = '\x7f';  // a large number in f32 and bf16, NaN in f16
  std::string All() const {
    std::string all(bytes_ + 2 * kGuard, '\0');
    World().Download(rank_, memory_, all);
    return all;
  }
  const int rank_;
  const size_t bytes_;
  void* memory_ = nullptr;
};

// Elements of `dtype` as bytes, and back.
inline std::string Encoded(DType dtype, const std::vector<float>& values) {
  std::string out(values.size() * ByteSize(dtype), '\0');
  EncodeElements(dtype, values, 1.0f, out.data());
  return out;
}
inline std::vector<float> Decoded(DType dtype, const std::string& bytes) {
  std::vector<float> out(bytes.size() / ByteSize(dtype));
  DecodeElements(dtype, bytes.data(), 1.0f, absl::MakeSpan(out));
  return out;
}

// One communicator after the other, by rank; joined by as many threads.
inline std::vector<std::unique_ptr<Collective>> JoinAll(int size) {
  std::vector<std::unique_ptr<Collective>> ranks(size);
  const absl::StatusOr<std::string> id = World().NewId();
  EXPECT_TRUE(id.ok()) << id.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<std::unique_ptr<Collective>> joined = World().Join(*id, rank, size, kAmple);
      ASSERT_TRUE(joined.ok()) << joined.status();
      ranks[rank] = *std::move(joined);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

// `body` on a thread for each rank; each also ends its communicator, as some implementations do that together.
inline void OnEach(std::vector<std::unique_ptr<Collective>> ranks, const std::function<void(Collective&)>& body) {
  std::vector<std::thread> threads;
  for (std::unique_ptr<Collective>& rank : ranks) {
    ASSERT_NE(rank, nullptr);
    threads.emplace_back([&body, collective = std::move(rank)] { body(*collective); });
  }
  for (std::thread& thread : threads) thread.join();
}

// By number of ranks; skipped, saying why, where the world lacks them.
class CollectiveTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string lacks = World().Lacks(GetParam()); !lacks.empty()) GTEST_SKIP() << lacks;
  }
  void OnEachRank(const std::function<void(Collective&)>& body) { OnEach(JoinAll(GetParam()), body); }
};
using CollectiveFaultTest = CollectiveTest;

}  // namespace precondor
