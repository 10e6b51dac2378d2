// SPDX-License-Identifier: Apache-2.0
// An outbox whose frames are written as text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

#include "client/cpp/src/outbox.h"
#include "kernels/base/error_reason.h"

namespace precondor {

constexpr uint64_t kCredit = 1000;
inline const absl::Time kNow = absl::FromUnixSeconds(1000);

inline ContributionId Statistics(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_STATISTICS, step, layer}; }
inline ContributionId Gradient(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_GRADIENT, step, layer}; }
inline ContributionId Pull(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_PULL, step, layer}; }
inline ContributionId Fetch(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_FETCH, step, layer}; }

inline char Letter(v1::FrameKind kind) {
  switch (kind) {
    case v1::FRAME_KIND_GRADIENT:
      return 'G';
    case v1::FRAME_KIND_PULL:
      return 'P';
    case v1::FRAME_KIND_FETCH:
      return 'F';
    default:
      return 'S';
  }
}

// The key of text as WriteAll writes it: "S5.0", or "S5.0+10" with a number of bytes.
inline ContributionId IdOf(absl::string_view text) {
  const std::vector<std::string> numbers = absl::StrSplit(text.substr(1), absl::ByAnyChar(".+"));
  const uint64_t step = std::stoull(numbers[0]);
  const uint32_t layer = static_cast<uint32_t>(std::stoul(numbers[1]));
  for (const ContributionId& id : {Gradient(step, layer), Pull(step, layer), Fetch(step, layer)}) {
    if (Letter(id.kind) == text[0]) return id;
  }
  return Statistics(step, layer);
}

inline absl::Status Refusal(ErrorReason reason, absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
  return ReasonedStatus(code, reason, "refused");
}

class OutboxTest : public ::testing::Test {
 protected:
  absl::Status Add(const ContributionId& id, uint64_t bytes, absl::Time deadline = absl::InfiniteFuture()) {
    return AddTo(outbox_, id, bytes, deadline);
  }
  static absl::Status AddTo(Outbox& outbox, const ContributionId& id, uint64_t bytes,
                            absl::Time deadline = absl::InfiniteFuture()) {
    auto item = std::make_shared<Contribution>();
    item->id = id;
    auto payload = std::make_shared<std::vector<uint8_t>>(bytes);
    item->payload = *payload;
    item->payload_owner = payload;
    item->deadline = deadline;
    return outbox.Add(std::move(item));
  }
  // Adds contributions in order: "S5.0+10 G5.0+11" are 10 bytes of statistics and 11 of a gradient.
  void Submit(absl::string_view text) { SubmitTo(outbox_, text); }
  static void SubmitTo(Outbox& outbox, absl::string_view text) {
    for (const absl::string_view word : absl::StrSplit(text, ' ')) {
      const std::vector<std::string> parts = absl::StrSplit(word, '+');
      ASSERT_TRUE(AddTo(outbox, IdOf(word), std::stoull(parts[1])).ok()) << word;
    }
  }
  void Acknowledge(absl::string_view text) {
    for (const absl::string_view word : absl::StrSplit(text, ' ')) outbox_.Acknowledge(IdOf(word));
  }
  // Everything that may be written now, e.g. "R0.1v3 | S0.1[0+10] G0.1[0+20]": kind, step, layer, and factor version or
  // chunk. B: RESUME of a process that begins. | : nothing was written until the RESUMEs before it were acknowledged.
  std::string WriteAll(absl::Time now = kNow) { return WriteAllOf(outbox_, now); }
  static std::string WriteAllOf(Outbox& outbox, absl::Time now = kNow) {
    std::string text;
    std::vector<ContributionId> resumes;
    for (;;) {
      const auto frame = outbox.Next(now);
      if (!frame.has_value()) {
        Outbox acknowledged = outbox;
        for (const ContributionId& id : resumes) acknowledged.Acknowledge(id);
        if (!acknowledged.Next(now).has_value()) return text;
        for (const ContributionId& id : resumes) outbox.Acknowledge(id);
        resumes.clear();
        text += " |";
        continue;
      }
      const ContributionId& id = frame->item->id;
      if (!text.empty()) text += ' ';
      const std::string key = std::to_string(id.step) + '.' + std::to_string(id.layer);
      if (id.kind == v1::FRAME_KIND_RESUME) {
        resumes.push_back(id);
        const uint64_t version = frame->item->factor_version;
        text += (frame->item->abstain ? 'B' : 'R') + key;
        if (!frame->item->abstain || version > 0) text += 'v' + std::to_string(version);
      } else {
        text += Letter(id.kind) + key + '[' + std::to_string(frame->chunk.offset) + '+' +
                std::to_string(frame->chunk.size) + ']';
      }
    }
  }

  void SubmitAndWrite(absl::string_view text) {
    Submit(text);
    WriteAll();
  }
  // Starts a stream to the memory of this generation; all that it writes.
  std::string NewStream(uint64_t generation) {
    outbox_.StartStream(kCredit, generation);
    return WriteAll();
  }

  // Its result has come, made with factors of ten updates a step; the gradient is kept.
  void Finish(const ContributionId& id) { FinishIn(outbox_, id); }
  static void FinishIn(Outbox& outbox, const ContributionId& id) {
    const Outbox::Item item = outbox.Find(id);
    ASSERT_NE(item, nullptr);
    ASSERT_NE(outbox.Finish(id, Outbox::CopyToKeep(*item), 10 * id.step), nullptr);
  }

  Outbox outbox_;
};

}  // namespace precondor
