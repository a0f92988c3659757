// Arguments of the kernels of a GPU that are no row functions. Each kernel takes one struct by value, which
// the host fills (launches.c). Pointers point to memory of the GPU.
#ifndef GPU_ARGUMENTS_H
#define GPU_ARGUMENTS_H
#include "../operations.h"

// Sizes that the kernels and the host share
enum {
  GPU_THREADS = 256,  // of every thread block, at most
  TILE = 128,         // columns of a tile, and its rows where high is 8
  TERMS = 16,         // of a stage
  STAGES = 4,
  GAP = 4,            // floats between the terms of a stage: no bank meets two copies that turn an operand
  QUERY_HEADS = 8     // of a thread block of attend_queries, at most
};

// Floats of a stage of a tile of 16 high rows
INLINE int stage_floats(int high) { return TERMS * (16 * high + GAP + TILE + GAP); }

// The second parameter of a row function's kernel. 16 threads compute a row, so a thread block of T
// threads computes T / 16 rows at once: group g = thread block (T / 16) + thread / 16 computes the rows g,
// g + thread blocks (T / 16), ..
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

// Blocks of integers X = 65 H + L, see integers.c. Rows of zeros fill up the last tile. The lines that a
// thread block fetches at once follow one another.
typedef struct {
  signed char *lines;  // [room / 128][blocks][2][128][LINE_BYTES]: 64 H, then 64 L, of each half of a block
  float *scales;       // [blocks][room]: 2^-s, or NaN; -2^-s if the block is mostly small
  signed char *rest;   // remainders as lines, or NULL
  int rows;
  int blocks;
  int room;  // rows that have memory
} SplitMatrix;

enum {
  LINE_BYTES = 128,
  INTEGER_STAGES = 3,
  INTEGER_TILE = 128,                      // rows of the highest tile
  HALF_BYTES = INTEGER_TILE * LINE_BYTES
};

INLINE int room_for_rows(int rows) { return (rows + INTEGER_TILE - 1) / INTEGER_TILE * INTEGER_TILE; }

// Where the line of the first half of a block is
INLINE long line_of(const SplitMatrix *o, int row, int block) {
  return ((long)(row / INTEGER_TILE) * o->blocks + block) * 2 * HALF_BYTES + row % INTEGER_TILE * LINE_BYTES;
}

// Floats of memory for lines, for them with their scales, and for both with remainders
INLINE long line_floats(int rows, int blocks) {
  return (long)blocks * room_for_rows(rows) * (2 * LINE_BYTES / 4);
}
INLINE long integer_floats(int rows, int blocks) {
  return line_floats(rows, blocks) + (long)blocks * room_for_rows(rows);
}
INLINE long factor_floats(int rows, int blocks) {
  return integer_floats(rows, blocks) + line_floats(rows, blocks);
}

INLINE SplitMatrix integers_in(float *memory, int rows, int blocks) {
  return (SplitMatrix){
      .lines = (signed char *)memory,
      .scales = memory + line_floats(rows, blocks),
      .rows = rows,
      .blocks = blocks,
      .room = room_for_rows(rows),
  };
}

// The same with remainders, for x or w of a product
INLINE SplitMatrix factor_in(float *memory, int rows, int blocks) {
  SplitMatrix all = integers_in(memory, rows, blocks);
  all.rest = (signed char *)(memory + integer_floats(rows, blocks));
  return all;
}

// A warp computes 16 high x 8 wide elements; a thread block has down x across warps
typedef struct {
  int high;
  int wide;
  int down;
  int across;
} IntegerForm;

#define TALL ((const IntegerForm){2, 4, 4, 2})  // 128 x 64
#define FLAT ((const IntegerForm){1, 2, 1, 8})  // 16 x 128, for few rows

INLINE int form_rows(const IntegerForm f) { return 16 * f.high * f.down; }
INLINE int form_columns(const IntegerForm f) { return 8 * f.wide * f.across; }
// of a half of a block: lines, then scales. Every stage begins at a multiple of 128 bytes.
INLINE int integer_stage_floats(const IntegerForm f) {
  const int lines = form_rows(f) + form_columns(f);
  return (lines + (lines + 31) / 32) * (LINE_BYTES / 4);
}

// From numbers to integers. split_rows: x [rows][ld], of `terms` terms; split_columns: x [terms][ld]
typedef struct {
  const float *x;
  long ld;
  int terms;
  const int *start;   // [blocks], the first term of a block; NULL: blocks have 128 terms each
  const int *length;  // [blocks]
  int asked;          // blocks that are mostly small need their remainders
  SplitMatrix to;
} SplitArguments;

typedef struct {
  ProductArguments product;  // without x and w
  SplitMatrix x;
  SplitMatrix w;
} IntegerProduct;

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

typedef struct {
  GradientArguments gradient;  // without dy and x
  SplitMatrix dy;                 // of n rows
  SplitMatrix x;                  // of k rows
} IntegerGradient;

// Row and column of a thread's first element
typedef struct {
  int row;
  int column;
} Corner;

// Gradients of columns
typedef struct {
  Columns of;
  int blocks;
  const int *start;
  const int *length;
  const int *slot;
  float *partial;  // [blocks][cols]: the sum of each block, rounded once
  long grad;
  Sums sums;
} ColumnArguments;

// Attention of single queries over the cache of a layer, see Batch. A thread block computes one query for at
// most 8 heads of a group. A query at position[t] of sequence[t], which begins at base[sequence[t]].
typedef struct {
  const float *q;  // [tokens][heads][head_dim]
  const float *keys;
  const float *values;
  const int *position;  // [tokens]
  const int *sequence;  // [tokens]
  const int *base;      // [sequences]
  long capacity;
  float *mixed;  // [tokens][heads][head_dim]
  float *top;    // [tokens][heads]
  float *total;
  int heads;
  int kv_heads;
  int head_dim;
  int window;
  float scale;
  float score_cap;
} AttendArguments;

// Floats of shared memory for `heads` heads of a group over `span` keys
INLINE long attend_queries_floats(int heads, int head_dim, int span) {
  long keys = multiple_of_16(span);
  return heads * (head_dim + keys + 1) + (keys + BLOCK - 1) / BLOCK * heads * head_dim;
}

// Attention of whole sequences by tiles: the key heads from first_kv on, of the sequences from first_sequence
// on. The grid says how many of each.
typedef struct {
  const float *q;  // [tokens][heads][head_dim]
  const float *keys;
  const float *values;
  const int *start;     // [sequences + 1]
  const int *position;  // [tokens]
  const int *base;      // [sequences]
  long capacity;
  float *p;      // [sequences of the launch][heads of the launch][most][ld]: scores, then p
  float *ds;     // the same shape; backward
  float *mixed;  // [tokens][heads][head_dim]
  float *top;    // [tokens][heads]
  float *total;
  const float *d_mixed;  // [tokens][heads][head_dim]; here and below: backward, where positions begin at 0
  float *dq;             // [tokens][heads][head_dim]
  float *d_raw;          // [tokens][d_raw_row]: the key and value parts of its rows get dk and dv
  long d_raw_row;
  int k_at;
  int k_step;
  int v_at;
  int v_step;
  int heads;
  int kv_heads;
  int head_dim;
  int window;
  float scale;
  float score_cap;
  int first_sequence;
  int first_kv;
  int most;  // queries of the longest sequence of the launch
  int ld;    // keys that a query of the launch sees at most, rounded up to 16
} SequenceArguments;
#endif
