// The parts of a decode step that a CPU spends on starting work rather than on doing it, each as one loop over memory.
//
// Built by compiled.py where a C++ compiler is, and never required: every function has a twin on torch that says what it
// computes. Everything is float32 and contiguous unless something else is said; weights of the base may be bfloat16,
// which are float32 numbers whose lower half is zero, so nothing is rounded. A row's numbers come from the same
// operations in the same order whatever rows stand beside it.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kWide = 8;    // floats of a vector; compilers split it where the machine's are shorter
constexpr int kBlock = 4;   // rows that share a load of a rank row
constexpr int kBand = 256;  // columns of an expand that one thread takes at a time: 1 KiB of every rank row
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef int32_t Ints __attribute__((vector_size(4 * kWide)));
typedef uint32_t Bits __attribute__((vector_size(4 * kWide)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWide)));

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// c + a * b, rounded once where the machine can and twice elsewhere, but everywhere in the same way: left to itself a
// compiler fuses some of these and not others.
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < kWide; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return c + a * b;
#endif
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats widen(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Floats out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// The last few numbers of a row, with zeros behind them: so the rest is computed by the same instructions as the others.
inline Floats load_part(const float* from, int64_t count) {
  float part[kWide] = {};
  std::memcpy(part, from, count * sizeof(float));
  return load(part);
}

inline Floats widen_part(const uint16_t* from, int64_t count) {
  uint16_t part[kWide] = {};
  std::memcpy(part, from, count * sizeof(uint16_t));
  return widen(part);
}

inline float total(Floats v) {
  auto four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

inline float dot(const float* a, const float* b, int64_t size) {
  Floats first = {}, second = {};
  int64_t i = 0;
  for (; i + 2 * kWide <= size; i += 2 * kWide) {
    first = fused(load(a + i), load(b + i), first);
    second = fused(load(a + i + kWide), load(b + i + kWide), second);
  }
  for (; i + kWide <= size; i += kWide) first = fused(load(a + i), load(b + i), first);
  if (i < size) second = fused(load_part(a + i, size - i), load_part(b + i, size - i), second);
  return total(first + second);
}

inline void add_scaled(float* to, const float* from, float by, int64_t size) {
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) store(to + i, fused(load(from + i), Floats{} + by, load(to + i)));
  if (i < size) {
    Floats last = fused(load_part(from + i, size - i), Floats{} + by, load_part(to + i, size - i));
    std::memcpy(to + i, &last, (size - i) * sizeof(float));
  }
}

// e^x within 2 units in the last place: x = n ln 2 + f, a polynomial in f, and n put into the exponent. NaN stays NaN,
// what is too large becomes infinite, what is too small 2e-38.
inline Floats exponential(Floats given) {
  const Floats low = Floats{} - 87.0f, high = Floats{} + 88.0f;
  Floats x = given < low ? low : given;
  x = x > high ? high : x;
  Floats scaled = x * 1.44269504f;
  Ints n = __builtin_convertvector(scaled + (scaled < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = Floats{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  Ints bits = (n + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return given > high ? Floats{} + __builtin_inff() : p * power;
}

inline float exponential_one(float x) { return exponential(Floats{} + x)[0]; }

template <int kRows>
void thin_rows(const float* x, const uint16_t* weight, const float* bias, const float* add, float* y, int64_t in,
               int64_t out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t o = 0; o < out; ++o) {
    const uint16_t* row = weight + o * in;
    Floats first[kRows] = {}, second[kRows] = {};
    int64_t i = 0;
    for (; i + 2 * kWide <= in; i += 2 * kWide) {
      Floats low = widen(row + i), high = widen(row + i + kWide);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        first[r] = fused(low, load(x + r * in + i), first[r]);
        second[r] = fused(high, load(x + r * in + i + kWide), second[r]);
      }
    }
    for (; i + kWide <= in; i += kWide) {
      Floats low = widen(row + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) first[r] = fused(low, load(x + r * in + i), first[r]);
    }
    if (i < in) {
      Floats low = widen_part(row + i, in - i);
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

template <int kRows>
void shrink_rows(const float* const* x, const float* shrink, float by, float* to, int64_t apart, int64_t in) {
  Floats sums[kRows] = {};
  int64_t i = 0;
  for (; i + kWide <= in; i += kWide) {
    Floats some = load(shrink + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = fused(some, load(x[r] + i), sums[r]);
  }
  if (i < in) {
    Floats some = load_part(shrink + i, in - i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = fused(some, load_part(x[r] + i, in - i), sums[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) to[r * apart] = by == 0.0f ? 0.0f : by * total(sums[r]);
}

// One rank row against all rows of its adapter: to[r * apart] = by * x[rows[r]] . shrink.
void shrink_rank(const float* x, const float* shrink, float by, const int64_t* rows, int64_t count, float* to,
                 int64_t apart, int64_t in) {
  for (int64_t r = 0; r < count; r += kBlock) {
    const float* some[kBlock];
    const int64_t left = count - r < kBlock ? count - r : kBlock;
    for (int64_t i = 0; i < left; ++i) some[i] = x + rows[r + i] * in;
    float* here = to + r * apart;
    switch (left) {
      case 1: shrink_rows<1>(some, shrink, by, here, apart, in); break;
      case 2: shrink_rows<2>(some, shrink, by, here, apart, in); break;
      case 3: shrink_rows<3>(some, shrink, by, here, apart, in); break;
      default: shrink_rows<4>(some, shrink, by, here, apart, in);
    }
  }
}

// Columns [from, from + count) of up to kBlock rows: y += by @ B, where by [rows, own] and count is at most 2 * kWide.
template <int kRows>
void expand_block(const float* b, const int64_t* ranks, int64_t own, const float* by, float* const* y, int64_t out,
                  int64_t from, int64_t count) {
  const int64_t low = count < kWide ? count : kWide, high = count - low;
  const bool whole = count == 2 * kWide;
  Floats first[kRows], second[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    first[r] = whole ? load(y[r] + from) : load_part(y[r] + from, low);
    second[r] = whole ? load(y[r] + from + kWide) : load_part(y[r] + from + low, high);
  }
  for (int64_t rank = 0; rank < own; ++rank) {
    const float* row = b + ranks[rank] * out + from;
    Floats left = whole ? load(row) : load_part(row, low), right = whole ? load(row + kWide) : load_part(row + low, high);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Floats factor = Floats{} + by[r * own + rank];
      first[r] = fused(left, factor, first[r]);
      second[r] = fused(right, factor, second[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(y[r] + from, &first[r], low * sizeof(float));
    std::memcpy(y[r] + from + low, &second[r], high * sizeof(float));
  }
}

// Columns [from, to) of all rows of an adapter.
void expand_band(const float* b, const int64_t* ranks, int64_t own, const float* by, const int64_t* rows, int64_t count,
                 float* y, int64_t out, int64_t from, int64_t to) {
  // Rank rows come from memory once. With few rows to serve they are best read along, with more they are kept for all.
  for (int64_t rank = 0; count <= 2 && rank < own; ++rank) {
    for (int64_t r = 0; r < count; ++r) {
      add_scaled(y + rows[r] * out + from, b + ranks[rank] * out + from, by[r * own + rank], to - from);
    }
  }
  for (int64_t r = 0; count > 2 && r < count; r += kBlock) {
    float* some[kBlock];
    const int64_t left = count - r < kBlock ? count - r : kBlock;
    for (int64_t i = 0; i < left; ++i) some[i] = y + rows[r + i] * out;
    for (int64_t at = from; at < to; at += 2 * kWide) {
      const int64_t size = to - at < 2 * kWide ? to - at : 2 * kWide;
      switch (left) {
        case 1: expand_block<1>(b, ranks, own, by + r * own, some, out, at, size); break;
        case 2: expand_block<2>(b, ranks, own, by + r * own, some, out, at, size); break;
        case 3: expand_block<3>(b, ranks, own, by + r * own, some, out, at, size); break;
        default: expand_block<4>(b, ranks, own, by + r * own, some, out, at, size);
      }
    }
  }
}

}  // namespace

extern "C" {

// y = x @ weight.T + bias + add. weight bfloat16 [out, in]; bias [out] and add [rows, out] may be null; 1 to 4 rows.
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
void loraport_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x + r * size;
    float* to = y + r * size;
    float by = 1.0f / __builtin_sqrtf(dot(from, from, size) / size + eps);
    int64_t i = 0;
    for (; i + kWide <= size; i += kWide) store(to + i, load(from + i) * load(weight + i) * by);
    for (; i < size; ++i) to[i] = from[i] * weight[i] * by;
  }
}

// out[r, h] = rotary(x[r, h]) for the first `heads` heads of rows that are `stride` floats apart: pairs
// (i, i + size / 2), cos and sin [rows, size / 2].
void loraport_rotate(const float* x, const float* cosine, const float* sine, float* out, int64_t rows, int64_t heads,
                     int64_t size, int64_t stride, int threads) {
  const int64_t half = size / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const float *c = cosine + r * half, *s = sine + r * half;
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x + r * stride + h * size;
      float* to = out + (r * heads + h) * size;
      for (int64_t i = 0; i < half; ++i) {
        float a = from[i], b = from[i + half];
        to[i] = a * c[i] - b * s[i];
        to[i + half] = b * c[i] + a * s[i];
      }
    }
  }
}

// out = silu(x[:, :size]) * x[:, size:].
void loraport_gated(const float* x, float* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const float *gate = x + 2 * r * size, *up = gate + size;
    float* to = out + r * size;
    int64_t i = 0;
    for (; i + kWide <= size; i += kWide) {
      Floats g = load(gate + i);
      store(to + i, g / (exponential(Floats{} - g) + 1.0f) * load(up + i));
    }
    for (; i < size; ++i) to[i] = gate[i] / (exponential_one(-gate[i]) + 1.0f) * up[i];
  }
}

// Attention of one query row per request over the paged cache. Row r sees positions [begins[r], ends[r]), which lie in
// keys and values [slots, kv_heads, size] at block table[r, p / block] * block + p % block. q [rows, q_heads, size] with
// rows `q_stride` floats apart; out [rows, q_heads * size]. Scores s become cap * tanh(s / cap) where cap is not 0.
void loraport_attend(const float* q, const float* keys, const float* values, const int32_t* table, const int32_t* begins,
                     const int32_t* ends, float* out, int64_t rows, int64_t q_heads, int64_t kv_heads, int64_t size,
                     int64_t block, int64_t width, int64_t q_stride, float scale, float cap, int threads) {
  // Where there are fewer rows than threads, the heads of a row are shared among them.
  const int64_t parts = rows < threads ? kv_heads : 1, groups = kv_heads / parts;
  const int64_t fold = q_heads / kv_heads, apart = kv_heads * size;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = begins[r], count = ends[r] - begin, heads = groups * fold;
        const int64_t padded = (count + kWide - 1) / kWide * kWide;
        const int32_t* blocks = table + r * width;
        const float* query = q + r * q_stride + part * heads * size;
        float* to = out + (r * q_heads + part * heads) * size;
        scores.assign(heads * padded, -1e30f);
        for (int64_t p = 0; p < count; ++p) {
          const int64_t at = begin + p;
          const float* key = keys + (blocks[at / block] * block + at % block) * apart + part * groups * size;
          for (int64_t h = 0; h < heads; ++h) {
            scores[h * padded + p] = dot(query + h * size, key + h / fold * size, size) * scale;
          }
        }
        for (int64_t h = 0; h < heads; ++h) {
          float* own = scores.data() + h * padded;
          for (int64_t p = 0; cap != 0.0f && p < padded; p += kWide) {
            store(own + p, cap - 2.0f * cap / (exponential(load(own + p) * (2.0f / cap)) + 1.0f));
          }
          float most = own[0], sum = 0.0f;
          for (int64_t p = 1; p < count; ++p) most = own[p] > most ? own[p] : most;
          for (int64_t p = 0; p < padded; p += kWide) store(own + p, exponential(load(own + p) - most));
          for (int64_t p = 0; p < count; ++p) sum += own[p];
          const float by = 1.0f / sum;
          for (int64_t p = 0; p < count; ++p) own[p] *= by;
        }
        std::memset(to, 0, heads * size * sizeof(float));
        for (int64_t p = 0; p < count; ++p) {
          const int64_t at = begin + p;
          const float* value = values + (blocks[at / block] * block + at % block) * apart + part * groups * size;
          for (int64_t h = 0; h < heads; ++h) {
            add_scaled(to + h * size, value + h / fold * size, scores[h * padded + p], size);
          }
        }
      }
    }
  }
}

// y += (x @ A.T * scale) @ B of every row's own adapter. Adapter s has the rank rows ranks[rank_starts[s] :
// rank_starts[s + 1]] of the pool and the rows row_of[row_starts[s] : row_starts[s + 1]] of x [rows, in] and y [rows, out].
// Pool: a [pool rows, subs, in], b [pool rows, out], scale [pool rows, subs]; sub u owns the columns edges[u] : edges[u + 1].
// `shrunk` is scratch: adapter s's numbers begin at shrink_starts[s], [sub, row, rank].
void loraport_lora(const float* x, const float* a, const float* b, const float* scale, const int64_t* ranks,
                   const int64_t* rank_starts, const int64_t* row_of, const int64_t* row_starts, const int64_t* edges,
                   const int64_t* shrink_starts, float* shrunk, float* y, int64_t adapters, int64_t subs, int64_t in,
                   int64_t out, int threads) {
  const int64_t total_ranks = rank_starts[adapters];
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t k = 0; k < total_ranks; ++k) {
      int64_t s = 0;
      while (rank_starts[s + 1] <= k) ++s;
      const int64_t own = rank_starts[s + 1] - rank_starts[s], rank = k - rank_starts[s];
      const int64_t count = row_starts[s + 1] - row_starts[s], *rows = row_of + row_starts[s];
      for (int64_t u = 0; u < subs; ++u) {
        float* to = shrunk + shrink_starts[s] + u * count * own + rank;
        shrink_rank(x, a + (ranks[k] * subs + u) * in, scale[ranks[k] * subs + u], rows, count, to, own, in);
      }
    }
    // A thread owns a band of the columns of all rows: no two write to one place.
    const int64_t bands = (out + kBand - 1) / kBand;
#pragma omp for schedule(static) collapse(2)
    for (int64_t c = 0; c < bands; ++c) {
      for (int64_t s = 0; s < adapters; ++s) {
        const int64_t own = rank_starts[s + 1] - rank_starts[s], count = row_starts[s + 1] - row_starts[s];
        for (int64_t u = 0; u < subs; ++u) {
          const int64_t from = c * kBand > edges[u] ? c * kBand : edges[u];
          const int64_t to = (c + 1) * kBand < edges[u + 1] ? (c + 1) * kBand : edges[u + 1];
          if (from >= to) continue;
          const float* by = shrunk + shrink_starts[s] + u * count * own;
          expand_band(b, ranks + rank_starts[s], own, by, row_of + row_starts[s], count, y, out, from, to);
        }
      }
    }
  }
}

}  // extern "C"
