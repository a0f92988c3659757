// Linear layers: y = x w^T + bias, and the gradient of x. Both are products by rule 1, see tiles.c. The
// gradients of w and bias are sums over rows, see gradients.c.
#include "kernels.h"

// Sizes that change no bit
enum {
  CONVERTED_ROWS = 16,  // rows of a task that makes integers
  CHUNK_ROWS = 192,     // rows of a task: a chunk of x and 128 terms of the panels fit the second-level cache
  GROUP_PANELS = 16,    // panels of a task, at most
  FAR_WEIGHTS = 1 << 20  // elements of a matrix that does not stay in the caches
};

// --------------------------------------------------------------------------------------------------- packing

// Panels [ceil(n / 16)][k][16] of w: panel p holds outputs 16 p .. 16 p + 15, so that a tile reads one vector
// for each term. Beyond n there are zeros. In precision high the k terms are blocks of integers.
static void pack_integer_panel(const Matrix *m, int p) {
  const int cols = least(COLS, m->n - p * COLS);
  float *panel = m->panels + (long)p * product_steps(PRECISION_HIGH, m->k) * COLS;
  for (int k0 = 0; k0 < m->k; k0 += BLOCK, panel += 2 * BLOCK_STEPS * COLS) {
    const int terms = least(BLOCK, m->k - k0);
    const float *w = m->w + (m->transposed ? (long)k0 * m->n + p * COLS : (long)p * COLS * m->k + k0);
    integer_panel(w, m->transposed ? m->n : m->k, terms, cols, m->transposed, panel);
  }
}

static void pack_panel(void *argument, int p) {
  const Matrix *m = argument;
  if (m->precision == PRECISION_HIGH) {
    pack_integer_panel(m, p);
    return;
  }
  float *panel = m->panels + (long)p * m->k * COLS;
  int cols = least(COLS, m->n - p * COLS);
  if (cols < COLS) zero_floats(panel, (long)m->k * COLS);
  if (m->transposed) {
    for (int k = 0; k < m->k; k++)
      copy_floats(panel + (long)k * COLS, m->w + (long)k * m->n + p * COLS, cols);
    return;
  }
  // 16 terms at a time: a cache line of each of the 16 rows
  for (int k0 = 0; k0 < m->k; k0 += 16)
    for (int j = 0; j < cols; j++)
      for (int k = k0; k < least(k0 + 16, m->k); k++)
        panel[(long)k * COLS + j] = m->w[(long)(p * COLS + j) * m->k + k];
}

void pack(Matrix *m) { parallel_for(panels_of(m->n), pack_panel, m); }

long panel_floats(int n, int k, Precision precision) {
  return (long)panels_of(n) * COLS * product_steps(precision, k);
}

// -------------------------------------------------------------------------------------------------- products

// A product, cut into tasks. A task computes a rectangle of the result: a chunk of rows, a group of panels.
typedef struct Product Product;
struct Product {
  const Matrix *w;
  const float *x;         // [rows][steps]: [rows][terms], in precision high as blocks of integers
  const float *residual;  // [rows][columns], added after the bias; or NULL
  float *y;               // [rows][columns]
  float *integers;        // of precision high
  int rows;
  int terms;
  int asked;              // in precision high: blocks of x that are mostly small need their remainders
  int steps;              // floats from one row of x to the next
  int columns;
  void (*rectangle)(const Product *a, int row0, int row1, int panel0, int panel1);
  int chunks;  // tasks along the rows
  int group;   // panels of a task
};

static void product_task(void *argument, int index) {
  const Product *a = argument;
  int panels = panels_of(a->columns);
  int groups = (panels + a->group - 1) / a->group;
  int chunk = index / groups;
  int group = index % groups;
  if ((long)a->w->n * a->w->k >= FAR_WEIGHTS) {  // group by group, so that weights come from memory once
    chunk = index % a->chunks;
    group = index / a->chunks;
  }
  int row0 = strip_row(a->rows, chunk, a->chunks);
  int row1 = strip_row(a->rows, chunk + 1, a->chunks);
  a->rectangle(a, row0, row1, group * a->group, least(panels, (group + 1) * a->group));
}

static void integer_rows_task(void *argument, int index) {
  const Product *a = argument;
  for (int t = index * CONVERTED_ROWS; t < least(a->rows, (index + 1) * CONVERTED_ROWS); t++)
    integer_row(a->x + (long)t * a->terms, a->terms, a->asked, a->integers + (long)t * a->steps);
}

static void run_product(Product a) {
  if (a.rows < 1) return;
  a.steps = product_steps(a.w->precision, a.terms);
  if (a.w->precision == PRECISION_HIGH) {
    a.integers = shared_scratch(SCRATCH_INTEGERS, (size_t)a.rows * (size_t)a.steps);
    parallel_for((a.rows + CONVERTED_ROWS - 1) / CONVERTED_ROWS, integer_rows_task, &a);
    a.x = a.integers;
  }
  int panels = panels_of(a.columns);
  a.chunks = (a.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
  a.group = task_size(panels, a.chunks, GROUP_PANELS);
  parallel_for(a.chunks * ((panels + a.group - 1) / a.group), product_task, &a);
}

// --------------------------------------------------------------------------------------------------- forward

// One block of terms, from k0, of rows [row0, row1), at most ROWS, and panels [panel0, panel1) of y = x w^T
INLINE void forward_tiles(const Product *a, int k0, int row0, int row1, int panel0, int panel1) {
  const Precision precision = a->w->precision;
  const long steps = a->steps;
  const int at = product_steps(precision, k0);
  BlockOfProduct block = {
      .precision = precision,
      .x = a->x + row0 * steps + at,
      .x_row = steps,
      .x_step = 1,
      .w = a->w->panels + (panel0 * steps + at) * COLS,
      .w_panel = steps * COLS,
      .w_step = COLS,
      .y = a->y + (long)row0 * a->columns + panel0 * COLS,
      .y_row = a->columns,
      .rows = row1 - row0,
      .terms = steps_of(precision, least(BLOCK, a->terms - k0)),
      .first = k0 == 0,
  };
  multiply_panels(&block, least(a->columns, panel1 * COLS) - panel0 * COLS);
}

// + bias, + residual
static void finish_rows(const Product *a, int row0, int row1, int n0, int n1) {
  const float *bias = a->w->bias;
  for (int t = row0; t < row1; t++) {
    float *restrict y = a->y + (long)t * a->columns;
    if (bias)
      for (int n = n0; n < n1; n++) y[n] = y[n] + bias[n];
    if (a->residual) {
      const float *restrict residual = a->residual + (long)t * a->columns;
      for (int n = n0; n < n1; n++) y[n] = residual[n] + y[n];
    }
  }
}

// y [rows][n] from x [rows][k] and the packed w. The order of loops is chosen for the caches. With one strip
// of rows (decoding) a panel is read once, from its beginning to its end. With more strips, 128 terms of the
// panels stay in the second-level cache, and each strip in turn in the first-level cache.
static void forward_rectangle(const Product *a, int row0, int row1, int panel0, int panel1) {
  int rows = row1 - row0;
  int strips = strips_of(rows);
  if (strips == 1) {
    for (int p = panel0; p < panel1; p += PANELS)
      for (int k0 = 0; k0 < a->terms; k0 += BLOCK)
        forward_tiles(a, k0, row0, row1, p, least(panel1, p + PANELS));
  } else {
    for (int k0 = 0; k0 < a->terms; k0 += BLOCK)
      for (int s = 0; s < strips; s++) {
        int strip0 = row0 + strip_row(rows, s, strips);
        int strip1 = row0 + strip_row(rows, s + 1, strips);
        forward_tiles(a, k0, strip0, strip1, panel0, panel1);
      }
  }
  finish_rows(a, row0, row1, panel0 * COLS, least(a->columns, panel1 * COLS));
}

// y = x w^T (+ bias) (+ residual): x [rows][k], y and residual [rows][n]. definition: linear.linear
void linear(const Matrix *w, const float *x, int rows, const float *residual, float *y) {
  run_product((Product){
      .w = w,
      .x = x,
      .residual = residual,
      .y = y,
      .rows = rows,
      .terms = w->k,
      .asked = 1,
      .columns = w->n,
      .rectangle = forward_rectangle,
  });
}

// --------------------------------------------------------------------------------- the gradient of the input

// Terms n0 .. n0 + terms - 1 of panel p of the transposed matrix: panel[i][j] = w[n0 + i][16 p + j]; in
// precision high as a block of integers
static void input_panel(const Matrix *w, int n0, int terms, int p, float *panel) {
  int k0 = p * COLS;
  int cols = least(COLS, w->k - k0);
  if (w->precision == PRECISION_HIGH) {
    const float *from = w->w + (w->transposed ? (long)k0 * w->n + n0 : (long)n0 * w->k + k0);
    integer_panel(from, w->transposed ? w->n : w->k, terms, cols, !w->transposed, panel);
    return;
  }
  if (cols < COLS) zero_floats(panel, terms * COLS);
  if (w->transposed) {
    for (int j = 0; j < cols; j++)
      for (int i = 0; i < terms; i++) panel[i * COLS + j] = w->w[(long)(k0 + j) * w->n + n0 + i];
  } else {
    for (int i = 0; i < terms; i++)
      copy_floats(panel + i * COLS, w->w + (long)(n0 + i) * w->k + k0, cols);
  }
}

// dx [rows][k] from dy [rows][n], w as it lies. A block of terms is packed once for all strips of the chunk.
static void input_gradient_rectangle(const Product *a, int row0, int row1, int panel0, int panel1) {
  int rows = row1 - row0;
  int strips = strips_of(rows);
  const int panel_size = product_steps(a->w->precision, BLOCK) * COLS;
  float *panels = scratch((size_t)(panel1 - panel0) * (size_t)panel_size);
  if (!panels) return;
  for (int n0 = 0; n0 < a->terms; n0 += BLOCK) {
    int terms = least(BLOCK, a->terms - n0);
    for (int p = panel0; p < panel1; p++)
      input_panel(a->w, n0, terms, p, panels + (p - panel0) * panel_size);
    for (int s = 0; s < strips; s++) {
      int strip0 = row0 + strip_row(rows, s, strips);
      int strip1 = row0 + strip_row(rows, s + 1, strips);
      BlockOfProduct block = {
          .precision = a->w->precision,
          .x = a->x + (long)strip0 * a->steps + product_steps(a->w->precision, n0),
          .x_row = a->steps,
          .x_step = 1,
          .w = panels,
          .w_panel = panel_size,
          .w_step = COLS,
          .y = a->y + (long)strip0 * a->columns + panel0 * COLS,
          .y_row = a->columns,
          .rows = strip1 - strip0,
          .terms = steps_of(a->w->precision, terms),
          .first = n0 == 0,
      };
      multiply_panels(&block, least(a->columns, panel1 * COLS) - panel0 * COLS);
    }
  }
}

// dx = dy w, the sum over n by rule 1: dy [rows][n], dx [rows][k]. definition: linear.linear_backward
static void linear_backward_input(const Matrix *w, const float *dy, int rows, float *dx) {
  run_product((Product){
      .w = w,
      .x = dy,
      .y = dx,
      .rows = rows,
      .terms = w->n,
      .columns = w->k,
      .rectangle = input_gradient_rectangle,
  });
}
