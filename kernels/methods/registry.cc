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
  absl::string_view name;
  absl::StatusOr<std::unique_ptr<Method>> (*make)(const MethodConfig&);
  // Reads every option of the method, as `make` does.
  void (*read)(OptionReader&);
};

constexpr Entry kMethods[] = {
    {"mkor", MakeMkor, [](OptionReader& reader) { ReadMkorConfig(reader); }},
    {"kron", MakeKron, [](OptionReader& reader) { ReadKronConfig(reader); }},
    {"soap", MakeSoap, [](OptionReader& reader) { ReadSoapConfig(reader); }},
    {"muon", MakeMuon, [](OptionReader& reader) { ReadMuonConfig(reader); }},
    {"identity", MakeIdentity, [](OptionReader&) {}},
    {"eva", MakeEva, ReadEvaOptions},
    {"kfac", MakeKfac, [](OptionReader& reader) { ReadKfacConfig(reader); }},
};

absl::Status UnknownMethod(absl::string_view name) {
  return absl::NotFoundError(absl::StrCat("method: expected one of ", absl::StrJoin(MethodNames(), ", "), ", got \"",
                                          name.substr(0, 64), "\""));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeMethod(const MethodConfig& config) {
  for (const Entry& entry : kMethods) {
    if (entry.name == config.name) return entry.make(config);
  }
  return UnknownMethod(config.name);
}

absl::StatusOr<std::vector<OptionInfo>> MethodOptions(absl::string_view method) {
  for (const Entry& entry : kMethods) {
    if (entry.name != method) continue;
    const MethodConfig defaults;
    OptionReader reader(defaults);
    entry.read(reader);
    return reader.options_read();
  }
  return UnknownMethod(method);
}

std::vector<absl::string_view> MethodNames() {
  std::vector<absl::string_view> names;
  for (const Entry& entry : kMethods) names.push_back(entry.name);
  return names;
}

}  // namespace precondor
