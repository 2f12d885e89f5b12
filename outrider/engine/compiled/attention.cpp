// Attention in bfloat16 with the processor's dot products (AVX512_BF16: Intel since Cooper Lake, AMD since Zen 4).
// `kernels.py` documents the function.
//
// As FlashAttention (2205.14135) does, keys are read in blocks, and a row's highest score, its sum of weights and its
// weighted values are carried from block to block. Keys and values of a block are rearranged once for all rows that read
// them, so that no sum goes across a vector. Weights are rounded to bfloat16 before they are multiplied with values, as
// transformers does it; sums are float32.
//
// Nodes of a hint tree share the blocks of their sequence's text, with each other and with rows that follow it in a line.
//
// Blocks begin at multiples of BLOCK in the sequence, and a row takes part in a block only where it sees one of its keys:
// what is added to a row, and in which order, depends on the row's own position alone. That makes it batch-invariant
// (invariant I2) by construction.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace {

constexpr int BLOCK = 256;    // keys
constexpr int TILE = 96;      // queries that share a rearranged block
constexpr int TOGETHER = 8;   // queries whose scores are computed at a time
constexpr int MAX_DIM = 128;
constexpr float LOWEST = -3.0e38f;  // a score that nothing is below; not infinity, whose differences are no numbers

// What one thread needs for a block and the queries of a tile.
struct alignas(64) Scratch {
  BFloat16 keys[BLOCK * MAX_DIM];    // [BLOCK / LANES][head_dim / 2][LANES][2]
  BFloat16 values[BLOCK * MAX_DIM];  // [BLOCK / 2][head_dim][2]
  float scores[TOGETHER][BLOCK];
  BFloat16 weights[TILE][BLOCK];
  float sums[TILE * MAX_DIM];  // weighted values so far
  float highest[TILE], total[TILE], factor[TILE];
  bool sees[TILE];  // a key of the block
};

struct Query {
  const int32_t* pairs;  // [head_dim / 2]
  BFloat16* output;
  int32_t first_key, num_keys;
  const Member* member;
};

// Whether a query finds the keys of a block where the text has them, and not some of them in its path.
INLINE bool reads_text(const Query& query, int32_t start) { return std::min(start + BLOCK, query.num_keys) <= query.member->tree_start; }

AVX512_BF16 INLINE __m512i load_line(const void* from) { return _mm512_loadu_si512(from); }

// 16 x 16 words.
AVX512_BF16 INLINE void transpose(__m512i* rows) {
  __m512i a[16], b[16];
  UNROLL for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

// A key of the block; zeros behind the last one.
template <int DIM>
AVX512_BF16 INLINE __m512i part_of(const BFloat16* cache, int64_t kv_width, const int32_t* slots, int32_t key, int32_t count, int part) {
  if (key >= count) return _mm512_setzero_si512();
  const BFloat16* from = cache + slots[key] * kv_width + part * 2 * LANES;
  if constexpr (DIM == LANES) return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return load_line(from);
}

// The keys of a cache lie apart from each other, so that the processor does not foresee which is next.
template <int DIM>
AVX512_BF16 INLINE void prefetch(const BFloat16* cache, int64_t kv_width, const int32_t* slots, int32_t key, int32_t count) {
  if (key >= count) return;
  const BFloat16* from = cache + slots[key] * kv_width;
  for (int i = 0; i < DIM; i += 2 * LANES) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

template <int DIM>
AVX512_BF16 INLINE void arrange_keys(const BFloat16* cache, int64_t kv_width, const int32_t* slots, int32_t count, BFloat16* to) {
  constexpr int PARTS = DIM < 2 * LANES ? 1 : DIM / (2 * LANES), PAIRS = DIM / 2 / PARTS;
  for (int32_t first = 0; first < count; first += LANES) {
    for (int i = 0; i < LANES; ++i) prefetch<DIM>(cache, kv_width, slots, first + LANES + i, count);
    for (int part = 0; part < PARTS; ++part) {
      __m512i rows[LANES];
      UNROLL for (int i = 0; i < LANES; ++i) rows[i] = part_of<DIM>(cache, kv_width, slots, first + i, count, part);
      transpose(rows);
      UNROLL for (int i = 0; i < PAIRS; ++i) {
        _mm512_storeu_si512(to + (first / LANES * DIM / 2 + part * PAIRS + i) * 2 * LANES, rows[i]);
      }
    }
  }
}

template <int DIM>
AVX512_BF16 INLINE void arrange_values(const BFloat16* cache, int64_t kv_width, const int32_t* slots, int32_t count, BFloat16* to) {
  constexpr int PARTS = DIM < 2 * LANES ? 1 : DIM / (2 * LANES);
  const __m512i steps = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i upper = _mm512_add_epi16(steps, _mm512_set1_epi16(16));
  for (int32_t key = 0; key < count; key += 2) {
    for (int i = 0; i < 2; ++i) prefetch<DIM>(cache, kv_width, slots, key + LANES + i, count);
    for (int part = 0; part < PARTS; ++part) {
      const __m512i one = part_of<DIM>(cache, kv_width, slots, key, count, part);
      const __m512i other = part_of<DIM>(cache, kv_width, slots, key + 1, count, part);
      BFloat16* at = to + key * DIM + part * 4 * LANES;
      _mm512_storeu_si512(at, _mm512_permutex2var_epi16(one, steps, other));
      if constexpr (DIM > LANES) _mm512_storeu_si512(at + 2 * LANES, _mm512_permutex2var_epi16(one, upper, other));
    }
  }
}

// Scores of QUERIES queries and the keys of a block, so many vectors of keys at a time that their sums fill the registers.
template <int QUERIES, int DIM>
AVX512_BF16 INLINE void score(const Query* queries, const BFloat16* keys, int32_t count, float scale, float (*scores)[BLOCK]) {
  constexpr int VECTORS = QUERIES <= 2 ? 8 : QUERIES <= 4 ? 4 : 2;
  for (int32_t first = 0; first < count; first += VECTORS * LANES) {
    __m512 sums[QUERIES][VECTORS];
    UNROLL for (int q = 0; q < QUERIES; ++q) {
      UNROLL for (int v = 0; v < VECTORS; ++v) sums[q][v] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < DIM / 2; ++pair) {
      __m512bh some[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        some[v] = (__m512bh)load_line(keys + (first + v * LANES) * DIM + pair * 2 * LANES);
      }
      UNROLL for (int q = 0; q < QUERIES; ++q) {
        const __m512bh input = (__m512bh)_mm512_set1_epi32(queries[q].pairs[pair]);
        UNROLL for (int v = 0; v < VECTORS; ++v) sums[q][v] = _mm512_dpbf16_ps(sums[q][v], input, some[v]);
      }
    }
    UNROLL for (int q = 0; q < QUERIES; ++q) {
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        _mm512_storeu_ps(scores[q] + first + v * LANES, _mm512_mul_ps(sums[q][v], _mm512_set1_ps(scale)));
      }
    }
  }
}

// Turns a query's scores into weights, of which those outside [begin, end) are zero, and carries its sums on.
AVX512_BF16 INLINE void weigh(float* scores, int32_t begin, int32_t end, int32_t count, float softcap, Scratch& scratch, int q) {
  if (softcap > 0.0f) {
    for (int32_t i = begin; i < end; ++i) scores[i] = std::tanh(scores[i] / softcap) * softcap;
  }
  Floats most = broadcast(LOWEST);
  const int32_t first = begin / LANES * LANES;
  for (int32_t i = first; i < end; i += LANES) {
    const Ints at = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + i;
    const Floats some = (at >= begin) & (at < end) ? load(scores + i) : broadcast(LOWEST);
    most = some > most ? some : most;
    store(scores + i, some);
  }
  float highest = scratch.highest[q];
  const float before = highest;
  for (int lane = 0; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
  Floats total{};
  BFloat16* weights = scratch.weights[q];
  std::memset(weights, 0, static_cast<size_t>(first) * sizeof(BFloat16));
  for (int32_t i = first; i < end; i += LANES) {
    const Floats weight = exponential(load(scores + i) - highest);
    total += weight;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh((__m512)weight));
  }
  const int32_t stop = (end + LANES - 1) / LANES * LANES;
  const int32_t whole = (count + 1) / 2 * 2;
  if (stop < whole) std::memset(weights + stop, 0, static_cast<size_t>(whole - stop) * sizeof(BFloat16));
  const float factor = before == LOWEST ? 0.0f : std::exp(before - highest);
  scratch.highest[q] = highest;
  scratch.total[q] = scratch.total[q] * factor + sum(total);
  scratch.factor[q] = factor;
}

// Adds a block's weighted values to the sums of QUERIES queries from `first` on.
template <int QUERIES, int DIM>
AVX512_BF16 INLINE void add_values(Scratch& scratch, int first, int32_t count) {
  constexpr int VECTORS = DIM / LANES;
  __m512 sums[QUERIES][VECTORS];
  const int32_t* weights[QUERIES];
  UNROLL for (int q = 0; q < QUERIES; ++q) {
    weights[q] = reinterpret_cast<const int32_t*>(scratch.weights[first + q]);
    const __m512 factor = _mm512_set1_ps(scratch.factor[first + q]);
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      sums[q][v] = _mm512_mul_ps(_mm512_loadu_ps(scratch.sums + (first + q) * DIM + v * LANES), factor);
    }
  }
  for (int32_t pair = 0; pair < (count + 1) / 2; ++pair) {
    __m512bh some[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) some[v] = (__m512bh)load_line(scratch.values + pair * 2 * DIM + v * 2 * LANES);
    UNROLL for (int q = 0; q < QUERIES; ++q) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[q][pair]);
      UNROLL for (int v = 0; v < VECTORS; ++v) sums[q][v] = _mm512_dpbf16_ps(sums[q][v], weight, some[v]);
    }
  }
  UNROLL for (int q = 0; q < QUERIES; ++q) {
    if (!scratch.sees[first + q]) continue;
    UNROLL for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(scratch.sums + (first + q) * DIM + v * LANES, sums[q][v]);
  }
}

template <int QUERIES, int DIM>
AVX512_BF16 void score_some(int num_queries, const Query* queries, const BFloat16* keys, int32_t count, float scale, float (*scores)[BLOCK]) {
  if (num_queries == QUERIES) return score<QUERIES, DIM>(queries, keys, count, scale, scores);
  if constexpr (QUERIES > 1) score_some<QUERIES - 1, DIM>(num_queries, queries, keys, count, scale, scores);
}
template <int QUERIES, int DIM>
AVX512_BF16 void add_some_values(int num_queries, Scratch& scratch, int first, int32_t count) {
  if (num_queries == QUERIES) return add_values<QUERIES, DIM>(scratch, first, count);
  if constexpr (QUERIES > 1) add_some_values<QUERIES - 1, DIM>(num_queries, scratch, first, count);
}

INLINE int32_t most_keys(const Query* queries, int first, int last) {
  int32_t most = 0;
  for (int q = first; q < last; ++q) most = std::max(most, queries[q].num_keys);
  return most;
}

// Adds what a block's keys bring to queries [first, last), which find them in the same slots.
template <int DIM>
AVX512_BF16 INLINE void attend_block(const Query* queries, int first, int last, int32_t start, int32_t count, const int32_t* slots, const BFloat16* keys, const BFloat16* values, int64_t kv_width, const Shape& shape, Scratch& scratch) {
  constexpr int VECTORS = DIM / LANES, ADDED_TOGETHER = VECTORS <= 2 ? 8 : 24 / VECTORS;  // their sums fit the registers
  arrange_keys<DIM>(keys, kv_width, slots, count, scratch.keys);
  arrange_values<DIM>(values, kv_width, slots, count, scratch.values);
  for (int some = first; some < last; some += TOGETHER) {
    const int end = std::min(some + TOGETHER, last);
    const int32_t seen = std::min(most_keys(queries, some, end) - start, count);
    if (seen > 0) score_some<TOGETHER, DIM>(end - some, queries + some, scratch.keys, seen, shape.scale, scratch.scores);
    for (int q = some; q < end; ++q) {
      const int32_t from = std::max(queries[q].first_key - start, 0), to = std::min(queries[q].num_keys - start, count);
      scratch.sees[q] = from < to;
      if (from < to) weigh(scratch.scores[q - some], from, to, count, shape.softcap, scratch, q);
    }
  }
  for (int some = first; some < last; some += ADDED_TOGETHER) {
    const int end = std::min(some + ADDED_TOGETHER, last);
    const int32_t seen = std::min(most_keys(queries, some, end) - start, count);
    if (seen > 0) add_some_values<ADDED_TOGETHER, DIM>(end - some, scratch, some, seen);
  }
}

// Attention of up to TILE queries over one KV head, those of a member side by side. slots: of the text, by position.
template <int DIM>
AVX512_BF16 void attend_tile(const Query* queries, int num_queries, const Step& step, const int32_t* slots, const BFloat16* keys, const BFloat16* values, int64_t kv_width, const Shape& shape) {
  static thread_local Scratch scratch;
  constexpr int VECTORS = DIM / LANES;
  int32_t begin = queries[0].first_key, end = 0;
  for (int q = 0; q < num_queries; ++q) {
    begin = std::min(begin, queries[q].first_key);
    end = std::max(end, queries[q].num_keys);
    scratch.highest[q] = LOWEST;
    scratch.total[q] = 0.0f;
  }
  std::memset(scratch.sums, 0, static_cast<size_t>(num_queries) * DIM * sizeof(float));
  for (int32_t start = begin / BLOCK * BLOCK; start < end; start += BLOCK) {
    for (int first = 0, last; first < num_queries; first = last) {
      const bool is_text = reads_text(queries[first], start);
      for (last = first + 1; last < num_queries; ++last) {
        if (is_text ? !reads_text(queries[last], start) : queries[last].member != queries[first].member) break;
      }
      const int32_t count = std::min(BLOCK, most_keys(queries, first, last) - start);
      if (count <= 0) continue;
      int32_t own[BLOCK];
      const Member& member = *queries[first].member;
      for (int32_t p = start; !is_text && p < start + count; ++p) own[p - start] = p < member.tree_start ? slots[p] : path_slot(step, member, p);
      attend_block<DIM>(queries, first, last, start, count, is_text ? slots + start : own, keys, values, kv_width, shape, scratch);
    }
  }
  for (int q = 0; q < num_queries; ++q) {
    const float factor = 1.0f / scratch.total[q];
    for (int v = 0; v < VECTORS; ++v) {
      // Zero is added, so that a sum of nothing has the same sign whatever was added to it.
      store(queries[q].output + v * LANES, (load(scratch.sums + q * DIM + v * LANES) + 0.0f) * factor);
    }
  }
}

// Queries `[first, first + TILE)` of those that read one KV head; they are ordered by member, then by row, then by head.
template <int DIM>
void attend_part(const BFloat16* qkv, BFloat16* output, const Step& step, const Shape& shape, const Member* members, int64_t num_rows, const int32_t* slots, const BFloat16* keys, const BFloat16* values, int64_t kv_head, int64_t first) {
  const int64_t kv_width = shape.num_kv_heads * DIM, share = shape.num_heads / shape.num_kv_heads;
  const int64_t width = shape.num_heads * DIM + 2 * kv_width;
  const int count = static_cast<int>(std::min<int64_t>(TILE, share * num_rows - first));
  Query queries[TILE];
  const Member* member = members;
  int64_t before = 0;  // rows of the members before
  for (int q = 0; q < count; ++q) {
    while ((first + q) / share - before >= member->num_rows) before += member++->num_rows;
    const int64_t row = (first + q) / share - before, head = kv_head * share + (first + q) % share;
    const int32_t num_keys = member->first_position + static_cast<int32_t>(row) + 1;
    queries[q] = {
        reinterpret_cast<const int32_t*>(qkv + (member->first_row + row) * width + head * DIM),
        output + (member->first_row + row) * shape.num_heads * DIM + head * DIM,
        shape.window > 0 ? std::max<int32_t>(0, num_keys - static_cast<int32_t>(shape.window)) : 0,
        num_keys,
        member,
    };
  }
  attend_tile<DIM>(queries, count, step, slots, keys + kv_head * DIM, values + kv_head * DIM, kv_width, shape);
}

constexpr int64_t PRODUCTS_WORTH_THREADS = 1 << 22;  // about as many as take 50 us

template <int DIM>
void attend_sequence(const BFloat16* qkv, BFloat16* output, const Step& step, const Shape& shape, const Member* members, int64_t num_members, const int32_t* slots, const BFloat16* keys, const BFloat16* values) {
  int64_t num_rows = 0, num_keys = 0;
  for (int64_t i = 0; i < num_members; ++i) {
    num_rows += members[i].num_rows;
    num_keys += static_cast<int64_t>(members[i].num_rows) * (members[i].first_position + members[i].num_rows);
  }
  const int64_t num_tiles = (shape.num_heads / shape.num_kv_heads * num_rows + TILE - 1) / TILE, num_parts = shape.num_kv_heads * num_tiles;
  const int32_t num_threads = static_cast<int32_t>(step.num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && 2 * shape.num_heads * num_keys * DIM > PRODUCTS_WORTH_THREADS)
  for (int64_t part = 0; part < num_parts; ++part) {
    attend_part<DIM>(qkv, output, step, shape, members, num_rows, slots, keys, values, part / num_tiles, part % num_tiles * TILE);
  }
}

}  // namespace

bool attend_sequence_dot_products(const BFloat16* qkv, BFloat16* output, const Step& step, const Shape& shape, const Member* members, int64_t num_members, const int32_t* slots, const BFloat16* keys, const BFloat16* values) {
  switch (shape.head_dim) {
    case 16: attend_sequence<16>(qkv, output, step, shape, members, num_members, slots, keys, values); return true;
    case 32: attend_sequence<32>(qkv, output, step, shape, members, num_members, slots, keys, values); return true;
    case 64: attend_sequence<64>(qkv, output, step, shape, members, num_members, slots, keys, values); return true;
    case 128: attend_sequence<128>(qkv, output, step, shape, members, num_members, slots, keys, values); return true;
  }
  return false;
}

#else

bool attend_sequence_dot_products(const BFloat16*, BFloat16*, const Step&, const Shape&, const Member*, int64_t, const int32_t*, const BFloat16*, const BFloat16*) { return false; }

#endif
