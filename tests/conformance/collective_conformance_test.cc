// SPDX-License-Identifier: Apache-2.0
// What a Collective computes. Expected values are sums in f64; most inputs are small whole numbers, whose sums every
// dtype holds exactly.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <gmock/gmock.h>
#include <numeric>

#include "kernels/base/random.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// From -7 to 7.
std::vector<float> WholeNumbers(int rank, int64_t count) {
  std::vector<float> out(count);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>((i * 7 + i / 15 + int64_t{4} * rank) % 15 - 7);
  return out;
}

std::vector<float> Normals(int rank, int64_t count) {
  std::vector<float> out(count);
  CounterRandom({static_cast<uint64_t>(rank), 11}).Normals(0, absl::MakeSpan(out));
  return out;
}

std::vector<float> Sum(const std::vector<std::vector<float>>& inputs) {
  std::vector<double> sum(inputs[0].size(), 0.0);
  for (const std::vector<float>& input : inputs) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += input[i];
  }
  return std::vector<float>(sum.begin(), sum.end());
}

// Of all ranks' whole numbers.
std::vector<float> SumOfRanks(int size, int64_t count) {
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(WholeNumbers(rank, count));
  return Sum(inputs);
}

std::vector<float> RowOf(const std::vector<float>& rows, int row, int64_t count) {
  return std::vector<float>(rows.begin() + row * count, rows.begin() + (row + 1) * count);
}

std::vector<float> RowAfterRow(int size, int64_t count) {
  std::vector<float> out;
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<float> row = WholeNumbers(rank, count);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// All five operations, apart and in place, with roots first and last.
void CheckAllOperations(Collective& ranks, DType dtype, int64_t count) {
  SCOPED_TRACE(absl::StrCat("rank ", ranks.rank(), " of ", ranks.size(), ", ", count, " ", DTypeName(dtype)));
  const int me = ranks.rank(), size = ranks.size();
  const size_t bytes = count * ByteSize(dtype);
  const std::vector<float> mine = WholeNumbers(me, count), sum = SumOfRanks(size, count);
  const DeviceBytes in(me, Encoded(dtype, mine));

  const DeviceBytes all_reduced(me, bytes);
  ASSERT_EQ(ranks.AllReduce(dtype, in.data(), all_reduced.data(), count, kAmple), absl::OkStatus());
  EXPECT_EQ(Decoded(dtype, all_reduced.Read()), sum);
  const DeviceBytes in_place(me, Encoded(dtype, mine));
  ASSERT_EQ(ranks.AllReduce(dtype, in_place.data(), in_place.data(), count, kAmple), absl::OkStatus());
  EXPECT_EQ(Decoded(dtype, in_place.Read()), sum);

  for (const int root : {0, size - 1}) {
    const DeviceBytes reduced(me, bytes);
    ASSERT_EQ(ranks.Reduce(dtype, in.data(), me == root ? reduced.data() : nullptr, count, root, kAmple),
              absl::OkStatus());
    if (me == root) {
      EXPECT_EQ(Decoded(dtype, reduced.Read()), sum);
    }
    const DeviceBytes received(me, bytes);
    ASSERT_EQ(ranks.Broadcast(dtype, me == root ? in.data() : nullptr, received.data(), count, root, kAmple),
              absl::OkStatus());
    EXPECT_EQ(Decoded(dtype, received.Read()), WholeNumbers(root, count));
    const DeviceBytes shared(me, Encoded(dtype, mine));
    ASSERT_EQ(ranks.Broadcast(dtype, shared.data(), shared.data(), count, root, kAmple), absl::OkStatus());
    EXPECT_EQ(Decoded(dtype, shared.Read()), WholeNumbers(root, count));
  }

  const DeviceBytes gathered(me, bytes * size);
  ASSERT_EQ(ranks.AllGather(dtype, in.data(), gathered.data(), count, kAmple), absl::OkStatus());
  EXPECT_EQ(Decoded(dtype, gathered.Read()), RowAfterRow(size, count));
  std::vector<float> own_row(count * size, 5.0f);
  std::copy(mine.begin(), mine.end(), own_row.begin() + me * count);
  const DeviceBytes rows(me, Encoded(dtype, own_row));
  ASSERT_EQ(ranks.AllGather(dtype, static_cast<char*>(rows.data()) + me * bytes, rows.data(), count, kAmple),
            absl::OkStatus());
  EXPECT_EQ(Decoded(dtype, rows.Read()), RowAfterRow(size, count));

  const std::vector<float> wide = WholeNumbers(me, count * size), wide_sum = SumOfRanks(size, count * size);
  const DeviceBytes wide_in(me, Encoded(dtype, wide));
  const DeviceBytes scattered(me, bytes);
  ASSERT_EQ(ranks.ReduceScatter(dtype, wide_in.data(), scattered.data(), count, kAmple), absl::OkStatus());
  EXPECT_EQ(Decoded(dtype, scattered.Read()), RowOf(wide_sum, me, count));
  EXPECT_EQ(Decoded(dtype, wide_in.Read()), wide) << "an input has changed";
  void* own = static_cast<char*>(wide_in.data()) + me * bytes;
  ASSERT_EQ(ranks.ReduceScatter(dtype, wide_in.data(), own, count, kAmple), absl::OkStatus());
  EXPECT_EQ(RowOf(Decoded(dtype, wide_in.Read()), me, count), RowOf(wide_sum, me, count));

  EXPECT_EQ(Decoded(dtype, in.Read()), mine) << "an input has changed";
}

TEST_P(CollectiveTest, SumsAndMovesInEveryDType) {
  OnEachRank([](Collective& ranks) {
    for (const DType dtype : kDTypes) {
      for (const int64_t count : {1, 2, 3, 17, 1000}) CheckAllOperations(ranks, dtype, count);
    }
  });
}

TEST_P(CollectiveTest, SumsAndMovesMoreThanBuffersHold) {
  OnEachRank([](Collective& ranks) {
    CheckAllOperations(ranks, DType::kF32, 2000003);
    CheckAllOperations(ranks, DType::kBF16, 300001);
  });
}

TEST_P(CollectiveTest, MovesNothingForCountZero) {
  OnEachRank([](Collective& ranks) {
    const int last = ranks.size() - 1;
    for (const DType dtype : kDTypes) {
      EXPECT_EQ(ranks.AllReduce(dtype, nullptr, nullptr, 0, kAmple), absl::OkStatus());
      EXPECT_EQ(ranks.Reduce(dtype, nullptr, nullptr, 0, last, kAmple), absl::OkStatus());
      EXPECT_EQ(ranks.Broadcast(dtype, nullptr, nullptr, 0, last, kAmple), absl::OkStatus());
      EXPECT_EQ(ranks.AllGather(dtype, nullptr, nullptr, 0, kAmple), absl::OkStatus());
      EXPECT_EQ(ranks.ReduceScatter(dtype, nullptr, nullptr, 0, kAmple), absl::OkStatus());
    }
    EXPECT_EQ(ranks.Run({}, kAmple), absl::OkStatus());
  });
}

TEST_P(CollectiveTest, RunsAGroupOfDifferentOperations) {
  OnEachRank([](Collective& ranks) {
    const int me = ranks.rank(), size = ranks.size(), root = size - 1;
    const int64_t count = 301;
    const DeviceBytes f32(me, Encoded(DType::kF32, WholeNumbers(me, count)));
    const DeviceBytes f16(me, Encoded(DType::kF16, WholeNumbers(me, count)));
    const DeviceBytes wide(me, Encoded(DType::kBF16, WholeNumbers(me, count * size)));
    const DeviceBytes sum(me, count * 4), gathered(me, count * 2 * size), row(me, count * 2), received(me, count * 4);
    const std::vector<CollectiveCall> group = {
        {CollectiveKind::kAllReduce, DType::kF32, f32.data(), sum.data(), count},
        {CollectiveKind::kAllGather, DType::kF16, f16.data(), gathered.data(), count},
        {CollectiveKind::kBarrier},
        {CollectiveKind::kReduceScatter, DType::kBF16, wide.data(), row.data(), count},
        {CollectiveKind::kBroadcast, DType::kF32, f32.data(), received.data(), count, root},
        {CollectiveKind::kReduce, DType::kF32, nullptr, nullptr, 0, root},
    };
    for (int repeat = 0; repeat < 3; ++repeat) ASSERT_EQ(ranks.Run(group, kAmple), absl::OkStatus());
    EXPECT_EQ(Decoded(DType::kF32, sum.Read()), SumOfRanks(size, count));
    EXPECT_EQ(Decoded(DType::kF16, gathered.Read()), RowAfterRow(size, count));
    EXPECT_EQ(Decoded(DType::kBF16, row.Read()), RowOf(SumOfRanks(size, count * size), me, count));
    EXPECT_EQ(Decoded(DType::kF32, received.Read()), WholeNumbers(root, count));
  });
}

// What one operation of a group writes may begin in the middle of a word where that of another ends.
TEST_P(CollectiveTest, OperandsOfAGroupMayShareAWord) {
  OnEachRank([](Collective& ranks) {
    const int me = ranks.rank(), size = ranks.size();
    const DeviceBytes in(me, Encoded(DType::kF16, WholeNumbers(me, 6)));
    const DeviceBytes out(me, Encoded(DType::kF16, std::vector<float>(8, 3.0f)));
    const auto part = [](const DeviceBytes& bytes, int64_t first) {
      return static_cast<char*>(bytes.data()) + first * ByteSize(DType::kF16);
    };
    const std::vector<CollectiveCall> group = {
        {CollectiveKind::kAllReduce, DType::kF16, part(in, 0), part(out, 0), 3},
        {CollectiveKind::kAllReduce, DType::kF16, part(in, 3), part(out, 3), 2},
        {CollectiveKind::kAllReduce, DType::kF16, part(in, 5), part(out, 5), 1},
    };
    ASSERT_EQ(ranks.Run(group, kAmple), absl::OkStatus());
    std::vector<float> expected = SumOfRanks(size, 6);
    expected.resize(8, 3.0f);
    EXPECT_EQ(Decoded(DType::kF16, out.Read()), expected);
  });
}

// Rounded sums: the same bits everywhere, and near the sum in f64.
TEST_P(CollectiveTest, GivesAllRanksTheSameBits) {
  const int size = GetParam();
  const int64_t count = 100003;
  for (const DType dtype : kDTypes) {
    std::vector<std::vector<float>> inputs;  // as dtype holds them
    for (int rank = 0; rank < size; ++rank) inputs.push_back(Decoded(dtype, Encoded(dtype, Normals(rank, count))));
    std::vector<std::string> results(size);
    OnEachRank([&](Collective& ranks) {
      const DeviceBytes buffer(ranks.rank(), Encoded(dtype, inputs[ranks.rank()]));
      ASSERT_EQ(ranks.AllReduce(dtype, buffer.data(), buffer.data(), count, kAmple), absl::OkStatus());
      results[ranks.rank()] = buffer.Read();
    });
    for (int rank = 1; rank < size; ++rank) EXPECT_EQ(results[rank], results[0]) << DTypeName(dtype);
    const std::vector<float> got = Decoded(dtype, results[0]), want = Sum(inputs);
    // Each of size - 1 additions rounds numbers below 4 * 6.8 to dtype's precision, at worst.
    const double unit = dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    for (int64_t i = 0; i < count; ++i) ASSERT_NEAR(got[i], want[i], size * 27.2 * unit) << DTypeName(dtype);
  }
}

// In f32 the sum of these depends on the order, and on whether 16 bits are rounded before the end.
TEST_P(CollectiveTest, SumsInRankOrderWhateverTheOrderOfArrival) {
  if (!World().sums_in_rank_order()) GTEST_SKIP() << "this implementation promises no order of sums";
  const int size = GetParam();
  const int64_t count = 50;
  const auto input = [](int rank, DType dtype) {
    std::vector<float> out(count);
    for (int64_t i = 0; i < count; ++i) {
      const float large = std::ldexp(1.0f, 12 + static_cast<int>(i % 4));
      out[i] = rank % 2 == 0 ? large / 3 : 1.0f / static_cast<float>(rank + i + 1) - large / 5;
    }
    return Decoded(dtype, Encoded(dtype, out));
  };
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::vector<int> arrivals;  // one order after another
  do {
    arrivals.insert(arrivals.end(), order.begin(), order.end());
  } while (std::next_permutation(order.begin(), order.end()));
  for (const DType dtype : kDTypes) {
    std::vector<float> want = input(0, dtype);
    for (int rank = 1; rank < size; ++rank) {
      const std::vector<float> term = input(rank, dtype);
      for (int64_t i = 0; i < count; ++i) want[i] += term[i];
    }
    std::atomic<size_t> arrived = 0;
    OnEachRank([&](Collective& ranks) {
      for (size_t turn = 0; turn < arrivals.size(); ++turn) {
        if (arrivals[turn] != ranks.rank()) continue;
        const DeviceBytes buffer(ranks.rank(), Encoded(dtype, input(ranks.rank(), dtype)));
        while (arrived != turn) std::this_thread::yield();
        ++arrived;
        ASSERT_EQ(ranks.AllReduce(dtype, buffer.data(), buffer.data(), count, kAmple), absl::OkStatus());
        EXPECT_EQ(buffer.Read(), Encoded(dtype, want)) << DTypeName(dtype);
      }
    });
  }
}

TEST_P(CollectiveTest, BarrierWaitsForAll) {
  const int size = GetParam();
  std::atomic<int> arrivals = 0;
  OnEachRank([&](Collective& ranks) {
    for (int round = 1; round <= 20; ++round) {
      ++arrivals;
      ASSERT_EQ(ranks.Barrier(kAmple), absl::OkStatus());
      EXPECT_GE(arrivals, round * size);
    }
  });
}

TEST_P(CollectiveTest, RefusesBadArgumentsAndGoesOn) {
  using testing::HasSubstr;
  OnEachRank([](Collective& ranks) {
    const int64_t me = ranks.rank();
    const auto expect_invalid = [](const absl::Status& status, const std::string& part) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    };
    const std::vector<float> content = WholeNumbers(ranks.rank(), 100);
    const DeviceBytes memory(ranks.rank(), Encoded(DType::kF32, content));
    auto* bytes = static_cast<char*>(memory.data());
    const DType f32 = DType::kF32;
    expect_invalid(ranks.AllReduce(f32, bytes, bytes, -1, kAmple), "AllReduce of -1 f32: expected a count");
    expect_invalid(ranks.AllGather(f32, bytes, bytes, INT64_MAX / 2, kAmple), "expected a count");
    expect_invalid(ranks.AllReduce(f32, nullptr, bytes, 4, kAmple), "AllReduce of 4 f32: expected a buffer to read");
    expect_invalid(ranks.AllGather(f32, bytes, nullptr, 4, kAmple), "AllGather of 4 f32: expected a buffer to write");
    expect_invalid(ranks.Reduce(f32, bytes, bytes, 4, ranks.size(), kAmple),
                   absl::StrCat("to rank ", ranks.size(), ": expected a root"));
    expect_invalid(ranks.Broadcast(f32, bytes, bytes, 4, -1, kAmple), "from rank -1: expected a root");
    expect_invalid(ranks.AllReduce(f32, bytes, bytes + 4, 4, kAmple), "apart or in place");
    expect_invalid(ranks.AllGather(f32, bytes + 4 * me + 4, bytes, 4, kAmple), "apart or in place");
    expect_invalid(ranks.ReduceScatter(f32, bytes, bytes + 8 * me + 4, 2, kAmple), "apart or in place");
    expect_invalid(ranks.AllReduce(f32, bytes, bytes, 4, absl::ZeroDuration()), "time-out: expected a positive");
    expect_invalid(ranks.Barrier(absl::InfiniteDuration()), "time-out: expected a positive, finite");
    EXPECT_EQ(ranks.status(), absl::OkStatus());
    EXPECT_EQ(Decoded(f32, memory.Read()), content);
    CheckAllOperations(ranks, f32, 5);
  });
}

TEST_P(CollectiveTest, RefusesBadCommunicators) {
  const absl::StatusOr<std::string> id = World().NewId();
  ASSERT_TRUE(id.ok());
  const int size = GetParam();
  EXPECT_EQ(World().Join(*id, size, size, kAmple).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(World().Join(*id, -1, size, kAmple).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(World().Join(*id, 0, 0, kAmple).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(World().Join(*id, 0, size, absl::ZeroDuration()).status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& none : {std::string(), std::string("none"), *id + "x", id->substr(1)}) {
    const absl::Status status = World().Join(none, 0, size, kAmple).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("unique id: expected"));
  }
}

TEST_P(CollectiveTest, KnowsItsRanks) {
  const int size = GetParam();
  OnEachRank([size](Collective& ranks) {
    EXPECT_EQ(ranks.size(), size);
    EXPECT_LT(ranks.rank(), ranks.size());
    EXPECT_FALSE(ranks.name().empty());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveTest, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace precondor
