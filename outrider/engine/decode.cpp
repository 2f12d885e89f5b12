// Matrix products for few rows, and a whole decoder step in one call. `kernels.py` says what each function does.
//
// A step of a few rows is bound by reading weights. They lie in the order they are read in, GROUP outputs at a time,
// and all rows of a tile use what was read. Every output is one sum in the order of its inputs, whichever tile its row
// is in: batch-invariant (invariant I2) by construction.

#include <algorithm>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define HAS_DOT_PRODUCTS 1
#define PRODUCTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#else
#define HAS_DOT_PRODUCTS 0
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

extern "C" {
void add_rms_norm_bfloat16(BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, int64_t, int64_t, float);
void silu_mul_bfloat16(const BFloat16*, BFloat16*, int64_t, int64_t);
void rotate_and_store_bfloat16(BFloat16*, const Step*, const Shape*, const float*, const float*, const BFloat16*, const BFloat16*, BFloat16*, BFloat16*);
bool attend_bfloat16(const BFloat16*, BFloat16*, const Step*, const Shape*, const BFloat16*, const BFloat16*, float*, int64_t, int32_t*, int64_t, int64_t);
}

struct Matrix {
  const BFloat16* weights;  // [num_groups][num_inputs / 2][GROUP][2], zeros behind the last output
  const BFloat16* bias;     // [num_outputs] or none
  int64_t num_inputs, num_outputs;
};

struct Layer {
  const BFloat16 *input_norm, *attention_norm, *query_norm, *key_norm;
  Matrix qkv, output, gate_up, down;
  Shape shape;
  BFloat16 *keys, *values;  // this layer's cache
};

struct Decoder {
  const Layer* layers;
  int64_t num_layers, width, intermediate, attended_width;
  const BFloat16 *embedding, *norm;
  Matrix head;
  const float *cosines, *sines;
  float epsilon;
  int32_t num_threads;
};

#if HAS_DOT_PRODUCTS

namespace {

constexpr int LANES = 16;
constexpr int VECTORS = 3;
constexpr int GROUP = VECTORS * LANES;
// 9 rows times 3 vectors of sums, the weights and an input just fit the 32 registers.
constexpr int TILE_ROWS = 9;
constexpr int AHEAD_BYTES = 4096;  // the processor's own prefetching stops at the end of a page

PRODUCTS inline void store(BFloat16* to, __m256i halves, int64_t count) {
  std::memcpy(to, &halves, static_cast<size_t>(count) * sizeof(BFloat16));
}
// Rounded as if stored: logits have the values that transformers' have.
PRODUCTS inline void store(float* to, __m256i halves, int64_t count) {
  const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  std::memcpy(to, &words, static_cast<size_t>(count) * sizeof(float));
}

// GROUP outputs of `ROWS` rows, of which the first `num_outputs` exist.
template <int ROWS, typename Output>
PRODUCTS inline void multiply_tile(const BFloat16* weights, const BFloat16* bias, const BFloat16* inputs, int64_t num_inputs, Output* outputs, int64_t stride, int64_t num_outputs) {
  __m512 sums[ROWS][VECTORS];
  const int32_t* pairs[ROWS];
  UNROLL for (int row = 0; row < ROWS; ++row) {
    pairs[row] = reinterpret_cast<const int32_t*>(inputs + row * num_inputs);
    UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_setzero_ps();
  }
  const char* at = reinterpret_cast<const char*>(weights);
  for (int64_t pair = 0; pair < num_inputs / 2; ++pair, at += 64 * VECTORS) {
    __m512bh some[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      _mm_prefetch(at + AHEAD_BYTES + 64 * v, _MM_HINT_T0);
      some[v] = (__m512bh)_mm512_loadu_si512(at + 64 * v);
    }
    UNROLL for (int row = 0; row < ROWS; ++row) {
      const __m512bh input = (__m512bh)_mm512_set1_epi32(pairs[row][pair]);
      UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], input, some[v]);
    }
  }
  UNROLL for (int v = 0; v < VECTORS; ++v) {
    const int64_t count = std::min<int64_t>(LANES, num_outputs - v * LANES);
    if (count <= 0) break;
    __m512 added = _mm512_setzero_ps();
    if (bias != nullptr) {
      __m256i halves = _mm256_setzero_si256();
      std::memcpy(&halves, bias + v * LANES, static_cast<size_t>(count) * sizeof(BFloat16));
      added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    UNROLL for (int row = 0; row < ROWS; ++row) {
      store(outputs + row * stride + v * LANES, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[row][v], added)), count);
    }
  }
}

template <typename Output>
PRODUCTS void multiply_group(const Matrix& matrix, int64_t group, const BFloat16* inputs, Output* outputs, int64_t num_rows) {
  const int64_t first = group * GROUP;
  const BFloat16* weights = matrix.weights + first * matrix.num_inputs;
  const BFloat16* bias = matrix.bias == nullptr ? nullptr : matrix.bias + first;
  for (int64_t row = 0, rest = num_rows; rest > 0;) {
    // Two tiles of about the same size rather than a full one and a small one.
    const int64_t rows = rest <= TILE_ROWS ? rest : std::min<int64_t>(TILE_ROWS, (rest + 1) / 2);
    const BFloat16* from = inputs + row * matrix.num_inputs;
    Output* to = outputs + row * matrix.num_outputs + first;
#define TILE(ROWS) \
  case ROWS: \
    multiply_tile<ROWS>(weights, bias, from, matrix.num_inputs, to, matrix.num_outputs, matrix.num_outputs - first); \
    break;
    switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) }
#undef TILE
    row += rows;
    rest -= rows;
  }
}

template <typename Output>
void multiply(const Matrix& matrix, const BFloat16* inputs, Output* outputs, int64_t num_rows, int32_t num_threads) {
  const int64_t num_groups = (matrix.num_outputs + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t group = 0; group < num_groups; ++group) multiply_group(matrix, group, inputs, outputs, num_rows);
}

}  // namespace

EXPORT bool has_products() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }

EXPORT void multiply_bfloat16(const Matrix* matrix, const BFloat16* inputs, BFloat16* outputs, int64_t num_rows, int32_t num_threads) {
  multiply(*matrix, inputs, outputs, num_rows, num_threads);
}

EXPORT bool decode_bfloat16(const Decoder* decoder, const Step* step, const int64_t* token_ids, const int64_t* wanted, int64_t num_wanted, BFloat16* activations, float* scores, int64_t stride, int32_t* slots, float* logits) {
  const int64_t rows = step->num_rows, width = decoder->width;
  BFloat16 *residual = activations, *normed = residual + rows * width, *addend = normed + rows * width;
  BFloat16 *narrow = addend + rows * width, *wide = narrow + rows * std::max(decoder->attended_width, decoder->intermediate);
  for (int64_t row = 0; row < rows; ++row) {
    if (token_ids[row] < 0 || token_ids[row] >= decoder->head.num_outputs) return false;
    std::memcpy(residual + row * width, decoder->embedding + token_ids[row] * width, width * sizeof(BFloat16));
  }
  const auto product = [decoder](const Matrix& matrix, const BFloat16* from, auto* to, int64_t count) {
    multiply(matrix, from, to, count, decoder->num_threads);
  };
  for (int64_t index = 0; index < decoder->num_layers; ++index) {
    const Layer& layer = decoder->layers[index];
    add_rms_norm_bfloat16(residual, index == 0 ? nullptr : addend, layer.input_norm, normed, rows, width, decoder->epsilon);
    product(layer.qkv, normed, wide, rows);
    rotate_and_store_bfloat16(wide, step, &layer.shape, decoder->cosines, decoder->sines, layer.query_norm, layer.key_norm, layer.keys, layer.values);
    if (!attend_bfloat16(wide, narrow, step, &layer.shape, layer.keys, layer.values, scores, stride, slots, 0, step->num_members)) return false;
    product(layer.output, narrow, addend, rows);
    add_rms_norm_bfloat16(residual, addend, layer.attention_norm, normed, rows, width, decoder->epsilon);
    product(layer.gate_up, normed, wide, rows);
    silu_mul_bfloat16(wide, narrow, rows, decoder->intermediate);
    product(layer.down, narrow, addend, rows);
  }
  if (wanted != nullptr) {  // ascending, so that nothing is overwritten before it was moved
    for (int64_t i = 0; i < num_wanted; ++i) {
      std::memmove(residual + i * width, residual + wanted[i] * width, width * sizeof(BFloat16));
      std::memmove(addend + i * width, addend + wanted[i] * width, width * sizeof(BFloat16));
    }
  }
  const int64_t num_last = wanted == nullptr ? rows : num_wanted;
  add_rms_norm_bfloat16(residual, addend, decoder->norm, normed, num_last, width, decoder->epsilon);
  product(decoder->head, normed, logits, num_last);
  return true;
}

#else

EXPORT bool has_products() { return false; }
EXPORT void multiply_bfloat16(const Matrix*, const BFloat16*, BFloat16*, int64_t, int32_t) {}
EXPORT bool decode_bfloat16(const Decoder*, const Step*, const int64_t*, const int64_t*, int64_t, BFloat16*, float*, int64_t, int32_t*, float*) { return false; }

#endif
