// The parts of a decode step that a CPU spends on starting work rather than on doing it, each as one loop over memory.
//
// Built by compiled.py where a C++ compiler is, and never required: every function has a twin on torch that says what it
// computes. Everything is float32 and contiguous, or all bfloat16: float32 numbers whose lower half is zero. Those are
// computed in float32 and rounded once. A row's numbers come from the same operations in the same order whatever rows
// stand beside it.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "adapters.h"
#include "tiles.h"
#include "vectors.h"

namespace {

template <int kRows>
void thin_rows(const float* x, const uint16_t* weight, const float* bias, const float* add, float* y, int64_t in,
               int64_t out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t o = 0; o < out; ++o) {
    const uint16_t* row = weight + o * in;
    Floats first[kRows] = {}, second[kRows] = {};
    int64_t i = 0;
    for (; i + 2 * kWide <= in; i += 2 * kWide) {
      Floats low = load(row + i), high = load(row + i + kWide);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        first[r] = fused(low, load(x + r * in + i), first[r]);
        second[r] = fused(high, load(x + r * in + i + kWide), second[r]);
      }
    }
    for (; i + kWide <= in; i += kWide) {
      Floats low = load(row + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) first[r] = fused(low, load(x + r * in + i), first[r]);
    }
    if (i < in) {
      Floats low = load_part(row + i, in - i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) second[r] = fused(low, load_part(x + r * in + i, in - i), second[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float value = total(first[r] + second[r]);
      if (bias) value += bias[o];
      if (add) value += add[r * out + o];
      y[r * out + o] = value;
    }
  }
}

template <typename T>
void norm(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * size;
    T* to = y + r * size;
    Floats squares = {};
    int64_t i = 0;
    for (; i + kWide <= size; i += kWide) {
      const Floats some = load(from + i);
      squares = fused(some, some, squares);
    }
    const Floats last = load_part(from + i, size - i);
    const float by = 1.0f / __builtin_sqrtf(total(fused(last, last, squares)) / size + eps);
    for (i = 0; i + kWide <= size; i += kWide) store(to + i, load(from + i) * load(weight + i) * by);
    store_part(to + i, last * load_part(weight + i, size - i) * by, size - i);
  }
}

template <typename T>
void rotate(const T* x, const T* cosine, const T* sine, T* out, int64_t rows, int64_t heads, int64_t size, int64_t stride,
            int threads) {
  const int64_t half = size / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const T *c = cosine + r * half, *s = sine + r * half;
    for (int64_t h = 0; h < heads; ++h) {
      const T* from = x + r * stride + h * size;
      T* to = out + (r * heads + h) * size;
      for (int64_t i = 0; i < half; i += kWide) {
        const int64_t left = half - i;
        const auto turn = [&](auto get, auto set) {
          const Floats a = get(from + i), b = get(from + i + half), cos = get(c + i), sin = get(s + i);
          set(to + i, a * cos - b * sin);
          set(to + i + half, b * cos + a * sin);
        };
        if (left >= kWide) {
          turn([](const T* at) { return load(at); }, [](T* at, Floats value) { store(at, value); });
        } else {
          turn([&](const T* at) { return load_part(at, left); }, [&](T* at, Floats value) { store_part(at, value, left); });
        }
      }
    }
  }
}

template <typename T>
void gated(const T* x, T* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const T *gate = x + 2 * r * size, *up = gate + size;
    T* to = out + r * size;
    const auto product = [](Floats g, Floats u) { return g / (exponential(Floats{} - g) + 1.0f) * u; };
    int64_t i = 0;
    for (; i + kWide <= size; i += kWide) store(to + i, product(load(gate + i), load(up + i)));
    store_part(to + i, product(load_part(gate + i, size - i), load_part(up + i, size - i)), size - i);
  }
}

constexpr int kAside = kWide == 16 ? 4 : 2;  // vectors of a value row that are summed at once: with kBlock heads they fill the registers
constexpr int kAhead = 8;           // positions that keys and values are asked for before they are needed

template <typename T>
inline void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Calls f with a number from 1 to kBlock that is known when it is compiled.
template <typename F>
void counted(int64_t count, const F& f) {
  switch (count) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, kBlock>{});
  }
}

// to[h * apart] = scale * query[h] . key for kHeads heads that share a key head.
template <int kHeads, typename T>
void score(const float* query, const T* key, float* to, int64_t apart, int64_t size, float scale) {
  Floats sums[kHeads] = {};
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) {
    const Floats some = load(key + i);
    for (int h = 0; h < kHeads; ++h) sums[h] = fused(load(query + h * size + i), some, sums[h]);
  }
  if (i < size) {
    const Floats some = load_part(key + i, size - i);
    for (int h = 0; h < kHeads; ++h) sums[h] = fused(load_part(query + h * size + i, size - i), some, sums[h]);
  }
  for (int h = 0; h < kHeads; ++h) to[h * apart] = total(sums[h]) * scale;
}

// Columns [at, at + kVectors * kWide) of to[h] = weights[h * apart] * values[places[0]] + weights[h * apart + 1] *
// values[places[1]] + ..., in this order. With `part` numbers only, where that is not 0. `ahead` numbers behind a place are
// asked for early.
template <int kHeads, int kVectors, typename T>
void weigh(const float* weights, int64_t apart, const T* values, const std::vector<int64_t>& places, T* to, int64_t size,
           int64_t at, int64_t part, int64_t ahead) {
  Floats sums[kHeads][kVectors] = {};
  for (size_t p = 0; p < places.size(); ++p) {
    if (p + kAhead < places.size()) prefetch(values + places[p + kAhead], ahead);
    const T* const from = values + places[p] + at;
    Floats some[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) some[v] = part ? load_part(from, part) : load(from + v * kWide);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Floats by = all(weights[h * apart + p]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[h][v] = fused(some[v], by, sums[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      if (part) {
        store_part(to + h * size + at, sums[h][v], part);
      } else {
        store(to + h * size + at + v * kWide, sums[h][v]);
      }
    }
  }
}

template <int kHeads, typename T>
void weigh_all(const float* weights, int64_t apart, const T* values, const std::vector<int64_t>& places, T* to,
               int64_t size, int64_t ahead) {
  int64_t at = 0;
  for (; at + kAside * kWide <= size; at += kAside * kWide, ahead = 0) {
    weigh<kHeads, kAside>(weights, apart, values, places, to, size, at, 0, ahead);
  }
  for (; at + kWide <= size; at += kWide, ahead = 0) weigh<kHeads, 1>(weights, apart, values, places, to, size, at, 0, ahead);
  if (at < size) weigh<kHeads, 1>(weights, apart, values, places, to, size, at, size - at, ahead);
}

// Scores become weights, in place: `count` of them, and room up to the end of a vector.
void weights_of(float* scores, int64_t count, int64_t padded, float cap) {
  for (int64_t p = 0; cap != 0.0f && p < padded; p += kWide) {
    store(scores + p, cap - 2.0f * cap / (exponential(load(scores + p) * (2.0f / cap)) + 1.0f));
  }
  std::fill(scores + count, scores + padded, -1e30f);  // weighs nothing
  Floats most = load(scores), sum = {};
  for (int64_t p = kWide; p < padded; p += kWide) {
    const Floats some = load(scores + p);
    most = some > most ? some : most;
  }
  float top = most[0];
  for (int i = 1; i < kWide; ++i) top = most[i] > top ? most[i] : top;
  for (int64_t p = 0; p < padded; p += kWide) {
    const Floats some = exponential(load(scores + p) - top);
    sum += some;
    store(scores + p, some);
  }
  const float by = 1.0f / total(sum);
  for (int64_t p = 0; p < padded; p += kWide) store(scores + p, load(scores + p) * by);
}

struct Cache {  // of a layer, see loraport_attend
  const int32_t *table, *begins, *ends;
  int64_t q_heads, kv_heads, size, block, width;
};

template <typename T>
void attend(const Cache& cache, const T* q, const T* keys, const T* values, T* out, int64_t rows, int64_t q_stride,
            float scale, float cap, int threads) {
  const auto [table, begins, ends, q_heads, kv_heads, size, block, width] = cache;
  // Where there are fewer rows than threads, the heads of a row are shared among them.
  const int64_t parts = rows < threads ? kv_heads : 1, groups = kv_heads / parts, fold = q_heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores, query(groups * fold * size);
    std::vector<int64_t> places;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t count = ends[r] - begins[r], padded = (count + kWide - 1) / kWide * kWide;
        places.resize(count);
        for (int64_t p = 0; p < count; ++p) {
          const int64_t at = begins[r] + p;
          places[p] = ((table[r * width + at / block] * block + at % block) * kv_heads + part * groups) * size;
        }
        const int64_t first = part * groups * fold;
        copy_row(q + r * q_stride + first * size, query.data(), groups * fold * size);
        scores.resize(groups * fold * padded);
        const auto each = [&](const auto& f) {  // some heads of a group at a time
          for (int64_t h = 0, some; h < groups * fold; h += some) {
            some = std::min<int64_t>(kBlock, fold - h % fold);
            counted(some, [&](auto heads) { f(h, h / fold * size, heads); });
          }
        };
        for (int64_t p = 0; p < count; ++p) {
          if (p + kAhead < count) prefetch(keys + places[p + kAhead], groups * size);
          each([&](int64_t h, int64_t at, auto heads) {
            score<heads.value>(query.data() + h * size, keys + places[p] + at, &scores[h * padded + p], padded, size, scale);
          });
        }
        for (int64_t h = 0; h < groups * fold; ++h) weights_of(&scores[h * padded], count, padded, cap);
        each([&](int64_t h, int64_t at, auto heads) {
          weigh_all<heads.value>(&scores[h * padded], padded, values + at, places, out + (r * q_heads + first + h) * size, size,
                                 h == 0 ? groups * size : 0);
        });
      }
    }
  }
}

}  // namespace

// Calls `function` on pointers to float32, or to bfloat16 numbers where `half` is not 0.
#define EITHER(call)                  \
  if (half) {                         \
    using T = uint16_t;               \
    call;                             \
  } else {                            \
    using T = float;                  \
    call;                             \
  }

extern "C" {

// What `half` is not 0 for is bfloat16 instead of float32: computed in float32, and rounded once.

// y = x @ weight.T + bias + add. weight bfloat16 [out, in], all else float32; bias [out] and add [rows, out] may be null;
// 1 to 4 rows.
void loraport_thin(const float* x, const uint16_t* weight, const float* bias, const float* add, float* y, int64_t rows,
                   int64_t in, int64_t out, int threads) {
  switch (rows) {
    case 1: return thin_rows<1>(x, weight, bias, add, y, in, out, threads);
    case 2: return thin_rows<2>(x, weight, bias, add, y, in, out, threads);
    case 3: return thin_rows<3>(x, weight, bias, add, y, in, out, threads);
    default: return thin_rows<4>(x, weight, bias, add, y, in, out, threads);
  }
}

// y = x * weight / sqrt(mean(x^2) + eps), row by row; y may be x.
void loraport_norm(int half, const void* x, const void* weight, void* y, int64_t rows, int64_t size, float eps,
                   int threads) {
  EITHER(norm((const T*)x, (const T*)weight, (T*)y, rows, size, eps, threads))
}

// out[r, h] = rotary(x[r, h]) for the first `heads` heads of rows that are `stride` numbers apart: pairs
// (i, i + size / 2), cos and sin [rows, size / 2].
void loraport_rotate(int half, const void* x, const void* cosine, const void* sine, void* out, int64_t rows, int64_t heads,
                     int64_t size, int64_t stride, int threads) {
  EITHER(rotate((const T*)x, (const T*)cosine, (const T*)sine, (T*)out, rows, heads, size, stride, threads))
}

// out = silu(x[:, :size]) * x[:, size:].
void loraport_gated(int half, const void* x, void* out, int64_t rows, int64_t size, int threads) {
  EITHER(gated((const T*)x, (T*)out, rows, size, threads))
}

// Attention of one query row per request over the paged cache. Row r sees positions [begins[r], ends[r]), which lie in
// keys and values [slots, kv_heads, size] at block table[r, p / block] * block + p % block. q [rows, q_heads, size] with
// rows `q_stride` numbers apart; out [rows, q_heads * size]. Scores s become cap * tanh(s / cap) where cap is not 0.
void loraport_attend(int half, const void* q, const void* keys, const void* values, const int32_t* table,
                     const int32_t* begins, const int32_t* ends, void* out, int64_t rows, int64_t q_heads,
                     int64_t kv_heads, int64_t size, int64_t block, int64_t width, int64_t q_stride, float scale,
                     float cap, int threads) {
  const Cache cache{table, begins, ends, q_heads, kv_heads, size, block, width};
  EITHER(attend(cache, (const T*)q, (const T*)keys, (const T*)values, (T*)out, rows, q_stride, scale, cap, threads))
}

// How many rows of x and y there must be room for in `wide` of loraport_lora.
int64_t loraport_wide_rows(int threads) { return wide_rows(threads); }

// y += (x @ A.T * scale) @ B of every row's own adapter, see `add_adapters`. With `wide`, room for some float32 rows of x and
// y, these are bfloat16: y is rounded once, in the rows that have an adapter.
void loraport_lora(const void* x, const float* a, const float* b, const float* scale, const int64_t* ranks,
                   const int64_t* rank_starts, const int64_t* row_of, const int64_t* row_starts, const int64_t* edges,
                   const int64_t* shrink_starts, float* shrunk, void* y, float* wide, int64_t adapters, int64_t subs,
                   int64_t in, int64_t out, int threads) {
  const Pool pool{a, b, scale, edges, subs, in, out};
  const Rows which{ranks, rank_starts, row_of, row_starts, shrink_starts, adapters};
  const HalfRows half{static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), wide};
  add_adapters(pool, which, wide ? nullptr : static_cast<const float*>(x), wide ? nullptr : static_cast<float*>(y),
               wide ? &half : nullptr, shrunk, threads);
}

#ifdef __AMX_BF16__
// Whether this process may call loraport_tiles; asks the kernel.
int loraport_may_use_tiles(void) { return may_use_tiles(); }

// The same as loraport_lora for bfloat16 rows and a bfloat16 pool, by the matrix unit; see `add_tiled`.
void loraport_tiles(const uint16_t* x, const uint16_t* a, const uint16_t* b, const float* scale, const int64_t* ranks,
                    const int64_t* rank_starts, const int64_t* row_of, const int64_t* row_starts, const int64_t* edges,
                    uint16_t* y, int64_t adapters, int64_t subs, int64_t in, int64_t out, int threads) {
  add_tiled({a, b, scale, edges, subs, in, out}, x, y, ranks, rank_starts, row_of, row_starts, adapters, threads);
}
#endif

}  // extern "C"
