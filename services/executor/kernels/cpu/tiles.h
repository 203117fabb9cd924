// The adapters of a step over a bfloat16 pool, by the matrix unit (AMX) and for bfloat16 rows.
//
// Sums are float32. Shrunk numbers are float32 too, and go on as two bfloat16 ones, what they are rounded to and what
// that leaves: sixteen bits of them are kept, so all that is rounded to bfloat16 is the answer. A tile is 16 rows of 64
// bytes, a product of tiles takes 16 x 32 by 32 x 16 numbers, the second with its rows in pairs. In a shrink the rank rows
// are the first operand, as they lie in the pool; in an expand the shrunk rows are.
#pragma once
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kEdge = 16;  // rows of a tile, and 32-bit numbers in each
constexpr int kPairs = 2 * kEdge;  // bfloat16 numbers in each
constexpr int kTileBytes = 1024;
constexpr int kAtOnce = 64;  // rows of an adapter that a thread takes at a time
constexpr int kColumns = 256;  // columns of B that are paired at a time: of 64 rank rows 32 KiB

// What the kernel wants to be asked before a process uses tiles (ARCH_REQ_XCOMP_PERM of XTILEDATA).
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// What was written is in memory before a tile reads it: headers of some GCCs do not tell the compiler what tiles read.
inline void written() { asm volatile("" ::: "memory"); }

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 and 1: sums of a shrink, 2 and 3 its operands. 4 and 5: sums of an expand, 6 shrunk rows, 7 columns of B.
// The last count for as many rows as there are: a product takes as long as its first operand has rows.
void shape_tiles(int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.bytes[tile] = 4 * kEdge;
    shapes.rows[tile] = tile >= 4 && tile <= 6 ? std::min<int64_t>(rows, kEdge) : kEdge;
  }
  asm volatile("" ::"r"(&shapes) : "memory");  // see `written`
  _tile_loadconfig(&shapes);
}

// 16 x 16 numbers of 32 bits, rows for columns.
inline void transpose(__m512i (&r)[kEdge]) {
  __m512i t[kEdge];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now r[4 i + j] has column 4 L + j of the rows 4 i to 4 i + 3 in its lane L.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kEdge; ++i) r[i] = t[i];
}

// The first `count` of 32 bfloat16 numbers, and zeros.
inline __m512i load_some(const uint16_t* from, int64_t count) {
  if (count >= kPairs) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((1u << std::max<int64_t>(count, 0)) - 1, from);
}

// The first `count` of 16 bfloat16 numbers as 32 bits each, and zeros.
inline __m512i spread(const uint16_t* from, int64_t count) {
  const __m256i some = count >= kEdge ? _mm256_loadu_si256((const __m256i*)from)
                                      : _mm256_maskz_loadu_epi16((1u << std::max<int64_t>(count, 0)) - 1, from);
  return _mm512_cvtepu16_epi32(some);
}

struct HalfPool {  // as Pool of adapters.h
  const uint16_t *a, *b;
  const float* scale;
  const int64_t* edges;
  int64_t subs, in, out;
};

// What a thread needs for kAtOnce rows, in `kept`, which grows.
class TileRoom {
 public:
  TileRoom(int64_t in, int64_t widest, std::vector<char>& kept)
      : deep((in + kPairs - 1) / kPairs), apart((widest + kPairs - 1) / kPairs * kPairs) {
    const int64_t bytes[] = {kAtOnce / kEdge * deep * kTileBytes, kAtOnce * apart * 2, kAtOnce * apart * 2,
                             apart / kPairs * kColumns / kEdge * kTileBytes, kTileBytes, 2 * kTileBytes};
    int64_t all = 64;
    for (const int64_t some : bytes) all += some;
    if ((int64_t)kept.size() < all) kept.resize(all);
    char* at = (char*)(((uintptr_t)kept.data() + 63) / 64 * 64);
    void** const parts[] = {(void**)&x, (void**)&shrunk, (void**)&rest, (void**)&b, (void**)&a, (void**)&sums};
    for (int i = 0; i < 6; at += bytes[i++]) *parts[i] = at;
  }

  // Where all of an adapter's shrunk numbers are in one tile with what rounding left of them.
  uint16_t* left_of(int64_t own) const { return own <= kEdge ? shrunk + kEdge : rest; }

  const int64_t deep, apart;     // tiles along a row of x; numbers of a shrunk row
  uint16_t *x, *shrunk, *rest;   // x in pairs [group, deep, tile]; shrunk rows [row, apart], twice
  uint16_t *b, *a;               // B's columns in pairs [columns / 16, apart / 32, tile]; a tile of rank rows
  float* sums;                   // two tiles
};

// Rows of x, 16 at a time, with numbers in pairs one below the other.
void pair_rows(const HalfPool& pool, const uint16_t* x, const int64_t* rows, int64_t count, TileRoom& room) {
  for (int64_t g = 0; g * kEdge < count; ++g) {
    for (int64_t t = 0; t < room.deep; ++t) {
      __m512i some[kEdge];
      for (int64_t r = 0; r < kEdge; ++r) {
        const bool is = g * kEdge + r < count;
        some[r] = is ? load_some(x + rows[g * kEdge + r] * pool.in + t * kPairs, pool.in - t * kPairs) : __m512i{};
      }
      transpose(some);
      char* to = (char*)room.x + (g * room.deep + t) * kTileBytes;
      for (int i = 0; i < kEdge; ++i) _mm512_store_si512(to + 64 * i, some[i]);
    }
  }
}

// The sums of a shrink, [rank, row], scaled: rows [row, rank] of two bfloat16 numbers each.
void split_sums(const float* sums, __m512 scale, int64_t rows, uint16_t* shrunk, uint16_t* rest, int64_t apart) {
  __m512i some[kEdge];
  for (int i = 0; i < kEdge; ++i) some[i] = _mm512_load_si512(sums + kEdge * i);
  transpose(some);
  // What has no scale is zero, whatever was read.
  const __mmask16 used = _mm512_cmp_ps_mask(scale, __m512{}, _CMP_NEQ_UQ);
  for (int64_t r = 0; r < rows; ++r) {
    const Floats value = (Floats)_mm512_maskz_mul_ps(used, (__m512)some[r], scale);
    store(shrunk + r * apart, value);
    store(rest + r * apart, value - load(shrunk + r * apart));
  }
}

// Sub u of all rank rows against the rows of x.
void shrink_tiles(const HalfPool& pool, const int64_t* ranks, int64_t own, int64_t u, int64_t count, TileRoom& room) {
  const int64_t stride = pool.subs * pool.in;
  for (int64_t k = 0; k < own; k += kEdge) {
    const int64_t some = std::min<int64_t>(own - k, kEdge);
    bool whole = some == kEdge;  // rank rows that lie one after the other are read where they lie
    alignas(64) float by[kEdge] = {};
    for (int64_t i = 0; i < some; ++i) {
      whole &= ranks[k + i] == ranks[k] + i;
      by[i] = pool.scale[ranks[k + i] * pool.subs + u];
    }
    for (int64_t g = 0; g * kEdge < count; g += 2) {
      const bool two = (g + 1) * kEdge < count;
      const uint16_t* const x = room.x + g * room.deep * kTileBytes / 2;
      written();
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t t = 0; t < room.deep; ++t) {
        if (whole && (t + 1) * kPairs <= pool.in) {
          _tile_loadd(2, pool.a + ranks[k] * stride + u * pool.in + t * kPairs, stride * 2);
        } else {
          for (int64_t i = 0; i < kEdge; ++i) {
            const uint16_t* row = i < some ? pool.a + ranks[k + i] * stride + u * pool.in + t * kPairs : nullptr;
            _mm512_store_si512(room.a + i * kPairs, row ? load_some(row, pool.in - t * kPairs) : __m512i{});
          }
          written();
          _tile_loadd(2, room.a, 64);
        }
        _tile_loadd(3, x + t * kTileBytes / 2, 64);
        _tile_dpbf16ps(0, 2, 3);
        if (!two) continue;
        _tile_loadd(3, x + (room.deep + t) * kTileBytes / 2, 64);
        _tile_dpbf16ps(1, 2, 3);
      }
      const auto split = [&](int64_t group) {
        const int64_t at = group * kEdge;
        split_sums(room.sums, _mm512_load_ps(by), std::min<int64_t>(count - at, kEdge),
                   room.shrunk + at * room.apart + k, room.left_of(own) + at * room.apart + k, room.apart);
      };
      _tile_stored(0, room.sums, 64);
      written();
      split(g);
      if (!two) continue;
      _tile_stored(1, room.sums, 64);
      written();
      split(g + 1);
    }
  }
}

// Up to kColumns columns of B, from column `at` of the pool's rows: rank rows in pairs.
void pair_columns(const HalfPool& pool, const int64_t* ranks, int64_t own, int64_t at, int64_t width, TileRoom& room) {
  const int64_t deep = (own + kPairs - 1) / kPairs;
  for (int64_t k = 0; k < deep * kPairs; k += 2) {
    const int64_t rank = own <= kEdge ? k % kEdge : k;  // for what rounding left they are there once more
    const int64_t first = rank < own ? width : 0, second = rank + 1 < own ? width : 0;
    const uint16_t* const one = pool.b + (first ? ranks[rank] : 0) * pool.out + at;
    const uint16_t* const two = pool.b + (second ? ranks[rank + 1] : 0) * pool.out + at;
    for (int64_t c = 0; c < (width + kPairs - 1) / kPairs * kPairs; c += kEdge) {
      const __m512i low = spread(one + c, first - c), high = _mm512_slli_epi32(spread(two + c, second - c), 16);
      uint16_t* to = room.b + ((c / kEdge * deep + k / kPairs) * kEdge + k % kPairs / 2) * kPairs;
      _mm512_store_si512(to, _mm512_or_si512(low, high));
    }
  }
}

// Adds to the columns [at, at + width) of some rows of y.
void expand_tiles(const HalfPool& pool, uint16_t* y, const int64_t* rows, int64_t count, int64_t own, int64_t at,
                  int64_t width, TileRoom& room) {
  const int64_t deep = (own + kPairs - 1) / kPairs;
  const auto multiply = [&](const uint16_t* shrunk, const uint16_t* b) {  // two tiles of columns
    _tile_loadd(6, shrunk, 2 * room.apart);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, b + deep * kTileBytes / 2, 64);
    _tile_dpbf16ps(5, 6, 7);
  };
  for (int64_t c = 0; c < width; c += 2 * kEdge) {
    for (int64_t g = 0; g < count; g += kEdge) {
      written();
      _tile_zero(4);
      _tile_zero(5);
      for (int64_t t = 0; t < deep; ++t) {
        const uint16_t* const b = room.b + (c / kEdge * deep + t) * kTileBytes / 2;
        multiply(room.shrunk + g * room.apart + t * kPairs, b);
        if (own > kEdge) multiply(room.rest + g * room.apart + t * kPairs, b);
      }
      _tile_stored(4, room.sums, 8 * kEdge);
      _tile_stored(5, room.sums + kEdge, 8 * kEdge);
      written();
      for (int64_t r = g; r < std::min(count, g + kEdge); ++r) {
        uint16_t* const to = y + rows[r] * pool.out + at + c;
        const float* const sums = room.sums + (r - g) * 2 * kEdge;
        const Floats first = load(sums), second = load(sums + kEdge);
        const int64_t left = width - c;
        if (left >= 2 * kEdge) {
          store(to, load(to) + first);
          store(to + kEdge, load(to + kEdge) + second);
        } else {
          store_part(to, load_part(to, std::min<int64_t>(left, kEdge)) + first, std::min<int64_t>(left, kEdge));
          const int64_t rest = std::max<int64_t>(left - kEdge, 0);
          store_part(to + kEdge, load_part(to + kEdge, rest) + second, rest);
        }
      }
    }
  }
}

// See add_adapters of adapters.h. A row's bits do not depend on the rows beside it.
void add_tiled(const HalfPool& pool, const uint16_t* x, uint16_t* y, const int64_t* ranks, const int64_t* rank_starts,
               const int64_t* row_of, const int64_t* row_starts, int64_t adapters, int threads) {
  struct Share {
    int64_t adapter, from, count;
  };
  std::vector<Share> shares;
  int64_t widest = 0;
  for (int64_t s = 0; s < adapters; ++s) {
    const int64_t count = row_starts[s + 1] - row_starts[s];
    const int64_t each = ((count + threads - 1) / threads + kEdge - 1) / kEdge * kEdge;
    const int64_t most = std::min<int64_t>(each, kAtOnce);
    for (int64_t from = 0; from < count; from += most) shares.push_back({s, from, std::min(most, count - from)});
    widest = std::max(widest, rank_starts[s + 1] - rank_starts[s]);
  }
  // The largest first: what is left when a thread has nothing more to do is small.
  const auto size_of = [&](const Share& share) {
    return (rank_starts[share.adapter + 1] - rank_starts[share.adapter]) * (share.count + kEdge);
  };
  std::stable_sort(shares.begin(), shares.end(), [&](const Share& a, const Share& b) { return size_of(a) > size_of(b); });
#pragma omp parallel num_threads(std::min<int64_t>(threads, shares.size()))
  {
    // Kept from call to call: a thread's memory that is given back is taken from the kernel again, page by page.
    static thread_local std::vector<char> kept;
    TileRoom room(pool.in, widest, kept);
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto [s, from, count] = shares[i];
      const int64_t* const own_ranks = ranks + rank_starts[s];
      const int64_t own = rank_starts[s + 1] - rank_starts[s];
      const int64_t* const rows = row_of + row_starts[s] + from;
      shape_tiles(count);
      pair_rows(pool, x, rows, count, room);
      // Rows and rank rows that fill a tile up count for nothing.
      const int64_t filled = (count + kEdge - 1) / kEdge * kEdge * room.apart * 2;
      std::memset(room.shrunk, 0, filled);
      std::memset(room.rest, 0, filled);
      for (int64_t u = 0; u < pool.subs; ++u) {
        shrink_tiles(pool, own_ranks, own, u, count, room);
        for (int64_t at = pool.edges[u]; at < pool.edges[u + 1]; at += kColumns) {
          const int64_t width = std::min<int64_t>(kColumns, pool.edges[u + 1] - at);
          pair_columns(pool, own_ranks, own, at, width, room);
          expand_tiles(pool, y, rows, count, own, at, width, room);
        }
      }
    }
    _tile_release();
  }
}

}  // namespace
#endif
