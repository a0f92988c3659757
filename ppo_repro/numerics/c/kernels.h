// What all kernels share: the constants of the law, types, and functions that must be inlined.
//
// The law: each output element is one chain of operations, each rounded once (+ - * / sqrt fma), in one written order
// that depends on that element alone. Vector lanes run along the outputs, so batch, padding, cache, micro-batches,
// threads, vector width and instruction set cannot change a bit. Compile with -ffp-contract=off, never -ffast-math.
#ifndef KERNELS_H
#define KERNELS_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "operations.h"

enum { COLS = 16 };                                // columns of a panel: free, as are all sizes below
#if defined(__AVX512F__)
enum { ROWS = 12, PANELS = 2 };
#else
enum { ROWS = 6, PANELS = 1 };
#endif

// 16 columns of a tile. A vector type, because clang turns some loops over arrays of this size into gathers.
typedef float Wide __attribute__((ext_vector_type(COLS), aligned(4)));

INLINE Wide wide_at(const float *x) { return *(const Wide *)x; }
INLINE Wide fma_wide(Wide a, Wide b, Wide c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_elementwise_fma(a, b, c);
#else
  for (int j = 0; j < COLS; j++) c[j] = fma32(a[j], b[j], c[j]);
  return c;
#endif
}

// ---- threads.c: one pool; results know nothing of it
typedef void (*Task)(void *argument, int index);
static void parallel_for(int total, Task task, void *argument);
static int task_size(long items, int others, int most);
static float *scratch(size_t floats);  // of this thread, until its next call

// ---- products.c
// Rows of a batch in blocks: consecutive rows of one sequence whose positions have one value of position / 128
typedef struct {
  int count, rows;
  int *start, *length, *slot;
  const Sums *sums;
} Blocks;

// ---- memory that calls share: one area for each purpose, because two may be in use at once
typedef enum {
  SCRATCH_GRADIENT_STRIPS,  // weight_gradient: dy, packed
  SCRATCH_GRADIENT_PANELS,  // weight_gradient: x, packed
  SCRATCH_PASS,             // model_forward: what a pass computes, where nothing is kept
  SCRATCH_DELTAS,           // model_backward: gradients of one layer
  SCRATCH_EXPERTS,          // gradients of the rows of experts
  SCRATCH_SQUARES,          // gradient_squares: sums of blocks
  SCRATCH_AREAS
} ScratchArea;
static float *shared_scratch(ScratchArea area, size_t floats);  // until the next call with this area
#endif
