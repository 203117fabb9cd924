// The parts of a decode step that a CPU spends on starting work rather than on doing it, each as one loop over memory.
//
// Built by compiled.py where a C++ compiler is, and never required: every function has a twin on torch that says what it
// computes. Everything is float32 and contiguous, or all bfloat16: float32 numbers whose lower half is zero. Those are
// computed in float32 and rounded once. A row's numbers come from the same operations in the same order whatever rows
// stand beside it.
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>

#include "adapters.h"
#include "attend.h"
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
    for (int64_t h = 0; h < heads; ++h) {
      turn(x + r * stride + h * size, cosine + r * half, sine + r * half, out + (r * heads + h) * size, half);
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

// The first of the largest numbers of a row, and whether all are finite. Where they are not, any place.
template <typename T>
int64_t largest(const T* row, int64_t size, bool* finite) {
  constexpr int64_t kStretch = 64 * kWide;  // the place is looked for in the best stretch only
  float best = -__builtin_inff();
  int64_t place = 0;
  Floats strange = {};  // a finite number times zero is zero, any other is NaN
  for (int64_t from = 0; from < size; from += kStretch) {
    const int64_t to = std::min(size, from + kStretch);
    Floats most = all(best);
    int64_t i = from;
    for (; i + kWide <= to; i += kWide) {
      const Floats some = load(row + i);
      most = some > most ? some : most;
      strange += some * 0.0f;
    }
    for (; i < to; ++i) {
      const Floats some = load_part(row + i, 1);
      most[0] = some[0] > most[0] ? some[0] : most[0];
      strange[0] += some[0] * 0.0f;
    }
    float top = most[0];
    for (int lane = 1; lane < kWide; ++lane) top = most[lane] > top ? most[lane] : top;
    if (top > best) {
      best = top;
      place = from;
    }
  }
  *finite = total(strange) == 0.0f;
  for (int64_t i = place; i < size; ++i) {
    if (load_part(row + i, 1)[0] == best) return i;
  }
  return 0;
}

}  // namespace

// Calls `function` on pointers to float32, or to bfloat16 numbers where `half` is not 0.
#define EITHER(...)                   \
  if (half) {                         \
    using T = uint16_t;               \
    __VA_ARGS__;                      \
  } else {                            \
    using T = float;                  \
    __VA_ARGS__;                      \
  }

extern "C" {

// Each of the calling thread's workers, and itself, stays on one of `threads` CPUs from now on, where the kernel allows it.
void loraport_settle(const int* cpus, int threads) {
#ifdef __linux__
#pragma omp parallel num_threads(threads)
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpus[omp_get_thread_num()], &own);
    sched_setaffinity(0, sizeof own, &own);
  }
#endif
}

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

// places[r] is the first of the largest numbers of row r of x [rows, size], -1 where one is not finite.
void loraport_largest(int half, const void* x, int64_t* places, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    bool finite = false;
    EITHER(places[r] = largest((const T*)x + r * size, size, &finite))
    if (!finite) places[r] = -1;
  }
}

// Attention of query rows over the paged cache. Row r sees positions [begins[r], ends[r]), which lie in
// keys and values [slots, kv_heads, size] at block table[r, p / block] * block + p % block. q [rows, q_heads, size] with
// rows `q_stride` numbers apart; out [rows, q_heads * size]. Scores s become cap * tanh(s / cap) where cap is not 0.
// Where k is not null, k and v [rows, kv_heads, size], rows `k_stride` and `v_stride` apart, are written to slots[r] first; where
// cosine is not null, [rows, size / 2] as sine, q and k are rotated before, and rounded.
void loraport_attend(int half, const void* q, const void* k, const void* v, const void* cosine, const void* sine,
                     const int64_t* slots, void* keys, void* values, const int32_t* table, const int32_t* begins,
                     const int32_t* ends, void* out, int64_t rows, int64_t q_heads, int64_t kv_heads, int64_t size,
                     int64_t block, int64_t width, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                     float scale, float cap, int threads) {
  const Cache cache{table, begins, ends, q_heads, kv_heads, size, block, width};
  EITHER(attend(cache, Fresh<T>{(const T*)k, (const T*)v, (const T*)cosine, (const T*)sine, slots, k_stride, v_stride},
                (const T*)q, (T*)keys, (T*)values, (T*)out, rows, q_stride, scale, cap, threads))
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
