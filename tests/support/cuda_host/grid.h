// SPDX-License-Identifier: Apache-2.0
// A grid of blocks on one CPU thread: each thread of a block is a fiber that runs until its next barrier. One grid of a
// process runs at a time, so that what a kernel reads most is no thread's own: that costs half of its time in a library
// that is loaded late, and more under AddressSanitizer.
#pragma once

#include <cstring>
#include <cuda_runtime.h>
#include <functional>

// The indexes of the fiber that runs, by the language's names: NOLINTBEGIN(readability-identifier-naming)
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
// NOLINTEND(readability-identifier-naming)

namespace precondor::cuda_host {

// Runs body once for every thread of the grid, with so many bytes of shared memory for DynamicShared(); aborts the
// process, with the place, when a barrier is not reached by all threads of its block or warp.
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

void WaitForBlock(const char* file, int line);
void WaitForWarp(const char* file, int line);
// 8 bytes for each lane of the caller's warp, which all of them see. Two sets take turns, so that a lane that is one
// shuffle ahead of another writes beside what that one has yet to read.
unsigned NextShuffle();
unsigned char* LaneSlot(unsigned shuffle, unsigned lane);
unsigned CurrentLane();

// The value of `lane`, which must be one of the warp's; all lanes take part.
template <typename T>
T Shuffle(unsigned mask, T value, unsigned lane, const char* file, int line) {
  static_assert(sizeof(T) <= 8);
  if (mask != 0xffffffffu) __builtin_trap();  // not needed so far
  const unsigned shuffle = NextShuffle();
  std::memcpy(LaneSlot(shuffle, CurrentLane()), &value, sizeof(T));
  WaitForWarp(file, line);
  T result;
  std::memcpy(&result, LaneSlot(shuffle, lane), sizeof(T));
  return result;
}
template <typename T>
T ShuffleDown(unsigned mask, T value, unsigned offset, const char* file, int line) {
  const unsigned lane = CurrentLane(), from = lane + offset;
  return Shuffle(mask, value, from < 32 ? from : lane, file, line);
}
// A bit for each lane of the warp whose `here` is true.
inline unsigned Ballot(unsigned mask, bool here, const char* file, int line) {
  if (mask != 0xffffffffu) __builtin_trap();  // not needed so far
  const unsigned shuffle = NextShuffle();
  std::memcpy(LaneSlot(shuffle, CurrentLane()), &here, sizeof(here));
  WaitForWarp(file, line);
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) lanes |= unsigned{*LaneSlot(shuffle, lane)} << lane;
  return lanes;
}
template <typename T>
T ShuffleXor(unsigned mask, T value, unsigned offset, const char* file, int line) {
  return Shuffle(mask, value, CurrentLane() ^ offset, file, line);
}

}  // namespace precondor::cuda_host
