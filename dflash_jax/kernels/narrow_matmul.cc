// Products of a few rows with a weight matrix at the speed of memory, called by XLA on CPU.
//
//   y[M, N] = x[M, K] w[K, N],  float32 or bfloat16, sums in float32, rounded once to the type of x.
//
// Decoding reads every weight once a call and multiplies it with 1 to 16 rows, so memory sets the pace. Threads take
// pieces of columns. Within a piece, blocks of kDepth rows of w are streamed once, each as contiguous runs, against
// sums that stay in the L1 cache; a tile of at most kRows x 2 vectors of them is in registers at a time.
//
// Each sum runs over k = 0, 1, ..., K - 1 with one fused multiply-add a step, whatever M, the threads and the pieces
// are: the result of a row has the same bits alone and among others.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native.h"

namespace {

constexpr int kGroup = 2 * kLanes;  // columns of a tile
constexpr int kDepth = 8;           // rows of w in a block
constexpr int kPiece = 512;         // columns of a piece at most; a multiple of kGroup
constexpr int kStride = kPiece + kLanes;  // of the rows of sums: not all in the same sets of the L1 cache
constexpr int kMaxRows = 16;               // rows of x
// kGroup columns and two vectors: float32 in order, bfloat16 as its even and its odd columns, since they are apart by
// a shift and a mask.
inline void LoadPair(const float* from, Floats& first, Floats& second) {
  first = Load<Floats>(from);
  second = Load<Floats>(from + kLanes);
}
inline void LoadPair(const BF16* from, Floats& even, Floats& odd) {
  const Words words = Load<Words>(from);
  even = AsFloats(words << 16);
  odd = AsFloats(words & 0xffff0000u);
}
inline void StorePair(Floats first, Floats second, float* to) {
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + kLanes, &second, sizeof second);
}
inline void StorePair(Floats even, Floats odd, BF16* to) {
  const Words words = (Rounded(even) >> 16) | (Rounded(odd) & 0xffff0000u);
  std::memcpy(to, &words, sizeof words);
}

// Adds the product of R rows of x with `depth` > 0 rows of w, over `groups` groups of columns, to `sums`.
// x: [R, depth], rows ldx apart; w: [depth, ldw]; sums: rows kStride apart. `ahead`: from a weight to the one to be fetched meanwhile.
template <int R, typename T>
void Accumulate(const float* x, int64_t ldx, const T* w, int64_t ldw, int depth, int groups, int64_t ahead, float* sums) {
  for (int g = 0; g < groups; ++g, w += kGroup, sums += kGroup) {
    Floats a[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      a[r][0] = Load<Floats>(sums + r * kStride);
      a[r][1] = Load<Floats>(sums + r * kStride + kLanes);
    }
    const float* factor = x;
    const T* from = w;
    int left = depth;
    do {
      Floats first, second;
      LoadPair(from, first, second);
      // The same columns of the next block: the hardware alone does not follow so many streams.
      const char* next = reinterpret_cast<const char*>(from + ahead);
#pragma GCC unroll 4
      for (size_t line = 0; line < kGroup * sizeof(T); line += 64) __builtin_prefetch(next + line);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        a[r][0] += first * factor[r * ldx];
        a[r][1] += second * factor[r * ldx];
      }
      from += ldw;
      ++factor;
    } while (--left);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      std::memcpy(sums + r * kStride, &a[r][0], sizeof(Floats));
      std::memcpy(sums + r * kStride + kLanes, &a[r][1], sizeof(Floats));
    }
  }
}

template <typename T>
constexpr decltype(&Accumulate<1, T>) kByRows[] = {
    nullptr,          Accumulate<1, T>, Accumulate<2, T>, Accumulate<3, T>, Accumulate<4, T>,
    Accumulate<5, T>, Accumulate<6, T>, Accumulate<7, T>, Accumulate<8, T>,
};

// Rows of x are multiplied in as few passes as the registers allow, of sizes as equal as can be.
struct Passes {
  explicit Passes(int64_t m) : m(m), count((m + kRows - 1) / kRows) {}
  int64_t Begin(int64_t pass) const { return pass * m / count; }
  int64_t m, count;
};

// One product; x in float32.
template <typename T>
struct Product {
  const T* w;
  T* y;
  const float* x;
  int64_t m, k, n;

  // Columns [begin, end) of y, at most kPiece of them.
  void Piece(int64_t begin, int64_t end) const {
    alignas(64) float sums[kMaxRows * kStride];
    alignas(64) T edge[kDepth * kGroup] = {};  // the last columns, filled up to a group
    const int groups = (end - begin) / kGroup, rest = (end - begin) % kGroup;
    const int columns = (groups + (rest != 0)) * kGroup;
    for (int64_t r = 0; r < m; ++r) std::fill_n(sums + r * kStride, columns, 0.0f);
    const Passes passes(m);
    for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
      const int depth = std::min<int64_t>(kDepth, k - k0);
      const T* block = w + k0 * n + begin;
      if (rest) {
        for (int i = 0; i < depth; ++i) {
          std::memcpy(edge + i * kGroup, block + i * n + groups * kGroup, rest * sizeof(T));
        }
      }
      for (int64_t pass = 0; pass < passes.count; ++pass) {
        const int64_t from = passes.Begin(pass), rows = passes.Begin(pass + 1) - from;
        const float* factors = x + from * k + k0;
        // Fetching past the end of the weights is harmless, and no second pass needs to.
        kByRows<T>[rows](factors, k, block, n, depth, groups, pass ? 0 : kDepth * n, sums + from * kStride);
        if (rest) {
          kByRows<T>[rows](factors, k, edge, kGroup, depth, 1, 0, sums + from * kStride + groups * kGroup);
        }
      }
    }
    for (int64_t r = 0; r < m; ++r) {
      const float* row = sums + r * kStride;
      T* out = y + r * n + begin;
      for (int g = 0; g < groups; ++g, row += kGroup, out += kGroup) {
        StorePair(Load<Floats>(row), Load<Floats>(row + kLanes), out);
      }
      if (rest) {
        StorePair(Load<Floats>(row), Load<Floats>(row + kLanes), edge);
        std::memcpy(out, edge, rest * sizeof(T));
      }
    }
  }
};

template <typename T>
void Multiply(ffi::ThreadPool& pool, const Product<T>& product) {
  const int64_t groups = (product.n + kGroup - 1) / kGroup;
  const int64_t bytes = product.k * product.n * sizeof(T);
  const int64_t threads =
      std::max<int64_t>(1, std::min({pool.num_threads(), bytes / kThreadBytes, groups}));
  const int64_t most = std::min<int64_t>(groups, kPiece / kGroup);
  int64_t count = std::max(threads, (groups + most - 1) / most);
  count = (count + threads - 1) / threads * threads;
  count = std::min(count, groups);
  ShareOut(pool, threads, count, [product, groups, count](int64_t i) {
    const int64_t begin = i * groups / count * kGroup, end = (i + 1) * groups / count * kGroup;
    product.Piece(begin, std::min(end, product.n));
  });
}

const float* InFloat(const float* x, int64_t, std::vector<float>&) { return x; }
const float* InFloat(const BF16* x, int64_t size, std::vector<float>& to) {
  if (to.size() < static_cast<size_t>(size)) to.resize(size);
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i].bits) << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
  return to.data();
}

template <typename T, ffi::DataType kType>
ffi::Error Run(ffi::ThreadPool pool, ffi::BufferR2<kType> x, ffi::BufferR2<kType> w,
               ffi::Result<ffi::BufferR2<kType>> y) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = w.dimensions()[1];
  if (m < 1 || m > kMaxRows || w.dimensions()[0] != k || y->dimensions()[0] != m || y->dimensions()[1] != n) {
    return ffi::Error::InvalidArgument("narrow_matmul takes x [M, K] with 1 <= M <= 16, w [K, N] and y [M, N]");
  }
  thread_local std::vector<float> kept;  // a call has no time to allocate
  const float* factors = InFloat(reinterpret_cast<const T*>(x.untyped_data()), m * k, kept);
  const Product<T> product = {reinterpret_cast<const T*>(w.untyped_data()), reinterpret_cast<T*>(y->untyped_data()),
                              factors, m, k, n};
  Multiply(pool, product);
  return ffi::Error::Success();
}

}  // namespace

#define DFLASH_HANDLER(name, T, type)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (Run<T, type>),                  \
                                ffi::Ffi::Bind()                       \
                                    .Ctx<ffi::ThreadPool>()            \
                                    .Arg<ffi::BufferR2<type>>()        \
                                    .Arg<ffi::BufferR2<type>>()        \
                                    .Ret<ffi::BufferR2<type>>())

DFLASH_HANDLER(dflash_narrow_matmul_f32, float, ffi::F32);
DFLASH_HANDLER(dflash_narrow_matmul_bf16, BF16, ffi::BF16);
