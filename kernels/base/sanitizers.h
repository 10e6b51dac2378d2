// SPDX-License-Identifier: Apache-2.0
// Macros, 0 or 1, that say with which sanitizers g++ or clang compiles the code.
#pragma once

#if defined(__has_feature)
#define PRECONDOR_HAS_FEATURE(feature) __has_feature(feature)
#else
#define PRECONDOR_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || PRECONDOR_HAS_FEATURE(address_sanitizer)
#define PRECONDOR_HAS_ASAN 1
#else
#define PRECONDOR_HAS_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || PRECONDOR_HAS_FEATURE(thread_sanitizer)
#define PRECONDOR_HAS_TSAN 1
#else
#define PRECONDOR_HAS_TSAN 0
#endif
