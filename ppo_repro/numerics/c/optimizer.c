// Operations after the backward passes, in this order: the join of the slots' gradients, the norm of
// all gradients, AdamW. A tensor of n numbers is cut into rows of 4,096. The last row may be shorter.
#include "operations.h"

// Rows of all operations except AdamW have the length of a stretch. Rule 3 needs this only for the squares.

// Scratch memory is counted in floats.
enum { FLOATS_OF_A_DOUBLE = sizeof(double) / sizeof(float) };

INLINE int rows_in(long n) { return (int)((n + STRETCH - 1) / STRETCH); }
INLINE int row_length(long n, int row) {
  long left = n - (long)row * STRETCH;
  return left < STRETCH ? (int)left : STRETCH;
}

// ------------------------------------------------------------------------------------------ 1. sums of slots

typedef struct {
  Sums sums;
  long n;
} Join;

// Rule 2, definition: gradients.join_slots: total = level[0] (or +0), then, for each bit i of `first`
// by rising i, total = total + level[i + 1]
ROW(join_row, Join) {
  const Sums *sums = &a->sums;
  const long begin = (long)row * STRETCH;
  const int n = row_length(a->n, row);
  float *total = sums->level[0] + begin;
  if (!sums->open) {
    EACH(i, n) total[i] = 0.0f;
  }
  for (int level = 0; level < sums->levels; level++) {
    if (!((sums->first >> level) & 1)) continue;
    const float *subtree = sums->level[level + 1] + begin;
    EACH(i, n) total[i] = total[i] + subtree[i];
  }
}

// ------------------------------------------------------------------------------ 2. the norm of all gradients

typedef struct {
  const float *g;
  long n;
  double *sums;  // [rows_in(n)]: the sum of squares of each stretch
} Squares;

ROW(squares_row, Squares) {
  const float *g = a->g + (long)row * STRETCH;
  a->sums[row] = dot_rows(g, g, row_length(a->n, row));
}

// -------------------------------------------------------------------------------------------------- 3. AdamW

enum { ADAMW_ROW = 512 };  // short, so that the tensors of a layer are enough rows for a GPU

typedef struct {
  Trained tensor;
  Step step;
} Adamw;

// Rule 6, definition: optimizer.adamw, for each element:
//   c = clip g,  m = beta1 m + (rest1 c),  v = beta2 v + ((rest2 c) c),
//   p = keep p - (rate m) / (sqrt(v) unroot + eps),  where each a b + c is one fma
ROW(adamw_row, Adamw) {
  const Step s = a->step;
  const long begin = (long)row * ADAMW_ROW;
  const long left = a->tensor.n - begin;
  float *p = a->tensor.p + begin;
  float *m = a->tensor.m + begin;
  float *v = a->tensor.v + begin;
  const float *g = a->tensor.g + begin;
  EACH(i, left < ADAMW_ROW ? (int)left : ADAMW_ROW) {
    float c = s.clip * g[i];
    m[i] = fma32(s.beta1, m[i], s.rest1 * c);
    v[i] = fma32(s.beta2, v[i], s.rest2 * c * c);
    p[i] = fma32(s.keep, p[i], -(s.rate * m[i] / fma32(sqrt32(v[i]), s.unroot, s.eps)));
  }
}

// ===================================================================================================== calls
// The code below runs on the host, see operations.h.
#ifndef GPU_KERNELS

// Joins the n sums of all slots in level[0], after the last backward pass. Slot `first` is the last slot with
// sequences (`open`), or has none.
void join_sums(const Sums *sums, long n) {
  if (sums->first == 1 << sums->levels) return;
  for_rows(rows_in(n), join_row, &(Join){*sums, n});
}

// Rule 3, definition: optimizer.sum_of_squares, definition: optimizer.global_norm. Writes the sum of g^2 of
// each tensor: the sums of its stretches are added in order from +0. Returns the sum over the tensors, in
// order from +0. The sum is NaN or infinite if and only if a gradient is, because no sum of squares of
// float32 overflows float64. `stretches`, unless it is NULL, gets the sums of all stretches, tensor after
// tensor.
double gradient_squares(Trained *tensors, int count, double *stretches) {
  double sum = 0.0;
  for (Trained *t = tensors; t < tensors + count; t++) {
    int rows = rows_in(t->n);
    double *sums = (double *)shared_scratch(SCRATCH_SQUARES, (size_t)rows * FLOATS_OF_A_DOUBLE);
    for_rows(rows, squares_row, &(Squares){t->g, t->n, sums});
    const double *squares = on_host(sums, (size_t)rows * sizeof(double));
    if (failed()) return 0.0;
    t->square = 0.0;
    for (int row = 0; row < rows; row++) t->square += squares[row];
    if (stretches) {
      memcpy(stretches, squares, (size_t)rows * sizeof(double));
      stretches += rows;
    }
    sum += t->square;
  }
  return sum;
}

void adamw(const Trained *tensors, int count, const Step *step) {
  for (const Trained *t = tensors; t < tensors + count; t++)
    for_rows((int)((t->n + ADAMW_ROW - 1) / ADAMW_ROW), adamw_row, &(Adamw){*t, *step});
}
#endif
