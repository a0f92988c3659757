// Gradients of weights (rule 2): sums over the rows t of a batch, cut into blocks and slots.
//
// A block is the rows of one sequence whose positions have one value of position / 128. The sum of a block is
// one chain over its rows. A slot is some consecutive sequences. The sum of a slot begins at +0, and the sums
// of its blocks are added in order.
//
// The sums of slots are joined as a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)). When a slot is complete, it is
// added to the subtrees before it as 1 is added to a binary counter: two subtrees of one size become one
// subtree of twice the size. So at most levels + 1 subtrees wait at any time.
//
// So each element of a gradient has `parts`: part 0 is the sum of the present slot, and part i + 1 is a
// subtree of 2^i slots that waits. Each task below takes a tile of elements through the whole batch. It loads
// the parts that an earlier backward pass left, adds its blocks, and stores the parts for the next pass. No
// other task touches these elements.
#include "kernels.h"

// Sizes that change no bit
enum {
  NEAR_ROWS = 200,    // rows of a panel and a strip that fit the first-level cache
  PACK_COLUMNS = 96,  // columns of a task that packs: a multiple of ROWS and of 16
  MAX_STRIPS = 32     // strips of a task, whose parts stay in the second-level cache
};

// --------------------------------------------------------------------------------------------- parts of sums

INLINE void add_vector(float *restrict a, const float *restrict b, const long n) {
  for (long i = 0; i < n; i++) a[i] = a[i] + b[i];
}

// The slots [from, to) are complete. The sum of a slot, part 0, is joined with the subtrees that wait before
// it, and part 0 begins again at +0. For example, slot 3 is joined with slot 2, then with the subtree of
// slots 0 and 1, and becomes a subtree of 4 slots: one join for each 1 at the end of 3 = 11 in binary.
// Parts [MAX_LEVELS + 1][n]. definition: gradients.join_slots
INLINE void close_slots(float *restrict parts, int from, int to, const int n) {
  for (int slot = from; slot < to; slot++) {
    int level = 0;
    for (; (slot >> level) & 1; level++) add_vector(parts, parts + (level + 1) * n, n);
    copy_floats(parts + (level + 1) * n, parts, n);
    zero_floats(parts, n);
  }
}

INLINE int parts_of(const Sums *s) { return s->levels + 2; }

// Returns whether a part is in memory between two passes: part 0 if the present slot is `open`, part i + 1 if
// a subtree of 2^i slots waits before the present slot, `slot`
INLINE int part_waits(int part, int slot, int open) { return part ? (slot >> (part - 1)) & 1 : open; }

// The elements of a gradient that one task computes: `rows` rows of `cols` <= 16, `ld` apart, the first at
// offset `at`. In a task's memory they are [parts][height][16].
typedef struct {
  long at;
  long ld;
  int rows;
  int cols;
} Elements;

INLINE void load_part(const float *level, Elements e, float *part) {
  for (int i = 0; i < e.rows; i++) copy_floats(part + i * COLS, level + e.at + i * e.ld, e.cols);
}

INLINE void store_part(float *level, Elements e, const float *part) {
  for (int i = 0; i < e.rows; i++) copy_floats(level + e.at + i * e.ld, part + i * COLS, e.cols);
}

INLINE void load_parts(const Sums *s, Elements e, float *parts, const int height) {
  zero_floats(parts, parts_of(s) * height * COLS);
  for (int part = 0; part <= s->levels; part++)
    if (part_waits(part, s->first, s->open)) load_part(s->level[part], e, parts + part * height * COLS);
}

// After the last pass of a minibatch the last part is the tree of all slots, which is the gradient.
INLINE void store_parts(const Sums *s, Elements e, const float *parts, const int height) {
  if (is_whole(s)) {
    store_part(s->level[0], e, parts + (s->levels + 1) * height * COLS);
    return;
  }
  for (int part = 0; part <= s->levels; part++)
    if (part_waits(part, s->last, s->stays_open)) store_part(s->level[part], e, parts + part * height * COLS);
}

// ---------------------------------------------------------------------------------------------------- blocks

// Returns whether block i is the last of its slot
INLINE int ends_slot(const Blocks *b, int i) { return b->slot[i + 1] != b->slot[i]; }

// -------------------------------------------------------------------------------------- gradient of a matrix

// dw [n][k] = sum over rows t of dy[t][n] x[t][k]: dy [rows][n], x [rows][k].
// First both are packed, so that a tile reads them one row after the other:
//   strips [ceil(n / ROWS)][rows][ROWS] of dy, panels [ceil(k / 16)][rows][16] of x.
// Then a task takes some strips and some panels. Each pair is a tile [ROWS][16] of dw. Panels are the outer
// loop: a panel stays in the first-level cache for all strips, which stay in the second-level cache for all
// panels.
typedef struct {
  const float *dy;
  const float *x;
  int n;
  int k;
  const Blocks *blocks;
  long grad;
  float *strips;
  float *panels;
  int strip_group;  // strips of a task
  int panel_group;  // panels of a task
  Precision precision;
  Blocks packed;  // the blocks in the floats of strips and panels; in precision highest a float is a row
} WeightGradient;

// Columns [col, col + count) of from [rows][ld] as [count / width][rows of all][width], with zeros beyond
// column `end`
INLINE void pack_columns(const float *from, long ld, int rows, long rows_of_all, int col, int count, int end,
                         const int width, float *to) {
  for (int t = 0; t < rows; t++)
    for (int c = col; c < col + count; c += width) {
      float *out = to + ((c - col) * rows_of_all + (long)t * width);
      if (c + width <= end) {
        copy_floats(out, from + t * ld + c, width);
      } else {
        for (int i = 0; i < width; i++) out[i] = c + i < end ? from[t * ld + c + i] : 0.0f;
      }
    }
}

INLINE int packing_tasks(int columns) { return (columns + PACK_COLUMNS - 1) / PACK_COLUMNS; }

// Does the same in precision high, where each block of rows becomes integers
INLINE void pack_integers(const WeightGradient *a, const float *from, int ld, int col, int count,
                          const int width, float *to) {
  const Blocks *b = a->blocks;
  float panel[BLOCK_STEPS * COLS];         // [steps][16]
  float rows[BLOCK_STEPS * PACK_COLUMNS];  // [steps][count]
  for (int i = 0; i < b->count; i++) {
    const int steps = a->packed.length[i];
    const float *first = from + (long)b->start[i] * ld;
    float *out = to + (long)a->packed.start[i] * width;
    for (int c = 0; c < count; c += COLS) {
      const int cols = least(COLS, ld - col - c);
      // a constant number of columns makes vectors
      if (cols == COLS) integer_columns(first + col + c, ld, b->length[i], COLS, panel, NULL);
      else if (cols > 0) integer_columns(first + col + c, ld, b->length[i], cols, panel, NULL);
      else zero_floats(panel, (long)steps * COLS);
      if (width == COLS) {
        copy_floats(out + (long)c * a->packed.rows, panel, (long)steps * COLS);
        continue;
      }
      for (int t = 0; t < steps; t++)
        copy_floats(rows + t * count + c, panel + t * COLS, least(COLS, count - c));
    }
    if (width != COLS) pack_columns(rows, count, steps, a->packed.rows, 0, count, count, width, out);
  }
}

static void pack_gradient_task(void *argument, int index) {
  const WeightGradient *a = argument;
  const int is_high = a->precision == PRECISION_HIGH;
  int rows = a->packed.rows;
  int strip_columns = strips_of(a->n) * ROWS;
  int panel_columns = panels_of(a->k) * COLS;
  int tasks = packing_tasks(strip_columns);
  if (index < tasks) {
    int c = index * PACK_COLUMNS;
    int count = least(PACK_COLUMNS, strip_columns - c);
    float *to = a->strips + (long)c * rows;
    if (is_high) pack_integers(a, a->dy, a->n, c, count, ROWS, to);
    else pack_columns(a->dy, a->n, rows, rows, c, count, a->n, ROWS, to);
  } else {
    int c = (index - tasks) * PACK_COLUMNS;
    int count = least(PACK_COLUMNS, panel_columns - c);
    float *to = a->panels + (long)c * rows;
    if (is_high) pack_integers(a, a->x, a->k, c, count, COLS, to);
    else pack_columns(a->x, a->k, rows, rows, c, count, a->k, COLS, to);
  }
}

// Adds one block to a tile: dy [terms][ROWS], x [terms][16], parts [parts][ROWS][16]. The block's chain is
// added to the sum of its slot, part 0. If the slot `ends` with this block, the parts change as by
// close_slots(parts, slot, slot + 1, ROWS * COLS), but the sum does not leave the registers.
// definition: gradients.weight_addends
INLINE void chain_block(const float *restrict dy, const float *restrict x, int terms, float *restrict parts,
                        int ends, int slot, const int is_high) {
  Wide acc[ROWS] = {0};
  Wide *sum = (Wide *)parts;
  for (int t = is_high; t < terms; t++) {
    Wide row = wide_at(x + t * COLS);
    for (int i = 0; i < ROWS; i++) acc[i] = chain_step(dy + t * ROWS + i, row, acc[i], is_high);
  }
#pragma clang loop unroll(full)  // or the sums do not stay in registers
  for (int i = 0; i < ROWS; i++) acc[i] = sum[i] + sum_of_block(acc[i], dy[i], wide_at(x), is_high);
  if (ends) {
    for (int i = 0; i < ROWS; i++) sum[i] = (Wide)0.0f;
    sum += ROWS;
    for (; slot & 1; slot >>= 1) {
      for (int i = 0; i < ROWS; i++) acc[i] = sum[i] + acc[i];
      sum += ROWS;
    }
  }
  for (int i = 0; i < ROWS; i++) sum[i] = acc[i];
}

// Returns the end of some consecutive blocks from `first` on, which have about NEAR_ROWS rows
static int near_blocks(const Blocks *b, int first) {
  int rows = 0;
  int i = first;
  for (; i < b->count; i++) {
    if (i > first && rows + b->length[i] > NEAR_ROWS) break;
    rows += b->length[i];
  }
  return i;
}

INLINE Elements tile_of_gradient(const WeightGradient *a, int strip, int panel) {
  return (Elements){
      .at = a->grad + (long)strip * ROWS * a->k + panel * COLS,
      .ld = a->k,
      .rows = least(ROWS, a->n - strip * ROWS),
      .cols = least(COLS, a->k - panel * COLS),
  };
}

// The tiles of strips [s0, s1) and one panel; memory [s1 - s0][parts][ROWS][16]
static void weight_gradient_panel(const WeightGradient *a, int panel, int s0, int s1, float *memory) {
  const Blocks *b = &a->packed;
  const Sums *sums = b->sums;
  const float *x = a->panels + (long)panel * COLS * b->rows;
  long each = (long)parts_of(sums) * ROWS * COLS;
  for (int s = s0; s < s1; s++) {
    float *parts = memory + (s - s0) * each;
    load_parts(sums, tile_of_gradient(a, s, panel), parts, ROWS);
    close_slots(parts, sums->first, b->slot[0], ROWS * COLS);
  }
  int after;
  for (int first = 0; first < b->count; first = after) {
    after = near_blocks(b, first);
    for (int s = s0; s < s1; s++)
      for (int i = first; i < after; i++) {
        float *parts = memory + (s - s0) * each;
        const float *dy = a->strips + ((long)s * b->rows + b->start[i]) * ROWS;
        const float *x_block = x + (long)b->start[i] * COLS;
        const int ends = ends_slot(b, i);
        const int terms = b->length[i];
        if (a->precision == PRECISION_HIGH) chain_block(dy, x_block, terms, parts, ends, b->slot[i], 1);
        else chain_block(dy, x_block, terms, parts, ends, b->slot[i], 0);
        close_slots(parts, b->slot[i] + 1, b->slot[i + 1], ROWS * COLS);  // empty slots that follow
      }
  }
  for (int s = s0; s < s1; s++)
    store_parts(sums, tile_of_gradient(a, s, panel), memory + (s - s0) * each, ROWS);
}

static void weight_gradient_task(void *argument, int index) {
  const WeightGradient *a = argument;
  int strips = strips_of(a->n);
  int panels = panels_of(a->k);
  int groups = (panels + a->panel_group - 1) / a->panel_group;
  int s0 = index / groups * a->strip_group;
  int s1 = least(strips, s0 + a->strip_group);
  int p0 = index % groups * a->panel_group;
  float *memory = scratch((size_t)(s1 - s0) * (size_t)parts_of(a->blocks->sums) * ROWS * COLS);
  if (!memory) return;
  for (int p = p0; p < least(panels, p0 + a->panel_group); p++) weight_gradient_panel(a, p, s0, s1, memory);
}

// Writes the blocks `packed`, which count floats of integers instead of rows. The caller frees `start`.
// Returns 0 if memory is full.
static int integer_blocks(const Blocks *b, Blocks *packed) {
  int *memory = allocate_zeros(2 * (size_t)b->count, sizeof(int));
  if (!memory) return 0;
  packed->start = memory;
  packed->length = memory + b->count;
  packed->rows = 0;
  for (int i = 0; i < b->count; i++) {
    packed->start[i] = packed->rows;
    packed->length[i] = steps_of(PRECISION_HIGH, b->length[i]);
    packed->rows += packed->length[i];
  }
  return 1;
}

static void weight_gradient(Precision precision, const float *dy, int n, const float *x, int k,
                            const Blocks *blocks, long grad) {
  if (grad < 0) return;
  Blocks packed = *blocks;
  if (precision == PRECISION_HIGH && !integer_blocks(blocks, &packed)) return;
  int strips = strips_of(n);
  int panels = panels_of(k);
  int rows = packed.rows;
  WeightGradient a = {
      .dy = dy,
      .x = x,
      .n = n,
      .k = k,
      .blocks = blocks,
      .grad = grad,
      .precision = precision,
      .packed = packed,
      .strips = shared_scratch(SCRATCH_GRADIENT_STRIPS, (size_t)strips * ROWS * (size_t)rows),
      .panels = shared_scratch(SCRATCH_GRADIENT_PANELS, (size_t)panels * COLS * (size_t)rows),
  };
  parallel_for(packing_tasks(strips * ROWS) + packing_tasks(panels * COLS), pack_gradient_task, &a);
  a.strip_group = least(MAX_STRIPS, 1 + (int)(65536 / (ROWS * (rows + 1L))));
  a.panel_group = task_size(panels, strips / a.strip_group + 1, 64);
  int strip_groups = (strips + a.strip_group - 1) / a.strip_group;
  int panel_groups = (panels + a.panel_group - 1) / a.panel_group;
  parallel_for(strip_groups * panel_groups, weight_gradient_task, &a);
  if (packed.start != blocks->start) free(packed.start);
}

// ------------------------------------------------------------------- gradients of biases and of norm weights

typedef struct {
  Columns of;
  const Blocks *blocks;
  long grad;
} ColumnSums;

// Adds the gradient of columns c .. c + cols - 1 from the rows [first, after) of a block to acc [cols], in
// float64
INLINE void column_chain(const Columns *a, int first, int after, int c, int cols, double *acc) {
  for (int t = first; t < after; t++)
    for (int e = 0; e < a->each; e++) {
      const float *dy = a->dy + t * a->ldd + (long)e * a->cols + c;
      if (!a->x) {
        for (int j = 0; j < cols; j++) acc[j] += dy[j];
        continue;
      }
      const float *x = a->x + t * a->ldx + (long)e * a->cols + c;
      float r = a->r[t * a->ldr + e];
      float mean = a->mean ? a->mean[t * a->ldr + e] : 0.0f;
      for (int j = 0; j < cols; j++) acc[j] += (double)dy[j] * ((a->mean ? x[j] - mean : x[j]) * r);
    }
}

// Takes 16 columns through all blocks. A block is summed in float64 and rounded once, because the terms of a
// norm's weight may be far larger than their sum. definition: gradients.column_addends
static void column_sums_task(void *argument, int index) {
  const ColumnSums *a = argument;
  const Blocks *b = a->blocks;
  float parts[(MAX_LEVELS + 1) * COLS];
  int c = index * COLS;
  int cols = least(COLS, a->of.cols - c);
  Elements columns = {.at = a->grad + c, .ld = 0, .rows = 1, .cols = cols};
  load_parts(b->sums, columns, parts, 1);
  close_slots(parts, b->sums->first, b->slot[0], COLS);
  for (int i = 0; i < b->count; i++) {
    double acc[COLS] = {0};
    int first = b->start[i];
    int after = first + b->length[i];
    // a constant number of columns makes vectors
    if (cols == COLS) column_chain(&a->of, first, after, c, COLS, acc);
    else column_chain(&a->of, first, after, c, cols, acc);
    for (int j = 0; j < COLS; j++) parts[j] = parts[j] + (float)acc[j];
    close_slots(parts, b->slot[i], b->slot[i + 1], COLS);
  }
  store_parts(b->sums, columns, parts, 1);
}

static void column_sums(Columns of, const Blocks *blocks, long grad) {
  if (grad < 0) return;
  ColumnSums sums = {.of = of, .blocks = blocks, .grad = grad};
  parallel_for(panels_of(of.cols), column_sums_task, &sums);
}

// ----------------------------------------------------------------------------------- gradients of embeddings

// The gradient of one id of the table: the gradients of the rows with this id are added to the slot's sum one
// by one, without blocks. definition: gradients.row_addends
ROW(table_gradient_row, TableGradient) {
  const Sums *sums = &a->sums;
  float parts[(MAX_LEVELS + 1) * COLS];
  int id = row;
  int begin = a->start[id];
  int end = id == a->skipped ? begin : a->start[id + 1];
  long gradient = a->grad + (long)id * a->width;
  if (begin == end && !sums->first && !sums->open && is_whole(sums)) {  // most ids of a large vocabulary
    zero_floats(sums->level[0] + gradient, a->width);
    return;
  }
  for (int c = 0; c < a->width; c += COLS) {
    Elements columns = {.at = gradient + c, .ld = 0, .rows = 1, .cols = least(COLS, a->width - c)};
    int slot = sums->first;
    load_parts(sums, columns, parts, 1);
    for (int i = begin; i < end; i++) {
      int t = a->sorted[i];
      const float *dx = a->dx + (long)t * a->width + c;
      close_slots(parts, slot, a->slot[t], COLS);
      slot = a->slot[t];
      for (int j = 0; j < columns.cols; j++) parts[j] = parts[j] + a->scale * dx[j];
    }
    close_slots(parts, slot, sums->last, COLS);
    store_parts(sums, columns, parts, 1);
  }
}

static void sum_table_rows(const TableGradient *of) { for_rows(of->entries, table_gradient_row, of); }
