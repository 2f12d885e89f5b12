// What the C++ files share; `kernels.py` has the same structures for callers.

#pragma once

#include <cstdint>

struct BFloat16 {
  uint16_t bits;
};

// Instructions of the processor that multiply bfloat16.
constexpr int64_t DOT_PRODUCTS = 1, WIDENED_PRODUCTS = 2;

// Most tokens of a row that are asked for; callers keep to it.
constexpr int64_t MAX_LIKELY = 64;

// Parameters of a layer that are the same for every step.
struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, rotary_half, window;
  int64_t instructions;  // that attention uses, one of the numbers above; others: any processor's
  float scale, softcap, norm_epsilon;
};

// Rows that see the same keys, each up to its own position. Key `p` is entry `p` of the sequence, or from `tree_start`
// on the entry that `paths` names.
struct Member {
  int32_t first_row, num_rows, first_position, table, tree_start, path;
};

struct Step {
  int64_t num_rows, num_members;
  const int32_t *positions, *write_slots;  // [num_rows]
  const Member* members;                   // [num_members]; those of a sequence, with its table, stand side by side
  const int32_t *tables, *paths;           // block tables; entries of tree nodes
  int64_t block_size;
  int64_t num_threads;  // at most, for products and for long attention
};

// Slot of key `p` of a member, which is in its path.
inline int32_t path_slot(const Step& step, const Member& member, int32_t p) {
  const int32_t entry = step.paths[member.path + p - member.tree_start], block_size = static_cast<int32_t>(step.block_size);
  return step.tables[member.table + entry / block_size] * block_size + entry % block_size;
}

// Attention with DOT_PRODUCTS of members with the same table (attention.cpp); false for heads of an unknown width. slots:
// of the text, by position.
bool attend_sequence_dot_products(const BFloat16* qkv, BFloat16* output, const Step& step, const Shape& shape, const Member* members, int64_t num_members, const int32_t* slots, const BFloat16* keys, const BFloat16* values);
