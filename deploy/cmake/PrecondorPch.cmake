# SPDX-License-Identifier: Apache-2.0
# Precompiled headers, one for libraries and one for tests, which precondor_library and precondor_test use.
#
# They hold headers of the system alone, by <name>: with a path of the tree in them a clone could not use what ccache
# has kept of another clone. Sources still include everything that they use: PRECONDOR_PCH=OFF builds without them.
option(PRECONDOR_PCH "Precompile the headers of the standard library, Abseil and GoogleTest" ON)
if(NOT PRECONDOR_PCH)
  return()
endif()

set(headers
  <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <deque> <fstream> <functional> <iostream> <limits>
  <map> <memory> <mutex> <numeric> <optional> <set> <sstream> <string> <thread> <tuple> <utility> <variant> <vector>
  <absl/container/flat_hash_map.h> <absl/functional/function_ref.h> <absl/status/status.h> <absl/status/statusor.h>
  <absl/strings/match.h> <absl/strings/numbers.h> <absl/strings/str_cat.h> <absl/strings/str_format.h>
  <absl/strings/str_join.h> <absl/strings/str_split.h> <absl/strings/string_view.h> <absl/time/clock.h>
  <absl/time/time.h> <absl/types/span.h>)

# One answer for all targets, since a precompiled header holds for one.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-pthread>)
# g++ 12 takes functions of std::string for ours when they come from a precompiled header, and warns of what they do.
add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>")
# What ccache needs to know objects by the content of the precompiled header.
add_compile_options(
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>
  "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # In place of CMake's own form, which also includes the header's text by a path that ccache does not make relative.
  set(CMAKE_CXX_COMPILE_OPTIONS_USE_PCH -include-pch <PCH_FILE>)
endif()

# The targets that own them. A library is compiled as PIC and a program as PIE, so each needs a target of its kind.
function(precondor_pch_checksum target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/deploy/cmake/compile_pch.sh)
  endif()
endfunction()
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/pch/main.cc CONTENT "int main() { return 0; }\n")
add_library(precondor_library_pch STATIC EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/pch/main.cc)
target_precompile_headers(precondor_library_pch PRIVATE ${headers})
precondor_pch_checksum(precondor_library_pch)

if(PRECONDOR_TESTS)
  add_executable(precondor_test_pch EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/pch/main.cc)
  target_precompile_headers(precondor_test_pch PRIVATE ${headers} <gmock/gmock.h> <gtest/gtest.h>)
  target_compile_options(precondor_test_pch PRIVATE -O0)
  target_link_libraries(precondor_test_pch PRIVATE GTest::gmock GTest::gtest)
  precondor_pch_checksum(precondor_test_pch)
endif()
