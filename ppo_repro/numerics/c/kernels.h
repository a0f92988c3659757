// Definitions that the kernels share: sizes of tiles, memory, threads, and blocks of rows.
//
// Every output element is one chain of operations (+ - * / sqrt fma), each rounded once. The order of the
// chain depends on that element alone. The rules of ../README.md say which order, and ../definition/ has them
// as functions of NumPy. The elements of a vector are different outputs. Sums of rows (rule 3) have 16 lanes,
// whatever the vector width. So batch, padding, cache, micro-batches, threads, vector width and instruction
// set cannot change a bit. Compile with -ffp-contract=off, never -ffast-math.
//
// all.c says which file is which.
#ifndef KERNELS_H
#define KERNELS_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "operations.h"
#include "shapes.h"

// The largest tile whose sums fit the vector registers. These sizes change no bit.
#if defined(__AVX512F__)
enum { ROWS = 12, PANELS = 2 };
#else
enum { ROWS = 6, PANELS = 1 };
#endif

// The 16 columns of a panel. A vector type, because clang turns some loops over arrays of this size into
// gathers.
typedef float Wide __attribute__((ext_vector_type(COLS), aligned(4)));

INLINE Wide wide_at(const float *x) { return *(const Wide *)x; }

// a b + c
INLINE Wide fma_wide(Wide a, Wide b, Wide c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_elementwise_fma(a, b, c);
#else
  for (int j = 0; j < COLS; j++) c[j] = fma32(a[j], b[j], c[j]);
  return c;
#endif
}

// ------------------------------------------------------------------------------------------------- threads.c

#ifndef GPU_HOST
typedef void (*Task)(void *argument, int index);
static void parallel_for(int total, Task task, void *argument);
static int task_size(long items, int others, int most);
#endif

// ------------------------------------------------------------------------------------------------- scratch.c

#ifndef GPU_HOST
static float *scratch(size_t floats);  // of this thread, until its next call; NULL if memory is full
static void free_scratch_of_thread(void);  // before the thread ends
#endif

INLINE void copy_floats(float *restrict to, const float *restrict from, long n) {
  memcpy(to, from, sizeof(float) * (size_t)n);
}

INLINE void zero_floats(float *x, long n) { memset(x, 0, sizeof(float) * (size_t)n); }

// Memory that calls share. Each purpose has an area, because two may be in use at once
typedef enum {
  SCRATCH_GRADIENT_STRIPS,  // weight_gradient: dy, packed
  SCRATCH_GRADIENT_PANELS,  // weight_gradient: x, packed
  SCRATCH_INTEGERS,         // linear, linear_backward_input: rows of x in precision high
  SCRATCH_INTEGER_WEIGHTS,  // linear_backward_input: w in precision high; on a GPU
  SCRATCH_PASS,             // model_forward: what a pass computes, where nothing is kept
  SCRATCH_DELTAS,           // model_backward: gradients of one layer
  SCRATCH_EXPERTS,          // gradients of the rows of experts
  SCRATCH_SQUARES,          // gradient_squares: sums of stretches
  SCRATCH_BOUNDS,           // sample_tokens: the largest bounds of groups of tokens
  SCRATCH_ROWS,             // here and below: on a GPU; for_rows_with_memory
  SCRATCH_PARTIAL_PRODUCTS,
  SCRATCH_GRADIENT_PARTS,
  SCRATCH_COLUMN_BLOCKS,
  SCRATCH_SCORES,           // of attention
  SCRATCH_AREAS
} ScratchArea;
static float *shared_scratch(ScratchArea area, size_t floats);  // until the next call with this area

// -------------------------------------------------------------------------------------------------- blocks.c

// The rows of a batch in blocks: consecutive rows of one sequence whose positions have one value of position
// / 128
typedef struct {
  int count;   // blocks
  int rows;
  int *start;  // [count], first row
  int *length; // [count]
  int *slot;   // [count + 1]; the last is the slot with which the pass ends
  const int *start_in_kernels;  // the same three in memory of kernels
  const int *length_in_kernels;
  const int *slot_in_kernels;
  const Sums *sums;
} Blocks;

// ------------------------------------------------------------------------------- gradients.c, gpu/launches.c

// Sums over the rows of all blocks (rule 2), added to the gradient at offset `grad`. If `grad` is -1, nothing
// is done. weight_gradient computes dw [n][k] from dy [rows][n] and x [rows][k].
static void weight_gradient(Precision precision, const float *dy, int n, const float *x, int k,
                            const Blocks *blocks, long grad);
static void column_sums(Columns of, const Blocks *blocks, long grad);
static void sum_table_rows(const TableGradient *of);

// ---------------------------------------------------------------------------------------------- attention.c

// Arguments of attention from one layer
typedef struct {
  const Model *m;
  const Batch *b;          // its integers lie on the host
  const Batch *in_kernels;  // the same batch; its integers lie in memory of kernels
  int window;
  float scale;
  float score_cap;
  float *keys;           // this layer's part of the cache, see Batch
  float *values;
  const float *q;        // [tokens][heads][head_dim], rotated
  float *top;            // [tokens][heads]
  float *total;          // [tokens][heads]
  float *mixed;          // [tokens][heads][head_dim]
  const float *d_mixed;  // [tokens][heads][head_dim]; here and below: of the backward pass
  float *dq;             // [tokens][heads][head_dim]
  float *d_raw;          // [tokens][qkv_width]: the key and value parts of its rows get dk and dv
} Heads;

// ------------------------------------------------------------------------------------------------- the model

// A forward or backward pass over a batch
typedef struct {
  const Model *m;
  const Batch *b;    // its integers lie on the host
  Batch in_kernels;  // the same batch; its integers lie in memory of kernels
} Pass;

// What the backward pass needs of a norm
typedef struct {
  float *r;     // [tokens], the factor 1 / sqrt(..)
  float *mean;  // [tokens]
} NormFactors;

// The results of a layer, in this order
typedef struct {
  float *x;        // [tokens][hidden], its input
  NormFactors norm1;
  float *normed1;  // [tokens][hidden], input of attention
  float *qkv;      // [tokens][qkv_width], before norms of heads and rotation
  float *q_r;      // [tokens][heads], factors of norms of heads
  float *k_r;      // [tokens][kv_heads]
  float *q;        // [tokens][heads][head_dim], as attention takes them
  float *top;      // [tokens][heads], the largest score
  float *total;    // [tokens][heads], the sum of exponentials
  float *mixed;    // [tokens][heads][head_dim], results of attention
  float *attended;  // [tokens][hidden], out(mixed); without norms after it: x2
  NormFactors norm1_after;
  float *x2;       // [tokens][hidden], the sum of x and attention
  NormFactors norm2;
  float *normed2;  // [tokens][hidden], input of the MLP
  float *router;   // [tokens][experts], logits
  int *route;      // [tokens][chosen], experts by rising index
  float *weights;  // [tokens][chosen]
  float *rows;     // [tokens chosen][hidden], normed2 in the order of experts
  float *up;       // [mlp_rows][up_width]
  float *act;      // [mlp_rows][mlp_width]
  float *y;        // [tokens chosen][hidden], results of experts
  float *raised;   // [tokens][hidden], result of the MLP; without norms after it: next
  NormFactors norm2_after;
  float *next;     // [tokens][hidden], its output
} Saved;
#endif
