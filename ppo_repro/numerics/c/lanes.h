// The loops of row functions. A row function computes one row: a token's hidden state, a row of logits, a
// stretch of a parameter. A row has 16 partial sums, the lanes (rule 3). This file is the CPU's form: one
// thread computes a row, with its lanes in the elements of a vector register. On a GPU 16 threads compute a
// row, each thread one lane: gpu/lanes.h has the other form of these definitions.
//
//   ROW(name, Struct) { .. }        a row function for for_rows: `a` is the struct, `row` the index of the
//                                   row, `memory` the floats that for_rows_with_memory gives it
//   EACH(i, n) ..                   a loop over [0, n) whose iterations are independent
//   EACH_OF_MANY(i, n) ..           the same if n is large
//   SHARE(i, n) ..                  a loop over [0, n) that the lanes share; local variables are each lane's
//   IN_LANES(i, n, ..)              the loop of rule 3: lane l takes the elements l, l + 16, .. in this order
//   LANE_VALUES(type, name, start)  one number for each lane, in IN_LANES called LANE(name)
//   join_lanes, largest_lane, ..    from the lanes' numbers to one
//   ONE_LANE { .. }                 work in one order, for one lane alone
//   MEET_LANES                      waits for all lanes, before a lane reads what another lane wrote
//   fixed_at(x, i)                  x[i] of an array that no row writes, which a GPU may load early
//   is_one(x)                       whether x is 1, so that a loop may leave out its divisions by x; a CPU
//                                   always says no, because leaving them out gains nothing there
//
// EACH and SHARE must not sum, and IN_LANES must sum into LANE(..) only: the pragma lets clang reorder float
// additions even without -ffast-math, and on a GPU each lane would have its own sum.
//
// To add an operation on rows, write a struct with all that it reads and writes (numbers, and pointers to
// memory of kernels), a ROW, and `for_rows(rows, name, &(Struct){..})` in the pass that needs it.
#ifndef LANES_H
#define LANES_H
#include "arithmetic.h"

#ifdef GPU_KERNELS
#include "gpu/lanes.h"
#else

// --------------------------------------------------------------------------------------- functions and loops

#ifdef GPU_HOST  // the host that drives a GPU: a row function is the kernel of its name
typedef struct {
  const char *name;
  int bytes;       // of the struct
  void *function;  // of the driver, once it is known
} Kernel;
typedef Kernel *RowFunction;

#define ROW(name, Struct)                                                            \
  static Kernel name[1] = {{#name, sizeof(Struct), NULL}};                           \
  __attribute__((unused)) static void name##_body(__attribute__((unused)) const Struct *a, \
                                                  __attribute__((unused)) int row,   \
                                                  __attribute__((unused)) float *memory)
#else
typedef void (*RowFunction)(const void *argument, int row, float *memory);

#define ROW(name, Struct)                                                           \
  INLINE void name##_body(const Struct *a, int row, float *memory);                 \
  static void name(const void *argument, int row, float *memory) {                  \
    name##_body(argument, row, memory);                                             \
  }                                                                                 \
  INLINE void name##_body(const Struct *a, int row, __attribute__((unused)) float *memory)
#endif

// clang vectorises these loops only if the pragma tells it that no iteration writes what another one reads.
// Some loops stay scalar all the same. clang warns of them, which is no error here.
#pragma clang diagnostic ignored "-Wpass-failed"
#define EACH(i, n) _Pragma("clang loop vectorize(assume_safety)") for (int i = 0; i < (n); i++)

#define EACH_OF_MANY(i, n) EACH(i, n)

#define SHARE(i, n) for (int i = 0; i < (n); i++)

#define ONE_LANE if (1)
#define MEET_LANES \
  do {             \
  } while (0)

// ----------------------------------------------------------------------------------------------------- lanes

#define LANE_VALUES(type, name, start) \
  type name[LANES];                    \
  for (int lane_ = 0; lane_ < LANES; lane_++) name[lane_] = (start)
#define LANE(name) name[lane_]

// The 16 elements that the lanes take at once are one vector. Left alone, clang may first unroll this loop
// into 16 scalar copies, of which it then finds only some vectors again: a softmax takes 1.4 times as long.
#define ONE_VECTOR _Pragma("clang loop unroll(disable) vectorize_width(16) interleave_count(1)")

#define IN_LANES(i, n, ...)                              \
  do {                                                   \
    int begin_ = 0;                                      \
    for (; begin_ + LANES <= (n); begin_ += LANES) {     \
      ONE_VECTOR                                         \
      for (int lane_ = 0; lane_ < LANES; lane_++) {      \
        const int i = begin_ + lane_;                    \
        __VA_ARGS__                                      \
      }                                                  \
    }                                                    \
    for (int lane_ = 0; begin_ + lane_ < (n); lane_++) { \
      const int i = begin_ + lane_;                      \
      __VA_ARGS__                                        \
    }                                                    \
  } while (0)

// Rule 3: the upper half of the lanes is added to the lower half, until one lane is left.
INLINE double join_lanes(double *lane) {
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) lane[l] += lane[l + width];
  return lane[0];
}

INLINE float largest_lane(const float *lane) {
  float top = lane[0];
  for (int l = 1; l < LANES; l++) top = lane[l] > top ? lane[l] : top;
  return top;
}

INLINE uint32_t largest_bits(const uint32_t *lane) {
  uint32_t top = lane[0];
  for (int l = 1; l < LANES; l++) top = lane[l] > top ? lane[l] : top;
  return top;
}

// Result of the lanes in a loop that they share: the largest score, and the first element that has it
typedef struct {
  double score;
  int element;
} Best;

INLINE Best best_of_lanes(Best own) { return own; }

// Returns whether a condition holds in all lanes
INLINE int all_of_lanes(int own) { return own; }

// ----------------------------------------------------------------------------------------------------- loads

INLINE float fixed_at(const float *x, int i) { return x[i]; }
INLINE int is_one(float x) {
  (void)x;
  return 0;  // vectors divide fast
}

// ----------------------------------------------------------------------------------------------------- flags

// *flag = value, unless a row has set it before
INLINE void set_flag(int *flag, int value) {
  if (!__atomic_load_n(flag, __ATOMIC_RELAXED)) __atomic_store_n(flag, value, __ATOMIC_RELAXED);
}
#endif  // not GPU_KERNELS
#endif
