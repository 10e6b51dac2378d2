// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/registry.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/methods/eva.h"
#include "kernels/methods/identity.h"
#include "kernels/methods/kfac.h"
#include "kernels/methods/kfac_config.h"
#include "kernels/methods/kron.h"
#include "kernels/methods/kron_config.h"
#include "kernels/methods/mkor.h"
#include "kernels/methods/mkor_config.h"
#include "kernels/methods/muon.h"
#include "kernels/methods/muon_config.h"
#include "kernels/methods/soap.h"
#include "kernels/methods/soap_config.h"

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

}  // namespace precondor
