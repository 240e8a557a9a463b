// Attention of a few tokens a row over cached keys and values and over themselves, called by XLA on CPU: what
// block_attention.py says, in float32.
//
// Memory sets the pace: the keys and values of a row's length are read once, where they lie in the cache, a tile of
// kTile at a time, with a running maximum and sum (online softmax). XLA's products read the whole capacity, and turn
// a copy of all keys around first.
//
// The query rows that share a KV head are the lanes of registers while scores are made (a key's channels are
// multiplied with all of them), and values are mixed with channels as lanes, so nothing is summed across a register.
// A row's result depends on its own inputs alone: not on other rows of the batch, nor on threads. A long block, a chunk
// of a prompt, is cut into kSlots tokens at a time, and tiles that none of them sees are left out.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native.h"

namespace {

constexpr int kTile = 32;           // keys of a tile; a multiple of kKeys
constexpr int64_t kSlots = 16;      // tokens of a row that are taken together; a longer block is cut
constexpr int kKeys = 8;            // keys whose scores are in registers at a time
constexpr float kMasked = -1e30f;   // as MASKED and PEAK_FLOOR in block_attention.py: with nothing visible all weights
constexpr float kPeakFloor = -1e29f;  // are exp(kMasked - kPeakFloor) = 0

inline Floats Splat(float x) { return Floats{} + x; }
inline Floats Select(Words mask, Floats a, Floats b) { return AsFloats((AsWords(a) & mask) | (AsWords(b) & ~mask)); }
inline Floats Max(Floats a, Floats b) { return Select(reinterpret_cast<Words>(a > b), a, b); }
inline void Store(Floats v, float* to) { std::memcpy(to, &v, sizeof v); }

// exp(x) for x <= 0, to two units in the last place; 0 below -87, where the smallest normal numbers begin. The range is
// cut with ln 2 in two parts, the polynomial is that of Cephes' expf.
inline Floats Exp(Floats x) {
  const Words tiny = reinterpret_cast<Words>(x < -87.0f);
  x = Max(x, Splat(-87.0f));
  const Floats magic = Splat(12582912.0f);  // 1.5 * 2^23: the sum holds a whole number in its low bits
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Words power = (AsWords(shifted) - 0x4b400000u + 127u) << 23;
  return AsFloats(AsWords(p * AsFloats(power)) & ~tiny);
}

// One call. Sizes as in block_attention.py: B rows of M tokens, N query and G KV heads, channels H of keys and V of
// values, P pages of S slots, T of them a row; masks of E = 1 or B rows.
struct Attention {
  const float *q, *k, *v;  // [B, M, N, H], [P, G, S, H], [P, G, S, V]
  const int32_t* table;    // [B, T]
  const float *k_block, *v_block;  // [B, G, M, H], [B, G, M, V]
  const int32_t *length, *first;   // [B]; [B, M]: the first context slot that a token sees
  const bool* mask;                // [E, M, M]
  const float* sinks;              // [N], or null
  float* out;                      // [B, M, N, V]
  int64_t M, N, G, H, V, P, S, T, E;
  float scale, softcap;  // 0: no cap

  void Unit(int64_t b, int64_t g, int64_t begin) const;
};

// What one row and KV head has at hand; kept by its thread, since a call has no time to allocate.
struct Scratch {
  std::vector<float> memory;
  float *q, *scores, *peak, *sum, *shrink, *mixed, *values;

  void Lay(int64_t lanes, int64_t rows, int64_t h, int64_t width) {
    const int64_t sizes[] = {h * lanes, kTile * lanes, lanes, lanes, lanes, rows * width, kTile * width};
    float** const parts[] = {&q, &scores, &peak, &sum, &shrink, &mixed, &values};
    int64_t total = 64 / sizeof(float);
    for (int64_t size : sizes) total += size;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    float* at = memory.data();
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);  // vectors do not straddle cache lines
    for (int i = 0; i < 7; ++i) {
      *parts[i] = at;
      at += sizes[i];
    }
  }
};

// mixed[r] = mixed[r] * shrink[r] + sum over t of scores[t][r] * values[t], for R rows and a vector of channels.
template <int R>
void Mix(int64_t lanes, int64_t width, const float* scores, const float* shrink, const float* const* values, int count,
         float* mixed) {
  for (int64_t c = 0; c < width; c += kLanes) {
    Floats sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = Load<Floats>(mixed + r * width + c) * shrink[r];
    for (int t = 0; t < count; ++t) {
      const Floats value = Load<Floats>(values[t] + c);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r] += value * scores[t * lanes + r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) Store(sums[r], mixed + r * width + c);
  }
}

constexpr decltype(&Mix<1>) kMix[] = {nullptr, Mix<1>, Mix<2>, Mix<3>, Mix<4>, Mix<5>, Mix<6>, Mix<7>, Mix<8>};

// Tokens begin to begin + kSlots of row b, and the query heads of KV head g.
void Attention::Unit(int64_t b, int64_t g, int64_t begin) const {
  const int64_t R = N / G, tokens = std::min(kSlots, M - begin), rows = R * tokens;  // row r * tokens + m
  const int64_t lanes = (rows + kLanes - 1) / kLanes * kLanes, width = (V + kLanes - 1) / kLanes * kLanes;
  thread_local Scratch at;
  at.Lay(lanes, rows, H, width);

  std::fill_n(at.q, H * lanes, 0.0f);
  std::fill_n(at.mixed, rows * width, 0.0f);
  std::fill_n(at.peak, lanes, kPeakFloor);
  std::fill_n(at.sum, lanes, 0.0f);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t m = 0; m < tokens; ++m) {
      const int64_t row = r * tokens + m, head = g * R + r;
      const float* from = q + ((b * M + begin + m) * N + head) * H;
      for (int64_t h = 0; h < H; ++h) at.q[h * lanes + row] = from[h];
      if (sinks != nullptr) {  // a key of its own, without a value
        at.peak[row] = std::max(kPeakFloor, sinks[head]);
        at.sum[row] = std::exp(sinks[head] - at.peak[row]);
      }
    }
  }

  const float *keys[kTile], *values[kTile];
  // Takes `count` keys in. `visible(t, m)`: whether token m sees key t; asked only if `masked`.
  const auto tile = [&](int count, bool masked, const auto& visible) {
    for (int t = count; t % kKeys; ++t) keys[t] = keys[count - 1];  // scores that nobody reads
    if (width != V) {
      for (int t = 0; t < count; ++t) {
        float* copy = at.values + t * width;
        std::fill(std::copy_n(values[t], V, copy), copy + width, 0.0f);
        values[t] = copy;
      }
    }
    for (int64_t l = 0; l < lanes; l += kLanes) {
      for (int t = 0; t < count; t += kKeys) {
        Floats dots[kKeys] = {};
        for (int64_t h = 0; h < H; ++h) {
          const Floats queries = Load<Floats>(at.q + h * lanes + l);
#pragma GCC unroll 8
          for (int i = 0; i < kKeys; ++i) dots[i] += queries * keys[t + i][h];
        }
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) Store(dots[i] * scale, at.scores + (t + i) * lanes + l);
      }
    }
    if (softcap != 0.0f) {
      for (int64_t i = 0; i < count * lanes; ++i) at.scores[i] = softcap * std::tanh(at.scores[i] / softcap);
    }
    if (masked) {
      for (int t = 0; t < count; ++t) {
        for (int64_t m = 0; m < tokens; ++m) {
          if (visible(t, m)) continue;
          for (int64_t r = 0; r < R; ++r) at.scores[t * lanes + r * tokens + m] = kMasked;
        }
      }
    }
    for (int64_t l = 0; l < lanes; l += kLanes) {
      const Floats before = Load<Floats>(at.peak + l);
      Floats peak = before;
      for (int t = 0; t < count; ++t) peak = Max(peak, Load<Floats>(at.scores + t * lanes + l));
      const Floats shrink = Exp(before - peak);
      Floats sum = Load<Floats>(at.sum + l) * shrink;
      for (int t = 0; t < count; ++t) {
        float* score = at.scores + t * lanes + l;
        const Floats weight = Exp(Load<Floats>(score) - peak);
        sum += weight;
        Store(weight, score);
      }
      Store(peak, at.peak + l);
      Store(sum, at.sum + l);
      Store(shrink, at.shrink + l);
    }
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t some = std::min<int64_t>(kRows, rows - row);
      kMix[some](lanes, width, at.scores + row, at.shrink + row, values, count, at.mixed + row * width);
    }
  };

  // Keys in the order of their positions, the context's and then the block's, in tiles that begin at multiples of kTile
  // whatever the tokens see: a token gets the sums that it gets alone, and those that it gets when the tokens before it
  // have moved from the block into the cache. So verifying a chain gives the bits of plain decoding.
  const int32_t *firsts = first + b * M + begin, *pages = table + b * T;
  const int64_t context = std::min<int64_t>(length[b], T * S), latest = *std::max_element(firsts, firsts + tokens);
  const bool* sees = mask + ((E == 1 ? 0 : b) * M + begin) * M;
  const int64_t earliest = std::min<int64_t>(*std::min_element(firsts, firsts + tokens), context);
  for (int64_t c = earliest / kTile * kTile; c < context + M; c += kTile) {
    const int count = std::min<int64_t>(kTile, context + M - c);
    if (c >= context) {
      const auto seen = [&](int64_t m) { return std::memchr(sees + m * M + c - context, 1, count) != nullptr; };
      int64_t m = 0;
      while (m < tokens && !seen(m)) ++m;
      if (m == tokens) continue;  // would change nothing: half of the tiles of a prompt's chunk
    }
    int64_t page = c / S, inside = c % S;
    for (int t = 0; t < count; ++t, ++inside) {
      if (c + t >= context) {
        const int64_t slot = (b * G + g) * M + c + t - context;
        keys[t] = k_block + slot * H;
        values[t] = v_block + slot * V;
        continue;
      }
      if (inside == S) ++page, inside = 0;
      const int64_t slot = (std::clamp<int64_t>(pages[page], 0, P - 1) * G + g) * S + inside;
      keys[t] = k + slot * H;
      values[t] = v + slot * V;
    }
    tile(count, latest > c || c + count > context, [&](int t, int64_t m) {
      return c + t < context ? firsts[m] <= c + t : sees[m * M + c + t - context];
    });
  }

  for (int64_t r = 0; r < R; ++r) {
    for (int64_t m = 0; m < tokens; ++m) {
      const int64_t row = r * tokens + m;
      const float total = std::max(at.sum[row], 1e-30f), *from = at.mixed + row * width;
      float* to = out + ((b * M + begin + m) * N + g * R + r) * V;
      for (int64_t c = 0; c < V; ++c) to[c] = from[c] / total;
    }
  }
}

using Tensor4 = ffi::BufferR4<ffi::F32>;

ffi::Error Run(ffi::ThreadPool pool, Tensor4 q, Tensor4 k, Tensor4 v, ffi::BufferR2<ffi::S32> table, Tensor4 k_block,
               Tensor4 v_block, ffi::BufferR1<ffi::S32> length, ffi::BufferR2<ffi::S32> first,
               ffi::BufferR3<ffi::PRED> mask, ffi::BufferR1<ffi::F32> sinks, float scale, float softcap,
               ffi::Result<Tensor4> out) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  const int64_t B = q_dims[0], M = q_dims[1], N = q_dims[2], H = q_dims[3];
  const int64_t P = k_dims[0], G = k_dims[1], S = k_dims[2], V = v.dimensions()[3];
  const int64_t T = table.dimensions()[1], E = mask.dimensions()[0], num_sinks = sinks.dimensions()[0];
  if (G < 1 || N % G || k_dims[3] != H || table.dimensions()[0] != B || (E != 1 && E != B) ||
      (num_sinks != 0 && num_sinks != N)) {
    return ffi::Error::InvalidArgument("the arrays of block_attention do not fit to each other");
  }
  const Attention call = {q.typed_data(), k.typed_data(), v.typed_data(), table.typed_data(), k_block.typed_data(),
                          v_block.typed_data(), length.typed_data(), first.typed_data(), mask.typed_data(),
                          num_sinks ? sinks.typed_data() : nullptr, out->typed_data(),
                          M, N, G, H, V, P, S, T, E, scale, softcap};
  const int64_t cuts = (M + kSlots - 1) / kSlots, units = B * G * cuts;
  int64_t bytes = 0;
  for (int64_t b = 0; b < B; ++b) bytes += (call.length[b] + M) * G * (H + V) * sizeof(float);
  const int64_t threads = std::max<int64_t>(1, std::min({pool.num_threads(), bytes * cuts / kThreadBytes, units}));
  ShareOut(pool, threads, units, [call, B, G, cuts](int64_t i) {
    const int64_t row_and_head = i % (B * G), cut = cuts - 1 - i / (B * G);  // the last first: they see the most
    call.Unit(row_and_head / G, row_and_head % G, cut * kSlots);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_block_attention, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Tensor4>()
                                  .Arg<Tensor4>()
                                  .Arg<Tensor4>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<Tensor4>()
                                  .Arg<Tensor4>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR3<ffi::PRED>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Ret<Tensor4>());
