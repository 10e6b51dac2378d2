// SPDX-License-Identifier: Apache-2.0
// The effects of LayerMachine as a transcript shows them: one line each.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/layer/layer_events.h"

namespace precondor {

// "ABORTED STALE_EPOCH". Leaves the message out: it is for people, and may change.
inline std::string TextOf(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  const std::string code = absl::StatusCodeToString(status.code());
  return reason == ErrorReason::kUnspecified ? code : absl::StrCat(code, " ", ErrorReasonName(reason));
}

// "PRECONDITIONED factors=1".
inline std::string TextOf(const Plan& plan) {
  return absl::StrCat(DecisionName(plan.decision), " factors=", plan.factor_version);
}

class EffectText {
 public:
  // `steps` has the step of each id.
  static std::string Of(const Effect& effect, const std::map<StepId, uint64_t>& steps) {
    return std::visit(EffectText(steps), effect);
  }

  std::string operator()(const SenderReply& e) const {
    if (!e.status.ok()) return "refuse " + TextOf(e.status);
    return e.duplicate ? "acknowledge duplicate" : "acknowledge";
  }
  std::string operator()(const AwaitAnswer& e) const { return "await answer" + Step(e.id); }
  std::string operator()(const GiveAnswer& e) const { return "give answer" + Step(e.id); }
  std::string operator()(const FetchFactors&) const { return "fetch factors"; }
  std::string operator()(const CountAccepted& e) const {
    return absl::StrCat("count step=", e.step, " accepted=", e.accepted, OfMode(e.mode));
  }
  std::string operator()(const KeepPayload& e) const {
    return absl::StrCat("keep ", KindName(e.kind), Step(e.id), " rank=", e.rank);
  }
  std::string operator()(const DropPayloads& e) const {
    return absl::StrCat("drop payloads of ", KindName(e.kind), Step(e.id));
  }
  std::string operator()(const ReportSealed& e) const {
    return absl::StrCat("sealed ", KindName(e.kind), " step=", e.step);
  }
  std::string operator()(const ReportUpdatesLost& e) const {
    return absl::StrCat("report lost updates=", e.lost, " newly=", e.newly, " rank=", e.rank, " known=", e.known);
  }
  std::string operator()(const ReportContradiction& e) const { return "report contradiction " + TextOf(e.why); }
  std::string operator()(const EndRequests& e) const {
    return absl::StrCat("end requests", Step(e.id), " ", TextOf(e.status), e.retired ? ", and keep no answer" : "");
  }
  std::string operator()(const DropStep& e) const { return "drop" + Step(e.id); }
  std::string operator()(const WakeWorker&) const { return "wake worker"; }
  std::string operator()(const BeginStep& e) const {
    const std::string rollback = e.rollback_epoch == 0 ? "" : absl::StrCat(" rollback_epoch=", e.rollback_epoch);
    return absl::StrCat("begin step=", e.step, rollback);
  }
  std::string operator()(const AccumulateGradient& e) const {
    return absl::StrCat("accumulate gradient", Step(e.id), " rank=", e.rank);
  }
  std::string operator()(const AppendUpdate& e) const {
    return absl::StrCat("append update step=", e.step, OfRanks(e.ranks), e.logged ? ", which the journal has" : "");
  }
  std::string operator()(const ApplyUpdate& e) const {
    return absl::StrCat("apply update step=", e.step, e.logged ? " from the journal" : "",
                        e.empty ? ", which is empty" : "");
  }
  std::string operator()(const AppendFailedUpdate& e) const {
    return absl::StrCat("append failed update step=", e.step);
  }
  std::string operator()(const ComputeAnswer& e) const {
    return absl::StrCat("compute answer", Step(e.id), OfRanks(e.ranks), OfMode(e.mode),
                        e.skip_reason.empty() ? "" : ", skip: " + e.skip_reason,
                        e.plan.has_value() ? ", as planned: " + TextOf(*e.plan) : "");
  }
  std::string operator()(const AppendPlan& e) const {
    return absl::StrCat("append plan step=", e.step, " ", TextOf(e.plan), OfMode(e.mode));
  }
  std::string operator()(const DeliverAnswer& e) const { return "deliver answer" + Step(e.id); }

 private:
  explicit EffectText(const std::map<StepId, uint64_t>& steps) : steps_(steps) {}
  std::string Step(StepId id) const { return absl::StrCat(" step=", steps_.at(id)); }
  static std::string OfRanks(const std::vector<uint32_t>& ranks) {
    return ranks.empty() ? "" : " ranks=" + absl::StrJoin(ranks, ",");
  }
  static std::string OfMode(Mode mode) { return mode == Mode::kSecondOrder ? "" : absl::StrCat(" ", ModeName(mode)); }
  static std::string KindName(ContributionKind kind) {
    return kind == ContributionKind::kStatistics ? "statistics" : kind == ContributionKind::kPull ? "pull" : "gradient";
  }
  const std::map<StepId, uint64_t>& steps_;
};

}  // namespace precondor
