// Structures shared by kernels.cpp and decode.cpp; `kernels.py` has the same ones for callers.

#pragma once

#include <cstdint>

struct BFloat16 {
  uint16_t bits;
};

// Parameters of a layer that are the same for every step.
struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, rotary_half, window;
  float scale, softcap, norm_epsilon;
};

struct Step {
  int64_t num_rows, num_members;
  const int32_t *positions, *write_slots;  // [num_rows]
  const int32_t* members;                  // [num_members][6], see Member in kernels.cpp
  const int32_t *tables, *paths;           // block tables; entries of tree nodes
  int64_t block_size;
};
