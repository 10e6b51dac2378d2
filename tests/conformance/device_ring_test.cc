// SPDX-License-Identifier: Apache-2.0
// Memory of a device that two processes share by CUDA IPC: on a device, and on tests/support/cuda_host. The program
// starts itself again as the other process (--peer), for CUDA does not survive a fork.
#include <csignal>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cuda/cuda_backend.h"
#include "tests/support/child_process.h"
#include "tests/support/normal_floats.h"
#include "tests/support/test_backend.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

constexpr char kProgram[] = "/proc/self/exe";
constexpr int64_t kRows = 300, kCols = 401, kCount = kRows * kCols;
constexpr int64_t kAnswerAt = 1 << 18;  // the peer's elements, behind the parent's
static_assert(kAnswerAt >= kCount);

ConstMatrixView Matrix(const std::vector<float>& x) { return ConstMatrixView(x.data(), kRows, kCols); }
MatrixView Matrix(std::vector<float>& x) { return MatrixView(x.data(), kRows, kCols); }

// The naive form of kernels/base/payload_digest.h is in tests/unit/kernels/cuda/cuda_plane_test.cc; here two processes
// are compared, so that the plane's own digest serves.
std::string DigestOf(DevicePlane& plane, const float* data) {
  const absl::StatusOr<PayloadFacts> facts = plane.Inspect(ConstMatrixView(data, kRows, kCols));
  return facts.ok() ? absl::StrCat(facts->digest, facts->finite ? " finite" : " not finite")
                    : facts.status().ToString();
}

// The other process. Answers each line of its input with a line:
//   map HANDLE BYTES   maps the ring (HANDLE in hex); "ok" or the error
//   digest             of the parent's elements in the ring
//   answer SEED        writes elements of its own behind them; "ok" or the error
//   export             exports a ring of its own: its handle in hex
int Peer() {
  absl::StatusOr<std::unique_ptr<DevicePlane>> plane = MakeCudaPlane(0);
  std::unique_ptr<SharedRegion> mapped, own;
  const auto said = [](const absl::Status& status) { return status.ok() ? "ok" : status.ToString(); };
  std::string line;
  while (plane.ok() && std::getline(std::cin, line)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    std::string answer = "unknown command";
    if (words[0] == "map") {
      auto ring = (*plane)->Map(absl::HexStringToBytes(words[1]), std::stoll(words[2]));
      answer = said(ring.status());
      if (ring.ok()) mapped = *std::move(ring);
    } else if (words[0] == "digest") {
      answer = DigestOf(**plane, mapped->data());
    } else if (words[0] == "answer") {
      const std::vector<float> values = Normal(kCount, std::stoull(words[1]));
      answer = said((*plane)->Upload(Matrix(values), MatrixView(mapped->data() + kAnswerAt, kRows, kCols)));
    } else if (words[0] == "export") {
      auto ring = (*plane)->Export(1);
      answer = ring.ok() ? absl::BytesToHexString((*ring)->handle()) : ring.status().ToString();
      if (ring.ok()) own = *std::move(ring);
    }
    std::cout << answer << std::endl;
  }
  if (!plane.ok()) std::cout << plane.status() << std::endl;
  return plane.ok() ? 0 : 1;
}

class DeviceRingTest : public testing::Test {
 protected:
  DeviceRingTest() : backend_(MakeTestBackend()), plane_(MakeCudaPlane(0).value()) {}

  static std::string Ask(ChildProcess& peer, const std::string& line) {
    peer.WriteLine(line);
    return peer.ReadLine().value_or("nothing: the peer has ended");
  }
  static std::string MapLine(const SharedRegion& ring) {
    return absl::StrCat("map ", absl::BytesToHexString(ring.handle()), " ", ring.bytes());
  }
  std::unique_ptr<SharedRegion> Export() {
    absl::StatusOr<std::unique_ptr<SharedRegion>> ring = plane_->Export((kAnswerAt + kCount) * 4);
    EXPECT_TRUE(ring.ok()) << ring.status();
    EXPECT_EQ((*ring)->bytes() % DevicePlane::kGranularity, 0) << "nothing of others' lies beside it";
    return *std::move(ring);
  }
  // The backend's stream writes `seed`'s elements into the ring; a mark tells when they are there.
  void WriteByStream(const SharedRegion& ring, uint64_t seed) {
    const std::vector<float> values = Normal(kCount, seed);
    DeviceMatrix x = backend_->Allocate(kRows, kCols).value();
    ASSERT_TRUE(backend_->Upload(Matrix(values), x.view()).ok());
    ASSERT_TRUE(backend_->ScaleBy(2, x.view(), x.view()).ok());
    const auto mark = plane_->Record(backend_->stream());
    ASSERT_TRUE(mark.ok()) << mark.status();
    for (absl::StatusOr<bool> reached = false; !*reached;) {
      reached = plane_->Reached(**mark);
      ASSERT_TRUE(reached.ok()) << reached.status();
    }
    ASSERT_TRUE(plane_->Copy(x.view(), MatrixView(ring.data(), kRows, kCols)).ok());
  }
  // Reads the elements that another process has put behind the parent's, through the backend's memory.
  std::vector<float> ReadAnswer(const SharedRegion& ring) {
    DeviceMatrix x = backend_->Allocate(kRows, kCols).value();
    std::vector<float> host(kCount);
    EXPECT_TRUE(backend_->Download(x.view(), Matrix(host)).ok());  // zeroed by now
    EXPECT_TRUE(plane_->Copy(ConstMatrixView(ring.data() + kAnswerAt, kRows, kCols), x.view()).ok());
    EXPECT_TRUE(backend_->Download(x.view(), Matrix(host)).ok());
    return host;
  }

  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<DevicePlane> plane_;
};

TEST_F(DeviceRingTest, TwoProcessesHandOverElementsInBothDirections) {
  const auto ring = Export();
  ChildProcess peer({kProgram, "--peer"});
  ASSERT_EQ(Ask(peer, MapLine(*ring)), "ok");
  for (uint64_t round = 0; round < 3; ++round) {
    WriteByStream(*ring, round);
    std::vector<float> expected = Normal(kCount, round);
    for (float& element : expected) element *= 2;
    std::vector<float> got(kCount);
    ASSERT_TRUE(plane_->Download(ConstMatrixView(ring->data(), kRows, kCols), Matrix(got)).ok());
    ASSERT_TRUE(got == expected) << "round " << round;
    EXPECT_EQ(Ask(peer, "digest"), DigestOf(*plane_, ring->data())) << "round " << round;
    ASSERT_EQ(Ask(peer, absl::StrCat("answer ", 100 + round)), "ok");
    EXPECT_TRUE(ReadAnswer(*ring) == Normal(kCount, 100 + round)) << "round " << round;
  }
}

TEST_F(DeviceRingTest, ElementsThatAreNotFiniteAreSeenByTheOtherProcess) {
  const auto ring = Export();
  ChildProcess peer({kProgram, "--peer"});
  ASSERT_EQ(Ask(peer, MapLine(*ring)), "ok");
  std::vector<float> values = Normal(kCount, 1);
  values[kCount - 1] = std::nanf("");
  ASSERT_TRUE(plane_->Upload(Matrix(values), MatrixView(ring->data(), kRows, kCols)).ok());
  EXPECT_THAT(Ask(peer, "digest"), testing::EndsWith(" not finite"));
}

TEST_F(DeviceRingTest, ARingOutlivesAPeerThatIsKilled) {
  const auto ring = Export();
  {
    ChildProcess peer({kProgram, "--peer"});
    ASSERT_EQ(Ask(peer, MapLine(*ring)), "ok");
    ASSERT_EQ(Ask(peer, "answer 5"), "ok");
    peer.Signal(SIGKILL);
    EXPECT_EQ(peer.ReadLine(), std::nullopt);
  }
  EXPECT_TRUE(ReadAnswer(*ring) == Normal(kCount, 5));
  ChildProcess next({kProgram, "--peer"});
  ASSERT_EQ(Ask(next, MapLine(*ring)), "ok");
  WriteByStream(*ring, 6);
  EXPECT_EQ(Ask(next, "digest"), DigestOf(*plane_, ring->data()));
}

TEST_F(DeviceRingTest, ARingThatCannotBeMappedIsUnavailable) {
  const auto ring = Export();
  EXPECT_EQ(plane_->Map(ring->handle(), ring->bytes()).status().code(), absl::StatusCode::kUnavailable)
      << "a process does not map its own";
  EXPECT_EQ(plane_->Map("short", 1).status().code(), absl::StatusCode::kUnavailable);
  ChildProcess peer({kProgram, "--peer"});
  const std::string handle = absl::HexStringToBytes(Ask(peer, "export"));
  ASSERT_EQ(handle.size(), ring->handle().size());
  peer.Signal(SIGKILL);
  EXPECT_EQ(peer.ReadLine(), std::nullopt);
  // A driver may still know the memory for a while after the process that exported it is gone.
  EXPECT_TRUE(WaitUntil([&] {
    return plane_->Map(handle, DevicePlane::kGranularity).status().code() == absl::StatusCode::kUnavailable;
  }));
  // Neither has ended the device's use.
  WriteByStream(*ring, 7);
  EXPECT_TRUE(backend_->fault().ok()) << backend_->fault();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--peer") == 0) return precondor::Peer();
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
