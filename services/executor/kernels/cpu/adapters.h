// The adapters of a step over a float32 pool, by vectors.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "vectors.h"

extern "C" int omp_get_thread_num(void);

namespace {

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

// Rows for which there is room: a tile of each thread, and those of shared adapters, of which there are fewer than
// kPart for each thread with fewer than kMany rows each.
int64_t wide_rows(int64_t threads) { return threads * (kTile + kPart * kMany); }

// y += (x @ A.T * scale) @ B of every row's own adapter, in one of two ways that give the same bits: an adapter that is a
// large part of the step and has few rows is shared among the threads by its rank rows, which are read once; of all others
// a thread computes some rows, or all of them, from x to y. Adapter s has the rank rows ranks[rank_starts[s] :
// rank_starts[s + 1]] of the pool and the rows row_of[row_starts[s] : row_starts[s + 1]] of x [rows, in] and y [rows, out].
// Pool: a [pool rows, subs, in], b [pool rows, out], scale [pool rows, subs]; sub u owns the columns edges[u] : edges[u + 1].
// `shrunk` is scratch: adapter s's numbers begin at shrink_starts[s], [sub, row, rank].
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
          copy_row(half->x + given[i] * in, tile_x + i * in, in);
          copy_row(half->y + given[i] * out, tile_y + i * out, out);
        }
        mine.rows = order.data();
      }
      // All subs of a tile put their numbers into one place, one after the other.
      float* own = shrunk + shrink_starts[s] + rows.from * mine.own;
      for (int64_t u = 0; u < subs; ++u) {
        shrink(pool, from, mine, u, {0, mine.own}, own);
        for (const Part part : parts(edges[u], edges[u + 1], columns_of(mine.count))) expand(pool, to, mine, own, part, slab.data());
      }
      for (int64_t i = 0; half && i < mine.count; ++i) copy_row(tile_y + i * out, half->y + given[i] * out, out);
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
          copy_row(half->x + shared[i] * in, shared_x + i * in, in);
          copy_row(half->y + shared[i] * out, shared_y + i * out, out);
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
        for (int64_t i = 0; i < some_rows; ++i) copy_row(shared_y + i * out, half->y + shared[i] * out, out);
      }
    }
  }
}

}  // namespace
