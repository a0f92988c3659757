// Products on a GPU (rule 1): y = x w^T (+ bias) (+ residual), and gradients of inputs, dx = dy w, which are
// products with the other layout of w. Each kernel is one form of a tile, see tiles.c.
#include "arguments.h"

// The numbers after the sum of blocks, in this order: bias, residual. definition: linear.linear
INLINE void put_result(const ProductArguments *a, int m, int n, float sum) {
  float y = sum;
  if (a->bias) y = y + a->bias[n];
  if (a->residual) y = a->residual[(long)m * a->ldy + n] + y;
  a->y[(long)m * a->ldy + n] = y;
}

// A thread block computes one tile of y; tiles that follow one another in x have the same columns, so that w
// comes from memory once. With `partial`, it computes some blocks of the tile and leaves them apart.
INLINE void product(const ProductArguments *a, const TileForm f) {
  const int height = 16 * f.high;
  const int tiles_down = tiles_of(a->rows, height);
  const int m0 = thread_block_x() % tiles_down * height;
  const int n0 = thread_block_x() / tiles_down * TILE;
  Operand x = matrix_by_terms(a->x, a->ldx, a->rows);
  Operand w = f.w_by_terms ? matrix_by_terms(a->w, a->ldw, a->cols) : matrix_by_rows(a->w, a->ldw, a->cols);
  Tile t = tile_at(x, w, m0, n0, a->terms, f);
  float y[MOST_HIGH][8];
  if (!a->partial) {
    sum_blocks(&t, 0, f, y);
    EACH_OWN(f) {
      int m = own_m(&t, i, f);
      int n = own_n(&t, j);
      if (m < a->rows && n < a->cols) put_result(a, m, n, y[i][j]);
    }
    return;
  }
  const int first = thread_block_y() * a->each;
  const int after = least(t.blocks, first + a->each);
  Pipeline p = begin_tile(&t, first, after, f);
  for (int block = first; block < after; block++) {
    chain(&t, &p, block, f, y);
    EACH_OWN(f) {
      int m = own_m(&t, i, f);
      int n = own_n(&t, j);
      if (m < a->rows && n < a->cols) a->partial[((long)block * a->rows + m) * a->cols + n] = y[i][j];
    }
  }
  end_tile();
}

INLINE TileForm by_terms(int rows) { return (TileForm){.high = rows / 16, .x_by_terms = 1, .w_by_terms = 1}; }

// y = x w^T with tiles of 128, 64, 32 and 16 rows
KERNEL(product_8, ProductArguments) { product(a, by_terms(128)); }
KERNEL(product_4, ProductArguments) { product(a, by_terms(64)); }
KERNEL(product_2, ProductArguments) { product(a, by_terms(32)); }
KERNEL(product_1, ProductArguments) { product(a, by_terms(16)); }

// y = x w, where w is [terms][cols]: gradients of inputs, and layers whose weight is stored the other way
KERNEL(product_8_rows, ProductArguments) { product(a, (const TileForm){.high = 8, .x_by_terms = 1}); }

// The blocks that `product` left apart: y = +0, then y = y + block, in order. A thread has one element of y.
KERNEL(add_blocks, ProductArguments) {
  const long elements = (long)a->rows * a->cols;
  const long i = (long)thread_block_x() * GPU_THREADS + thread_index();
  if (i >= elements) return;
  float y = 0.0f;
  for (int block = 0; block < tiles_of(a->terms, BLOCK); block++) y = y + a->partial[block * elements + i];
  put_result(a, (int)(i / a->cols), (int)(i % a->cols), y);
}
