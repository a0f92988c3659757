// Precision high on tensor cores: blocks of integers as ../integers.c says, their exact sums from products
// of bytes. Tensor cores multiply bytes, so X = 64 H + L, with H in -64..64 and L in -32..31:
//
//   sum of X W = 4096 HH' + 64 (HL' + LH') + LL'
//
// Where a block has no term, H = L = 0. The order of these sums is free, and the instruction's own.
//
// The sum of remainders, X W' + X' W, is computed in the same way, from two products. It is rare, so its
// lines come straight from global memory.
//
// A thread block of 8 warps computes a tile of y, and a warp 16 high x 8 wide elements of it. Halves of
// blocks, 64 terms, come by asynchronous copies: of each row one line of 128 bytes, 64 H and then 64 L. Chunk
// c of line r, 16 bytes, is stored as chunk c ^ r % 8, so that load_matrices meets no bank twice.
#include "arguments.h"
#include "machine.h"

enum {
  MOST_FOURS = 8,                    // of a warp: high wide
  LINE_FLOATS = LINE_BYTES / 4,
  LEAST_EXPONENT = 127 + 11 - 63,    // as ../integers.c: s is at most 63
  REFUSED_EXPONENT = 127 + 60,       // 2^60, and infinity and NaN
  SMALL = 32                         // as ../integers.c too
};

// ---------------------------------------------------------------------------------- from numbers to integers

INLINE int integer_of(float x) {
  const float whole = 0x1.8p23f;  // between 2^23 and 2^24 a float is an integer, so the sum rounds
  const int n = (int)(as_bits(x + whole) - as_bits(whole));
  return n > 4095 ? 4095 : n < -4095 ? -4095 : n;
}

INLINE int sum_of_lanes(int x) {
  UNROLL
  for (int mask = LANES / 2; mask; mask /= 2) x += (int)other_lane((uint32_t)x, mask);
  return x;
}

// The bytes H and L of 4 integers, to the place of a thread's terms in a line
INLINE void put_bytes(const int x[4], uint32_t *line) {
  uint32_t high = 0;
  uint32_t low = 0;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const int H = (x[i] + 32) >> 6;
    high |= ((uint32_t)H & 255) << 8 * i;
    low |= ((uint32_t)(x[i] - 64 * H) & 255) << 8 * i;
  }
  line[0] = high;
  line[LINE_FLOATS / 2] = low;
}

// 16 threads turn one block of a row into integers. Thread l has the terms 64 half + 4 l + i in v[half][i],
// and 0 beyond `terms`. definition: product.integers
INLINE void split_block(float v[2][4], int terms, const SplitMatrix *to, int row, int block, int asked) {
  const int lane = thread_index() % LANES;
  uint32_t largest = 0;
  UNROLL
  for (int half = 0; half < 2; half++)
    UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t size = as_bits(v[half][i]) & 0x7fffffffu;
      largest = size > largest ? size : largest;
    }
  UNROLL
  for (int mask = LANES / 2; mask; mask /= 2) {
    const uint32_t other = other_lane(largest, mask);
    largest = other > largest ? other : largest;
  }
  const int found = (int)(largest >> 23);
  const int exponent = found > LEAST_EXPONENT ? found : LEAST_EXPONENT;
  const float up = as_float((uint32_t)(127 + 127 + 11 - exponent) << 23);
  const long at = ((long)row * to->blocks + block) * 2 * LINE_BYTES + 4 * lane;
  int small = 0;
  UNROLL
  for (int half = 0; half < 2; half++) {
    int x[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
      x[i] = integer_of(v[half][i] * up);
      small += x[i] < SMALL && x[i] > -SMALL && v[half][i] != 0.0f;
    }
    put_bytes(x, (uint32_t *)(to->lines + at + half * LINE_BYTES));
    if (!to->rest) continue;
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = integer_of((v[half][i] * up - (float)x[i]) * 0x1p11f);
    put_bytes(x, (uint32_t *)(to->rest + at + half * LINE_BYTES));
  }
  const int mostly_small = asked && 2 * sum_of_lanes(small) > terms;
  if (lane) return;
  const float scale = as_float(exponent >= REFUSED_EXPONENT ? 0x7fc00000u : (uint32_t)(exponent - 11) << 23);
  to->scales[(long)block * to->room + row] = mostly_small ? -scale : scale;
}

// The rows of x, whose terms follow one another: 16 threads have a block of a row
KERNEL(split_rows, SplitArguments) {
  const int block = thread_block_x() % a->to.blocks;
  const int row = thread_block_x() / a->to.blocks * (GPU_THREADS / LANES) + thread_index() / LANES;
  const int begin = block * BLOCK;
  const int terms = least(BLOCK, a->terms - begin);
  const int own = row < a->to.rows ? terms : 0;  // a row that fills up a tile is zeros
  const float *x = a->x + row * a->ld + begin;
  float v[2][4];
  UNROLL
  for (int half = 0; half < 2; half++)
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int k = 64 * half + 4 * (thread_index() % LANES) + i;
      v[half][i] = k < own ? x[k] : 0.0f;
    }
  split_block(v, terms, &a->to, row, block, a->asked);
}

// The columns of x [terms][ld]: a thread block has one block of 32 of them. In shared memory they are
// rotated, so that neither rows nor columns meet a bank twice.
KERNEL(split_columns, SplitArguments) {
  const int block = thread_block_x() % a->to.blocks;
  const int column = thread_block_x() / a->to.blocks * 32;
  const int begin = a->start ? a->start[block] : block * BLOCK;
  const int terms = a->start ? a->length[block] : least(BLOCK, a->terms - begin);
  const int lane = thread_index() % 32;
  UNROLL
  for (int i = 0; i < BLOCK; i += GPU_THREADS / 32) {
    const int t = i + thread_index() / 32;
    const int exists = t < terms && column + lane < a->to.rows;
    shared_memory[32 * t + (lane + t / 4) % 32] = exists ? a->x[(begin + t) * a->ld + column + lane] : 0.0f;
  }
  barrier();
  const int l = thread_index() % LANES;
  UNROLL
  for (int c = 0; c < 32; c += 16) {
    // the two columns of a warp are 16 apart
    const int own = thread_index() / 32 + thread_index() / LANES % 2 * 16 + c / 2;
    float v[2][4];
    UNROLL
    for (int half = 0; half < 2; half++)
      UNROLL
      for (int i = 0; i < 4; i++) {
        const int t = 64 * half + 4 * l + i;
        v[half][i] = shared_memory[32 * t + (own + t / 4) % 32];
      }
    split_block(v, terms, &a->to, column + own, block, a->asked);
  }
}

// ----------------------------------------------------------------------------------------------------- tiles

// The tile of y from row m0 and column n0 on, as one thread sees it
typedef struct {
  const SplitMatrix *x;
  const SplitMatrix *w;
  int m0;
  int n0;
  int m;  // the warp's first row in the tile, and column
  int n;
} IntegerTile;

// Which half of a block is fetched next, the one after the last, and the stage that is computed next; where
// the thread's chunk of the next half is in its first rows of x and w
typedef struct {
  int next;
  int after;
  int stage;
  const signed char *x;
  const signed char *w;
} Halves;

INLINE IntegerTile integer_tile_at(const SplitMatrix *x, const SplitMatrix *w, int m0, int n0,
                                   const IntegerForm f) {
  const int warp = thread_index() / 32;
  return (IntegerTile){x, w, m0, n0, warp / f.across * 16 * f.high, warp % f.across * 8 * f.wide};
}

// The lines of one half of `count` rows, from the thread's chunk on: 8 threads have a line
INLINE void fetch_lines(const SplitMatrix *o, const signed char *from, const int count, SHARED float *to) {
  const int row = thread_index() / 8;
  to += row * LINE_FLOATS + 4 * (thread_index() % 8 ^ row % 8);
  if (count < GPU_THREADS / 8 && row >= count) return;
  UNROLL
  for (int i = 0; i < count; i += GPU_THREADS / 8) {
    copy16(to + i * LINE_FLOATS, (const float *)from, 16);
    from += (long)2 * o->blocks * LINE_BYTES * (GPU_THREADS / 8);
  }
}

INLINE const signed char *own_chunk(const SplitMatrix *o, int first, int half) {
  const long line = (long)(first + thread_index() / 8) * 2 * o->blocks + half;
  return o->lines + line * LINE_BYTES + 16 * (thread_index() % 8);
}

INLINE void fetch_scales(const SplitMatrix *o, int first, const int count, int block, SHARED float *to) {
  const int row = 4 * thread_index();  // 16 bytes are four scales
  if (row < count) copy16(to + row, o->scales + (long)block * o->room + first + row, 16);
}

INLINE void fetch_half(const IntegerTile *t, Halves *h, int stage, const IntegerForm f) {
  const int rows = form_rows(f);
  const int columns = form_columns(f);
  SHARED float *to = shared_memory + stage * integer_stage_floats(f);
  if (h->next < h->after) {
    fetch_lines(t->x, h->x, rows, to);
    fetch_lines(t->w, h->w, columns, to + rows * LINE_FLOATS);
    h->x += LINE_BYTES;
    h->w += LINE_BYTES;
    if (h->next % 2) {
      SHARED float *scales = to + (rows + columns) * LINE_FLOATS;
      fetch_scales(t->x, t->m0, rows, h->next / 2, scales);
      fetch_scales(t->w, t->n0, columns, h->next / 2, scales + rows);
    }
    h->next++;
  }
  commit_copies();
}

// Blocks [first, after) of the tile
INLINE Halves begin_integer_tile(const IntegerTile *t, int first, int after, const IntegerForm f) {
  Halves h = {.next = 2 * first, .after = 2 * after};
  h.x = own_chunk(t->x, t->m0, h.next);
  h.w = own_chunk(t->w, t->n0, h.next);
  for (int stage = 0; stage < INTEGER_STAGES - 1; stage++) fetch_half(t, &h, stage, f);
  return h;
}

// The products of 32 terms, from chunk 2 k of the stage's lines on: sums[0] of HH', [1] of HL' and LH', [2]
// of LL'
INLINE void multiply_terms(const IntegerTile *t, SHARED const float *at, int k, const IntegerForm f,
                           int sums[3][MOST_FOURS][4]) {
  const int lane = thread_index() % 32;
  SHARED const float *x_line = at + (t->m + lane % 16) * LINE_FLOATS;
  SHARED const float *w_line = at + (form_rows(f) + t->n + lane % 8 + lane / 16 * 8) * LINE_FLOATS;
  const int x_chunk = lane / 16 ^ lane % 8;
  const int w_chunk = lane / 8 % 2 ^ lane % 8;
  uint32_t x[2][4][4];
  uint32_t w[2][4][2];
  UNROLL
  for (int part = 0; part < 2; part++) {  // H, L
    UNROLL
    for (int i = 0; i < f.high; i++)
      load_matrices(x_line + 16 * i * LINE_FLOATS + 4 * (x_chunk ^ (4 * part + 2 * k)), x[part][i]);
    UNROLL
    for (int j = 0; j < f.wide; j += 2)  // the columns of two
      load_matrices(w_line + 8 * j * LINE_FLOATS + 4 * (w_chunk ^ (4 * part + 2 * k)), w[part][j]);
  }
  UNROLL
  for (int i = 0; i < f.high; i++)
    UNROLL
    for (int j = 0; j < f.wide; j++)
      UNROLL
      for (int parts = 0; parts < 4; parts++)
        multiply_bytes(sums[parts / 2 + parts % 2][i * f.wide + j], x[parts / 2][i], w[parts % 2][j]);
}

// 4 bytes of a line in global memory
INLINE uint32_t bytes_of(const SplitMatrix *o, const signed char *lines, int row, int block, int byte) {
  return *(const uint32_t *)(lines + ((long)row * o->blocks + block) * 2 * LINE_BYTES + byte);
}

// The products of a block, from lines in global memory, for the four whose first row and column these are
INLINE void multiply_lines(const IntegerTile *t, const signed char *x_lines, const signed char *w_lines,
                           int row, int column, int block, int sums[3][4]) {
  for (int k = 0; k < 4; k++) {  // of 32 terms each
    const int byte = k / 2 * LINE_BYTES + k % 2 * 32 + thread_index() % 4 * 4;
    uint32_t x[2][4];
    uint32_t w[2][2];
    UNROLL
    for (int part = 0; part < 2; part++) {  // H, L
      UNROLL
      for (int i = 0; i < 4; i++)
        x[part][i] = bytes_of(t->x, x_lines, row + i % 2 * 8, block, byte + 64 * part + i / 2 * 16);
      UNROLL
      for (int i = 0; i < 2; i++)
        w[part][i] = bytes_of(t->w, w_lines, column, block, byte + 64 * part + 16 * i);
    }
    UNROLL
    for (int parts = 0; parts < 4; parts++)
      multiply_bytes(sums[parts / 2 + parts % 2], x[parts / 2], w[parts % 2]);
  }
}

// Without a sign: a refused block may overflow
INLINE int sum_of_bytes(int high, int middle, int low) {
  return (int)(64 * (64 * (uint32_t)high + (uint32_t)middle) + (uint32_t)low);
}

// The sums of remainders of four q
INLINE void remainder_sums(const IntegerTile *t, int q, int block, const IntegerForm f, int rest[4]) {
  const int row = t->m0 + t->m + q / f.wide * 16 + thread_index() % 32 / 4;
  const int column = t->n0 + t->n + q % f.wide * 8 + thread_index() % 32 / 4;
  int sums[3][4] = {{0}};
  multiply_lines(t, t->x->lines, t->w->rest, row, column, block, sums);
  multiply_lines(t, t->x->rest, t->w->lines, row, column, block, sums);
  UNROLL
  for (int c = 0; c < 4; c++) rest[c] = sum_of_bytes(sums[0][c], sums[1][c], sums[2][c]);
}

// y += block, for the four elements q, where a block of the warp's rows or columns is mostly small
INLINE void add_with_remainders(const IntegerTile *t, int q, int block, const IntegerForm f,
                                const float of_x[2], const float of_w[2], const int sums[4], float y[4]) {
  int rest[4];
  remainder_sums(t, q, block, f, rest);
  UNROLL
  for (int c = 0; c < 4; c++) {
    const float scale = abs32(of_x[c / 2] * of_w[c % 2]);
    float sum = (float)sums[c] * scale;
    if ((as_bits(of_x[c / 2]) | as_bits(of_w[c % 2])) >> 31) sum = sum + (float)rest[c] * (scale * 0x1p-11f);
    y[c] = y[c] + sum;
  }
}

// y += block, for the thread's elements: four i wide + j has rows m + 16 i and columns n + 8 j, see corner_of
INLINE void add_integer_block(const IntegerTile *t, Halves *h, int block, const IntegerForm f,
                              const int is_product, float y[][4]) {
  const int rows = form_rows(f);
  int sums[3][MOST_FOURS][4];
  UNROLL
  for (int part = 0; part < 3; part++)
    UNROLL
    for (int q = 0; q < f.high * f.wide; q++)
      UNROLL
      for (int c = 0; c < 4; c++) sums[part][q][c] = 0;
  SHARED const float *at = shared_memory;
  UNROLL
  for (int half = 0; half < 2; half++) {
    wait_copies(INTEGER_STAGES - 2);
    // all threads see this half, and none reads the one before it, whose place the next one takes
    barrier();
    fetch_half(t, h, h->stage ? h->stage - 1 : INTEGER_STAGES - 1, f);
    at = shared_memory + h->stage * integer_stage_floats(f);
    h->stage = h->stage + 1 == INTEGER_STAGES ? 0 : h->stage + 1;
    UNROLL
    for (int k = 0; k < 2; k++) multiply_terms(t, at, k, f, sums);
  }
  const int lane = thread_index() % 32;
  SHARED const float *scales = at + (rows + form_columns(f)) * LINE_FLOATS;
  float of_x[2 * MOST_FOURS];  // the scales of the thread's rows, and columns; below 0 if mostly small
  float of_w[2 * MOST_FOURS];
  uint32_t signs = 0;
  UNROLL
  for (int i = 0; i < 2 * f.high; i++) {
    of_x[i] = scales[t->m + lane / 4 + 8 * i];
    signs |= as_bits(of_x[i]);
  }
  UNROLL
  for (int j = 0; j < 2 * f.wide; j++) {
    of_w[j] = scales[rows + t->n + lane % 4 * 2 + j / 2 * 8 + j % 2];
    signs |= as_bits(of_w[j]);
  }
  const int with_rest = is_product && any_of_warp(signs >> 31);
  UNROLL
  for (int q = 0; q < f.high * f.wide; q++) {
    const float *x_scales = of_x + q / f.wide * 2;
    const float *w_scales = of_w + q % f.wide * 2;
    int four[4];
    UNROLL
    for (int c = 0; c < 4; c++) four[c] = sum_of_bytes(sums[0][q][c], sums[1][q][c], sums[2][q][c]);
    if (with_rest) {
      add_with_remainders(t, q, block, f, x_scales, w_scales, four, y[q]);
      continue;
    }
    UNROLL
    for (int c = 0; c < 4; c++)  // of an exact product: a sum
      y[q][c] = fma32((float)four[c] * x_scales[c / 2], w_scales[c % 2], y[q][c]);
  }
}

// -------------------------------------------------------------------------------------------------- products

// Where a thread's elements begin
INLINE Corner integer_corner(const IntegerTile *t) {
  const int lane = thread_index() % 32;
  return (Corner){t->m0 + t->m + lane / 4, t->n0 + t->n + lane % 4 * 2};
}

INLINE void zero_fours(float y[][4], const int fours) {
  UNROLL
  for (int q = 0; q < fours; q++)
    UNROLL
    for (int c = 0; c < 4; c++) y[q][c] = 0.0f;
}

#define EACH_INTEGER_ELEMENT(corner, f, rows, cols, ...)          \
  UNROLL                                                          \
  for (int q = 0; q < (f).high * (f).wide; q++)                   \
    UNROLL                                                        \
    for (int c = 0; c < 4; c++) {                                 \
      const int m = (corner).row + q / (f).wide * 16 + c / 2 * 8; \
      const int n = (corner).column + q % (f).wide * 8 + c % 2;   \
      if (m < (rows) && n < (cols)) {                             \
        __VA_ARGS__                                               \
      }                                                           \
    }

// As `product` in products.c
INLINE void integer_product(const IntegerProduct *a, const IntegerForm f) {
  const ProductArguments *p = &a->product;
  const int tiles_down = tiles_of(p->rows, form_rows(f));
  const int m0 = thread_block_x() % tiles_down * form_rows(f);
  const int n0 = thread_block_x() / tiles_down * form_columns(f);
  const IntegerTile t = integer_tile_at(&a->x, &a->w, m0, n0, f);
  const Corner corner = integer_corner(&t);
  const int first = p->partial ? thread_block_y() * p->each : 0;
  const int after = p->partial ? least(a->x.blocks, first + p->each) : a->x.blocks;
  Halves h = begin_integer_tile(&t, first, after, f);
  float y[MOST_FOURS][4];
  zero_fours(y, f.high * f.wide);
  for (int block = first; block < after; block++) {
    add_integer_block(&t, &h, block, f, 1, y);
    if (!p->partial) continue;
    float *partial = p->partial + (long)block * p->rows * p->cols;
    EACH_INTEGER_ELEMENT(corner, f, p->rows, p->cols, partial[(long)m * p->cols + n] = y[q][c];)
    zero_fours(y, f.high * f.wide);
  }
  end_tile();
  if (!p->partial) EACH_INTEGER_ELEMENT(corner, f, p->rows, p->cols, put_result(p, m, n, y[q][c]);)
}

KERNEL(integer_product_tall, IntegerProduct) { integer_product(a, TALL); }
KERNEL(integer_product_flat, IntegerProduct) { integer_product(a, FLAT); }

// -------------------------------------------------------------------------------------- gradients of weights

// As `weight_gradient_tiles` in gradients.c
KERNEL(integer_gradient_tiles, IntegerGradient) {
  const GradientArguments *g = &a->gradient;
  const int tiles_down = tiles_of(g->n, form_rows(TALL));
  const int tiles = tiles_down * tiles_of(g->k, form_columns(TALL));
  float *parts = parts_of_thread(g, 1);
  for (int index = thread_block_x(); index < tiles; index += thread_blocks_x()) {
    const int m0 = index % tiles_down * form_rows(TALL);
    const int n0 = index / tiles_down * form_columns(TALL);
    const IntegerTile t = integer_tile_at(&a->dy, &a->x, m0, n0, TALL);
    const Corner corner = integer_corner(&t);
    float y[MOST_FOURS][4];
    open_sums(g, corner, 1, parts, y);
    Halves h = begin_integer_tile(&t, 0, g->blocks, TALL);
    for (int block = 0; block < g->blocks; block++) {
      add_integer_block(&t, &h, block, TALL, 0, y);
      close_tile_slots(y, 1, parts, g->slot[block], g->slot[block + 1]);
    }
    end_tile();
    store_sums(g, corner, 1, parts, y);
  }
}
