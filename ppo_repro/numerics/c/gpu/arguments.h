// What the kernels of a GPU take that are no row functions, one struct each, by value: the host fills it
// (launches.c), the kernel reads it. Pointers point to memory of the GPU.
#ifndef GPU_ARGUMENTS_H
#define GPU_ARGUMENTS_H
#include "../operations.h"

enum { GPU_THREADS = 256 };  // of every thread block

// The second parameter of a row function's kernel. 16 threads compute a row, so a thread block computes 16
// rows at once: group g = 16 block + thread / 16 computes the rows g, g + 16 blocks, ..
typedef struct {
  int rows;
  int floats;     // of memory for each group, a multiple of 4
  float *memory;  // [groups][floats]
} RowsOf;

// y [rows][cols] = x [rows][terms] w^T (+ bias) (+ residual). product_N: w [cols][terms]; .._rows: w
// [terms][cols]. Rows of x and w are ldx and ldw floats apart, rows of y and residual ldy.
typedef struct {
  const float *x;
  long ldx;
  const float *w;
  long ldw;
  const float *bias;      // [cols], or NULL
  const float *residual;  // [rows][cols], or NULL
  float *y;
  long ldy;
  float *partial;  // NULL, or [blocks of terms][rows][cols]: gets each block's sum, which add_blocks adds up
  int rows;
  int cols;
  int terms;
  int each;  // with `partial`: blocks of terms of a thread block
} ProductArguments;

// dw [n][k] = sum over rows t of dy[t][n] x[t][k], by rule 2
typedef struct {
  const float *dy;
  long ldd;
  const float *x;
  long ldx;
  int n;
  int k;
  int blocks;         // of rows, see Blocks
  const int *start;   // [blocks]
  const int *length;  // [blocks]
  const int *slot;    // [blocks + 1]
  long grad;          // offset of dw in `sums`
  float *parts;       // [thread blocks][levels + 1][128 x 128]
  Sums sums;
} GradientArguments;

// Gradients of columns, see ColumnSums
typedef struct {
  const float *dy;
  long ldd;
  const float *x;
  long ldx;
  const float *r;
  const float *mean;
  long ldr;
  int each;
  int cols;
  int blocks;
  const int *start;
  const int *length;
  const int *slot;
  float *partial;  // [blocks][cols]: the sum of each block, rounded once
  long grad;
  Sums sums;
} ColumnArguments;

// Gradients of the rows of a table, see table_gradient in gradients.c
typedef struct {
  const float *dx;  // [rows][width]
  int width;
  float scale;
  int entries;
  int skipped;
  const int *start;   // [entries + 1]
  const int *sorted;  // [rows]
  const int *slot;    // [rows]
  long grad;
  Sums sums;
} TableArguments;

// Attention of tokens over the cache of a layer: keys [kv_heads][capacity / 16][d][16], values
// [kv_heads][capacity][d]. Token t is at position[t] of sequence[t], which begins at base[sequence[t]].
typedef struct {
  const float *q;  // [tokens][heads][d]
  const float *keys;
  const float *values;
  const int *sequence;
  const int *position;
  const int *base;
  float *mixed;  // [tokens][heads][d]
  float *top;    // [tokens][heads]
  float *total;
  int tokens;
  int heads;
  int kv_heads;
  int d;
  int window;
  int longest;  // the largest position, plus 1
  long capacity;
  float scale;
} AttendArguments;

// Bytes of shared memory of attend_queries
INLINE long attend_queries_bytes(const AttendArguments *a) {
  const long each = a->heads / a->kv_heads;
  const long span = round16(a->longest);
  const long blocks = (a->longest + BLOCK - 1) / BLOCK;
  return 4 * (each * a->d + each * span + 2 * 16 + blocks * each * a->d);
}

// Causal attention over one sequence, all of whose tokens are here: head h at q + h d, key head g at
// k + g k_step and v + g v_step; rows of positions ldq, ldk and ldv floats apart. Heads [first, first + heads)
// of `all_heads`: p and ds hold the scores of these heads alone.
typedef struct {
  const float *q;
  long ldq;
  const float *k;
  long ldk;
  long k_step;
  const float *v;
  long ldv;
  long v_step;
  float *p;   // [heads][count][round16(count)]
  float *ds;  // the same; backward
  float *mixed;  // [count][all_heads][d]
  float *top;    // [count][all_heads]
  float *total;
  const float *d_mixed;  // [count][all_heads][d]; here and below: backward
  float *dq;             // [count][all_heads][d]
  float *dk;             // key head g at dk + g d_step, rows ldd floats apart
  float *dv;
  long ldd;
  long d_step;
  int heads;
  int first;
  int all_heads;
  int each;  // heads of a key head; divides `heads` and `first`
  int d;
  int count;
  int window;
  float scale;
} SequenceArguments;

// rows [kv][count][d] from the keys of one sequence in panels [kv] `step` floats apart
typedef struct {
  const float *panels;
  long step;
  int count;
  int d;
  float *rows;
} KeysArguments;
#endif
