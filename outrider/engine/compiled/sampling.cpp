// Choices of coupled decoding. `kernels.py` documents each function.
//
// A row's choice is the token with the greatest prob / Exponential, where Exponential is -log(u) and u a hash of the
// row's key and the token (`sampling.keyed_scores`). With v = (1 - u) / (1 + u), -log(u) = 2 (v + v^3 / 3 + v^5 / 5 + ...)
// is at least its first terms. A token whose prob divided by those is below the best score so far cannot beat it. Few
// tokens are left that need a logarithm: about as many as their probabilities add up to.

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

struct Choice {
  double score;
  double bound;  // at least the score
  int64_t token;
};

// Puts a token among the best `count`, which are in falling order; of equals the first comes first.
INLINE void take(Choice* best, int64_t count, const Choice& one) {
  int64_t place = count - 1;
  if (!(one.score > best[place].score)) return;
  for (; place > 0 && one.score > best[place - 1].score; --place) best[place] = best[place - 1];
  best[place] = one;
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

// Finds the best `count` tokens of a row. Returns the sum of all scores, if it is wanted: the best one's own and the
// bounds of all others, however many are asked for.
INLINE double choose(const float* probs, int64_t width, uint64_t key, Choice* best, int64_t count, bool sums_up) {
  const uint64_t start = key + GOLDEN;
  for (int64_t i = 0; i < count; ++i) best[i] = {0.0, 0.0, 0};
  Doubles totals{};
  for (int64_t first = 0; first < width; first += LANES) {
    const Doubles u = uniforms(start, first);
    Doubles prob = {};
    const int lanes = width - first < LANES ? static_cast<int>(width - first) : LANES;
    if (lanes == LANES) {
      Floats some;
      std::memcpy(&some, probs + first, sizeof(some));
      prob = __builtin_convertvector(some, Doubles);
    } else {
      for (int lane = 0; lane < lanes; ++lane) prob[lane] = probs[first + lane];
    }
    Doubles bounds{};
    if (sums_up) {
      const Doubles v = (1.0 - u) / (1.0 + u), squared = v * v;
      bounds = prob / (2.0 * v * (1.0 + squared * (1.0 / 3 + squared * (1.0 / 5))));
      totals += bounds;
    }
    const Flags may_win = (prob > 0.0) & (prob * (1.0 + u) * SLACK >= best[count - 1].score * (2.0 * (1.0 - u)));
    int64_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= may_win[lane];
    if (!any) continue;
    for (int lane = 0; lane < lanes; ++lane) {
      if (may_win[lane]) take(best, count, {prob[lane] / -std::log(u[lane]), bounds[lane], first + lane});
    }
  }
  double total = 0.0;
  for (int lane = 0; lane < LANES; ++lane) total += totals[lane];
  return total + best[0].score - best[0].bound;
}

INLINE void choose_rows(const float* probs, int64_t num_rows, int64_t width, const uint64_t* keys, int64_t count, int64_t* choices, float* shares) {
  Choice best[MAX_LIKELY];
  for (int64_t row = 0; row < num_rows; ++row) {
    const double total = choose(probs + row * width, width, keys[row], best, count, shares != nullptr);
    for (int64_t i = 0; i < count; ++i) {
      choices[row * count + i] = best[i].token;
      if (shares != nullptr) shares[row * count + i] = total > 0.0 ? static_cast<float>(best[i].score / total) : 0.0f;
    }
  }
}

}  // namespace

extern "C" CLONED __attribute__((visibility("default"))) void coupled_choices_float32(const float* probs, int64_t num_rows, int64_t width, const uint64_t* keys, int64_t count, int64_t* choices, float* shares) {
  // Apart, so that neither has what only the other needs.
  if (count == 1 && shares == nullptr) {
    choose_rows(probs, num_rows, width, keys, 1, choices, nullptr);
  } else {
    choose_rows(probs, num_rows, width, keys, count, choices, shares);
  }
}
