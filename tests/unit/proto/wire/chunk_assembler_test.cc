// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/chunk_assembler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error_reason.h"
#include "kernels/base/sanitizers.h"
#include "tests/support/status_matchers.h"
#include "tests/support/text_proto.h"
#include "tests/unit/proto/wire/wire_testing.h"

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;
using Progress = ChunkAssembler::Progress;

// A gradient of [1, elements] in f32.
v1::FrameHeader Header(uint32_t layer, int64_t elements) {
  auto header = FromText<v1::FrameHeader>(R"(
    session_id: 11 epoch: 2 step: 5 rank: 1 incarnation: 77 kind: FRAME_KIND_GRADIENT mode: MODE_SECOND_ORDER samples: 8
    tensors { data_type: DATA_TYPE_F32 dims: 1 })");
  header.set_layer(layer);
  header.mutable_tensors(0)->add_dims(elements);
  header.set_payload_bytes(4 * elements);
  return header;
}

v1::FrameHeader At(v1::FrameHeader header, uint64_t offset) {
  header.set_chunk_offset(offset);
  return header;
}

std::string Bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

std::string Text(const std::vector<uint8_t>& payload) { return std::string(payload.begin(), payload.end()); }

class ChunkAssemblerTest : public ::testing::Test {
 protected:
  absl::StatusOr<ChunkAssembler::Result> Add(const v1::FrameHeader& header, const std::string& bytes) {
    return assembler_->Add(header, AsReceived(bytes, 7),
                           [&](const v1::FrameHeader& first) -> absl::StatusOr<std::vector<uint8_t>> {
                             ++asked_;
                             open_bytes_when_asked_ = assembler_->open_bytes();
                             EXPECT_EQ(first.chunk_offset(), 0u);
                             if (!verdict_.ok()) return verdict_;
                             return std::vector<uint8_t>();
                           });
  }
  Progress Accepted(const v1::FrameHeader& header, const std::string& bytes) {
    const absl::StatusOr<ChunkAssembler::Result> result = Add(header, bytes);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->progress : Progress::kIgnored;
  }
  void ExpectRefused(const v1::FrameHeader& header, const std::string& bytes, ErrorReason reason,
                     const std::string& text) {
    EXPECT_THAT(Add(header, bytes), StatusIs(reason == ErrorReason::kCapacity ? absl::StatusCode::kResourceExhausted
                                                                              : absl::StatusCode::kInvalidArgument,
                                             reason, HasSubstr(text)));
  }

  std::optional<ChunkAssembler> assembler_{AssemblerLimits{.max_open = 4, .max_open_bytes = 1000}};
  absl::Status verdict_;
  int asked_ = 0;
  uint64_t open_bytes_when_asked_ = 0;
};

TEST_F(ChunkAssemblerTest, AWholeContributionCompletesAtOnce) {
  const std::string bytes = Bytes(40, 1);
  const absl::StatusOr<ChunkAssembler::Result> result = Add(Header(3, 10), bytes);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->progress, Progress::kComplete);
  EXPECT_EQ(Text(result->payload), bytes);
  EXPECT_EQ(result->header.SerializeAsString(), Header(3, 10).SerializeAsString());
  EXPECT_EQ(assembler_->open(), 0u);
  EXPECT_EQ(asked_, 1);
}

TEST_F(ChunkAssemblerTest, AnAbstentionHasNoPayload) {
  v1::FrameHeader header = Header(0, 1);
  header.set_abstain(true);
  ExpectRefused(header, "1234", ErrorReason::kMalformed, "an abstention has no tensors");
  header.clear_tensors();
  ExpectRefused(header, "1234", ErrorReason::kSizeMismatch, "payload_bytes says 4");
  header.set_payload_bytes(0);
  ExpectRefused(header, "1234", ErrorReason::kSizeMismatch, "expected 0 bytes, got 4");
  EXPECT_EQ(Accepted(header, ""), Progress::kComplete);
}

TEST_F(ChunkAssemblerTest, InterleavedContributionsComeOutWhole) {
  const std::string a = Bytes(100, 1), b = Bytes(60, 2);
  EXPECT_EQ(Accepted(Header(1, 25), a.substr(0, 30)), Progress::kPartial);
  EXPECT_EQ(Accepted(Header(2, 15), b.substr(0, 59)), Progress::kPartial);
  EXPECT_EQ(assembler_->open(), 2u);
  EXPECT_EQ(assembler_->open_bytes(), 160u);
  EXPECT_EQ(Accepted(At(Header(1, 25), 30), a.substr(30, 1)), Progress::kPartial);
  const auto second = Add(At(Header(2, 15), 59), b.substr(59));
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->progress, Progress::kComplete);
  EXPECT_EQ(Text(second->payload), b);
  const auto first = Add(At(Header(1, 25), 31), a.substr(31));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Text(first->payload), a);
  EXPECT_EQ(first->header.chunk_offset(), 0u);
  EXPECT_EQ(assembler_->open(), 0u);
  EXPECT_EQ(assembler_->open_bytes(), 0u);
  EXPECT_EQ(asked_, 2) << "once a contribution";
}

TEST_F(ChunkAssemblerTest, EveryPartOfTheKeyTellsContributionsApart) {
  assembler_.emplace(AssemblerLimits{.max_open = 100, .max_open_bytes = 100000});
  std::vector<v1::FrameHeader> headers(8, Header(1, 25));
  headers[1].set_session_id(12);
  headers[2].set_epoch(3);
  headers[3].set_step(6);
  headers[4].set_layer(2);
  headers[5].set_rank(2);
  headers[6].set_incarnation(78);
  headers[7].set_kind(v1::FRAME_KIND_STATISTICS);
  for (const v1::FrameHeader& header : headers) EXPECT_EQ(Accepted(header, Bytes(50, 1)), Progress::kPartial);
  EXPECT_EQ(assembler_->open(), 8u);
  for (const v1::FrameHeader& header : headers) {
    EXPECT_EQ(Accepted(At(header, 50), Bytes(50, 2)), Progress::kComplete);
  }
}

TEST_F(ChunkAssemblerTest, RefusesClaimsThatDoNotFitTheTensorsBeforeAsking) {
  v1::FrameHeader header = Header(1, 10);
  header.set_payload_bytes(5'000'000'000);
  ExpectRefused(header, Bytes(40, 1), ErrorReason::kSizeMismatch,
                "the tensors take 40 bytes, payload_bytes says 5000000000");
  header = Header(1, 10);
  header.set_payload_bytes(0);
  ExpectRefused(header, Bytes(40, 1), ErrorReason::kSizeMismatch, "payload_bytes says 0");
  header = Header(1, 10);
  header.mutable_tensors(0)->set_dims(0, INT64_MAX);
  ExpectRefused(header, Bytes(40, 1), ErrorReason::kSizeMismatch, "tensors[0]");
  header = Header(1, 10);
  header.mutable_tensors(0)->set_data_type(v1::DATA_TYPE_UNSPECIFIED);
  ExpectRefused(header, Bytes(40, 1), ErrorReason::kMalformed, "tensors[0].data_type");
  ExpectRefused(Header(1, 10), Bytes(41, 1), ErrorReason::kSizeMismatch, "expected 40 bytes, got 41");
  ExpectRefused(Header(1, 10), "", ErrorReason::kMalformed, "a chunk without bytes");
  ExpectRefused(At(Header(1, 10), 8), Bytes(32, 1), ErrorReason::kSizeMismatch,
                "expected a first chunk at 0, got one at 8");
  EXPECT_EQ(asked_, 0);
  EXPECT_EQ(assembler_->open(), 0u);
}

TEST_F(ChunkAssemblerTest, AsksBeforeItTakesMemory) {
  verdict_ = ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "epoch 2, now 3");
  // 4 TB: a server that allocated first would not come back from this.
  const v1::FrameHeader header = Header(1, int64_t{1} << 40);
  EXPECT_THAT(Add(header, Bytes(50, 1)), ReasonIs(ErrorReason::kStaleEpoch));
  EXPECT_EQ(open_bytes_when_asked_, 0u);
  EXPECT_EQ(assembler_->open(), 0u);
  EXPECT_EQ(assembler_->open_bytes(), 0u);
}

TEST_F(ChunkAssemblerTest, MemoryThatIsNotThereIsARefusal) {
#if PRECONDOR_HAS_ASAN
  GTEST_SKIP() << "AddressSanitizer ends the process where operator new would throw";
#endif
  EXPECT_EQ(GetErrorReason(Add(Header(1, int64_t{1} << 43), Bytes(50, 1)).status()), ErrorReason::kCapacity)
      << "32 TiB, admitted by mistake";
  EXPECT_EQ(assembler_->open(), 0u);
}

TEST_F(ChunkAssemblerTest, RefusesOverlapsAndGaps) {
  EXPECT_EQ(Accepted(Header(1, 25), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(Header(1, 25), Bytes(40, 1), ErrorReason::kDuplicateFrame, "expected the chunk at 40, got one at 0");
  EXPECT_EQ(assembler_->open(), 0u) << "nothing is kept";
  EXPECT_EQ(Accepted(Header(2, 25), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(At(Header(2, 25), 39), Bytes(61, 1), ErrorReason::kDuplicateFrame, "got one at 39");
  EXPECT_EQ(Accepted(Header(3, 25), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(At(Header(3, 25), 41), Bytes(59, 1), ErrorReason::kSizeMismatch, "expected a chunk at 40");
  EXPECT_EQ(Accepted(Header(4, 25), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(At(Header(4, 25), 40), Bytes(61, 1), ErrorReason::kSizeMismatch, "of at most 60 bytes, got 61");
  EXPECT_EQ(Accepted(Header(5, 25), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(At(Header(5, 25), 40), "", ErrorReason::kMalformed, "a chunk without bytes");
  EXPECT_EQ(assembler_->open(), 0u);
  EXPECT_EQ(assembler_->open_bytes(), 0u);
}

TEST_F(ChunkAssemblerTest, LaterHeadersHaveToSayTheSame) {
  const auto refused = [&](auto change) {
    EXPECT_EQ(Accepted(Header(1, 25), Bytes(40, 1)), Progress::kPartial);
    v1::FrameHeader later = At(Header(1, 25), 40);
    change(later);
    ExpectRefused(later, Bytes(10, 2), ErrorReason::kMalformed, "differs from that of the first chunk");
    EXPECT_EQ(assembler_->open(), 0u);
  };
  refused([](v1::FrameHeader& h) { h.set_samples(9); });
  refused([](v1::FrameHeader& h) { h.set_mode(v1::MODE_FIRST_ORDER); });
  refused([](v1::FrameHeader& h) { h.set_abstain(true); });
  refused([](v1::FrameHeader& h) { h.set_payload_bytes(104); });
  refused([](v1::FrameHeader& h) { h.clear_tensors(); });
  refused([](v1::FrameHeader& h) { h.mutable_tensors(0)->set_scale(2); });
  refused([](v1::FrameHeader& h) { h.mutable_tensors(0)->set_data_type(v1::DATA_TYPE_F16); });
  refused([](v1::FrameHeader& h) { h.mutable_tensors(0)->set_dims(1, 24); });
  refused([](v1::FrameHeader& h) { h.mutable_tensors(0)->add_dims(1); });
}

TEST_F(ChunkAssemblerTest, TheSecretIsShownOnce) {
  v1::FrameHeader first = Header(1, 25);
  first.set_secret("secret");
  EXPECT_EQ(Accepted(first, Bytes(40, 1)), Progress::kPartial);
  EXPECT_EQ(Accepted(At(Header(1, 25), 40), Bytes(60, 2)), Progress::kComplete);
}

TEST_F(ChunkAssemblerTest, TheRestOfARefusedContributionIsPassedOver) {
  verdict_ = absl::NotFoundError("no such layer");
  EXPECT_FALSE(Add(Header(1, 25), Bytes(40, 1)).ok());
  EXPECT_EQ(Accepted(At(Header(1, 25), 40), Bytes(40, 1)), Progress::kIgnored);
  EXPECT_EQ(Accepted(At(Header(1, 25), 80), Bytes(20, 1)), Progress::kIgnored);
  EXPECT_EQ(asked_, 1);
  // The end is forgotten: one more is an error again.
  ExpectRefused(At(Header(1, 25), 80), Bytes(20, 1), ErrorReason::kSizeMismatch, "expected a first chunk at 0");
}

TEST_F(ChunkAssemblerTest, ARefusedContributionMayBeSentAgain) {
  verdict_ = ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kFutureEpoch, "not yet");
  EXPECT_FALSE(Add(Header(1, 25), Bytes(40, 1)).ok());
  verdict_ = absl::OkStatus();
  EXPECT_EQ(Accepted(Header(1, 25), Bytes(40, 1)), Progress::kPartial);
  EXPECT_EQ(Accepted(At(Header(1, 25), 40), Bytes(60, 1)), Progress::kComplete);
}

TEST_F(ChunkAssemblerTest, OpenContributionsAreLimitedInNumber) {
  for (uint32_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(Accepted(Header(layer, 25), Bytes(40, 1)), Progress::kPartial);
  }
  ExpectRefused(Header(4, 25), Bytes(40, 1), ErrorReason::kCapacity, "4 contributions are open");
  EXPECT_EQ(Accepted(Header(5, 25), Bytes(100, 1)), Progress::kComplete) << "a whole one is never open";
  EXPECT_EQ(Accepted(At(Header(0, 25), 40), Bytes(60, 1)), Progress::kComplete);
  EXPECT_EQ(Accepted(Header(6, 25), Bytes(40, 1)), Progress::kPartial);
}

TEST_F(ChunkAssemblerTest, OpenContributionsAreLimitedInBytesButOneMayAlwaysBeOpen) {
  EXPECT_EQ(Accepted(Header(1, 500), Bytes(40, 1)), Progress::kPartial);  // 2000 of 1000 bytes, alone
  ExpectRefused(Header(2, 25), Bytes(40, 1), ErrorReason::kCapacity, "at most 1000");
  EXPECT_EQ(Accepted(At(Header(1, 500), 40), Bytes(1960, 1)), Progress::kComplete);
  EXPECT_EQ(Accepted(Header(3, 125), Bytes(40, 1)), Progress::kPartial);
  EXPECT_EQ(Accepted(Header(4, 125), Bytes(40, 1)), Progress::kPartial);
  ExpectRefused(Header(5, 1), Bytes(2, 1), ErrorReason::kCapacity, "4 bytes on top of 1000");
}

TEST_F(ChunkAssemblerTest, RefusalsAreRememberedInBoundedMemory) {
  verdict_ = absl::NotFoundError("no such layer");
  for (uint32_t layer = 0; layer < 1000; ++layer) EXPECT_FALSE(Add(Header(layer, 25), Bytes(40, 1)).ok());
  int passed_over = 0;
  for (uint32_t layer = 0; layer < 1000; ++layer) passed_over += Add(At(Header(layer, 25), 40), Bytes(60, 1)).ok();
  EXPECT_EQ(passed_over, 4) << "as many as may be open";
}

// Random chunking and interleaving with faults: whatever completes is what was sent, and the books balance.
TEST_F(ChunkAssemblerTest, SurvivesRandomSchedules) {
  std::mt19937 random(4711);
  int completed = 0, refused = 0;
  for (int round = 0; round < 300; ++round) {
    struct Sender {
      v1::FrameHeader header;
      std::string bytes;
      size_t next = 0;
    };
    std::vector<Sender> senders;
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const int64_t elements = 1 + random() % 40;
      senders.push_back({Header(layer, elements), Bytes(4 * elements, random()), 0});
    }
    for (int frame = 0; frame < 60; ++frame) {
      Sender& s = senders[random() % senders.size()];
      if (s.next == s.bytes.size()) s.next = 0;
      const size_t size = 1 + random() % (s.bytes.size() - s.next);
      v1::FrameHeader header = At(s.header, s.next);
      const bool fault = random() % 20 == 0;
      if (fault) header.set_chunk_offset(random() % 200);
      const auto result = Add(header, s.bytes.substr(s.next, size));
      s.next += size;
      if (!result.ok()) {
        ++refused;
        s.next = 0;
      } else if (result->progress == Progress::kComplete && !fault) {
        ++completed;
        ASSERT_EQ(Text(result->payload), s.bytes) << "round " << round << " frame " << frame;
      }
      ASSERT_LE(assembler_->open(), 3u);
      ASSERT_EQ(assembler_->open_bytes() == 0, assembler_->open() == 0);
    }
    assembler_.emplace(AssemblerLimits{.max_open = 4, .max_open_bytes = 1000});
  }
  EXPECT_GT(completed, 1000);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace precondor::wire
