// Matrix products for few rows, and a whole decoder step in one call. `kernels.py` documents each function.
//
// A step of a few rows is bound by reading weights. They are stored in the order of reading, GROUP outputs at a time, and
// all rows of a tile use what was read. Every output is one sum in the order of its inputs, whichever tile its row is in:
// batch-invariant (invariant I2) by construction.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define HAS_PRODUCTS 1
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define AVX2 __attribute__((target("avx2,fma")))
#else
#define HAS_PRODUCTS 0
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
  int64_t instructions;
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
  const int64_t* taps;
  int64_t num_taps;
};

#if HAS_PRODUCTS

namespace {

constexpr int GROUP = 48;
constexpr int MAX_PARTS = 64;  // of the groups of a product, for threads
constexpr int AHEAD_BYTES = 4096;  // the processor's own prefetching stops at the end of a page

// One tile of outputs: GROUP outputs, of which the first `num_outputs` exist, of up to MAX_ROWS rows.
struct Tile {
  const BFloat16 *weights, *bias, *inputs;
  int64_t num_inputs, stride, num_outputs;
};

// 16 pairs of inputs and weights multiplied and added by one instruction (AVX512_BF16: Intel since Cooper Lake, AMD
// since Zen 4). 9 rows times 3 vectors of sums, the weights and an input just fit the 32 registers.
struct DotProducts {
  static constexpr int LANES = 16, VECTORS = GROUP / LANES, MAX_ROWS = 9;

  AVX512_BF16 static void store(BFloat16* to, __m256i halves, int64_t count) {
    std::memcpy(to, &halves, static_cast<size_t>(count) * sizeof(BFloat16));
  }
  // Rounded as if stored: logits equal transformers'.
  AVX512_BF16 static void store(float* to, __m256i halves, int64_t count) {
    const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    std::memcpy(to, &words, static_cast<size_t>(count) * sizeof(float));
  }

  template <int ROWS, typename Output>
  AVX512_BF16 static void multiply(const Tile& tile, Output* outputs) {
    __m512 sums[ROWS][VECTORS];
    const int32_t* pairs[ROWS];
    UNROLL for (int row = 0; row < ROWS; ++row) {
      pairs[row] = reinterpret_cast<const int32_t*>(tile.inputs + row * tile.num_inputs);
      UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_setzero_ps();
    }
    const char* at = reinterpret_cast<const char*>(tile.weights);
    for (int64_t pair = 0; pair < tile.num_inputs / 2; ++pair, at += 64 * VECTORS) {
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
      const int64_t count = std::min<int64_t>(LANES, tile.num_outputs - v * LANES);
      if (count <= 0) break;
      __m512 added = _mm512_setzero_ps();
      if (tile.bias != nullptr) {
        __m256i halves = _mm256_setzero_si256();
        std::memcpy(&halves, tile.bias + v * LANES, static_cast<size_t>(count) * sizeof(BFloat16));
        added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
      }
      UNROLL for (int row = 0; row < ROWS; ++row) {
        store(outputs + row * tile.stride + v * LANES, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[row][v], added)), count);
      }
    }
  }
};

// Where there is no such instruction, 8 products at a time, exact in float32, the second of each pair first (AVX2 and
// FMA: Intel since Haswell, AMD since Zen). Few rows are bound by reading weights, so they read all of GROUP at once;
// for more rows the sums of 33 % of it fit the 16 registers, and the rest of the weights comes from the cache.
struct WidenedProducts {
  static constexpr int LANES = 8, VECTORS = GROUP / LANES, MAX_ROWS = 6;

  AVX2 static __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  AVX2 static __m256 second_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
  }
  AVX2 static __m256 widened(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  // Rounds to nearest, ties to even; NaN stays NaN. The result is in the upper half of each word.
  AVX2 static __m256i rounded_words(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
  }
  AVX2 static void store(BFloat16* to, __m256 values, int64_t count) {
    const __m256i words = _mm256_srli_epi32(rounded_words(values), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    std::memcpy(to, &halves, static_cast<size_t>(count) * sizeof(BFloat16));
  }
  AVX2 static void store(float* to, __m256 values, int64_t count) {
    const __m256i words = _mm256_and_si256(rounded_words(values), _mm256_set1_epi32(static_cast<int32_t>(0xffff0000)));
    std::memcpy(to, &words, static_cast<size_t>(count) * sizeof(float));
  }

  template <int ROWS, int WIDTH, typename Output>
  AVX2 static void multiply_some(const Tile& tile, int64_t first, Output* outputs) {
    __m256 sums[ROWS][WIDTH];
    const int32_t* pairs[ROWS];
    UNROLL for (int row = 0; row < ROWS; ++row) {
      pairs[row] = reinterpret_cast<const int32_t*>(tile.inputs + row * tile.num_inputs);
      UNROLL for (int v = 0; v < WIDTH; ++v) sums[row][v] = _mm256_setzero_ps();
    }
    const char* at = reinterpret_cast<const char*>(tile.weights + 2 * first);
    for (int64_t pair = 0; pair < tile.num_inputs / 2; ++pair, at += 32 * VECTORS) {
      const __m256i* some = reinterpret_cast<const __m256i*>(at);
      UNROLL for (int line = 0; line < WIDTH / 2; ++line) _mm_prefetch(at + AHEAD_BYTES + 64 * line, _MM_HINT_T0);
      __m256 weights[WIDTH];
      UNROLL for (int v = 0; v < WIDTH; ++v) weights[v] = second_of(_mm256_loadu_si256(some + v));
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const __m256 input = second_of(_mm256_set1_epi32(pairs[row][pair]));
        UNROLL for (int v = 0; v < WIDTH; ++v) sums[row][v] = _mm256_fmadd_ps(input, weights[v], sums[row][v]);
      }
      UNROLL for (int v = 0; v < WIDTH; ++v) weights[v] = first_of(_mm256_loadu_si256(some + v));
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const __m256 input = first_of(_mm256_set1_epi32(pairs[row][pair]));
        UNROLL for (int v = 0; v < WIDTH; ++v) sums[row][v] = _mm256_fmadd_ps(input, weights[v], sums[row][v]);
      }
    }
    UNROLL for (int v = 0; v < WIDTH; ++v) {
      const int64_t at_output = first + v * LANES, count = std::min<int64_t>(LANES, tile.num_outputs - at_output);
      if (count <= 0) break;
      __m256 added = _mm256_setzero_ps();
      if (tile.bias != nullptr) {
        __m128i halves = _mm_setzero_si128();
        std::memcpy(&halves, tile.bias + at_output, static_cast<size_t>(count) * sizeof(BFloat16));
        added = widened(halves);
      }
      UNROLL for (int row = 0; row < ROWS; ++row) {
        store(outputs + row * tile.stride + at_output, _mm256_add_ps(sums[row][v], added), count);
      }
    }
  }

  template <int ROWS, typename Output>
  AVX2 static void multiply(const Tile& tile, Output* outputs) {
    constexpr int WIDTH = ROWS <= 2 ? VECTORS : 2;
    for (int64_t first = 0; first < std::min<int64_t>(GROUP, tile.num_outputs); first += WIDTH * LANES) {
      multiply_some<ROWS, WIDTH>(tile, first, outputs);
    }
  }
};

template <typename Instructions, int ROWS, typename Output>
void multiply_rows(const Tile& tile, int64_t num_rows, Output* outputs) {
  if (num_rows == ROWS) return Instructions::template multiply<ROWS>(tile, outputs);
  if constexpr (ROWS > 1) multiply_rows<Instructions, ROWS - 1>(tile, num_rows, outputs);
}

template <typename Instructions, typename Output>
void multiply_group(const Matrix& matrix, int64_t group, const BFloat16* inputs, Output* outputs, int64_t num_rows) {
  constexpr int64_t MAX_ROWS = Instructions::MAX_ROWS;
  const int64_t first = group * GROUP;
  const BFloat16* weights = matrix.weights + first * matrix.num_inputs;
  const BFloat16* bias = matrix.bias == nullptr ? nullptr : matrix.bias + first;
  for (int64_t row = 0, rest = num_rows; rest > 0;) {
    // Two tiles of about the same size rather than a full one and a small one.
    const int64_t rows = rest <= MAX_ROWS ? rest : std::min<int64_t>(MAX_ROWS, (rest + 1) / 2);
    const Tile tile = {weights, bias, inputs + row * matrix.num_inputs, matrix.num_inputs, matrix.num_outputs, matrix.num_outputs - first};
    multiply_rows<Instructions, MAX_ROWS>(tile, rows, outputs + row * matrix.num_outputs + first);
    row += rows;
    rest -= rows;
  }
}

template <typename Output>
void multiply_groups(const Matrix& matrix, int64_t first, int64_t end, const BFloat16* inputs, Output* outputs, int64_t num_rows) {
  for (int64_t group = first; group < end; ++group) {
    if (matrix.instructions == DOT_PRODUCTS) {
      multiply_group<DotProducts>(matrix, group, inputs, outputs, num_rows);
    } else {
      multiply_group<WidenedProducts>(matrix, group, inputs, outputs, num_rows);
    }
  }
}

// Every thread has a part of the groups, read in order. One that is done helps the others with the rest of theirs, so that
// a thread whose core does other work in between does not hold up the step.
template <typename Output>
void multiply(const Matrix& matrix, const BFloat16* inputs, Output* outputs, int64_t num_rows, int32_t num_threads) {
  const int64_t num_groups = (matrix.num_outputs + GROUP - 1) / GROUP;
  const int64_t num_parts = std::min<int64_t>({num_threads, num_groups, MAX_PARTS});
  if (num_parts <= 1) return multiply_groups(matrix, 0, num_groups, inputs, outputs, num_rows);
  struct alignas(64) Next {
    std::atomic<int64_t> group;
  } next[MAX_PARTS];
  const auto begin_of = [=](int64_t part) { return part * num_groups / num_parts; };
  for (int64_t part = 0; part < num_parts; ++part) next[part].group.store(begin_of(part), std::memory_order_relaxed);
#pragma omp parallel num_threads(num_parts)
  for (int64_t turn = 0, own = omp_get_thread_num(); turn < num_parts; ++turn) {
    const int64_t part = (own + turn) % num_parts, end = begin_of(part + 1);
    for (;;) {
      const int64_t group = next[part].group.fetch_add(1, std::memory_order_relaxed);
      if (group >= end) break;
      multiply_groups(matrix, group, group + 1, inputs, outputs, num_rows);
    }
  }
}

}  // namespace

EXPORT bool has_instructions(int64_t instructions) {
  if (instructions == DOT_PRODUCTS) return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return instructions == WIDENED_PRODUCTS && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

EXPORT void multiply_bfloat16(const Matrix* matrix, const BFloat16* inputs, BFloat16* outputs, int64_t num_rows, int32_t num_threads) {
  multiply(*matrix, inputs, outputs, num_rows, num_threads);
}

EXPORT bool decode_bfloat16(const Decoder* decoder, const Step* step, const int64_t* token_ids, const int64_t* wanted, int64_t num_wanted, BFloat16* activations, float* scores, int64_t stride, int32_t* slots, float* logits, BFloat16* tapped) {
  const int64_t rows = step->num_rows, width = decoder->width;
  BFloat16 *residual = activations, *normed = residual + rows * width, *addend = normed + rows * width;
  BFloat16 *narrow = addend + rows * width, *wide = narrow + rows * std::max(decoder->attended_width, decoder->intermediate);
  for (int64_t row = 0; row < rows; ++row) {
    if (token_ids[row] < 0 || token_ids[row] >= decoder->head.num_outputs) return false;
    std::memcpy(residual + row * width, decoder->embedding + token_ids[row] * width, width * sizeof(BFloat16));
  }
  const auto product = [step](const Matrix& matrix, const BFloat16* from, auto* to, int64_t count) {
    multiply(matrix, from, to, count, static_cast<int32_t>(step->num_threads));
  };
  const auto tap = [decoder, tapped, rows, width](int64_t layer, const BFloat16* states) {
    for (int64_t i = 0; tapped != nullptr && i < decoder->num_taps; ++i) {
      if (decoder->taps[i] != layer) continue;
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(tapped + (row * decoder->num_taps + i) * width, states + row * width, width * sizeof(BFloat16));
      }
    }
  };
  for (int64_t index = 0; index < decoder->num_layers; ++index) {
    const Layer& layer = decoder->layers[index];
    add_rms_norm_bfloat16(residual, index == 0 ? nullptr : addend, layer.input_norm, normed, rows, width, decoder->epsilon);
    tap(index, residual);
    product(layer.qkv, normed, wide, rows);
    rotate_and_store_bfloat16(wide, step, &layer.shape, decoder->cosines, decoder->sines, layer.query_norm, layer.key_norm, layer.keys, layer.values);
    if (!attend_bfloat16(wide, narrow, step, &layer.shape, layer.keys, layer.values, scores, stride, slots, 0, step->num_members)) return false;
    product(layer.output, narrow, addend, rows);
    add_rms_norm_bfloat16(residual, addend, layer.attention_norm, normed, rows, width, decoder->epsilon);
    product(layer.gate_up, normed, wide, rows);
    silu_mul_bfloat16(wide, narrow, rows, decoder->intermediate);
    product(layer.down, narrow, addend, rows);
  }
  add_rms_norm_bfloat16(residual, addend, decoder->norm, normed, rows, width, decoder->epsilon);
  tap(decoder->num_layers, normed);
  if (wanted != nullptr) {  // ascending, so that nothing is overwritten before it is moved
    for (int64_t i = 0; i < num_wanted; ++i) {
      std::memmove(normed + i * width, normed + wanted[i] * width, width * sizeof(BFloat16));
    }
  }
  product(decoder->head, normed, logits, wanted == nullptr ? rows : num_wanted);
  return true;
}

#else

EXPORT bool has_instructions(int64_t) { return false; }
EXPORT void multiply_bfloat16(const Matrix*, const BFloat16*, BFloat16*, int64_t, int32_t) {}
EXPORT bool decode_bfloat16(const Decoder*, const Step*, const int64_t*, const int64_t*, int64_t, BFloat16*, float*, int64_t, int32_t*, float*, BFloat16*) { return false; }

#endif
