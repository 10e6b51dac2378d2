// SPDX-License-Identifier: Apache-2.0
// operator new and delete of a program of one thread that copies small values all the time: blocks of equal size come
// from one list, without glibc's search and merging, which took half of an exploration's time. Nothing goes back to the
// system.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <utility>

namespace {

constexpr size_t kStep = 16;                    // between the sizes of blocks
constexpr size_t kLargest = 512;                // glibc has what is larger
constexpr size_t kPage = size_t{64} << 10;      // of blocks of one size
constexpr size_t kReserved = size_t{64} << 30;  // of addresses, not of memory

struct Block {
  Block* next;
};

class Pool {
 public:
  void* Allocate(size_t size) {
    const size_t of = size == 0 ? 1 : (size + kStep - 1) / kStep;
    if (free_[of] == nullptr) AddPage(of);
    return std::exchange(free_[of], free_[of]->next);
  }
  bool Has(const void* block) const {
    return reinterpret_cast<uintptr_t>(block) - reinterpret_cast<uintptr_t>(begin_) < used_ * kPage;
  }
  void Free(void* block) {
    Block*& first = free_[size_of_page_[static_cast<size_t>(static_cast<char*>(block) - begin_) / kPage]];
    first = new (block) Block{first};
  }

 private:
  void AddPage(size_t of) {
    if (begin_ == nullptr) {
      void* const reserved =
          mmap(nullptr, kReserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (reserved == MAP_FAILED) throw std::bad_alloc();
      begin_ = static_cast<char*>(reserved);
    }
    if (used_ == size_of_page_.size()) throw std::bad_alloc();
    char* const page = begin_ + used_ * kPage;
    size_of_page_[used_++] = static_cast<uint8_t>(of);
    const size_t size = of * kStep;
    for (size_t end = kPage / size * size; end > 0; end -= size) free_[of] = new (page + end - size) Block{free_[of]};
  }

  std::array<Block*, kLargest / kStep + 1> free_ = {};
  std::array<uint8_t, kReserved / kPage> size_of_page_ = {};  // in kStep
  char* begin_ = nullptr;
  size_t used_ = 0;  // pages
};

constinit Pool pool;

}  // namespace

void* operator new(size_t size) {
  if (size <= kLargest) return pool.Allocate(size);
  void* const block = std::malloc(size);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void operator delete(void* block) noexcept {
  if (block == nullptr) return;
  if (pool.Has(block)) {
    pool.Free(block);
  } else {
    std::free(block);
  }
}

void operator delete(void* block, size_t) noexcept { operator delete(block); }
