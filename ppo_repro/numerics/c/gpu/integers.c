// Precision high on tensor cores: blocks of integers as ../integers.c says, their exact sums from products of
// bytes. Tensor cores multiply bytes, so X + 4096 = 64 H + L, with H in 0..127 and L in 0..63:
//
//   sum of X W = 4096 HH' + 64 (HL' + LH') + LL' - offset(x) - offset(w)
//   offset(x) = 4096 sum X + terms 2^23
//
// modulo 2^32: sums may wrap on the way, the result is below 2^31. Where a block has no term, H = L = 0. The
// order of these sums is free, and the instruction's own.
//
// The sum of remainders, X W' + X' W, is computed in the same way, from two products and four offsets. It is
// rare, so its lines come straight from global memory.
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

// The remainders of a block, as split_block has it, from 2^s. Returns whether the block is mostly small.
INLINE int split_remainders(float v[2][4], float up, int terms, const SplitMatrix *to, int row, int block) {
  const int lane = thread_index() % LANES;
  uint32_t *line = (uint32_t *)(to->rest + ((long)row * to->blocks + block) * 2 * LINE_BYTES) + lane;
  int sum = 0;
  int small = 0;
  UNROLL
  for (int half = 0; half < 2; half++) {
    uint32_t high = 0;
    uint32_t low = 0;
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int x = integer_of(v[half][i] * up);
      const int rest = integer_of((v[half][i] * up - (float)x) * 0x1p11f);
      if (64 * half + 4 * lane + i >= terms) continue;
      small += x < SMALL && x > -SMALL && v[half][i] != 0.0f;
      sum += rest;
      high |= (uint32_t)(rest + 4096) / 64 << 8 * i;
      low |= (uint32_t)(rest + 4096) % 64 << 8 * i;
    }
    line[half * LINE_FLOATS] = high;
    line[half * LINE_FLOATS + 16] = low;
  }
  const uint32_t offset = 4096u * (uint32_t)sum_of_lanes(sum) + ((uint32_t)terms << 23);
  if (!lane) to->rest_offsets[(long)block * to->stride + row] = offset;
  return 2 * sum_of_lanes(small) > terms;
}

// 16 threads turn one block of a row into integers. Thread l has the terms 64 half + 4 l + i in v[half][i].
// definition: product.integers
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
  uint32_t *line = (uint32_t *)(to->lines + ((long)row * to->blocks + block) * 2 * LINE_BYTES) + lane;
  int sum = 0;
  UNROLL
  for (int half = 0; half < 2; half++) {
    uint32_t high = 0;
    uint32_t low = 0;
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int x = integer_of(v[half][i] * up);
      if (64 * half + 4 * lane + i >= terms) continue;
      sum += x;
      high |= (uint32_t)(x + 4096) / 64 << 8 * i;
      low |= (uint32_t)(x + 4096) % 64 << 8 * i;
    }
    line[half * LINE_FLOATS] = high;
    line[half * LINE_FLOATS + 16] = low;
  }
  sum = sum_of_lanes(sum);
  const int small = to->rest && split_remainders(v, up, terms, to, row, block) && asked;
  if (lane) return;
  BlockScale scale = {.offset = 4096u * (uint32_t)sum + ((uint32_t)terms << 23)};
  scale.scale = as_float(exponent >= REFUSED_EXPONENT ? 0x7fc00000u : (uint32_t)(exponent - 11) << 23);
  if (small) scale.scale = -scale.scale;
  to->scales[(long)block * to->stride + row] = scale;
}

// The rows of x, whose terms follow one another: 16 threads have a block of a row
KERNEL(split_rows, SplitArguments) {
  const int block = thread_block_x() % a->to.blocks;
  const int row = thread_block_x() / a->to.blocks * (GPU_THREADS / LANES) + thread_index() / LANES;
  if (row >= a->to.rows) return;
  const int begin = block * BLOCK;
  const int terms = least(BLOCK, a->terms - begin);
  const float *x = a->x + row * a->ld + begin;
  float v[2][4];
  UNROLL
  for (int half = 0; half < 2; half++)
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int k = 64 * half + 4 * (thread_index() % LANES) + i;
      v[half][i] = k < terms ? x[k] : 0.0f;
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
    if (column + own >= a->to.rows) continue;
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

// Which half of a block is fetched next, the one after the last, and the stage that is computed next
typedef struct {
  int next;
  int after;
  int stage;
} Halves;

INLINE IntegerTile integer_tile_at(const SplitMatrix *x, const SplitMatrix *w, int m0, int n0,
                                   const IntegerForm f) {
  const int warp = thread_index() / 32;
  return (IntegerTile){x, w, m0, n0, warp / f.across * 16 * f.high, warp % f.across * 8 * f.wide};
}

// The lines of one half of the rows [first, first + count)
INLINE void fetch_lines(const SplitMatrix *o, int first, const int count, int half, SHARED float *to) {
  const int row = thread_index() / 8;
  const int chunk = thread_index() % 8;
  const long line = (long)(first + row) * 2 * o->blocks + half;
  const unsigned char *from = o->lines + line * LINE_BYTES + 16 * chunk;
  to += row * LINE_FLOATS + 4 * (chunk ^ row % 8);
  UNROLL
  for (int i = 0; i < count; i += GPU_THREADS / 8) {
    if (count < GPU_THREADS / 8 && row >= count) continue;
    copy16(to + i * LINE_FLOATS, (const float *)from, first + i + row < o->rows ? 16 : 0);
    from += (long)2 * o->blocks * LINE_BYTES * (GPU_THREADS / 8);
  }
}

INLINE void fetch_scales(const SplitMatrix *o, int first, const int count, int block, SHARED float *to) {
  const int row = 2 * thread_index();  // 16 bytes are two scales
  if (row >= count) return;
  const float *from = (const float *)(o->scales + (long)block * o->stride + first + row);
  copy16(to + 2 * row, from, first + row < o->rows ? 16 : 0);
}

INLINE void fetch_half(const IntegerTile *t, Halves *h, int stage, const IntegerForm f) {
  const int rows = form_rows(f);
  const int columns = form_columns(f);
  SHARED float *to = shared_memory + stage * integer_stage_floats(f);
  if (h->next < h->after) {
    fetch_lines(t->x, t->m0, rows, h->next, to);
    fetch_lines(t->w, t->n0, columns, h->next, to + rows * LINE_FLOATS);
    if (h->next % 2) {
      SHARED float *scales = to + (rows + columns) * LINE_FLOATS;
      fetch_scales(t->x, t->m0, rows, h->next / 2, scales);
      fetch_scales(t->w, t->n0, columns, h->next / 2, scales + 2 * rows);
    }
    h->next++;
  }
  commit_copies();
}

// Blocks [first, after) of the tile
INLINE Halves begin_integer_tile(const IntegerTile *t, int first, int after, const IntegerForm f) {
  Halves h = {.next = 2 * first, .after = 2 * after};
  for (int stage = 0; stage < INTEGER_STAGES - 1; stage++) fetch_half(t, &h, stage, f);
  return h;
}

// The products of 32 terms, from chunk 2 k of the stage's lines on: sums[0] of HH', [1] of HL' and LH', [2]
// of LL'
INLINE void multiply_terms(const IntegerTile *t, SHARED const float *at, int k, const IntegerForm f,
                           uint32_t sums[3][MOST_FOURS][4]) {
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

// Returns whether a block of the warp's rows or columns is mostly small: the same in all of its threads. 16
// threads together have all columns and half of the rows, so each also looks at a row of the other half.
INLINE int needs_remainders(SHARED const float *x_scales, SHARED const float *w_scales, const IntegerForm f) {
  const int other = thread_index() / 4 % 8 < 4 ? 8 : -8;  // 4 rows on or back, in floats
  uint32_t signs = 0;
  UNROLL
  for (int i = 0; i < 2 * f.high; i++) signs |= as_bits(x_scales[16 * i]) | as_bits(x_scales[16 * i + other]);
  UNROLL
  for (int j = 0; j < 2 * f.wide; j++) signs |= as_bits(w_scales[j / 2 * 16 + j % 2 * 2]);
  UNROLL
  for (int mask = LANES / 2; mask; mask /= 2) signs |= other_lane(signs, mask);
  return signs >> 31;
}

// 4 bytes of a line in global memory; rows that do not exist have those of the last one, for nobody
INLINE uint32_t bytes_of(const SplitMatrix *o, const unsigned char *lines, int row, int block, int byte) {
  const long line = ((long)least(row, o->rows - 1) * o->blocks + block) * 2;
  return *(const uint32_t *)(lines + line * LINE_BYTES + byte);
}

// The products of a block, from lines in global memory, for the four whose first row and column these are
INLINE void multiply_lines(const IntegerTile *t, const unsigned char *x_lines, const unsigned char *w_lines,
                           int row, int column, int block, uint32_t sums[3][4]) {
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

INLINE uint32_t rest_offset(const SplitMatrix *o, int row, int block) {
  return o->rest_offsets[(long)block * o->stride + least(row, o->rows - 1)];
}

// The sums of remainders of four q, without the offsets of X and W
INLINE void remainder_sums(const IntegerTile *t, int q, int block, const IntegerForm f, uint32_t rest[4]) {
  const int row = t->m0 + t->m + q / f.wide * 16;
  const int column = t->n0 + t->n + q % f.wide * 8;
  const int lane = thread_index() % 32;
  uint32_t sums[3][4] = {{0}};
  multiply_lines(t, t->x->lines, t->w->rest, row + lane / 4, column + lane / 4, block, sums);
  multiply_lines(t, t->x->rest, t->w->lines, row + lane / 4, column + lane / 4, block, sums);
  UNROLL
  for (int c = 0; c < 4; c++)
    rest[c] = 4096 * sums[0][c] + 64 * sums[1][c] + sums[2][c] -
              rest_offset(t->x, row + lane / 4 + c / 2 * 8, block) -
              rest_offset(t->w, column + lane % 4 * 2 + c % 2, block);
}

// y += block, for the thread's elements: four i wide + j has rows m + 16 i and columns n + 8 j, see corner_of
INLINE void add_integer_block(const IntegerTile *t, Halves *h, int block, const IntegerForm f,
                              const int is_product, float y[][4]) {
  const int rows = form_rows(f);
  uint32_t sums[3][MOST_FOURS][4];
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
  SHARED const float *x_scales = scales + 2 * (t->m + lane / 4);
  SHARED const float *w_scales = scales + 2 * (rows + t->n + lane % 4 * 2);
  const int with_rest = is_product && needs_remainders(x_scales, w_scales, f);
  UNROLL
  for (int q = 0; q < f.high * f.wide; q++) {
    uint32_t rest[4];
    if (with_rest) remainder_sums(t, q, block, f, rest);
    UNROLL
    for (int c = 0; c < 4; c++) {
      SHARED const float *of_x = x_scales + 2 * (q / f.wide * 16 + c / 2 * 8);
      SHARED const float *of_w = w_scales + 2 * (q % f.wide * 8 + c % 2);
      const uint32_t bytes = 4096 * sums[0][q][c] + 64 * sums[1][q][c] + sums[2][q][c];
      const uint32_t offset = as_bits(of_x[1]) + as_bits(of_w[1]);
      const float scale = abs32(of_x[0] * of_w[0]);
      float sum = (float)(int)(bytes - offset) * scale;
      if (with_rest && (as_bits(of_x[0]) | as_bits(of_w[0])) >> 31)
        sum = sum + (float)(int)(rest[c] - offset) * (scale * 0x1p-11f);
      y[q][c] = y[q][c] + sum;
    }
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
