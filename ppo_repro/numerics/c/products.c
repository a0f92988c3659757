// Matrix products. Law: y[m, n] = sum_k x[m, k] w[n, k] is a chain acc = fma(x, w, acc) from +0 within each block of 128
// terms, by rising k; y = +0, then y = y + block in order. So no sum is -0, and terms that are zero may be left out.
#include "kernels.h"

#ifdef FALLING_TERMS  // another order, for the tests
#define TERM(k, terms) ((terms) - 1 - (k))
#else
#define TERM(k, terms) (k)
#endif
enum { CHUNK_ROWS = 192, GROUP_PANELS = 16, NEAR_ROWS = 200, PACKED = 96, STRIP_GROUP = 32, FAR_WEIGHTS = 1 << 20 };  // free

// ------------------------------------------------------------------------------------------------------------ tiles

// One block: y[i][j] (+)= sum_k x[i, k] w[k, j] for one panel or two, `w_panel` apart
INLINE void tile(const float *restrict x, long x_row, long x_step, const float *restrict w, long w_panel, long w_step,
                 int terms, float *restrict y, long y_row, int first, const int rows, const int panels) {
  Wide acc[ROWS][PANELS] = {0}, column[PANELS];
  for (int k = 0; k < terms; k++) {
    for (int p = 0; p < panels; p++) column[p] = wide_at(w + p * w_panel + TERM(k, terms) * w_step);
#pragma clang loop unroll(full)  // or the sums do not stay in registers
    for (int i = 0; i < rows; i++)
      for (int p = 0; p < panels; p++)
        acc[i][p] = fma_wide((Wide)x[i * x_row + TERM(k, terms) * x_step], column[p], acc[i][p]);
  }
  for (int i = 0; i < rows; i++)
    for (int p = 0; p < panels; p++) {
      Wide *out = (Wide *)(y + i * y_row + p * COLS);
      *out = (first ? (Wide)0.0f : *out) + acc[i][p];
    }
}

#define TILE_CASE(r, x_step, w_step, panels) \
  case r: tile(x, x_row, x_step, w, w_panel, w_step, terms, y, y_row, first, r, panels); break;
#if defined(__AVX512F__)
#define TALLER(x_step, w_step, panels) \
  TILE_CASE(7, x_step, w_step, panels) TILE_CASE(8, x_step, w_step, panels) TILE_CASE(9, x_step, w_step, panels) \
  TILE_CASE(10, x_step, w_step, panels) TILE_CASE(11, x_step, w_step, panels) TILE_CASE(12, x_step, w_step, panels)
#else
#define TALLER(x_step, w_step, panels)
#endif
#define TILE_OF_ROWS(x_step, w_step, panels)                                                                       \
  switch (rows) {                                                                                                  \
    TILE_CASE(1, x_step, w_step, panels) TILE_CASE(2, x_step, w_step, panels) TILE_CASE(3, x_step, w_step, panels) \
    TILE_CASE(4, x_step, w_step, panels) TILE_CASE(5, x_step, w_step, panels) TILE_CASE(6, x_step, w_step, panels) \
    TALLER(x_step, w_step, panels)                                                                                 \
  }

static void whole_panels_tile(const float *x, long x_row, const float *w, long w_panel, int terms, float *y, long y_row,
                              int first, int rows) {
  TILE_OF_ROWS(1, COLS, PANELS)
}

static void whole_tile(const float *x, long x_row, long x_step, const float *w, long w_step, int terms, float *y,
                       long y_row, int first, int rows) {
  const long w_panel = 0;
  TILE_OF_ROWS(x_step, w_step, 1)
}

// The same where y has only `cols` < 16 columns, but w has 16
static void ragged_tile(const float *x, long x_row, long x_step, const float *w, long w_step, int terms, float *y,
                        long y_row, int first, int rows, int cols) {
  float wide[ROWS * COLS];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < COLS; j++) wide[i * COLS + j] = first || j >= cols ? 0.0f : y[i * y_row + j];
  whole_tile(x, x_row, x_step, w, w_step, terms, wide, COLS, first, rows);
  for (int i = 0; i < rows; i++) memcpy(y + i * y_row, wide + i * COLS, sizeof(float) * (size_t)cols);
}

// `cols` columns of y. w has a panel [terms][16] for each 16 of them, `w_panel` apart.
static void panels_tile(const float *x, long x_row, const float *w, long w_panel, int terms, float *y, long y_row,
                        int first, int rows, int cols) {
  for (; cols >= PANELS * COLS; cols -= PANELS * COLS, w += PANELS * w_panel, y += PANELS * COLS)
    whole_panels_tile(x, x_row, w, w_panel, terms, y, y_row, first, rows);
  for (; cols >= COLS; cols -= COLS, w += w_panel, y += COLS)
    whole_tile(x, x_row, 1, w, COLS, terms, y, y_row, first, rows);
  if (cols > 0) ragged_tile(x, x_row, 1, w, COLS, terms, y, y_row, first, rows, cols);
}

// Any strides; a ragged last part of w is copied, so that nothing is read beyond its columns.
static void any_tile(const float *x, long x_row, long x_step, const float *w, long w_step, int terms, float *y,
                     long y_row, int first, int rows, int cols) {
  if (cols >= COLS) {
    whole_tile(x, x_row, x_step, w, w_step, terms, y, y_row, first, rows);
    return;
  }
  float panel[BLOCK * COLS] = {0};
  for (int k = 0; k < terms; k++) memcpy(panel + k * COLS, w + k * w_step, sizeof(float) * (size_t)cols);
  ragged_tile(x, x_row, x_step, panel, COLS, terms, y, y_row, first, rows, cols);
}

// Strips of nearly equal height, at most ROWS: the row at which strip s of `strips` begins
INLINE int strip_row(int rows, int s, int strips) { return (int)((long)rows * s / strips); }
INLINE int strips_of(int rows) { return (rows + ROWS - 1) / ROWS; }
INLINE int panels_of(int columns) { return (columns + COLS - 1) / COLS; }

// ---------------------------------------------------------------------------------------------------------- packing

// Panels [ceil(n / 16)][k][16] of w, with zeros beyond n
static void pack_task(void *argument, int p) {
  const Matrix *m = argument;
  float *out = m->panels + (long)p * m->k * COLS;
  int rows = least(COLS, m->n - p * COLS);
  if (rows < COLS) memset(out, 0, sizeof(float) * (size_t)m->k * COLS);
  if (m->transposed) {
    for (int k = 0; k < m->k; k++) memcpy(out + (long)k * COLS, m->w + (long)k * m->n + p * COLS, sizeof(float) * (size_t)rows);
    return;
  }
  for (int k0 = 0; k0 < m->k; k0 += 16)
    for (int j = 0; j < rows; j++)
      for (int k = k0; k < least(k0 + 16, m->k); k++) out[(long)k * COLS + j] = m->w[(long)(p * COLS + j) * m->k + k];
}

void pack(Matrix *m) { parallel_for(panels_of(m->n), pack_task, m); }
long panel_floats(int n, int k) { return (long)panels_of(n) * COLS * k; }

// ---------------------------------------------------------------------------------------------------------- forward

// y = x w^T (+ bias) (+ residual), or, `backward`, y = x w; rows of x and y are ldx, ldy long, as those of w say
typedef struct {
  const Matrix *w;
  const float *x; long ldx; int rows;
  const float *residual;
  float *y; long ldy;
  int backward, group, chunks;
} Product;

static void finish_linear(const Product *l, int m0, int m1, int n0, int n1) {
  const float *bias = l->w->bias;
  for (int m = m0; m < m1; m++) {
    float *restrict y = l->y + m * l->ldy;
    if (bias)
      for (int n = n0; n < n1; n++) y[n] = y[n] + bias[n];
    if (l->residual) {
      const float *restrict r = l->residual + m * l->ldy;
      for (int n = n0; n < n1; n++) y[n] = r[n] + y[n];
    }
  }
}

// Rows [a, b) and panels [p0, p1)
INLINE void linear_tile(const Product *l, int k0, int a, int b, int p0, int p1) {
  const Matrix *w = l->w;
  panels_tile(l->x + a * l->ldx + k0, l->ldx, w->panels + ((long)p0 * w->k + k0) * COLS, (long)w->k * COLS,
              least(BLOCK, w->k - k0), l->y + a * l->ldy + p0 * COLS, l->ldy, k0 == 0, b - a,
              least(w->n, p1 * COLS) - p0 * COLS);
}

static void linear_block(const Product *l, int m0, int m1, int p0, int p1) {
  int strips = strips_of(m1 - m0), terms = l->w->k;
  if (strips == 1) {  // a panel is read once, from its beginning to its end
    for (int p = p0; p < p1; p += PANELS)
      for (int k0 = 0; k0 < terms; k0 += BLOCK) linear_tile(l, k0, m0, m1, p, least(p1, p + PANELS));
  } else {  // a strip stays in the first-level cache, a block of the panels in the second
    for (int k0 = 0; k0 < terms; k0 += BLOCK)
      for (int s = 0; s < strips; s++)
        linear_tile(l, k0, m0 + strip_row(m1 - m0, s, strips), m0 + strip_row(m1 - m0, s + 1, strips), p0, p1);
  }
  finish_linear(l, m0, m1, p0 * COLS, least(l->w->n, p1 * COLS));
}

// Terms [n0, n0 + terms) of panel p of the transposed matrix
static void input_panel(const Matrix *w, int n0, int terms, int p, float *panel) {
  int k0 = p * COLS, cols = least(COLS, w->k - k0);
  if (cols < COLS) memset(panel, 0, sizeof(float) * (size_t)terms * COLS);
  if (w->transposed) {
    for (int j = 0; j < cols; j++)
      for (int n = 0; n < terms; n++) panel[n * COLS + j] = w->w[(long)(k0 + j) * w->n + n0 + n];
  } else {
    for (int n = 0; n < terms; n++) memcpy(panel + n * COLS, w->w + (long)(n0 + n) * w->k + k0, sizeof(float) * (size_t)cols);
  }
}

static void input_gradient_block(const Product *l, int m0, int m1, int p0, int p1) {
  const Matrix *w = l->w;
  int strips = strips_of(m1 - m0);
  float *panels = scratch((size_t)(p1 - p0) * BLOCK * COLS);
  for (int n0 = 0; n0 < w->n; n0 += BLOCK) {
    int terms = least(BLOCK, w->n - n0);
    for (int p = p0; p < p1; p++) input_panel(w, n0, terms, p, panels + (p - p0) * BLOCK * COLS);
    for (int s = 0; s < strips; s++) {
      int a = m0 + strip_row(m1 - m0, s, strips), b = m0 + strip_row(m1 - m0, s + 1, strips);
      panels_tile(l->x + a * l->ldx + n0, l->ldx, panels, BLOCK * COLS, terms, l->y + a * l->ldy + p0 * COLS, l->ldy,
                  n0 == 0, b - a, least(w->k, p1 * COLS) - p0 * COLS);
    }
  }
}

static void product_task(void *argument, int index) {
  const Product *l = argument;
  int panels = panels_of(l->backward ? l->w->k : l->w->n), groups = (panels + l->group - 1) / l->group;
  int by_chunk = (long)l->w->n * l->w->k < FAR_WEIGHTS;  // or by group, so that weights come from memory once
  int chunk = by_chunk ? index / groups : index % l->chunks, p0 = (by_chunk ? index % groups : index / l->chunks) * l->group;
  int p1 = least(panels, p0 + l->group);
  int m0 = strip_row(l->rows, chunk, l->chunks), m1 = strip_row(l->rows, chunk + 1, l->chunks);
  (l->backward ? input_gradient_block : linear_block)(l, m0, m1, p0, p1);
}

static void run_product(Product l) {
  if (l.rows < 1) return;
  int panels = panels_of(l.backward ? l.w->k : l.w->n);
  l.chunks = (l.rows + CHUNK_ROWS - 1) / CHUNK_ROWS, l.group = task_size(panels, l.chunks, GROUP_PANELS);
  parallel_for(l.chunks * ((panels + l.group - 1) / l.group), product_task, &l);
}

void linear(const Matrix *w, const float *x, int rows, const float *residual, float *y) {
  run_product((Product){w, x, w->k, rows, residual, y, w->n, 0, 0, 0});
}

// dx[m, k] = sum_n dy[m, n] w[n, k], the same law over n
static void linear_backward_input(const Matrix *w, const float *dy, int rows, float *dx) {
  run_product((Product){w, dy, w->n, rows, NULL, dx, w->k, 1, 0, 0});
}

// ------------------------------------------------------------------------------------------- sums of gradients

// Law: the sum of a slot begins at +0; blocks are added in order; slots are joined as a binary tree. A tile of such sums
// is [MAX_LEVELS + 1][n]: part 0 is the present slot's, part i + 1 a subtree of 2^i slots. See Sums.

INLINE void add_vector(float *restrict a, const float *restrict b, const long n) {
  for (long i = 0; i < n; i++) a[i] = a[i] + b[i];
}

// Slots [from, to) are over: each joins the subtrees before it.
INLINE void close_slots(float *restrict part, int from, int to, const int n) {
  for (int s = from; s < to; s++) {
    int level = 0;
    for (; (s >> level) & 1; level++) add_vector(part, part + (level + 1) * n, n);
    memcpy(part + (level + 1) * n, part, sizeof(float) * (size_t)n);
    memset(part, 0, sizeof(float) * (size_t)n);
  }
}

INLINE int is_whole(const Sums *s) { return s->last == 1 << s->levels; }
INLINE int parts_of(const Sums *s) { return s->levels + 2; }

// Calls `copy(memory, part)` for each array that lies in memory between calls after slot `slot`
#define FOR_OPEN_PARTS(sums, slot, open, copy)                     \
  do {                                                             \
    if (open) copy((sums)->level[0], 0);                           \
    for (int level_ = 0; level_ < (sums)->levels; level_++)        \
      if (((slot) >> level_) & 1) copy((sums)->level[level_ + 1], level_ + 1); \
  } while (0)

// `rows` x `cols` elements of a gradient at `at` (rows `ld` apart), as `height` x 16 in each part
INLINE void load_parts(const Sums *s, long at, long ld, int rows, int cols, float *part, const int height) {
  memset(part, 0, sizeof(float) * (size_t)(parts_of(s) * height * COLS));
#define LOAD(memory, index) \
  for (int i = 0; i < rows; i++) \
    memcpy(part + ((index) * height + i) * COLS, (memory) + at + i * ld, sizeof(float) * (size_t)cols)
  FOR_OPEN_PARTS(s, s->first, s->open, LOAD);
#undef LOAD
}

INLINE void store_parts(const Sums *s, long at, long ld, int rows, int cols, const float *part, const int height) {
#define STORE(memory, index) \
  for (int i = 0; i < rows; i++) \
    memcpy((memory) + at + i * ld, part + ((index) * height + i) * COLS, sizeof(float) * (size_t)cols)
  if (is_whole(s)) {
    STORE(s->level[0], s->levels + 1);
    return;
  }
  FOR_OPEN_PARTS(s, s->last, s->stays_open, STORE);
#undef STORE
}

// Blocks of rows: consecutive rows of one sequence with one value of position / 128. slot[count] is `last`.
static Blocks make_blocks(int rows, const int *sequence, const int *position, const int *slots, const Sums *sums) {
  int *memory = malloc(sizeof(int) * 3 * (size_t)(rows + 2));
  Blocks b = {0, rows, memory, memory + rows + 2, memory + 2 * (rows + 2), sums};
  for (int r = 0; r < rows; r++) {
    int same = r && sequence[r] == sequence[r - 1] && position[r] / BLOCK == position[r - 1] / BLOCK;
    if (!same) b.start[b.count] = r, b.length[b.count] = 0, b.slot[b.count++] = slots[sequence[r]];
    b.length[b.count - 1]++;
  }
  b.slot[b.count] = sums->last;
  return b;
}

static void free_blocks(Blocks *b) { free(b->start); }

// ----------------------------------------------------------------------------------------------- gradients of weights

// dw[n, k] = sum over blocks of rows t of (chain of dy[t, n] x[t, k])
typedef struct {
  const float *dy; int n;
  const float *x; int k;
  const Blocks *blocks;
  long grad;
  float *strips, *panels;  // dy as [n / ROWS][rows][ROWS], x as [k / 16][rows][16]
  int strip_group, panel_group;
} WeightGradient;

// Columns [col, col + count) of `from` as [count / width][rows][width], with zeros beyond `end`
INLINE void pack_columns(const float *from, long ld, int rows, int col, int count, int end, const int width, float *out) {
  for (int t = 0; t < rows; t++)
    for (int c = col; c < col + count; c += width) {
      float *to = out + ((long)(c - col) * rows + (long)t * width);
      if (c + width <= end) memcpy(to, from + t * ld + c, sizeof(float) * (size_t)width);
      else for (int i = 0; i < width; i++) to[i] = c + i < end ? from[t * ld + c + i] : 0.0f;
    }
}

static void pack_operands_task(void *argument, int index) {
  const WeightGradient *g = argument;
  int rows = g->blocks->rows, strip_columns = strips_of(g->n) * ROWS, panel_columns = panels_of(g->k) * COLS;
  int tasks = (strip_columns + PACKED - 1) / PACKED, n = index * PACKED, k = (index - tasks) * PACKED;
  if (index < tasks)
    pack_columns(g->dy, g->n, rows, n, least(PACKED, strip_columns - n), g->n, ROWS, g->strips + (long)n * rows);
  else
    pack_columns(g->x, g->k, rows, k, least(PACKED, panel_columns - k), g->k, COLS, g->panels + (long)k * rows);
}

// A block's sum joins its slot's in part 0, which is empty if the slot `begins` with it. If the slot ends with it, the sum
// joins the subtrees before the slot, as in close_slots.
INLINE void chain_block(const float *restrict d, const float *restrict x, int terms, float *restrict part, int begins, int ends, int slot) {
  Wide acc[ROWS] = {0}, *sum = (Wide *)part;
  for (int t = 0; t < terms; t++) {
    Wide row = wide_at(x + TERM(t, terms) * COLS);
    for (int i = 0; i < ROWS; i++) acc[i] = fma_wide((Wide)d[TERM(t, terms) * ROWS + i], row, acc[i]);
  }
  for (int i = 0; i < ROWS; i++) acc[i] = (begins ? (Wide)0.0f : sum[i]) + acc[i];
  if (ends)
    for (sum += ROWS; slot & 1; slot >>= 1, sum += ROWS)
      for (int i = 0; i < ROWS; i++) acc[i] = sum[i] + acc[i];
  for (int i = 0; i < ROWS; i++) sum[i] = acc[i];
}

// The slot of block i begins or ends with it.
INLINE int begins_slot(const Blocks *b, int i) {
  return i ? b->slot[i] != b->slot[i - 1] : !(b->sums->open && b->slot[0] == b->sums->first);
}
INLINE int ends_slot(const Blocks *b, int i) { return b->slot[i + 1] != b->slot[i]; }

// Blocks [first, after) of about 200 rows, so that a panel's part stays in the first-level cache
static int near_blocks(const Blocks *b, int first) {
  int rows = 0, i = first;
  while (i < b->count && (i == first || rows + b->length[i] <= NEAR_ROWS)) rows += b->length[i++];
  return i;
}

static void weight_gradient_panel(const WeightGradient *g, int p, int s0, int s1, float *parts) {
  const Blocks *b = g->blocks;
  const Sums *sums = b->sums;
  int rows = b->rows, cols = least(COLS, g->k - p * COLS);
  const float *x = g->panels + (long)p * COLS * rows;
  long each = (long)parts_of(sums) * ROWS * COLS;
  for (int s = s0; s < s1; s++) {
    float *part = parts + (s - s0) * each;
    load_parts(sums, g->grad + (long)s * ROWS * g->k + p * COLS, g->k, least(ROWS, g->n - s * ROWS), cols, part, ROWS);
    close_slots(part, sums->first, b->slot[0], ROWS * COLS);
  }
  for (int first = 0, after; first < b->count; first = after) {
    after = near_blocks(b, first);
    for (int s = s0; s < s1; s++)
      for (int i = first; i < after; i++) {
        float *part = parts + (s - s0) * each;
        chain_block(g->strips + ((long)s * rows + b->start[i]) * ROWS, x + (long)b->start[i] * COLS, b->length[i], part,
                    begins_slot(b, i), ends_slot(b, i), b->slot[i]);
        // The next block begins a slot of its own, which starts from nothing. After the last block the slot that
        // stays open may have no rows here; part 0 must not keep the closed slot's sum for it.
        if (b->slot[i + 1] > b->slot[i] + (i + 1 < b->count)) {
          memset(part, 0, sizeof(float) * ROWS * COLS);
          close_slots(part, b->slot[i] + 1, b->slot[i + 1], ROWS * COLS);
        }
      }
  }
  for (int s = s0; s < s1; s++)
    store_parts(sums, g->grad + (long)s * ROWS * g->k + p * COLS, g->k, least(ROWS, g->n - s * ROWS), cols,
                parts + (s - s0) * each, ROWS);
}

static void weight_gradient_task(void *argument, int index) {
  const WeightGradient *g = argument;
  int strips = strips_of(g->n), panels = panels_of(g->k), groups = (panels + g->panel_group - 1) / g->panel_group;
  int s0 = index / groups * g->strip_group, s1 = least(strips, s0 + g->strip_group), p0 = index % groups * g->panel_group;
  float *parts = scratch((size_t)(s1 - s0) * (size_t)parts_of(g->blocks->sums) * ROWS * COLS);
  for (int p = p0; p < least(panels, p0 + g->panel_group); p++) weight_gradient_panel(g, p, s0, s1, parts);
}

static void weight_gradient(const float *dy, int n, const float *x, int k, const Blocks *blocks, long grad) {
  if (grad < 0) return;
  WeightGradient g = {dy, n, x, k, blocks, grad, NULL, NULL, 0, 0};
  int strips = strips_of(n), panels = panels_of(k), rows = blocks->rows;
  g.strips = shared_scratch(SCRATCH_GRADIENT_STRIPS, (size_t)strips * ROWS * (size_t)rows);
  g.panels = shared_scratch(SCRATCH_GRADIENT_PANELS, (size_t)panels * COLS * (size_t)rows);
  parallel_for((strips * ROWS + PACKED - 1) / PACKED + (panels * COLS + PACKED - 1) / PACKED, pack_operands_task, &g);
  g.strip_group = least(STRIP_GROUP, 1 + 65536 / (ROWS * (rows + 1)));  // a group's strips stay in the second-level cache
  g.panel_group = task_size(panels, strips / g.strip_group + 1, 64);
  parallel_for((strips + g.strip_group - 1) / g.strip_group * ((panels + g.panel_group - 1) / g.panel_group),
               weight_gradient_task, &g);
}

// dw[c] = sum of dy[t, c] x[t, c] r[t], or of dy[t, c] where x is NULL: a block in float64, one term after the other, rounded
// once, since the terms of a norm's weight may be far larger than their sum. A row of the batch has `each` rows of
// `cols` here, one after the other; with `mean`, x[t, c] - mean[t] stands for x[t, c].
typedef struct {
  const float *dy; long ldd;
  const float *x; long ldx;
  const float *r, *mean; long ldr;
  int each, cols;
  const Blocks *blocks;
  long grad;
} ColumnSums;

INLINE void column_chain(const ColumnSums *a, int first, int after, int c, int cols, double *acc) {
  for (int t = first; t < after; t++)
    for (int e = 0; e < a->each; e++) {
      const float *dy = a->dy + t * a->ldd + (long)e * a->cols + c;
      if (!a->x) {
        for (int j = 0; j < cols; j++) acc[j] += dy[j];
        continue;
      }
      const float *x = a->x + t * a->ldx + (long)e * a->cols + c;
      float r = a->r[t * a->ldr + e], mean = a->mean ? a->mean[t * a->ldr + e] : 0.0f;
      for (int j = 0; j < cols; j++) acc[j] += (double)dy[j] * ((a->mean ? x[j] - mean : x[j]) * r);
    }
}

static void column_sums_task(void *argument, int index) {
  const ColumnSums *a = argument;
  const Blocks *b = a->blocks;
  float part[(MAX_LEVELS + 1) * COLS];
  int c = index * COLS, cols = least(COLS, a->cols - c);
  load_parts(b->sums, a->grad + c, 0, 1, cols, part, 1);
  close_slots(part, b->sums->first, b->slot[0], COLS);
  for (int i = 0; i < b->count; i++) {
    double acc[COLS] = {0};
    if (cols == COLS) column_chain(a, b->start[i], b->start[i] + b->length[i], c, COLS, acc);
    else column_chain(a, b->start[i], b->start[i] + b->length[i], c, cols, acc);
    for (int j = 0; j < COLS; j++) part[j] = part[j] + (float)acc[j];
    close_slots(part, b->slot[i], b->slot[i + 1], COLS);
  }
  store_parts(b->sums, a->grad + c, 0, 1, cols, part, 1);
}

static void column_sums(ColumnSums a) {
  if (a.grad >= 0) parallel_for(panels_of(a.cols), column_sums_task, &a);
}

static void linear_backward_weight(const Matrix *w, const float *dy, const float *x, const Blocks *blocks) {
  if (w->transposed) weight_gradient(x, w->k, dy, w->n, blocks, w->grad);
  else weight_gradient(dy, w->n, x, w->k, blocks, w->grad);
  if (w->bias) column_sums((ColumnSums){dy, w->n, NULL, 0, NULL, NULL, 0, 1, w->n, blocks, w->bias_grad});
}

// The backward pass of a linear layer that stands alone: rows [rows] of sequences, see Blocks. dx may be NULL.
void linear_backward(const Matrix *w, const float *dy, const float *x, int rows, const int *sequence,
                            const int *position, const int *slots, const Sums *sums, float *dx) {
  if (dx) linear_backward_input(w, dy, rows, dx);
  if (w->grad < 0 && w->bias_grad < 0) return;
  Blocks blocks = make_blocks(rows, sequence, position, slots, sums);
  linear_backward_weight(w, dy, x, &blocks);
  free_blocks(&blocks);
}

// ------------------------------------------------------------------------------------------- gradients of embeddings

// d table[id] = sum of scale dx[t] over the rows t with that id, added one by one, straight into the slot's sum
typedef struct {
  const float *dx; int width; float scale;
  const Blocks *blocks;
  long grad;
  int skipped;                     // an id that takes no gradient, or -1
  const int *start, *rows, *slot;  // rows of id: rows[start[id]] .. rows[start[id + 1] - 1]; slot of each row
} TableGradient;

static void table_gradient_row(const void *argument, int id, float *memory) {
  (void)memory;
  const TableGradient *g = argument;
  const Sums *sums = g->blocks->sums;
  float part[(MAX_LEVELS + 1) * COLS];
  int begin = g->start[id], end = id == g->skipped ? begin : g->start[id + 1];
  if (begin == end && !sums->first && !sums->open && is_whole(sums)) {
    memset(sums->level[0] + g->grad + (long)id * g->width, 0, sizeof(float) * (size_t)g->width);
    return;
  }
  for (int c = 0; c < g->width; c += COLS) {
    long at = g->grad + (long)id * g->width + c;
    int cols = least(COLS, g->width - c), slot = sums->first;
    load_parts(sums, at, 0, 1, cols, part, 1);
    for (int i = begin; i < end; i++) {
      int t = g->rows[i];
      close_slots(part, slot, g->slot[t], COLS);
      slot = g->slot[t];
      for (int j = 0; j < cols; j++) part[j] = part[j] + g->scale * g->dx[(long)t * g->width + c + j];
    }
    close_slots(part, slot, sums->last, COLS);
    store_parts(sums, at, 0, 1, cols, part, 1);
  }
}

static void table_gradient(const float *dx, int width, float scale, const int *ids, int entries, int skipped, const Blocks *blocks, long grad) {
  if (grad < 0) return;
  int rows = blocks->rows, *memory = calloc((size_t)entries + 2 + 2 * (size_t)rows, sizeof(int));
  int *start = memory, *sorted = start + entries + 2, *slot = sorted + rows;
  for (int t = 0; t < rows; t++) start[ids[t] + 2]++;
  for (int id = 0; id < entries; id++) start[id + 2] += start[id + 1];
  for (int t = 0; t < rows; t++) sorted[start[ids[t] + 1]++] = t;
  for (int i = 0; i < blocks->count; i++)
    for (int t = 0; t < blocks->length[i]; t++) slot[blocks->start[i] + t] = blocks->slot[i];
  TableGradient g = {dx, width, scale, blocks, grad, skipped, start, sorted, slot};
  for_rows(entries, table_gradient_row, &g);
  free(memory);
}
