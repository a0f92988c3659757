// Tiles: small rectangles of a result whose sums stay in registers. Products, gradients of weights and
// attention are loops over tiles. This file has the chain of rule 1, and chain_block in gradients.c has the
// same chain over positions.
//
// Rule 1: y[i][j] = sum over k of x[i][k] w[k][j]. The terms are cut into blocks of BLOCK. A block is one
// chain acc = fma(x, w, acc) from +0 by rising k, and the blocks are added in order, y = y + block from y =
// +0. Because the first block too is added to +0, no y is -0, and terms that are zero may be left out.
// definition: product.chain, product.product
//
// A tile is ROWS rows by 16 columns (by 32 with AVX-512). Each of its sums stays in one element of one vector
// register, so no width of a vector changes a bit.
#include "kernels.h"

// One block of a product: x [rows][terms] times w [terms][columns], added to y [rows][columns]. In precision
// high x and w are blocks of integers (integers.c), and k counts floats: the scale is at k = 0, pairs follow,
// and the remainders are at k = terms.
typedef struct {
  Precision precision;
  const float *x;  // x[i][k] is at x + i * x_row + k * x_step
  long x_row;
  long x_step;
  const float *w;  // w[k][16 p + j] is at w + p * w_panel + k * w_step + j
  long w_panel;
  long w_step;
  float *y;        // y[i][16 p + j] is at y + i * y_row + 16 p + j
  long y_row;
  int rows;        // at most ROWS
  int terms;       // at most BLOCK, in high BLOCK_STEPS
  const float *rest;  // [rows][panels of the tile][16]: what remainders add to the block; or NULL
  int first;       // this block is the first of its sum, which begins at +0; earlier contents of y are lost
} BlockOfProduct;

// What a tile sums: a chain of float32, or in precision high integers, or their remainders
enum { CHAIN, INTEGERS, REMAINDERS };

// Adds one tile of the block, from w and y on, to y. Callers pass constants as `rows` and `panels`, because
// then the compiler keeps all sums in registers.
INLINE void add_tile(const BlockOfProduct *a, const float *restrict w, float *restrict y, long x_step,
                     long w_step, const int rows, const int panels, const int kind) {
  const int is_high = kind != CHAIN;
  const float *restrict x = a->x;
  const long x_row = a->x_row;
  const long w_panel = a->w_panel;
  const long y_row = a->y_row;
  const int terms = a->terms;
  const int first = a->first;
  Wide acc[ROWS][PANELS] = {0};
  Wide column[PANELS];
  Wide rest[PANELS];
  for (int k = is_high; k < terms; k++) {
    for (int p = 0; p < panels; p++) column[p] = wide_at(w + p * w_panel + k * w_step);
    if (kind == REMAINDERS)
      for (int p = 0; p < panels; p++) rest[p] = wide_at(w + p * w_panel + (terms + k) * w_step);
#pragma clang loop unroll(full)  // or the sums do not stay in registers
    for (int i = 0; i < rows; i++)
      for (int p = 0; p < panels; p++) {
        const float *at = x + i * x_row + k * x_step;
        if (kind == REMAINDERS) acc[i][p] = chain_step(at, rest[p], acc[i][p], is_high);
        if (kind == REMAINDERS) at += terms;
        acc[i][p] = chain_step(at, column[p], acc[i][p], is_high);
      }
  }
#pragma clang loop unroll(full)  // here too, or each tile begins with zeros in memory
  for (int i = 0; i < rows; i++)
    for (int p = 0; p < panels; p++) {
      Wide *out = (Wide *)(y + i * y_row + p * COLS);
      Wide sum = sum_of_block(acc[i][p], x[i * x_row], wide_at(w + p * w_panel), is_high);
      if (kind == REMAINDERS) {
        const Wide of_w = wide_at(w + p * w_panel + terms * w_step);
        sum *= __builtin_elementwise_max((Wide)x[i * x_row + terms], of_w);
      }
      if (kind == INTEGERS && a->rest) sum = sum + wide_at(a->rest + (i * panels + p) * COLS);
      *out = (first ? (Wide)0.0f : *out) + sum;
    }
}

// One copy of `add_tile` for each number of rows
#define CASE(r, x_step, w_step, panels, kind)           \
  case r:                                               \
    add_tile(a, w, y, x_step, w_step, r, panels, kind); \
    break;
#define CASES_TO_6(...)  \
  CASE(1, __VA_ARGS__)   \
  CASE(2, __VA_ARGS__)   \
  CASE(3, __VA_ARGS__)   \
  CASE(4, __VA_ARGS__)   \
  CASE(5, __VA_ARGS__)   \
  CASE(6, __VA_ARGS__)
#if defined(__AVX512F__)
_Static_assert(ROWS <= 12, "a number of rows without a case computes nothing");
#define CASES_TO_12(...) \
  CASE(7, __VA_ARGS__)   \
  CASE(8, __VA_ARGS__)   \
  CASE(9, __VA_ARGS__)   \
  CASE(10, __VA_ARGS__)  \
  CASE(11, __VA_ARGS__)  \
  CASE(12, __VA_ARGS__)
#else
_Static_assert(ROWS <= 6, "a number of rows without a case computes nothing");
#define CASES_TO_12(...)
#endif
#define CASES(...) CASES_TO_6(__VA_ARGS__) CASES_TO_12(__VA_ARGS__)

// Returns whether a block of a tile's rows, or of its `panels` panels, is mostly small
INLINE int needs_remainders(const BlockOfProduct *a, const float *w, const int panels) {
  Ints of_w = 0;
  uint32_t of_x = 0;
  for (int p = 0; p < panels; p++) of_w |= (Ints)wide_at(w + p * a->w_panel + a->terms * COLS);
  for (int i = 0; i < a->rows; i++) of_x |= as_bits(a->x[i * a->x_row + a->terms]);
  return of_x || __builtin_reduce_or(of_w);
}

// The tile of a block's remainders: `rest` of the block, as y
INLINE BlockOfProduct remainders_alone(const BlockOfProduct *a, const int panels) {
  BlockOfProduct alone = *a;
  alone.y_row = panels * COLS;
  alone.first = 1;
  return alone;
}

static void wide_remainders(const BlockOfProduct *a, const float *w, float *y) {
  switch (a->rows) { CASES(1, COLS, PANELS, REMAINDERS) }
}

static void narrow_remainders(const BlockOfProduct *a, const float *w, float *y) {
  switch (a->rows) { CASES(1, COLS, 1, REMAINDERS) }
}

// 16 PANELS columns of packed w: x_step is 1, w_step is 16
static void add_wide_tile(const BlockOfProduct *a, const float *w, float *y) {
  if (a->precision == PRECISION_HIGH) {
    float rest[ROWS * PANELS * COLS];
    BlockOfProduct with;
    if (needs_remainders(a, w, PANELS)) {
      const BlockOfProduct alone = remainders_alone(a, PANELS);
      wide_remainders(&alone, w, rest);
      with = *a;
      with.rest = rest;
      a = &with;
    }
    switch (a->rows) { CASES(1, COLS, PANELS, INTEGERS) }
  } else {
    switch (a->rows) { CASES(1, COLS, PANELS, CHAIN) }
  }
}

// Adds 16 columns, for any steps
static void add_narrow_tile(const BlockOfProduct *a, const float *w, float *y) {
  const long x_step = a->x_step;
  const long w_step = a->w_step;
  if (a->precision == PRECISION_HIGH) {
    float rest[ROWS * COLS];
    BlockOfProduct with;
    if (needs_remainders(a, w, 1)) {
      const BlockOfProduct alone = remainders_alone(a, 1);
      narrow_remainders(&alone, w, rest);
      with = *a;
      with.rest = rest;
      a = &with;
    }
    switch (a->rows) { CASES(1, COLS, 1, INTEGERS) }
  } else {
    switch (a->rows) { CASES(x_step, w_step, 1, CHAIN) }
  }
}

// Adds `cols` < 16 columns to y, where w has 16. The tile is computed in a copy of y that has 16 columns.
static void add_ragged_tile(const BlockOfProduct *a, const float *w, float *y, int cols) {
  float copy[ROWS * COLS];
  BlockOfProduct to_copy = *a;
  to_copy.y_row = COLS;
  for (int i = 0; i < a->rows; i++)
    for (int j = 0; j < COLS; j++) copy[i * COLS + j] = a->first || j >= cols ? 0.0f : y[i * a->y_row + j];
  add_narrow_tile(&to_copy, w, copy);
  for (int i = 0; i < a->rows; i++) copy_floats(y + i * a->y_row, copy + i * COLS, cols);
}

// Adds any number `cols` of columns to y, where w is packed in panels: w_step is 16, x_step is 1, and every
// panel has 16 columns in memory, also the last one.
static void multiply_panels(const BlockOfProduct *a, int cols) {
  const float *w = a->w;
  float *y = a->y;
  for (; cols >= PANELS * COLS; cols -= PANELS * COLS) {
    add_wide_tile(a, w, y);
    w += PANELS * a->w_panel;
    y += PANELS * COLS;
  }
  for (; cols >= COLS; cols -= COLS) {
    add_narrow_tile(a, w, y);
    w += a->w_panel;
    y += COLS;
  }
  if (cols > 0) add_ragged_tile(a, w, y, cols);
}

// Adds any number `cols` of columns to y, where rows of w are any distance apart. If less than 16 columns are
// left, their part of w is copied, so that nothing is read beyond it.
static void multiply_rows(const BlockOfProduct *a, int cols) {
  const float *w = a->w;
  float *y = a->y;
  for (; cols >= COLS; cols -= COLS) {
    add_narrow_tile(a, w, y);
    w += COLS;
    y += COLS;
  }
  if (cols < 1) return;
  float panel[BLOCK * COLS] = {0};
  BlockOfProduct in_panel = *a;
  in_panel.w_step = COLS;
  for (int k = 0; k < a->terms; k++) copy_floats(panel + k * COLS, w + k * a->w_step, cols);
  add_ragged_tile(&in_panel, panel, y, cols);
}

// Rows are cut into strips of nearly equal height, at most ROWS: the number of strips, and the row at which
// strip s begins.
INLINE int strips_of(int rows) { return (rows + ROWS - 1) / ROWS; }
INLINE int strip_row(int rows, int s, int strips) { return (int)((long)rows * s / strips); }

INLINE int panels_of(int columns) { return (columns + COLS - 1) / COLS; }
