// Vectors of float32 numbers, and the same of bfloat16 ones: a float32 number's upper half.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Floats of a vector; compilers split it where the machine's are shorter.
#ifdef __AVX512F__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
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

// A bfloat16 number is the upper half of a float32 one.
inline Floats load(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#ifdef __AVX512F__
  const Bits bits = (Bits)_mm512_cvtepu16_epi32((__m256i)halves) << 16;  // GCC widens two halves apart below
#else
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
#endif
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

inline Floats load_part(const uint16_t* from, int64_t count) {
  uint16_t part[kWide] = {};
  std::memcpy(part, from, count * sizeof(uint16_t));
  return load(part);
}

// Rounded to the nearest, ties to even, as torch does.
inline Halves narrow(Floats value) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)value);  // what is too small for a normal number becomes zero
#else
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
  return __builtin_convertvector(value != value ? Bits{} + 0x7fc0 : bits, Halves);
#endif
}

inline void store(uint16_t* to, Floats value) {
  const Halves halves = narrow(value);
  std::memcpy(to, &halves, sizeof halves);
}

inline void store_part(float* to, Floats value, int64_t count) { std::memcpy(to, &value, count * sizeof(float)); }

inline void store_part(uint16_t* to, Floats value, int64_t count) {
  const Halves halves = narrow(value);
  std::memcpy(to, &halves, count * sizeof(uint16_t));
}

// The same numbers as another type.
template <typename From, typename To>
void copy_row(const From* from, To* to, int64_t size) {
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) store(to + i, load(from + i));
  store_part(to + i, load_part(from + i, size - i), size - i);
}

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

template <typename T>
inline float dot(const float* a, const T* b, int64_t size) {
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

template <typename T>
inline void add_scaled(float* to, const T* from, float by, int64_t size) {
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

}  // namespace
