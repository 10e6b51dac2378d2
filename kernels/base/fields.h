// SPDX-License-Identifier: Apache-2.0
// One list of the fields of a struct, for all code that treats them alike: comparison, messages, files and Python.
#pragma once

#include <concepts>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Matches S and const S.
template <typename T, typename S>
concept Is = std::same_as<std::remove_const_t<T>, S>;

// Lists all fields of a struct, in order; a list that lacks one does not compile. It is in the struct's namespace,
// where the templates below find it.
#define PRECONDOR_FIELDS(Struct, ...)                                            \
  constexpr absl::string_view FieldNames(const Struct*) { return #__VA_ARGS__; } \
  auto Fields(Is<Struct> auto& value) {                                          \
    auto& [__VA_ARGS__] = value;                                                 \
    return std::tie(__VA_ARGS__);                                                \
  }

template <typename T>
concept HasFields = requires(T& value) {
  Fields(value);
};

template <HasFields T>
std::vector<absl::string_view> NamesOfFields() {
  return absl::StrSplit(FieldNames(static_cast<const T*>(nullptr)), ", ");
}

// Calls f(name, field) for each field of a struct, or f(name, field, other field) for those of two.
template <typename F, HasFields T, typename... Others>
void ForEachField(F&& f, T& value, Others&... others) {
  const std::vector<absl::string_view> names = NamesOfFields<std::remove_const_t<T>>();
  const auto call = [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
    const auto one = [&]<size_t kPlace>(std::integral_constant<size_t, kPlace>) {
      f(names[kPlace], std::get<kPlace>(Fields(value)), std::get<kPlace>(Fields(others))...);
    };
    (one(std::integral_constant<size_t, kPlaces>()), ...);
  };
  call(std::make_index_sequence<std::tuple_size_v<decltype(Fields(value))>>());
}

}  // namespace precondor
