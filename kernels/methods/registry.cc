// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/registry.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/methods/eva.h"
#include "kernels/methods/identity.h"
#include "kernels/methods/kfac.h"
#include "kernels/methods/kron.h"
#include "kernels/methods/mkor.h"
#include "kernels/methods/soap.h"

namespace precondor {
namespace {

struct Entry {
  absl::string_view name;
  absl::StatusOr<std::unique_ptr<Method>> (*make)(const MethodConfig&);
};

constexpr Entry kMethods[] = {
    {"mkor", MakeMkor},         {"kron", MakeKron}, {"soap", MakeSoap},
    {"identity", MakeIdentity}, {"eva", MakeEva},   {"kfac", MakeKfac},
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeMethod(const MethodConfig& config) {
  for (const Entry& entry : kMethods) {
    if (entry.name == config.name) return entry.make(config);
  }
  return absl::NotFoundError(absl::StrCat("method: expected one of ", absl::StrJoin(MethodNames(), ", "), ", got \"",
                                          config.name.substr(0, 64), "\""));
}

std::vector<absl::string_view> MethodNames() {
  std::vector<absl::string_view> names;
  for (const Entry& entry : kMethods) names.push_back(entry.name);
  return names;
}

}  // namespace precondor
