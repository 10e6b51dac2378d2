# SPDX-License-Identifier: Apache-2.0
# Two helpers that every CMakeLists of the project uses, and the flags they apply.
#
#   precondor_library(name [UNITY] SRCS ... [DEPS ...] [PRIVATE_DEPS ...])
#     A static library precondor_<name>, alias precondor::<name>. The source root is its only include
#     directory. DEPS are part of its interface, PRIVATE_DEPS are not. Headers need no listing; a library
#     without SRCS is an INTERFACE library.
#     UNITY compiles five sources at a time as one, which reads the headers once: names at namespace scope, anonymous or not,
#     have to differ within five. Sources with options of their own (precondor_vectorize, called before) stay alone.
#     -DPRECONDOR_UNITY=OFF compiles each source alone.
#   precondor_vectorize(SOURCE ...)
#     Optimised builds compile these sources of the current folder at -O3: g++ 12 vectorises no loop of unknown length
#     at -O2. For sources whose loops over elements are on the hot path.
#   precondor_test(name [UNITY] SRCS ... DEPS ... LABELS ... [TIMEOUT s] [ARGS ...] [ENVIRONMENT ...] [OPTIMIZED] [THREADS])
#     A GoogleTest program, registered with CTest under its name and labels. Its own sources are compiled without
#     optimisation, to save time (docs/develop/adr/0020-a-build-that-fits.md); OPTIMIZED is for tests that compute much themselves.
#     THREADS marks a test in which threads of this project meet: ThreadSanitizer's preset runs these alone.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# Assertions stay on, debug information stays small.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")

find_program(PRECONDOR_CCACHE ccache)
if(PRECONDOR_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths within the tree do not count: every clone on a machine finds what another has compiled.
  # With the sloppiness that ccache asks for where headers are precompiled; no source here uses __TIME__ or __DATE__. What
  # CMake writes for them is new when it is compiled, and would not be kept: every clone would then compile anew.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_PCH_EXTSUM=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${PRECONDOR_CCACHE})
  foreach(language C CXX CUDA)
    set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
  endforeach()
endif()

# ld.lld, where it is installed: the tests are many programs, and it links faster than ld.bfd.
find_program(PRECONDOR_LLD ld.lld)
mark_as_advanced(PRECONDOR_LLD)
if(PRECONDOR_LLD)
  add_link_options(-fuse-ld=lld)
endif()

if(PRECONDOR_SANITIZE)  # -O1: about half the build time of -O2, at little cost to the instrumented run
  add_compile_options(-O1 -fsanitize=${PRECONDOR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${PRECONDOR_SANITIZE})
endif()

# What makes errors in memory harder to use (docs/operate/security.md): the optimised builds of libraries and programs, of which
# tests/lint/check_hardening.py reads what came out. _FORTIFY_SOURCE needs an optimiser and, for 3, sizes known at run time.
include(CheckCXXSourceCompiles)
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)
if(NOT PRECONDOR_SANITIZE)
  check_cxx_source_compiles("int main(int n, char**) { char a[8]; return __builtin_dynamic_object_size(a + n, 0) > 8; }"
                            PRECONDOR_HAS_DYNAMIC_OBJECT_SIZE)
  set(PRECONDOR_FORTIFY -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$<IF:$<BOOL:${PRECONDOR_HAS_DYNAMIC_OBJECT_SIZE}>,3,2>)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong>"
    "$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<CONFIG:RelWithDebInfo,Release,MinSizeRel>>:${PRECONDOR_FORTIFY}>")
  add_link_options(LINKER:-z,relro LINKER:-z,now)
endif()

# Warnings for our own code; generated code does not link it.
add_library(precondor_warnings INTERFACE)
target_compile_options(precondor_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wnon-virtual-dtor -Woverloaded-virtual>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wthread-safety>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${PRECONDOR_WERROR}>>:-Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${PRECONDOR_WERROR}>>:-Werror=all-warnings>)

option(PRECONDOR_UNITY "Compile five sources at a time where a target says UNITY" ON)

# In place of CMake's own unity build, whose files hold absolute paths: ccache would find nothing of another clone's.
function(precondor_unity_sources target out)
  if(NOT PRECONDOR_UNITY)
    set(${out} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  set(groups)
  set(together)
  foreach(source ${ARGN})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    if(options)
      list(APPEND groups ${source})
    else()
      list(APPEND together ${source})
    endif()
  endforeach()
  list(LENGTH together count)
  math(EXPR last "${count} - 1")
  foreach(begin RANGE 0 ${last} 5)
    list(SUBLIST together ${begin} 5 group)
    list(TRANSFORM group REPLACE "(.+)" "#include \"${folder}/\\1\"\n")
    list(JOIN group "" text)
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_unity_${begin}.cc)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    list(APPEND groups ${file})
  endforeach()
  set(${out} ${groups} PARENT_SCOPE)
endfunction()

function(precondor_library name)
  cmake_parse_arguments(ARG "UNITY" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  set(target precondor_${name})
  if(ARG_UNITY)
    precondor_unity_sources(${target} ARG_SRCS ${ARG_SRCS})
  endif()
  if(ARG_SRCS)
    add_library(${target} STATIC ${ARG_SRCS})
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
    target_link_libraries(${target} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS} $<BUILD_INTERFACE:precondor_warnings>)
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
    target_link_libraries(${target} INTERFACE ${ARG_DEPS})
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  add_library(precondor::${name} ALIAS ${target})
  if(ARG_SRCS AND TARGET precondor_library_pch)
    target_precompile_headers(${target} REUSE_FROM precondor_library_pch)
  endif()
endfunction()

function(precondor_vectorize)
  if(NOT PRECONDOR_SANITIZE)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:RelWithDebInfo,Release>:-O3>"
      SKIP_PRECOMPILE_HEADERS ON)  # which are compiled at -O2
  endif()
endfunction()

# How a target of tests is compiled.
function(precondor_test_options target optimized)
  target_link_libraries(${target} PRIVATE GTest::gmock GTest::gtest precondor_warnings)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  if(NOT optimized)
    target_compile_options(${target} PRIVATE -O0)
    if(TARGET precondor_test_pch)
      target_precompile_headers(${target} REUSE_FROM precondor_test_pch)
    endif()
  endif()
endfunction()

# The environment of tests that run the host's CUDA, in place of the preset's: to find uses after return,
# AddressSanitizer maps a second stack for each of its many fibers.
set(PRECONDOR_ASAN_OF_FIBERS "")
if(PRECONDOR_SANITIZE MATCHES address)
  set(PRECONDOR_ASAN_OF_FIBERS ASAN_OPTIONS=strict_string_checks=1)
endif()

function(precondor_test name)
  cmake_parse_arguments(ARG "OPTIMIZED;THREADS;UNITY" "TIMEOUT" "SRCS;DEPS;LABELS;ARGS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  if(PRECONDOR_SANITIZE)  # limits are for what hangs; machines differ by more than a factor of two
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  if("precondor::cuda_on_host" IN_LIST ARG_DEPS)
    list(APPEND ARG_ENVIRONMENT ${PRECONDOR_ASAN_OF_FIBERS})
  endif()
  if(ARG_UNITY)
    precondor_unity_sources(${name} ARG_SRCS ${ARG_SRCS})
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} precondor::test_main)
  precondor_test_options(${name} "${ARG_OPTIMIZED}")
  if(ARG_THREADS)
    list(APPEND ARG_LABELS threads)
    set_property(GLOBAL APPEND PROPERTY PRECONDOR_THREADS_TESTS ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()
