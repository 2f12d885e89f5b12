// Vectors of 16 floats, GCC's portable ones, for all kernels. Everything is inlined, so that it is compiled for the
// processor that the calling function is compiled for.

#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef float UnalignedFloats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint32_t UnalignedWords __attribute__((vector_size(64), aligned(2)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(32), aligned(2)));

INLINE Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
INLINE Floats load(const BFloat16* from) {
  const Halves halves = *reinterpret_cast<const UnalignedHalves*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN. The result is in the upper half of each word.
INLINE Words rounded_words(Floats values) {
  const Words bits = reinterpret_cast<Words>(values);
  const Words up = bits + 0x7fff + ((bits >> 16) & 1);
  return (values != values) ? Words{} + 0x7fc00000 : up;
}
INLINE Halves rounded(Floats values) { return __builtin_convertvector(rounded_words(values) >> 16, Halves); }

INLINE void store(float* to, Floats values) { *reinterpret_cast<UnalignedFloats*>(to) = values; }
INLINE void store(BFloat16* to, Floats values) { *reinterpret_cast<UnalignedHalves*>(to) = rounded(values); }

// The value as it would be after being stored and loaded.
INLINE Floats as_stored(const float*, Floats values) { return values; }
INLINE Floats as_stored(const BFloat16*, Floats values) {
  return reinterpret_cast<Floats>(__builtin_convertvector(rounded(values), Words) << 16);
}

// Loads the first `count` values; zeros follow.
template <typename T>
INLINE Floats load_some(const T* from, int count) {
  T padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}
template <typename T>
INLINE void store_some(T* to, Floats values, int count) {
  T padded[LANES];
  store(padded, values);
  std::memcpy(to, padded, count * sizeof(T));
}

INLINE Floats broadcast(float value) { return value - Floats{}; }

INLINE float sum(Floats v) {
  v += __builtin_shuffle(v, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  v += __builtin_shuffle(v, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
  return v[0];
}

INLINE Floats exponential(Floats x) {
  // exp(x) = 2^n * exp(r), |r| <= ln(2)/2, with the polynomial of Cephes' expf.
  const Floats lowest = broadcast(-87.0f), highest = broadcast(88.0f);
  const Ints is_tiny = x < lowest;
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x * 1.44269504088896341f + magic) - magic;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return is_tiny ? Floats{} : p * reinterpret_cast<Floats>(exponent);
}

}  // namespace
