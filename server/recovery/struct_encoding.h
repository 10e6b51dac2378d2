// SPDX-License-Identifier: Apache-2.0
// Encodes values as bytes and decodes them, for the records of shards and coordinators. A struct goes by its
// PRECONDOR_FIELDS, in order: a change of them, or of their types, is another format.
//
// Format, little-endian: bool and enumerations take 1 byte, integers their size, double its 8 IEEE bytes. string and
// vector are an 8-byte count and the elements. optional is a bool and the value. A struct is its fields.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/base/byte_codec.h"
#include "kernels/base/fields.h"
#include "kernels/base/session_spec.h"

namespace precondor {
// For enumerations that several records have.
constexpr Mode LastEnumerator(Mode) { return Mode::kFirstOrder; }
}  // namespace precondor

namespace precondor::recovery {

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
    std::apply([&out](const auto&... fields) { (recovery::Put(out, fields), ...); }, Fields(value));
  }
  static void Take(Decoder& decoder, T& value) {
    std::apply([&decoder](auto&&... fields) { (recovery::Take(decoder, fields), ...); }, Fields(value));
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
    for (const T& element : value) recovery::Put(out, element);
  }
  static void Take(Decoder& decoder, std::vector<T>& value) {
    value.clear();
    // The vector grows only while bytes are left, so that a wrong count cannot claim memory.
    for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) recovery::Take(decoder, value.emplace_back());
  }
};

template <typename T>
struct Code<std::optional<T>> {
  static void Put(std::string& out, const std::optional<T>& value) {
    recovery::Put(out, value.has_value());
    if (value.has_value()) recovery::Put(out, *value);
  }
  static void Take(Decoder& decoder, std::optional<T>& value) {
    bool there = false;
    recovery::Take(decoder, there);
    value.reset();
    if (there) recovery::Take(decoder, value.emplace());
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

}  // namespace precondor::recovery
