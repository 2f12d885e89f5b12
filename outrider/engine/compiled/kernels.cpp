// CPU kernels between the matrix products of a decoder layer. `kernels.py` documents each function.
//
// Every output row is computed from its own inputs by the same operations in the same order, whatever else is in the
// batch: loops over rows share loaded keys and values, never a sum. That makes them batch-invariant (invariant I2) by
// construction. Vectors are GCC's portable ones; the compiler clones each entry point for the processors below and the
// right one is chosen when the library is loaded.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "vectors.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define EXPORT extern "C" CLONED __attribute__((visibility("default")))

namespace {

constexpr int MAX_QUERIES = 24;  // sharing one pass over the keys; a multiple of 4
constexpr int MAX_HEAD_VECTORS = 16;

// Loads a head's values as vectors. Those of bfloat16 are split into even and odd ones, which costs an operation each
// where widening in order costs several; queries, keys and values are split alike, so that products are unaffected.
template <int VECTORS>
INLINE void load_head(const float* from, Floats* to) {
  UNROLL for (int v = 0; v < VECTORS; ++v) to[v] = load(from + v * LANES);
}
template <int VECTORS>
INLINE void load_head(const BFloat16* from, Floats* to) {
  if constexpr (VECTORS % 2 == 0) {
    UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const Words pairs = *reinterpret_cast<const UnalignedWords*>(from + v * LANES);
      to[v] = reinterpret_cast<Floats>(pairs << 16);
      to[v + 1] = reinterpret_cast<Floats>(pairs & 0xffff0000);
    }
  } else {
    UNROLL for (int v = 0; v < VECTORS; ++v) to[v] = load(from + v * LANES);
  }
}
template <int VECTORS>
INLINE void store_head(float* to, const Floats* from, float factor) {
  UNROLL for (int v = 0; v < VECTORS; ++v) store(to + v * LANES, from[v] * factor);
}
template <int VECTORS>
INLINE void store_head(BFloat16* to, const Floats* from, float factor) {
  if constexpr (VECTORS % 2 == 0) {
    UNROLL for (int v = 0; v < VECTORS; v += 2) {
      const Words even = rounded_words(from[v] * factor) >> 16, odd = rounded_words(from[v + 1] * factor) & 0xffff0000;
      *reinterpret_cast<UnalignedWords*>(to + v * LANES) = even | odd;
    }
  } else {
    UNROLL for (int v = 0; v < VECTORS; ++v) store(to + v * LANES, from[v] * factor);
  }
}

// Adds halves of pairs of vectors, so that after four levels lane i holds the sum of vector i. Each sum pairs lanes as
// `sum` does, so that a score has the same bits whichever of the two computed it.
INLINE Floats halve(Floats a, Floats b) {
  return __builtin_shuffle(a, b, Ints{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
         __builtin_shuffle(a, b, Ints{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}
INLINE Floats quarter(Floats a, Floats b) {
  return __builtin_shuffle(a, b, Ints{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
         __builtin_shuffle(a, b, Ints{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
}
INLINE Floats eighth(Floats a, Floats b) {
  return __builtin_shuffle(a, b, Ints{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}) +
         __builtin_shuffle(a, b, Ints{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
}
INLINE Floats last(Floats a, Floats b) {
  return __builtin_shuffle(a, b, Ints{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}) +
         __builtin_shuffle(a, b, Ints{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

INLINE float maximum(const float* values, int32_t count) {
  Floats found = broadcast(values[0]);
  int32_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats some = load(values + i);
    found = some > found ? some : found;
  }
  float highest = found[0];
  for (int lane = 1; lane < LANES; ++lane) highest = std::max(highest, found[lane]);
  for (; i < count; ++i) highest = std::max(highest, values[i]);
  return highest;
}

template <typename T>
INLINE void add_rms_norm(T* residual, const T* addend, const T* weight, T* output, int64_t num_rows, int64_t width, float epsilon) {
  const int64_t whole = width / LANES * LANES;
  const int rest = static_cast<int>(width - whole);
  for (int64_t row = 0; row < num_rows; ++row) {
    T* own = residual + row * width;
    const T* added = addend == nullptr ? nullptr : addend + row * width;
    T* out = output + row * width;
    Floats squares{};
    for (int64_t i = 0; i < whole; i += LANES) {
      Floats value = load(own + i);
      if (added != nullptr) {
        value = as_stored(own, value + load(added + i));
        store(own + i, value);
      }
      squares += value * value;
    }
    if (rest != 0) {
      Floats value = load_some(own + whole, rest);
      if (added != nullptr) {
        value = as_stored(own, value + load_some(added + whole, rest));
        store_some(own + whole, value, rest);
      }
      squares += value * value;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) {
      store(out + i, as_stored(own, load(own + i) * factor) * load(weight + i));
    }
    if (rest != 0) {
      store_some(out + whole, as_stored(own, load_some(own + whole, rest) * factor) * load_some(weight + whole, rest), rest);
    }
  }
}

template <typename T>
INLINE void silu_mul(const T* gate_up, T* output, int64_t num_rows, int64_t width) {
  const int64_t whole = width / LANES * LANES;
  const int rest = static_cast<int>(width - whole);
  for (int64_t row = 0; row < num_rows; ++row) {
    const T *gate = gate_up + 2 * row * width, *up = gate + width;
    T* out = output + row * width;
    for (int64_t i = 0; i < whole; i += LANES) {
      const Floats g = load(gate + i);
      store(out + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    if (rest != 0) {
      const Floats g = load_some(gate + whole, rest);
      store_some(out + whole, g / (1.0f + exponential(-g)) * load_some(up + whole, rest), rest);
    }
  }
}

// Processes one head: root mean square norm if there is a weight, then rotation of its first 2 * half values.
template <typename T>
INLINE void rotate(const T* from, T* to, const T* norm, float epsilon, const float* cosine, const float* sine, int64_t half, int64_t head_dim) {
  float head[MAX_HEAD_VECTORS * LANES];
  Floats squares{};
  for (int64_t i = 0; i < head_dim; i += LANES) {
    const Floats value = load(from + i);
    store(head + i, value);
    squares += value * value;
  }
  if (norm != nullptr) {
    const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(head_dim) + epsilon);
    for (int64_t i = 0; i < head_dim; i += LANES) {
      store(head + i, as_stored(from, as_stored(from, load(head + i) * factor) * load(norm + i)));
    }
  }
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, half - i));
    const Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
    const Floats c = load_some(cosine + i, count), s = load_some(sine + i, count);
    store_some(to + i, a * c - b * s, count);
    store_some(to + half + i, b * c + a * s, count);
  }
  for (int64_t i = 2 * half; i < head_dim; i += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, head_dim - i));
    store_some(to + i, load_some(head + i, count), count);
  }
}

template <typename T>
INLINE void rotate_and_store(T* qkv, const Step& step, const Shape& shape, const float* cosines, const float* sines, const T* query_norm, const T* key_norm, T* keys, T* values) {
  const int64_t d = shape.head_dim, kv_width = shape.num_kv_heads * d;
  const int64_t width = shape.num_heads * d + 2 * kv_width;
  for (int64_t row = 0; row < step.num_rows; ++row) {
    const float* cosine = cosines + step.positions[row] * shape.rotary_half;
    const float* sine = sines + step.positions[row] * shape.rotary_half;
    T* own = qkv + row * width;
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      rotate(own + head * d, own + head * d, query_norm, shape.norm_epsilon, cosine, sine, shape.rotary_half, d);
    }
    const T* own_keys = own + shape.num_heads * d;
    const int64_t slot = step.write_slots[row];
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      rotate(own_keys + head * d, keys + slot * kv_width + head * d, key_norm, shape.norm_epsilon, cosine, sine, shape.rotary_half, d);
    }
    std::memcpy(values + slot * kv_width, own_keys + kv_width, kv_width * sizeof(T));
  }
}

template <int VECTORS>
INLINE Floats product(const Floats* query, const Floats* key) {
  Floats total = query[0] * key[0];
  UNROLL for (int v = 1; v < VECTORS; ++v) total += query[v] * key[v];
  return total;
}

// Scores of one query and LANES keys.
template <int VECTORS>
INLINE Floats scores_of(const Floats* query, const Floats (*keys)[VECTORS]) {
  Floats quarters[4];
  UNROLL for (int i = 0; i < 4; ++i) {
    const Floats first = halve(product<VECTORS>(query, keys[4 * i]), product<VECTORS>(query, keys[4 * i + 1]));
    const Floats second = halve(product<VECTORS>(query, keys[4 * i + 2]), product<VECTORS>(query, keys[4 * i + 3]));
    quarters[i] = quarter(first, second);
  }
  return last(eighth(quarters[0], quarters[1]), eighth(quarters[2], quarters[3]));
}

// Loads up to LANES rows of the cache as floats and prefetches those of the next block.
template <typename T, int VECTORS>
INLINE void gather(const T* cache, int64_t kv_width, const int32_t* slots, int32_t begin, int32_t end, Floats (*rows)[VECTORS]) {
  const int32_t stop = std::min(begin + LANES, end);
  for (int32_t p = begin; p < stop; ++p) {
    if (p + LANES < end) {
      const char* ahead = reinterpret_cast<const char*>(cache + slots[p + LANES] * kv_width);
      for (size_t i = 0; i < VECTORS * LANES * sizeof(T); i += 64) __builtin_prefetch(ahead + i);
    }
    load_head<VECTORS>(cache + slots[p] * kv_width, rows[p - begin]);
  }
}

// Attention of up to MAX_QUERIES queries over one KV head. `num_keys[q]` are visible to query q, none before
// `first_key[q]`. `scores` holds MAX_QUERIES rows of `stride` floats.
template <typename T, int VECTORS>
INLINE void attend(const T* const* queries, T* const* outputs, int num_queries, const int32_t* first_key, const int32_t* num_keys, const int32_t* slots, const T* keys, const T* values, int64_t kv_width, const Shape& shape, float* scores, int64_t stride) {
  int32_t begin = first_key[0], end = num_keys[0];
  Floats query[MAX_QUERIES][VECTORS];
  for (int q = 0; q < num_queries; ++q) {
    begin = std::min(begin, first_key[q]);
    end = std::max(end, num_keys[q]);
    load_head<VECTORS>(queries[q], query[q]);
  }
  Floats rows[LANES][VECTORS];
  for (int32_t p = begin; p < end; p += LANES) {
    gather<T, VECTORS>(keys, kv_width, slots, p, end, rows);
    if (p + LANES <= end) {
      for (int q = 0; q < num_queries; ++q) store(scores + q * stride + p, scores_of<VECTORS>(query[q], rows) * shape.scale);
    } else {
      for (int q = 0; q < num_queries; ++q) {
        for (int32_t i = p; i < end; ++i) scores[q * stride + i] = sum(product<VECTORS>(query[q], rows[i - p])) * shape.scale;
      }
    }
  }
  float factor[MAX_QUERIES];
  for (int q = 0; q < num_queries; ++q) {
    float* own = scores + q * stride;
    // Aligned to the row's own first key, so that the order of the sum depends on the row alone.
    const int32_t count = num_keys[q] - first_key[q];
    float* row = own + first_key[q];
    if (shape.softcap > 0.0f) {
      for (int32_t i = 0; i < count; ++i) row[i] = std::tanh(row[i] / shape.softcap) * shape.softcap;
    }
    const float highest = maximum(row, count);
    Floats total{};
    for (int32_t i = 0; i < count; i += LANES) {
      const int rest = std::min(LANES, count - i);
      if (rest == LANES) {
        const Floats weight = exponential(load(row + i) - highest);
        store(row + i, weight);
        total += weight;
      } else {
        Floats weight = exponential(load_some(row + i, rest) - highest);
        store_some(row + i, weight, rest);
        total += load_some(row + i, rest);
      }
    }
    for (int32_t p = begin; p < first_key[q]; ++p) own[p] = 0.0f;
    for (int32_t p = num_keys[q]; p < end; ++p) own[p] = 0.0f;
    factor[q] = 1.0f / sum(total);
  }
  // Few enough at a time for their sums to fit registers. A weight of zero adds an exact zero.
  constexpr int TOGETHER = VECTORS <= 4 ? 4 : 2;
  const int num_padded = (num_queries + TOGETHER - 1) / TOGETHER * TOGETHER;
  Floats sums[MAX_QUERIES][VECTORS];
  for (int q = 0; q < num_padded; ++q) {
    UNROLL for (int v = 0; v < VECTORS; ++v) sums[q][v] = Floats{};
    if (q >= num_queries) std::fill_n(scores + q * stride + begin, end - begin, 0.0f);
  }
  for (int32_t p = begin; p < end; p += LANES) {
    gather<T, VECTORS>(values, kv_width, slots, p, end, rows);
    const int count = std::min<int32_t>(LANES, end - p);
    for (int first = 0; first < num_queries; first += TOGETHER) {
      Floats some[TOGETHER][VECTORS];
      std::memcpy(some, sums[first], sizeof some);
      for (int i = 0; i < count; ++i) {
        UNROLL for (int q = 0; q < TOGETHER; ++q) {
          const float weight = scores[(first + q) * stride + p + i];
          UNROLL for (int v = 0; v < VECTORS; ++v) some[q][v] += rows[i][v] * weight;
        }
      }
      std::memcpy(sums[first], some, sizeof some);
    }
  }
  for (int q = 0; q < num_queries; ++q) {
    store_head<VECTORS>(outputs[q], sums[q], factor[q]);
  }
}

// Slots of the first keys of a sequence that is a line.
INLINE void write_text_slots(const Step& step, int32_t table, int32_t num_keys, int32_t* slots) {
  const int32_t block_size = static_cast<int32_t>(step.block_size);
  for (int32_t start = 0, block = table; start < num_keys; start += block_size, ++block) {
    const int32_t count = std::min(block_size, num_keys - start), first = step.tables[block] * block_size;
    for (int32_t i = 0; i < count; ++i) slots[start + i] = first + i;
  }
}

INLINE int32_t longest_of(const Member& member) { return member.first_position + member.num_rows; }

// Attends the members from `members` on that read the same table, with DOT_PRODUCTS; returns how many, 0 for heads of an
// unknown width.
INLINE int64_t attend_same_table(const BFloat16* qkv, BFloat16* output, const Step& step, const Shape& shape, const Member* members, int64_t num_left, const BFloat16* keys, const BFloat16* values, int32_t* slots) {
  int64_t count = 0;
  int32_t num_text = 0;
  for (; count < num_left && members[count].table == members[0].table; ++count) {
    num_text = std::max(num_text, std::min(longest_of(members[count]), members[count].tree_start));
  }
  write_text_slots(step, members[0].table, num_text, slots);
  return attend_sequence_dot_products(qkv, output, step, shape, members, count, slots, keys, values) ? count : 0;
}

template <typename T, int VECTORS>
INLINE void attend_members(const T* qkv, T* output, const Step& step, const Shape& shape, const T* keys, const T* values, float* scores, int64_t stride, int32_t* slots, int64_t first_member, int64_t last_member) {
  const int64_t d = shape.head_dim, kv_width = shape.num_kv_heads * d;
  const int64_t width = shape.num_heads * d + 2 * kv_width, share = shape.num_heads / shape.num_kv_heads;
  for (int64_t number = first_member; number < last_member; ++number) {
    const Member& member = step.members[number];
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (shape.instructions == DOT_PRODUCTS) {
        if (const int64_t count = attend_same_table(qkv, output, step, shape, &member, last_member - number, keys, values, slots)) {
          number += count - 1;
          continue;
        }
      }
    }
    const int32_t longest = longest_of(member), num_text = std::min(longest, member.tree_start);
    write_text_slots(step, member.table, num_text, slots);
    for (int32_t p = num_text; p < longest; ++p) slots[p] = path_slot(step, member, p);
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const int64_t total = share * member.num_rows;
      for (int64_t first = 0; first < total; first += MAX_QUERIES) {
        const int count = static_cast<int>(std::min<int64_t>(MAX_QUERIES, total - first));
        const T* queries[MAX_QUERIES];
        T* outputs[MAX_QUERIES];
        int32_t first_key[MAX_QUERIES], num_keys[MAX_QUERIES];
        for (int q = 0; q < count; ++q) {
          const int64_t row = (first + q) / share, head = kv_head * share + (first + q) % share;
          queries[q] = qkv + (member.first_row + row) * width + head * d;
          outputs[q] = output + (member.first_row + row) * shape.num_heads * d + head * d;
          num_keys[q] = member.first_position + static_cast<int32_t>(row) + 1;
          first_key[q] = shape.window > 0 ? std::max<int32_t>(0, num_keys[q] - static_cast<int32_t>(shape.window)) : 0;
        }
        attend<T, VECTORS>(queries, outputs, count, first_key, num_keys, slots, keys + kv_head * d, values + kv_head * d, kv_width, shape, scores, stride);
      }
    }
  }
}

template <typename T>
INLINE bool attend_any(const T* qkv, T* output, const Step& step, const Shape& shape, const T* keys, const T* values, float* scores, int64_t stride, int32_t* slots, int64_t first_member, int64_t last_member) {
#define ATTEND(VECTORS) \
  case VECTORS: \
    attend_members<T, VECTORS>(qkv, output, step, shape, keys, values, scores, stride, slots, first_member, last_member); \
    return true;
  switch (shape.head_dim / LANES) {
    ATTEND(1)
    ATTEND(2)
    ATTEND(4)
    ATTEND(8)
  }
#undef ATTEND
  return false;
}

INLINE bool any(Ints flags) {
  flags |= __builtin_shuffle(flags, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  flags |= __builtin_shuffle(flags, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  flags |= __builtin_shuffle(flags, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return (flags[0] | flags[1]) != 0;
}

// Finds the `count` highest values of one row in falling order, among equals the first; missing ones have index 0.
INLINE void highest(const float* values, int64_t width, int64_t count, int64_t* indices, float* found) {
  constexpr int64_t STRIDE = 4 * LANES;
  std::fill_n(found, count, -INFINITY);
  std::fill_n(indices, count, 0);
  for (int64_t start = 0; start < width; start += STRIDE) {
    const int64_t stop = std::min(start + STRIDE, width);
    if (stop - start == STRIDE) {
      const Floats least = broadcast(found[count - 1]);
      Ints above{};
      UNROLL for (int v = 0; v < 4; ++v) above |= load(values + start + v * LANES) > least;
      if (!any(above)) continue;
    }
    for (int64_t i = start; i < stop; ++i) {
      if (!(values[i] > found[count - 1])) continue;
      int64_t place = count - 1;
      for (; place > 0 && values[i] > found[place - 1]; --place) {
        found[place] = found[place - 1];
        indices[place] = indices[place - 1];
      }
      found[place] = values[i];
      indices[place] = i;
    }
  }
}

INLINE void most_likely(const float* logits, int64_t num_rows, int64_t width, int64_t count, int64_t* indices, float* chances) {
  const int64_t whole = width / LANES * LANES;
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* own = logits + row * width;
    float found[MAX_LIKELY];
    highest(own, width, count, indices + row * count, found);
    if (chances == nullptr) continue;
    const float top = found[0];
    Floats totals{};
    for (int64_t i = 0; i < whole; i += LANES) totals += exponential(load(own + i) - top);
    float total = sum(totals);
    for (int64_t i = whole; i < width; ++i) total += std::exp(own[i] - top);
    for (int64_t i = 0; i < count; ++i) chances[row * count + i] = std::exp(found[i] - top) / total;
  }
}

}  // namespace

EXPORT int32_t kernels_version() { return 8; }

EXPORT void add_rms_norm_bfloat16(BFloat16* residual, const BFloat16* addend, const BFloat16* weight, BFloat16* output, int64_t num_rows, int64_t width, float epsilon) {
  add_rms_norm(residual, addend, weight, output, num_rows, width, epsilon);
}
EXPORT void add_rms_norm_float32(float* residual, const float* addend, const float* weight, float* output, int64_t num_rows, int64_t width, float epsilon) {
  add_rms_norm(residual, addend, weight, output, num_rows, width, epsilon);
}
EXPORT void silu_mul_bfloat16(const BFloat16* gate_up, BFloat16* output, int64_t num_rows, int64_t width) {
  silu_mul(gate_up, output, num_rows, width);
}
EXPORT void silu_mul_float32(const float* gate_up, float* output, int64_t num_rows, int64_t width) {
  silu_mul(gate_up, output, num_rows, width);
}
EXPORT void rotate_and_store_bfloat16(BFloat16* qkv, const Step* step, const Shape* shape, const float* cosines, const float* sines, const BFloat16* query_norm, const BFloat16* key_norm, BFloat16* keys, BFloat16* values) {
  rotate_and_store(qkv, *step, *shape, cosines, sines, query_norm, key_norm, keys, values);
}
EXPORT void rotate_and_store_float32(float* qkv, const Step* step, const Shape* shape, const float* cosines, const float* sines, const float* query_norm, const float* key_norm, float* keys, float* values) {
  rotate_and_store(qkv, *step, *shape, cosines, sines, query_norm, key_norm, keys, values);
}
EXPORT bool attend_bfloat16(const BFloat16* qkv, BFloat16* output, const Step* step, const Shape* shape, const BFloat16* keys, const BFloat16* values, float* scores, int64_t stride, int32_t* slots, int64_t first_member, int64_t last_member) {
  return attend_any(qkv, output, *step, *shape, keys, values, scores, stride, slots, first_member, last_member);
}
EXPORT bool attend_float32(const float* qkv, float* output, const Step* step, const Shape* shape, const float* keys, const float* values, float* scores, int64_t stride, int32_t* slots, int64_t first_member, int64_t last_member) {
  return attend_any(qkv, output, *step, *shape, keys, values, scores, stride, slots, first_member, last_member);
}
EXPORT void most_likely_float32(const float* logits, int64_t num_rows, int64_t width, int64_t count, int64_t* indices, float* chances) {
  most_likely(logits, num_rows, width, count, indices, chances);
}
