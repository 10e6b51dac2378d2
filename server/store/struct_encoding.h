// SPDX-License-Identifier: Apache-2.0
// Encodes values as bytes and decodes them, from one list of fields for both directions. A function Fields(value)
// returns the fields of a struct as a tuple of references. It is in the struct's own namespace, where these templates
// find it.
//
// Write Fields with a structured binding that names every field. If a field is added to the struct, that line no longer
// compiles, which reminds the developer to give the record a new version.
//
// Format, little-endian: bool and enumerations take 1 byte, integers their size, double its 8 IEEE bytes. string,
// vector and map are an 8-byte count and the elements. optional is a bool and the value. variant is the index in 1 byte
// and the value. A struct is its fields.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/base/byte_codec.h"

namespace precondor::store {

// Matches S and const S, so that one Fields serves both directions.
template <typename T, typename S>
concept Is = std::same_as<std::remove_const_t<T>, S>;

template <typename T>
concept Number = std::integral<T> && !std::same_as<T, bool>;

template <typename T>
void Put(std::string& out, const T& value);
// If the bytes are too few or invalid, decoder.ok() is false afterwards, and `value` has what was decoded before the
// error.
template <typename T>
void Take(Decoder& decoder, T& value);

namespace internal {

template <typename T>
struct Code {
  static void Put(std::string& out, const T& value) {
    std::apply([&out](const auto&... fields) { (store::Put(out, fields), ...); }, Fields(value));
  }
  static void Take(Decoder& decoder, T& value) {
    std::apply([&decoder](auto&&... fields) { (store::Take(decoder, fields), ...); }, Fields(value));
  }
};

template <Number T>
struct Code<T> {
  static void Put(std::string& out, T value) { PutFixed(out, static_cast<uint64_t>(value), sizeof(T)); }
  static void Take(Decoder& decoder, T& value) { value = static_cast<T>(decoder.Fixed(sizeof(T))); }
};

template <>
struct Code<bool> {
  static void Put(std::string& out, bool value) { PutFixed(out, value ? 1 : 0, 1); }
  static void Take(Decoder& decoder, bool& value) {
    const uint8_t byte = decoder.U8();
    if (byte > 1) decoder.Fail();
    value = byte == 1;
  }
};

template <>
struct Code<double> {
  static void Put(std::string& out, double value) { PutU64(out, std::bit_cast<uint64_t>(value)); }
  static void Take(Decoder& decoder, double& value) { value = std::bit_cast<double>(decoder.U64()); }
};

// Enumerators count from 1. LastEnumerator(E), in E's namespace, returns the last one.
template <typename T>
requires std::is_enum_v<T>
struct Code<T> {
  static void Put(std::string& out, T value) { PutFixed(out, static_cast<uint64_t>(value), 1); }
  static void Take(Decoder& decoder, T& value) {
    const uint8_t byte = decoder.U8();
    if (byte < 1 || byte > static_cast<uint64_t>(LastEnumerator(T{}))) decoder.Fail();
    value = static_cast<T>(byte);
  }
};

template <>
struct Code<std::string> {
  static void Put(std::string& out, const std::string& value) { PutBytes(out, value); }
  static void Take(Decoder& decoder, std::string& value) { value = std::string(decoder.Bytes()); }
};

template <typename T>
struct Code<std::vector<T>> {
  static void Put(std::string& out, const std::vector<T>& value) {
    PutU64(out, value.size());
    for (const T& element : value) store::Put(out, element);
  }
  static void Take(Decoder& decoder, std::vector<T>& value) {
    value.clear();
    // The vector grows only while bytes are left, so that a wrong count cannot claim memory.
    for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) store::Take(decoder, value.emplace_back());
  }
};

template <typename K, typename V>
struct Code<std::map<K, V>> {
  static void Put(std::string& out, const std::map<K, V>& value) {
    PutU64(out, value.size());
    for (const auto& [key, element] : value) {
      store::Put(out, key);
      store::Put(out, element);
    }
  }
  static void Take(Decoder& decoder, std::map<K, V>& value) {
    value.clear();
    for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) {
      K key;
      store::Take(decoder, key);
      store::Take(decoder, value[std::move(key)]);
    }
  }
};

template <typename T>
struct Code<std::optional<T>> {
  static void Put(std::string& out, const std::optional<T>& value) {
    store::Put(out, value.has_value());
    if (value.has_value()) store::Put(out, *value);
  }
  static void Take(Decoder& decoder, std::optional<T>& value) {
    bool there = false;
    store::Take(decoder, there);
    value.reset();
    if (there) store::Take(decoder, value.emplace());
  }
};

template <typename... T>
struct Code<std::variant<T...>> {
  static void Put(std::string& out, const std::variant<T...>& value) {
    PutFixed(out, value.index(), 1);
    std::visit([&out](const auto& held) { store::Put(out, held); }, value);
  }
  static void Take(Decoder& decoder, std::variant<T...>& value) {
    const uint8_t index = decoder.U8();
    if (index >= sizeof...(T)) return decoder.Fail();
    TakeAt(decoder, value, index, std::index_sequence_for<T...>());
  }
  template <size_t... I>
  static void TakeAt(Decoder& decoder, std::variant<T...>& value, size_t index, std::index_sequence<I...>) {
    ((I == index ? store::Take(decoder, value.template emplace<I>()) : void()), ...);
  }
};

}  // namespace internal

template <typename T>
void Put(std::string& out, const T& value) {
  internal::Code<T>::Put(out, value);
}

template <typename T>
void Take(Decoder& decoder, T& value) {
  internal::Code<T>::Take(decoder, value);
}

}  // namespace precondor::store
