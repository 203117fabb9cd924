// The parts of a decode step that a CPU spends on starting work rather than on doing it, each as one loop over memory.
//
// Built by compiled.py where a C++ compiler is, and never required: every function has a twin on torch that says what it
// computes. Everything is float32 and contiguous unless something else is said; weights of the base may be bfloat16,
// which are float32 numbers whose lower half is zero, so nothing is rounded. A row's numbers come from the same
// operations in the same order whatever rows stand beside it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

extern "C" int omp_get_thread_num(void);

namespace {

// Floats of a vector; compilers split it where the machine's are shorter.
#ifdef __AVX512F__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
constexpr int kBlock = 4;   // rows that share a load of a rank row
constexpr int kTriple = 3;  // rank rows that share a load of a row: 4 x 3 sums fill the vector registers
constexpr int kShare = 4 * kTriple;  // rank rows that a thread takes at a time where an adapter has few rows
constexpr int kAlong = 4;   // rows of an adapter up to which rank rows are best read along, and not copied
constexpr int kMany = 12;   // rows of an adapter from which arithmetic counts for more than reading its rank rows
constexpr int kPart = 3;    // of a thread's share of all rank rows: an adapter up to that is one thread's alone
constexpr int kTile = 48;   // rows that a thread takes at a time then: with 1,536 columns they are 288 KiB
constexpr int kPiece = 2 * kWide;  // columns of an expand that are kept in registers
constexpr int kSlab = 8 * kPiece;  // columns of B that are copied at a time: of 64 rank rows 32 KiB
constexpr int kLong = 96 * kWide;  // columns of B that are read along at a time: of four rows 12 KiB of y stay at hand
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
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);  // GCC makes sixteen scalar ones of the loop below
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kWide; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return c + a * b;
#endif
}

inline Floats all(float value) { return Floats{} + value; }

// A number that is used more than once stays in its register; left to itself a compiler loads it again each time.
inline void keep(Floats& value) {
#ifdef __AVX__  // without it a value is in two registers, and nothing is gained
  asm("" : "+v"(value));
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

// Rounded to the nearest, ties to even, as torch does.
inline Halves narrow(Floats value) {
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
  return __builtin_convertvector(value != value ? Bits{} + 0x7fc0 : bits, Halves);
}

inline void widen_row(const uint16_t* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) {
    const Floats wide = widen(from + i);
    std::memcpy(to + i, &wide, sizeof wide);
  }
  const Floats last = widen_part(from + i, size - i);
  std::memcpy(to + i, &last, (size - i) * sizeof(float));
}

inline void narrow_row(const float* from, uint16_t* to, int64_t size) {
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) {
    const Halves some = narrow(load(from + i));
    std::memcpy(to + i, &some, sizeof some);
  }
  const Halves last = narrow(load_part(from + i, size - i));
  std::memcpy(to + i, &last, (size - i) * sizeof(uint16_t));
}

inline void store_part(float* to, Floats value, int64_t count) { std::memcpy(to, &value, count * sizeof(float)); }

inline float total(Floats v) {
#ifdef __AVX512F__
  auto eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  auto eight = v;
#endif
  auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
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
  for (; i + kWide <= size; i += kWide) store(to + i, fused(load(from + i), all(by), load(to + i)));
  if (i < size) {
    Floats last = fused(load_part(from + i, size - i), all(by), load_part(to + i, size - i));
    store_part(to + i, last, size - i);
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

inline float exponential_one(float x) { return exponential(all(x))[0]; }

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

// Rows of x against rank rows: to[r * apart + k] = by[k] * x[r] . shrink[k]. `kWhole` says that `in` is a multiple of
// kWide. Every sum is formed in the same way whatever stands beside it.
template <int kRows, int kRanks, bool kWhole>
__attribute__((noinline)) void shrink_block(const float* const* x, const float* const* shrink, const float* by,
                                            float* to, int64_t apart, int64_t in) {
  Floats sums[kRows][kRanks] = {};
  for (int64_t i = 0; i < in; i += kWide) {
    const int64_t left = in - i < kWide ? in - i : kWide;
    Floats some[kRanks];
#pragma GCC unroll 3
    for (int k = 0; k < kRanks; ++k) keep(some[k] = kWhole ? load(shrink[k] + i) : load_part(shrink[k] + i, left));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Floats row = kWhole ? load(x[r] + i) : load_part(x[r] + i, left);
      keep(row);
#pragma GCC unroll 3
      for (int k = 0; k < kRanks; ++k) sums[r][k] = fused(some[k], row, sums[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int k = 0; k < kRanks; ++k) to[r * apart + k] = by[k] == 0.0f ? 0.0f : by[k] * total(sums[r][k]);
  }
}

template <int kRows, int kRanks>
void shrink_either(const float* const* x, const float* const* shrink, const float* by, float* to, int64_t apart,
                   int64_t in) {
  if (in % kWide == 0) return shrink_block<kRows, kRanks, true>(x, shrink, by, to, apart, in);
  shrink_block<kRows, kRanks, false>(x, shrink, by, to, apart, in);
}

template <int kRanks>
void shrink_rows(const float* const* x, const float* const* shrink, const float* by, float* to, int64_t apart,
                 int64_t in, int64_t rows) {
  switch (rows) {
    case 1: return shrink_either<1, kRanks>(x, shrink, by, to, apart, in);
    case 2: return shrink_either<2, kRanks>(x, shrink, by, to, apart, in);
    case 3: return shrink_either<3, kRanks>(x, shrink, by, to, apart, in);
    default: return shrink_either<4, kRanks>(x, shrink, by, to, apart, in);
  }
}

// Columns [at, at + count) of some rows: y += by @ B, where by [rows, own] and B's columns are b [own, kPiece]. `kWhole`
// says that count is kPiece.
template <int kRows, bool kWhole>
__attribute__((noinline)) void expand_block(const float* b, int64_t own, const float* by, float* const* y, int64_t at,
                                            int64_t count) {
  const int64_t low = count < kWide ? count : kWide, high = count - low;
  Floats first[kRows], second[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    first[r] = kWhole ? load(y[r] + at) : load_part(y[r] + at, low);
    second[r] = kWhole ? load(y[r] + at + kWide) : load_part(y[r] + at + low, high);
  }
  for (int64_t rank = 0; rank < own; ++rank) {
    const float* row = b + rank * kPiece;
    Floats left = kWhole ? load(row) : load_part(row, low), right = kWhole ? load(row + kWide) : load_part(row + low, high);
    keep(left);
    keep(right);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats factor = all(by[r * own + rank]);
      first[r] = fused(left, factor, first[r]);
      second[r] = fused(right, factor, second[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    if (kWhole) {
      store(y[r] + at, first[r]);
      store(y[r] + at + kWide, second[r]);
    } else {
      store_part(y[r] + at, first[r], low);
      store_part(y[r] + at + low, second[r], high);
    }
  }
}

template <int kRows>
void expand_either(const float* b, int64_t own, const float* by, float* const* y, int64_t at, int64_t left) {
  if (left >= kPiece) return expand_block<kRows, true>(b, own, by, y, at, kPiece);
  expand_block<kRows, false>(b, own, by, y, at, left);
}

void expand_rows(const float* b, int64_t own, const float* by, float* const* y, int64_t at, int64_t left, int64_t rows) {
  switch (rows) {
    case 1: return expand_either<1>(b, own, by, y, at, left);
    case 2: return expand_either<2>(b, own, by, y, at, left);
    case 3: return expand_either<3>(b, own, by, y, at, left);
    default: return expand_either<4>(b, own, by, y, at, left);
  }
}

struct Pool {  // see add_adapters
  const float *a, *b, *scale;
  const int64_t* edges;
  int64_t subs, in, out;
};

struct Rows {  // see add_adapters
  const int64_t *ranks, *rank_starts, *row_of, *row_starts, *shrink_starts;
  int64_t adapters;
};

struct HalfRows {  // x and y in bfloat16, and room for the float32 numbers of wide_rows(threads) rows of both
  const uint16_t* x;
  uint16_t* y;
  float* wide;
};

struct Part {
  int64_t from, to;
};

struct Task {
  int64_t adapter, sub;
  Part part;
};

std::vector<Part> parts(int64_t from, int64_t to, int64_t each) {
  std::vector<Part> out;
  for (; from < to; from += each) out.push_back({from, from + each < to ? from + each : to});
  return out;
}

struct Own {  // some rows of an adapter, and its rank rows
  const int64_t *rows, *ranks;
  int64_t count, own;
};

// Some rank rows of sub u against all rows: shrunk [row, rank].
void shrink(const Pool& pool, const float* x, const Own& mine, int64_t u, Part ranks, float* shrunk) {
  for (int64_t k = ranks.from, some; k < ranks.to; k += some) {
    some = ranks.to - k < kTriple ? ranks.to - k : kTriple;
    const float* rank_rows[kTriple];
    float by[kTriple];
    for (int64_t i = 0; i < some; ++i) {
      rank_rows[i] = pool.a + (mine.ranks[k + i] * pool.subs + u) * pool.in;
      by[i] = pool.scale[mine.ranks[k + i] * pool.subs + u];
    }
    for (int64_t r = 0; r < mine.count; r += kBlock) {
      const int64_t rows = mine.count - r < kBlock ? mine.count - r : kBlock;
      const float* from[kBlock];
      for (int64_t i = 0; i < rows; ++i) from[i] = x + mine.rows[r + i] * pool.in;
      float* to = shrunk + r * mine.own + k;
      switch (some) {
        case 1: shrink_rows<1>(from, rank_rows, by, to, mine.own, pool.in, rows); break;
        case 2: shrink_rows<2>(from, rank_rows, by, to, mine.own, pool.in, rows); break;
        default: shrink_rows<3>(from, rank_rows, by, to, mine.own, pool.in, rows);
      }
    }
  }
}

// y[r] += by[r * apart] * b[0] + by[r * apart + 1] * b[1] + ..., in this order, for kRows rows of `width` columns.
template <int kRows, int kRanks>
void along(const float* const* b, const float* by, int64_t apart, float* const* y, int64_t width) {
  int64_t i = 0;
  for (; i + kWide <= width; i += kWide) {
    Floats part[kRanks];
#pragma GCC unroll 4
    for (int k = 0; k < kRanks; ++k) part[k] = load(b[k] + i);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      Floats sum = load(y[r] + i);
#pragma GCC unroll 4
      for (int k = 0; k < kRanks; ++k) sum = fused(part[k], all(by[r * apart + k]), sum);
      store(y[r] + i, sum);
    }
  }
  for (int r = 0; i < width && r < kRows; ++r) {
    for (int k = 0; k < kRanks; ++k) add_scaled(y[r] + i, b[k] + i, by[r * apart + k], width - i);
  }
}

// Two rows by four rank rows: their eight factors stay in registers.
void along_rows(const Pool& pool, float* y, const Own& mine, const float* shrunk, Part columns) {
  const int64_t width = columns.to - columns.from;
  for (int64_t k = 0, some; k < mine.own; k += some) {
    some = std::min<int64_t>(mine.own - k, kBlock);
    const float* b[kBlock];
    for (int64_t i = 0; i < some; ++i) b[i] = pool.b + mine.ranks[k + i] * pool.out + columns.from;
    for (int64_t r = 0; r < mine.count; r += 2) {
      const bool two = r + 1 < mine.count;
      float* to[2] = {y + mine.rows[r] * pool.out + columns.from, two ? y + mine.rows[r + 1] * pool.out + columns.from : nullptr};
      const float* by = shrunk + r * mine.own + k;
      switch (some + (two ? 4 : 0)) {
        case 1: along<1, 1>(b, by, mine.own, to, width); break;
        case 2: along<1, 2>(b, by, mine.own, to, width); break;
        case 3: along<1, 3>(b, by, mine.own, to, width); break;
        case 4: along<1, 4>(b, by, mine.own, to, width); break;
        case 5: along<2, 1>(b, by, mine.own, to, width); break;
        case 6: along<2, 2>(b, by, mine.own, to, width); break;
        case 7: along<2, 3>(b, by, mine.own, to, width); break;
        default: along<2, 4>(b, by, mine.own, to, width);
      }
    }
  }
}

// How many columns `expand` takes at a time.
inline int64_t columns_of(int64_t rows) { return rows <= kAlong ? kLong : kSlab; }

// Up to columns_of(mine.count) columns of all rows. `slab` is scratch of own * kSlab numbers.
void expand(const Pool& pool, float* y, const Own& mine, const float* shrunk, Part columns, float* slab) {
  const int64_t from = columns.from, width = columns.to - from;
  if (mine.count <= kAlong) return along_rows(pool, y, mine, shrunk, columns);
  // Copied, piece by piece: rank rows may lie a power of two apart and would put one another out of the cache.
  for (int64_t rank = 0; rank < mine.own; ++rank) {
    const float* row = pool.b + mine.ranks[rank] * pool.out + from;
    float* to = slab + rank * kPiece;
    int64_t at = 0;
    for (; at + kPiece <= width; at += kPiece) {
      __builtin_prefetch(row + at + kSlab);  // the next slab's: rank rows are read in pieces too short to be foreseen
      store(to + at * mine.own, load(row + at));
      store(to + at * mine.own + kWide, load(row + at + kWide));
    }
    if (at < width) std::memcpy(to + at * mine.own, row + at, (width - at) * sizeof(float));
  }
  for (int64_t r = 0; r < mine.count; r += kBlock) {
    const int64_t rows = mine.count - r < kBlock ? mine.count - r : kBlock;
    float* to[kBlock];
    for (int64_t i = 0; i < rows; ++i) to[i] = y + mine.rows[r + i] * pool.out + from;
    for (int64_t at = 0; at < width; at += kPiece) {
      expand_rows(slab + at * mine.own, mine.own, shrunk + r * mine.own, to, at, width - at, rows);
    }
  }
}

// y += (x @ A.T * scale) @ B of every row's own adapter, in one of two ways that give the same bits: an adapter that is a
// large part of the step and has few rows is shared among the threads by its rank rows, which are read once; of all others
// a thread computes some rows, or all of them, from x to y. Adapter s has the rank rows ranks[rank_starts[s] :
// rank_starts[s + 1]] of the pool and the rows row_of[row_starts[s] : row_starts[s + 1]] of x [rows, in] and y [rows, out].
// Pool: a [pool rows, subs, in], b [pool rows, out], scale [pool rows, subs]; sub u owns the columns edges[u] : edges[u + 1].
// `shrunk` is scratch: adapter s's numbers begin at shrink_starts[s], [sub, row, rank].
// Rows for which there is room: a tile of each thread, and those of shared adapters, of which there are fewer than
// kPart for each thread with fewer than kMany rows each.
int64_t wide_rows(int64_t threads) { return threads * (kTile + kPart * kMany); }

void add_adapters(const Pool& pool, const Rows& which, const float* x, float* y, const HalfRows* half, float* shrunk,
                  int threads) {
  const auto [ranks, rank_starts, row_of, row_starts, shrink_starts, adapters] = which;
  const auto [a, b, scale, edges, subs, in, out] = pool;
  const auto all_of = [&](int64_t s) {
    return Own{row_of + row_starts[s], ranks + rank_starts[s], row_starts[s + 1] - row_starts[s], rank_starts[s + 1] - rank_starts[s]};
  };
  // Tasks of the two ways: rows of an adapter from x to y; some of its rank rows, then some columns.
  std::vector<Task> tiles, shrinks, expands;
  std::vector<int64_t> shared, places(adapters);  // rows of shared adapters; where in them an adapter's begin
  int64_t widest = 0;
  for (int64_t s = 0; s < adapters; ++s) {
    const auto [rows, _, count, own] = all_of(s);
    places[s] = shared.size();
    if (count > kAlong) widest = std::max(widest, own);
    if (count >= kMany) {
      const int64_t each = ((count + threads - 1) / threads + kBlock - 1) / kBlock * kBlock;
      for (const Part part : parts(0, count, std::min<int64_t>(each, kTile))) tiles.push_back({s, 0, part});
    } else if (threads == 1 || own * kPart * threads <= rank_starts[adapters]) {
      tiles.push_back({s, 0, {0, count}});
    } else {
      shared.insert(shared.end(), rows, rows + count);
      for (int64_t u = 0; u < subs; ++u) {
        for (const Part part : parts(0, own, kShare)) shrinks.push_back({s, u, part});
        for (const Part part : parts(edges[u], edges[u + 1], columns_of(count))) expands.push_back({s, u, part});
      }
    }
  }
  // The largest first: what is left when a thread has nothing more to do is small.
  const auto size_of = [&](const Task& task) { return all_of(task.adapter).own * (task.part.to - task.part.from + kBlock); };
  std::stable_sort(tiles.begin(), tiles.end(), [&](const Task& one, const Task& two) { return size_of(one) > size_of(two); });
  std::vector<int64_t> order(std::max<int64_t>(kTile, shared.size()));
  std::iota(order.begin(), order.end(), 0);
  const int64_t some_rows = shared.size();
  float* const shared_x = half ? half->wide + threads * kTile * (in + out) : nullptr;
  float* const shared_y = half ? shared_x + some_rows * in : nullptr;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> slab(widest * kSlab);
    const float* from = x;
    float* to = y;
    float *tile_x = nullptr, *tile_y = nullptr;
    if (half) {
      from = tile_x = half->wide + omp_get_thread_num() * kTile * (in + out);
      to = tile_y = tile_x + kTile * in;
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t t = 0; t < tiles.size(); ++t) {
      const auto [s, _, rows] = tiles[t];
      Own mine = all_of(s);
      mine.rows += rows.from;
      mine.count = rows.to - rows.from;
      const int64_t* const given = mine.rows;
      if (half) {  // the tile stays in the cache from the first of its numbers to the last
        for (int64_t i = 0; i < mine.count; ++i) {
          widen_row(half->x + given[i] * in, tile_x + i * in, in);
          widen_row(half->y + given[i] * out, tile_y + i * out, out);
        }
        mine.rows = order.data();
      }
      // All subs of a tile put their numbers into one place, one after the other.
      float* own = shrunk + shrink_starts[s] + rows.from * mine.own;
      for (int64_t u = 0; u < subs; ++u) {
        shrink(pool, from, mine, u, {0, mine.own}, own);
        for (const Part part : parts(edges[u], edges[u + 1], columns_of(mine.count))) expand(pool, to, mine, own, part, slab.data());
      }
      for (int64_t i = 0; half && i < mine.count; ++i) narrow_row(tile_y + i * out, half->y + given[i] * out, out);
    }
    // Threads wait for one another as seldom as can be: each time costs more than a small adapter.
    if (!shrinks.empty()) {
      const auto own_of = [&](int64_t s) {
        Own mine = all_of(s);
        if (half) mine.rows = order.data() + places[s];
        return mine;
      };
      if (half) {
        from = shared_x;
        to = shared_y;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < some_rows; ++i) {
          widen_row(half->x + shared[i] * in, shared_x + i * in, in);
          widen_row(half->y + shared[i] * out, shared_y + i * out, out);
        }
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t t = 0; t < shrinks.size(); ++t) {
        const auto [s, u, some] = shrinks[t];
        const Own mine = own_of(s);
        shrink(pool, from, mine, u, some, shrunk + shrink_starts[s] + u * mine.count * mine.own);
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t t = 0; t < expands.size(); ++t) {
        const auto [s, u, columns] = expands[t];
        const Own mine = own_of(s);
        expand(pool, to, mine, shrunk + shrink_starts[s] + u * mine.count * mine.own, columns, slab.data());
      }
      if (half) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < some_rows; ++i) narrow_row(shared_y + i * out, half->y + shared[i] * out, out);
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

}  // extern "C"
