// SPDX-License-Identifier: Apache-2.0
// Feeds the events of each transcript to a LayerMachine, and compares its effects with those in the file; README.md.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/layer/layer_machine.h"
#include "tests/transcripts/effect_text.h"

namespace precondor {
namespace {

using std::filesystem::path;

constexpr uint64_t kNoStep = ~uint64_t{0};

std::string ReadFile(const path& from) {
  std::ifstream in(from);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<path> FilesIn(const path& folder) {
  std::vector<path> files;
  for (const path& file : std::filesystem::directory_iterator(folder)) {
    if (file.extension() == ".txt" && file.filename() != "CMakeLists.txt") files.push_back(file);
  }
  std::sort(files.begin(), files.end());
  return files;
}

// "statistics rank=0 step=3 abstains". An option that is not taken is an error of the script.
class Line {
 public:
  explicit Line(const std::string& text) : text_(text) {
    const std::vector<std::string> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
    name_ = words.front();
    for (size_t i = 1; i < words.size(); ++i) {
      const std::pair<std::string, std::string> option = absl::StrSplit(words[i], absl::MaxSplits('=', 1));
      options_.insert(option);
    }
  }
  ~Line() { EXPECT_TRUE(options_.empty()) << text_ << ": " << options_.begin()->first << " is unknown"; }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  const std::string& name() const { return name_; }
  bool Has(const std::string& key) { return options_.erase(key) > 0; }
  std::string Text(const std::string& key, std::string otherwise) {
    const auto found = options_.extract(key);
    return found.empty() ? std::move(otherwise) : found.mapped();
  }
  uint64_t Number(const std::string& key, uint64_t otherwise) { return ToNumber(Text(key, absl::StrCat(otherwise))); }
  absl::Duration Seconds(const std::string& key, absl::Duration otherwise) {
    return options_.contains(key) ? absl::Seconds(Number(key, 0)) : otherwise;
  }
  // "1:4,2:0": ranks, and the steps that their processes begin with.
  std::vector<Member> Members(const std::string& key) {
    std::vector<Member> members;
    for (const absl::string_view member : absl::StrSplit(Text(key, ""), ',', absl::SkipEmpty())) {
      const std::pair<std::string, std::string> of = absl::StrSplit(member, ':');
      members.push_back({.rank = static_cast<uint32_t>(ToNumber(of.first)), .first_step = ToNumber(of.second)});
    }
    return members;
  }

 private:
  uint64_t ToNumber(const std::string& text) const {
    uint64_t number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text_ << ": " << text << " is no number";
    return number;
  }
  const std::string text_;
  std::string name_;
  std::map<std::string, std::string> options_;
};

// The machine of one layer, and what stands for the driver: it has the number of updates in the place of factors.
class Script {
 public:
  // Returns `text` with the actual effects in the place of the expected ones.
  std::string Run(const std::string& text) {
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
      if (absl::StartsWith(line, "  ")) continue;  // an effect
      absl::StrAppend(&out_, out_.empty() ? "" : "\n", line);
      if (line.empty() || line.front() == '#') continue;
      Line words(absl::StartsWith(line, "> ") ? line.substr(2) : line);
      Do(words);
    }
    return out_;
  }

 private:
  void Do(Line& line) {
    const std::string& name = line.name();
    if (name == "layer") return Begin(line);
    PRECONDOR_CHECK(machine_ != nullptr);  // a script begins with its layer
    now_ = absl::UnixEpoch() + line.Seconds("at", now_ - absl::UnixEpoch());
    if (name == "given") return FinishStep(line.Number("step", 0));
    if (name == "restored") return Restore(line);
    if (name == "work") return Work();
    if (name == "done") return Answer(line.Has("failed"));
    if (name == "epoch-ended") epoch_ = line.Number("epoch", epoch_ + 1);
    Feed(EventOf(line));
  }

  void Begin(Line& line) {
    spec_ = SessionSpec();
    spec_.inv_freq = 1;
    spec_.layers = {LayerSpec{.name = "layer", .d_out = 1, .d_in = 1}};
    spec_.world_size = static_cast<int32_t>(line.Number("ranks", 2));
    const std::string exchange = line.Text("exchange", "DIRECT");
    for (const auto mode : {ExchangeMode::kDelegate, ExchangeMode::kPullFactors, ExchangeMode::kReplay}) {
      if (exchange == ExchangeModeName(mode)) spec_.exchange = mode;
    }
    EXPECT_EQ(exchange, ExchangeModeName(spec_.exchange));
    learns_ = line.Has("learns");
    rules_ = {.spec = &spec_, .needs_statistics = !learns_, .window_steps = line.Number("window", 2)};
    epoch_ = 1;
    machine_ = std::make_unique<LayerMachine>(rules_, epoch_, /*rollback_epoch=*/0, line.Members("members"));
    (void)machine_->Step(FactorsReplaced{});
    factors_ = 0;
    steps_.clear();
    updated_.clear();
    owed_.clear();
  }

  // All ranks send all of a step and have the answer.
  void FinishStep(uint64_t step) {
    const std::string out = out_;
    const std::string gradient = rules_.workers_precondition() ? "pull" : "gradient";
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec_.world_size); ++rank) {
      for (const std::string& event : {std::string("statistics"), gradient, std::string("ask")}) {
        if (event == "statistics" ? learns_ : !rules_.SendsGradient(rank)) continue;
        Line line(absl::StrCat(event, " rank=", rank, " step=", step));
        Do(line);
      }
    }
    Work();
    EXPECT_FALSE(absl::StrContains(out_.substr(out.size()), "refuse")) << out_;
    out_ = out;
  }

  void Restore(Line& line) {
    RestoredStep& step = restored_.emplace_back();
    step.step = line.Number("step", 0);
    step.update_pending = line.Has("pending");
    step.updated = line.Has("updated") || step.update_pending;
    step.update_is_empty = line.Has("empty");
    step.answered = line.Has("answered");
    const std::string plan = line.Text("plan", "");
    for (const auto decision : {Decision::kPreconditioned, Decision::kIdentity, Decision::kSkip}) {
      if (plan == DecisionName(decision)) step.plan = Plan{decision, line.Number("factors", 0), /*reason=*/""};
    }
    EXPECT_EQ(plan.empty(), !step.plan.has_value()) << plan;
  }

  LayerEvent EventOf(Line& line) {
    const std::string& name = line.name();
    if (name == "epoch-ended") {
      return EpochEnded{epoch_, ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch, "epoch")};
    }
    if (name == "epoch-began") {
      const uint64_t step = line.Number("rollback", kNoStep);
      return EpochBegan{epoch_, step == kNoStep ? 0 : epoch_, step == kNoStep ? 0 : step, line.Members("replaced")};
    }
    if (name == "worker-ready") {
      EXPECT_TRUE(owed_.empty()) << "the worker does one thing at a time";
      return WorkerReady{};
    }
    if (name == "replay-finished") {
      factors_ = line.Number("factors", 0);
      return ReplayFinished{line.Number("rollback_epoch", 0), std::exchange(restored_, {}), factors_, now_};
    }
    const uint64_t epoch = line.Number("epoch", epoch_);
    const ContributionKey key{
        .epoch = epoch, .step = line.Number("step", 0), .rank = static_cast<uint32_t>(line.Number("rank", 0))};
    if (name == "ask") return AnswerRequested{key};
    if (name == "resume") {
      const uint64_t next_step = static_cast<uint64_t>(line.Number("lacks", static_cast<int64_t>(key.step)));
      return RankResumed{{key, static_cast<uint64_t>(line.Number("factors", 0)), next_step, /*begins=*/false}, now_};
    }
    if (name == "begin") return RankResumed{{key, /*factor_version=*/0, key.step, /*begins=*/true}, now_};
    if (name == "fetch") return FactorsRequested{key, now_};
    ContributionArrived event{.key = key, .now = now_};
    if (name == "gradient") event.kind = ContributionKind::kGradient;
    if (name == "pull") event.kind = ContributionKind::kPull;
    EXPECT_TRUE(event.kind != ContributionKind::kStatistics || name == "statistics") << name << " is no event";
    if (line.Has("first-order")) event.mode = Mode::kFirstOrder;
    if (line.Has("abstains")) event.status = ContributionStatus::kAbstained;
    if (line.Has("not-finite")) event.status = ContributionStatus::kRefused;
    event.digest = line.Has("other-bytes") ? 100 : static_cast<uint64_t>(event.status);
    return event;
  }

  bool Feed(const LayerEvent& event) {
    const Effects effects = machine_->Step(event);
    for (const auto& [step, of] : machine_->window().steps()) steps_[of.id] = step;
    for (const Effect& effect : effects) {
      Print(EffectText::Of(effect, steps_));
      const bool owes = std::holds_alternative<ApplyUpdate>(effect) || std::holds_alternative<ComputeAnswer>(effect) ||
                        std::holds_alternative<DeliverAnswer>(effect);
      if (owes) owed_.push_back(effect);
    }
    return !effects.empty();
  }

  // Runs the worker until it sleeps.
  void Work() {
    for (int i = 0; i < 1000; ++i) {
      if (!owed_.empty()) {
        Answer(/*failed=*/false);
      } else if (!Feed(WorkerReady{})) {
        return;
      }
    }
    ADD_FAILURE() << "the worker does not sleep";
  }

  // The driver has carried out the oldest effect that it has to report on.
  void Answer(bool failed) {
    PRECONDOR_CHECK(!owed_.empty());
    const Effect effect = owed_.front();
    owed_.pop_front();
    if (const auto* update = std::get_if<ApplyUpdate>(&effect)) {
      if (!update->empty && !failed) {
        ++factors_;
        updated_.insert(update->id);
      }
      Print(absl::StrCat("(update ", failed ? "failed" : "done", ": factors=", factors_, ")"));
      const bool restored = update->logged && !update->empty;
      Feed(UpdateDone{update->id, update->step, update->logged, restored, failed, factors_});
    } else if (const auto* compute = std::get_if<ComputeAnswer>(&effect)) {
      const bool lacks = learns_ && compute->plan.has_value() && compute->plan->factor_version > factors_ + 1;
      const bool taken_in = compute->plan.has_value() && compute->plan->factor_version == factors_;
      if (learns_ && compute->skip_reason.empty() && !taken_in) ++factors_;
      Plan plan = PlanOf(*compute);
      Print(absl::StrCat("(answer done: ", TextOf(plan), lacks ? ", not as planned" : "", ")"));
      Feed(AnswerDone{.id = compute->id, .plan = plan, .plan_holds = !lacks, .factor_version = factors_});
    } else {
      Print("(answer visible)");
      Feed(AnswerVisible{std::get<DeliverAnswer>(effect).id});
      EXPECT_FALSE(Feed(AnswerDelivered{}));
    }
  }

  Plan PlanOf(const ComputeAnswer& of) const {
    const std::optional<Decision> planned = of.plan.has_value() ? std::optional(of.plan->decision) : std::nullopt;
    Plan plan{.decision = Decision::kIdentity, .factor_version = factors_, .reason = of.skip_reason};
    const bool made = updated_.contains(of.id) || planned == Decision::kPreconditioned;
    if (!of.skip_reason.empty() || planned == Decision::kSkip) {
      plan.decision = Decision::kSkip;
    } else if (rules_.workers_precondition() ? made : factors_ > 0 && of.mode == Mode::kSecondOrder) {
      plan.decision = planned.value_or(Decision::kPreconditioned);
    }
    return plan;
  }

  void Print(const std::string& line) { absl::StrAppend(&out_, "\n  ", line); }

  SessionSpec spec_;
  LayerRules rules_;
  std::unique_ptr<LayerMachine> machine_;
  std::string out_;
  absl::Time now_ = absl::UnixEpoch();
  uint64_t epoch_ = 1;
  uint64_t factors_ = 0;
  bool learns_ = false;  // from gradients: a computed answer takes them in
  std::map<StepId, uint64_t> steps_;
  std::set<StepId> updated_;  // whose statistics have changed the factors
  std::deque<Effect> owed_;   // that the driver has yet to report on
  std::vector<RestoredStep> restored_;
};

class TranscriptTest : public testing::TestWithParam<path> {};

TEST_P(TranscriptTest, GivesTheseEffects) {
  const std::string expected = ReadFile(GetParam());
  const std::string text = Script().Run(expected);
  if (std::getenv("PRECONDOR_REWRITE") != nullptr) {
    if (!HasFailure()) std::ofstream(GetParam()) << text;
    return;
  }
  EXPECT_EQ(text, expected) << "PRECONDOR_REWRITE=1 writes " << GetParam().filename() << " anew";
}

TEST_P(TranscriptTest, IsNamedInTheProtocol) {
  const std::string protocol = ReadFile(path(PRECONDOR_TRANSCRIPTS) / "../../docs/develop/protocol.md");
  EXPECT_TRUE(absl::StrContains(protocol, absl::StrCat("`", GetParam().filename().string(), "`")));
}

std::string NameOf(const testing::TestParamInfo<path>& of) {
  std::string name = of.param.stem();
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Files, TranscriptTest, testing::ValuesIn(FilesIn(PRECONDOR_TRANSCRIPTS)), NameOf);

}  // namespace
}  // namespace precondor
