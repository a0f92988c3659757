// Widths of rows, and places in the cache: for the passes and for row functions alike.
#ifndef SHAPES_H
#define SHAPES_H
#include "operations.h"

enum { COLS = 16 };  // columns of a panel

INLINE int q_width(const Model *m) { return m->heads * m->head_dim; }
INLINE int kv_width(const Model *m) { return m->kv_heads * m->head_dim; }
INLINE int qkv_width(const Model *m) { return q_width(m) + 2 * kv_width(m); }

// Returns the offset of a key among the keys of its head: keys lie in panels [position / 16][head_dim][16]
INLINE long key_at(int position, int head_dim) {
  return (long)(position / COLS) * head_dim * COLS + position % COLS;
}

// The first position that the query at `position` sees; window 0: all
INLINE int first_seen(int window, int position) {
  return window && position >= window ? position - window + 1 : 0;
}
#endif
