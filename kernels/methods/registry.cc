// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/registry.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/eva.h"
#include "kernels/methods/factor.h"
#include "kernels/methods/identity.h"
#include "kernels/methods/kfac.h"
#include "kernels/methods/kfac_side.h"
#include "kernels/methods/kron.h"
#include "kernels/methods/kron_block.h"
#include "kernels/methods/mkor.h"
#include "kernels/methods/muon.h"
#include "kernels/methods/soap.h"

namespace precondor {
namespace {

struct Entry {
  const MethodTraits& traits;
  absl::StatusOr<std::unique_ptr<Method>> (*make)(const MethodConfig&);
  // Reads every option of the method, as `make` does.
  void (*read)(OptionReader&);
};

constexpr Entry kMethods[] = {
    {kMkorTraits, MakeMkor, [](OptionReader& reader) { ReadMkorConfig(reader); }},
    {kKronTraits, MakeKron, [](OptionReader& reader) { ReadKronConfig(reader); }},
    {kSoapTraits, MakeSoap, [](OptionReader& reader) { ReadSoapConfig(reader); }},
    {kMuonTraits, MakeMuon, [](OptionReader& reader) { ReadMuonConfig(reader); }},
    {kIdentityTraits, MakeIdentity, [](OptionReader&) {}},
    {kEvaTraits, MakeEva, ReadEvaOptions},
    {kKfacTraits, MakeKfac, [](OptionReader& reader) { ReadKfacConfig(reader); }},
};

absl::Status UnknownMethod(absl::string_view name) {
  return absl::NotFoundError(absl::StrCat("method: expected one of ", absl::StrJoin(MethodNames(), ", "), ", got \"",
                                          name.substr(0, 64), "\""));
}

absl::Status CheckWorkerFactors(const SessionSpec& spec, absl::string_view field, const Method& method) {
  const WorkerFactors needed =
      spec.exchange == ExchangeMode::kReplay ? WorkerFactors::kReplayed : WorkerFactors::kPulled;
  if (!WorkersPrecondition(spec) || method.traits().worker_factors >= needed) return absl::OkStatus();
  std::vector<absl::string_view> names;
  for (const MethodTraits& traits : AllMethodTraits()) {
    if (traits.worker_factors >= needed) names.push_back(traits.name);
  }
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected one of ", absl::StrJoin(names, ", "),
                                                 " with exchange ", ExchangeModeName(spec.exchange), ", got ",
                                                 method.name()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeMethod(const MethodConfig& config) {
  for (const Entry& entry : kMethods) {
    if (entry.traits.name == config.name) return entry.make(config);
  }
  return UnknownMethod(config.name);
}

absl::StatusOr<std::vector<OptionInfo>> MethodOptions(absl::string_view method) {
  for (const Entry& entry : kMethods) {
    if (entry.traits.name != method) continue;
    const MethodConfig defaults;
    OptionReader reader(defaults);
    entry.read(reader);
    return reader.options_read();
  }
  return UnknownMethod(method);
}

std::vector<absl::string_view> MethodNames() {
  std::vector<absl::string_view> names;
  for (const Entry& entry : kMethods) names.push_back(entry.traits.name);
  return names;
}

std::vector<MethodTraits> AllMethodTraits() {
  std::vector<MethodTraits> traits;
  for (const Entry& entry : kMethods) traits.push_back(entry.traits);
  return traits;
}

bool TakesStatistics(const SessionSpec& spec, int64_t layer) {
  const absl::string_view name = MethodOf(spec, layer).name;
  for (const Entry& entry : kMethods) {
    if (entry.traits.name == name) return entry.traits.statistics != StatisticsForm::kNone;
  }
  return true;
}

absl::StatusOr<MethodSet> MethodSet::Make(const SessionSpec& spec, const MethodFactory& make) {
  MethodSet set;
  PRECONDOR_ASSIGN_OR_RETURN(set.methods_.emplace_back(), make(spec.method));
  PRECONDOR_RETURN_IF_ERROR(CheckWorkerFactors(spec, "method", *set.methods_.back()));
  set.of_layer_.assign(spec.layers.size(), 0);
  for (size_t i = 0; i < spec.layer_methods.size(); ++i) {
    const LayerMethod& entry = spec.layer_methods[i];
    absl::StatusOr<std::unique_ptr<Method>> method = make(entry.method);
    if (!method.ok()) {
      return absl::Status(method.status().code(), absl::StrCat("layer_methods[", i, "]: ", method.status().message()));
    }
    set.methods_.push_back(*std::move(method));
    PRECONDOR_RETURN_IF_ERROR(
        CheckWorkerFactors(spec, absl::StrCat("layer_methods[", i, "].method"), *set.methods_.back()));
    for (const uint32_t layer : entry.layers) set.of_layer_[layer] = static_cast<uint32_t>(set.methods_.size() - 1);
  }
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    const Method& method = set.of(static_cast<int64_t>(layer));
    const bool takes = method.traits().statistics == StatisticsForm::kCovariances;
    if (StatisticsOf(spec, static_cast<int64_t>(layer)) != StatisticsKind::kCovariance || takes) continue;
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " \"", spec.layers[layer].name,
                                                   "\": statistics: expected vectors for method ", method.name(),
                                                   ", got COVARIANCE"));
  }
  return set;
}

}  // namespace precondor
