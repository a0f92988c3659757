// The loops of row functions on a GPU: the macros and functions of ../lanes.h, where each lane of a row has a
// thread of its own. 16 threads compute a row. Each thread has its own variables, so `LANE(sum)` is `sum`.
// Lanes exchange values by shuffles. A warp computes two rows, which need not keep step.
#ifndef GPU_LANES_H
#define GPU_LANES_H
#include "../arithmetic.h"
#include "machine.h"

INLINE int lane_index(void) { return thread_index() % LANES; }

// --------------------------------------------------------------------------------------- functions and loops

typedef void (*RowFunction)(const void *argument, int row, float *memory);  // of a CPU; see operations.h

// A row function becomes a kernel of the same name, whose second argument is RowsOf (arguments.h). Group g of
// 16 lanes computes the rows g, g + groups, ..
#define ROW(name, Struct)                                                                           \
  INLINE void name##_body(const Struct *a, int row, float *memory);                                 \
  ROW_KERNEL(name, Struct) {                                                                        \
    const int groups_at_once = threads() / LANES;                                                   \
    const int group = thread_block_x() * groups_at_once + thread_index() / LANES;                   \
    float *memory = rows.memory + (long)group * rows.floats;                                        \
    for (int row = group; row < rows.rows; row += thread_blocks_x() * groups_at_once) {             \
      name##_body(&argument, row, memory);                                                          \
      meet_lanes(); /* the next row uses the same memory */                                         \
    }                                                                                               \
  }                                                                                                 \
  INLINE void name##_body(const Struct *a, int row, __attribute__((unused)) float *memory)

#define SHARE(i, n) for (int i = lane_index(); i < (n); i += LANES)
#define EACH(i, n) SHARE(i, n)
#define EACH_OF_MANY(i, n) _Pragma("unroll 16") SHARE(i, n)

#define ONE_LANE if (lane_index() == 0)
#define MEET_LANES meet_lanes()

// ----------------------------------------------------------------------------------------------------- lanes

#define LANE_VALUES(type, name, start) type name = (start)
#define LANE(name) name

// Unrolled: a lane adds its terms in order, but may compute several terms at once.
#define IN_LANES(i, n, ...) \
  do {                      \
    _Pragma("unroll 8")     \
    SHARE(i, n) {           \
      __VA_ARGS__           \
    }                       \
  } while (0)

// Rule 3: lane l + lane l + 8, then + 4, + 2, + 1. Both lanes of a pair compute the same sum, so in the end
// all lanes have it.
INLINE double join_lanes(double sum) {
  for (int width = LANES / 2; width; width /= 2) sum = sum + double_of_other_lane(sum, width);
  return sum;
}

INLINE float largest_lane(float top) {
  for (int width = LANES / 2; width; width /= 2) {
    float other = as_float(other_lane(as_bits(top), width));
    top = other > top ? other : top;
  }
  return top;
}

INLINE uint32_t largest_bits(uint32_t top) {
  for (int width = LANES / 2; width; width /= 2) {
    uint32_t other = other_lane(top, width);
    top = other > top ? other : top;
  }
  return top;
}

// Result of the lanes in a loop that they share: the largest score, and the first element that has it
typedef struct {
  double score;
  int element;
} Best;

INLINE Best best_of_lanes(Best own) {
  for (int width = LANES / 2; width; width /= 2) {
    double score = double_of_other_lane(own.score, width);
    int element = (int)other_lane((uint32_t)own.element, width);
    int better = score > own.score || (score == own.score && element < own.element);
    own.score = better ? score : own.score;
    own.element = better ? element : own.element;
  }
  return own;
}

// Returns whether a condition holds in all lanes
INLINE int all_of_lanes(int own) {
  for (int width = LANES / 2; width; width /= 2) own &= (int)other_lane((uint32_t)own, width);
  return own;
}

// ----------------------------------------------------------------------------------------------------- loads

// A load that may move over stores, so that the loads of several elements are on their way at once
INLINE float fixed_at(const float *x, int i) { return load_fixed(x + i); }

// Returns whether x is 1. x / 1 is x, so a loop may leave out this division. A division contains a branch for
// rare numbers, and the compiler moves no load over a branch.
INLINE int is_one(float x) { return x == 1.0f; }

// ----------------------------------------------------------------------------------------------------- flags

// *flag = value, unless a row has set it before. All rows of a launch have the same value, so whichever lane
// is last changes nothing.
INLINE void set_flag(int *flag, int value) {
  if (!*flag) *flag = value;
}
#endif
