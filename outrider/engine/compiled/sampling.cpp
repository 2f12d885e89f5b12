// Choices of coupled decoding. `kernels.py` documents each function.
//
// A row's choice is the token with the greatest prob / Exponential, where Exponential is -log(u) and u a hash of the
// row's key and the token (`sampling.keyed_scores`). Because -log(u) >= 1 - u, a token with prob <= best * (1 - u) cannot
// beat the best so far. Few tokens are left that need a logarithm: about as many as their probabilities add up to.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 8;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MULTIPLIER_1 = 0xBF58476D1CE4E5B9, MULTIPLIER_2 = 0x94D049BB133111EB;
constexpr double UNIT = 0x1p-52;
constexpr double SLACK = 1.0 + 1e-9;  // for the rounding of both sides

typedef uint64_t Words __attribute__((vector_size(64)));
typedef int64_t Flags __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32), aligned(4)));

struct Best {
  double score;
  int64_t token;
};

INLINE void take(Best& best, double prob, double u, int64_t token) {
  const double score = prob / -std::log(u);
  if (score > best.score) best = {score, token};
}

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the stream that starts at `start`, from its element `first` on.
INLINE Doubles uniforms(uint64_t start, int64_t first) {
  Words value = Words{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint64_t>(first);
  value = value * GOLDEN + start;
  value = (value ^ (value >> 30)) * MULTIPLIER_1;
  value = (value ^ (value >> 27)) * MULTIPLIER_2;
  value ^= value >> 31;
  return (__builtin_convertvector(value >> 12, Doubles) + 0.5) * UNIT;
}

INLINE int64_t choice(const float* probs, int64_t width, uint64_t key) {
  const uint64_t start = key + GOLDEN;
  Best best = {0.0, 0};
  for (int64_t first = 0; first < width; first += LANES) {
    const Doubles u = uniforms(start, first);
    Doubles prob = {};
    const int count = width - first < LANES ? static_cast<int>(width - first) : LANES;
    if (count == LANES) {
      Floats some;
      std::memcpy(&some, probs + first, sizeof(some));
      prob = __builtin_convertvector(some, Doubles);
    } else {
      for (int lane = 0; lane < count; ++lane) prob[lane] = probs[first + lane];
    }
    const Flags may_win = (prob > 0.0) & (prob * SLACK >= best.score * (1.0 - u));
    int64_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= may_win[lane];
    if (!any) continue;
    for (int lane = 0; lane < count; ++lane) {
      if (may_win[lane]) take(best, prob[lane], u[lane], first + lane);
    }
  }
  return best.token;
}

}  // namespace

extern "C" CLONED __attribute__((visibility("default"))) void coupled_choices_float32(const float* probs, int64_t num_rows, int64_t width, const uint64_t* keys, int64_t* choices) {
  for (int64_t row = 0; row < num_rows; ++row) choices[row] = choice(probs + row * width, width, keys[row]);
}
