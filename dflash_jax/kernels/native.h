// What the kernels in C++ share: registers of floats, bfloat16, and pieces of work for XLA's threads.

#ifndef DFLASH_JAX_KERNELS_NATIVE_H_
#define DFLASH_JAX_KERNELS_NATIVE_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Lanes of a register, and how many rows of sums the registers hold beside what is multiplied (two vectors a row).
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 8;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 8;
#endif
constexpr int64_t kThreadBytes = 1 << 16;  // read memory below which another thread costs more than it brings

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct BF16 {
  uint16_t bits;
};

template <typename V>
inline V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats AsFloats(Words v) {
  Floats f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}

inline Words AsWords(Floats f) {
  Words v;
  std::memcpy(&v, &f, sizeof v);
  return v;
}

// The upper halves are the bfloat16 nearest to `f`, ties to even; a NaN stays one.
inline Words Rounded(Floats f) {
  const Words bits = AsWords(f), is_nan = reinterpret_cast<Words>(f != f);
  return ((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~is_nan) | ((bits | 0x400000u) & is_nan);
}

// Pieces of a call, taken by whoever is free. Helpers that start late find nothing left and touch nothing but
// this, which they own too; the caller waits only for pieces that somebody has begun. So no pool can deadlock.
struct Pieces {
  std::atomic<int64_t> next{0}, done{0};
};

// Calls take(i) once for each i in [0, count), on up to `threads` threads of the pool and the caller's own; returns when
// all have returned. `take` is copied into each of them.
template <typename F>
void ShareOut(ffi::ThreadPool& pool, int64_t threads, int64_t count, const F& take) {
  const auto pieces = std::make_shared<Pieces>();
  const auto work = [take, count, pieces] {
    for (int64_t i; (i = pieces->next.fetch_add(1)) < count;) {
      take(i);
      pieces->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; pieces->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 4096) std::this_thread::yield();
  }
}

}  // namespace

#endif  // DFLASH_JAX_KERNELS_NATIVE_H_
