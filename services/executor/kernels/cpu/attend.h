// Attention of query rows over the paged cache, and what a step adds to it; see loraport_attend of step.cpp.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "adapters.h"
#include "vectors.h"

namespace {

// to = rotary(from) of one head: pairs (i, i + half).
template <typename T>
void turn(const T* from, const T* cosine, const T* sine, T* to, int64_t half) {
  for (int64_t i = 0; i < half; i += kWide) {
    const int64_t left = half - i;
    const auto some = [&](auto get, auto set) {
      const Floats a = get(from + i), b = get(from + i + half), cos = get(cosine + i), sin = get(sine + i);
      set(to + i, a * cos - b * sin);
      set(to + i + half, b * cos + a * sin);
    };
    if (left >= kWide) {
      some([](const T* at) { return load(at); }, [](T* at, Floats value) { store(at, value); });
    } else {
      some([&](const T* at) { return load_part(at, left); }, [&](T* at, Floats value) { store_part(at, value, left); });
    }
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
struct Fresh {  // what a step adds to the cache, see loraport_attend
  const T *k, *v, *cosine, *sine;
  const int64_t* slots;
  int64_t k_stride, v_stride;
};

template <typename T>
void attend(const Cache& cache, const Fresh<T>& fresh, const T* q, T* keys, T* values, T* out, int64_t rows,
            int64_t q_stride, float scale, float cap, int threads) {
  const auto [table, begins, ends, q_heads, kv_heads, size, block, width] = cache;
  // Where there are fewer rows than threads, the heads of a row are shared among them.
  const int64_t parts = rows < threads ? kv_heads : 1, groups = kv_heads / parts, fold = q_heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores, query(groups * fold * size);
    std::vector<int64_t> places;
    std::vector<T> turned(fresh.cosine ? groups * fold * size : 0);
    const int64_t half = size / 2;
    if (fresh.k) {  // all of it before any row reads: rows of one prompt see one another
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t h = 0; h < kv_heads; ++h) {
          const int64_t to = (fresh.slots[r] * kv_heads + h) * size;
          const T* const key = fresh.k + r * fresh.k_stride + h * size;
          if (fresh.cosine) {
            turn(key, fresh.cosine + r * half, fresh.sine + r * half, keys + to, half);
          } else {
            std::copy_n(key, size, keys + to);
          }
          std::copy_n(fresh.v + r * fresh.v_stride + h * size, size, values + to);
        }
      }
    }
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
        const T* const from = q + r * q_stride + first * size;
        for (int64_t h = 0; fresh.cosine && h < groups * fold; ++h) {
          turn(from + h * size, fresh.cosine + r * half, fresh.sine + r * half, &turned[h * size], half);
        }
        copy_row(fresh.cosine ? turned.data() : from, query.data(), groups * fold * size);
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
