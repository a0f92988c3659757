// Queries, keys and values between the product `qkv` and attention: norms of heads, rotation, rounding, the
// cache.
//
// In a row of qkv, head h of the queries begins at q_at + h q_step, head h of the keys at k_at + h k_step,
// head h of the values at v_at + h v_step.
#include "elementary.h"
#include "operations.h"
#include "shapes.h"

// Writes head x, turned by the angles of a position times `way`, to y [head_dim]. Elements that do not rotate
// stay. y may be x.
INLINE void rotate_head(const Rotary *r, int position, const float *x, int head_dim, const float way,
                        float *y) {
  const int half = r->elements / 2;
  const long at = (long)position * half;
  if (half) rotate(x, r->cosine + at, r->sine + at, way, half, y);
  EACH(d, head_dim - r->elements) y[r->elements + d] = x[r->elements + d];
}

// Elements that one norm of queries or keys covers, and how many such norms a row has
INLINE int head_norm_width(const Model *m, int heads) {
  return m->qk_norm == QK_NORM_HEAD ? m->head_dim : heads * m->head_dim;
}
INLINE int head_norms(const Model *m, int heads) { return m->qk_norm == QK_NORM_HEAD ? heads : 1; }

// --------------------------------------------------------------------------------------------------- forward

typedef struct {
  Model m;              // its numbers
  Rotary rotary;
  const float *q_norm;  // weights of norms [head_norm_width]
  const float *k_norm;
  const int *position;  // of the batch
  const int *sequence;
  const int *base;
  long capacity;
  const float *qkv;  // [tokens][qkv_width]
  float *q_r;        // [tokens][heads] and [tokens][kv_heads], factors of norms
  float *k_r;
  float *q;     // [tokens][heads][head_dim]
  float *keys;  // of this layer's cache, see Batch
  float *values;
} HeadRows;

// The norms of `heads` heads that follow one another in x; writes r and y
INLINE void norm_heads(const Model *m, const float *w, const float *x, int heads, float *r, float *y) {
  const int width = head_norm_width(m, heads);
  float no_mean;
  for (int i = 0; i < head_norms(m, heads); i++)
    norm(m->head_norm, m->eps, w, NULL, x + i * width, width, r + i, &no_mean, y + i * width);
}

// Rows of a token: one for each head, but one for all heads if a norm covers them together
INLINE int head_rows(const Model *m, int heads) { return m->qk_norm == QK_NORM_WHOLE ? 1 : heads; }

// Norms, rotates and rounds `heads` heads of x, which are `step` floats apart, to y [heads][head_dim]
INLINE void turn_heads(const HeadRows *a, int token, const float *w, const float *x, int step, int heads,
                       float *r, float *y) {
  const Model *m = &a->m;
  if (m->qk_norm != QK_NORM_NONE) {
    norm_heads(m, w, x, heads, r, y);
    MEET_LANES;
    x = y;
    step = m->head_dim;
  }
  for (int h = 0; h < heads; h++)
    rotate_head(&a->rotary, a->position[token], x + (long)h * step, m->head_dim, 1.0f, y + h * m->head_dim);
  MEET_LANES;
  for (int h = 0; h < heads; h++) round_row(m->round_activations, 0, y + h * m->head_dim, m->head_dim);
}

// Queries, to `q`
ROW(queries_row, HeadRows) {
  const Model *m = &a->m;
  const int rows = head_rows(m, m->heads);
  const int token = row / rows;
  const long first = row % rows;  // head
  const float *x = a->qkv + (long)token * qkv_width(m) + m->q_at + first * m->q_step;
  const long at = (long)token * m->heads + first;
  turn_heads(a, token, a->q_norm, x, m->q_step, m->heads / rows, a->q_r + at, a->q + at * m->head_dim);
}

// Keys and values, to the cache. `memory` holds the keys.
ROW(keys_row, HeadRows) {
  const Model *m = &a->m;
  const int d_all = m->head_dim;
  const int rows = head_rows(m, m->kv_heads);
  const int heads = m->kv_heads / rows;
  const int token = row / rows;
  const long first = row % rows;
  const float *qkv = a->qkv + (long)token * qkv_width(m);
  float *r = a->k_r + (long)token * m->kv_heads + first;
  turn_heads(a, token, a->k_norm, qkv + m->k_at + first * m->k_step, m->k_step, heads, r, memory);
  const int position = a->position[token];
  const int base = a->base[a->sequence[token]];
  for (int h = 0; h < heads; h++) {
    const long head = ((first + h) * a->capacity + base) * d_all;
    float *key = memory + h * d_all;
    float *cached_key = a->keys + head + key_at(position, d_all);
    float *cached_value = a->values + head + (long)position * d_all;
    const float *value = qkv + m->v_at + (first + h) * m->v_step;
    round_row(m->round_cache, 0, key, d_all);
    EACH(d, d_all) cached_key[d * COLS] = key[d];
    EACH(d, d_all) cached_value[d] = value[d];
    round_row(m->round_cache, 0, cached_value, d_all);
  }
}

// -------------------------------------------------------------------------------------------------- backward

typedef struct {
  Model m;
  Rotary rotary;
  const int *position;
  const float *dq;  // [tokens][heads][head_dim], of rotated queries
  float *d_qkv;     // [tokens][qkv_width]: has gradients of rotated keys and of values; gets all three
} HeadsBackward;

// Gradients of rotated queries and keys, turned back
ROW(heads_backward_row, HeadsBackward) {
  const Model *m = &a->m;
  const int position = a->position[row];
  float *d_qkv = a->d_qkv + (long)row * qkv_width(m);
  for (int h = 0; h < m->heads; h++) {
    const float *dq = a->dq + (long)row * q_width(m) + h * m->head_dim;
    rotate_head(&a->rotary, position, dq, m->head_dim, -1.0f, d_qkv + m->q_at + h * m->q_step);
  }
  for (int h = 0; h < m->kv_heads; h++) {
    float *dk = d_qkv + m->k_at + h * m->k_step;
    rotate_head(&a->rotary, position, dk, m->head_dim, -1.0f, dk);
  }
}

typedef struct {
  Model m;
  const float *q_norm;
  const float *k_norm;
  const float *qkv;  // [tokens][qkv_width]
  const float *q_r;
  const float *k_r;
  float *d_qkv;  // [tokens][qkv_width], of normed queries and keys; receives gradients of queries and keys
} HeadNormsBackward;

INLINE void norm_heads_backward(const Model *m, const float *w, const float *x, int heads, const float *r,
                                float *dx) {
  const int width = head_norm_width(m, heads);
  for (int i = 0; i < head_norms(m, heads); i++) {
    float *dx_i = dx + i * width;
    norm_backward(m->head_norm, w, dx_i, x + i * width, width, r[i], 0.0f, NULL, dx_i);
  }
}

ROW(head_norms_backward_row, HeadNormsBackward) {
  const Model *m = &a->m;
  const float *qkv = a->qkv + (long)row * qkv_width(m);
  float *d_qkv = a->d_qkv + (long)row * qkv_width(m);
  const float *q_r = a->q_r + (long)row * m->heads;
  const float *k_r = a->k_r + (long)row * m->kv_heads;
  norm_heads_backward(m, a->q_norm, qkv + m->q_at, m->heads, q_r, d_qkv + m->q_at);
  norm_heads_backward(m, a->k_norm, qkv + m->k_at, m->kv_heads, k_r, d_qkv + m->k_at);
}

// ===================================================================================================== calls
// The code below runs on the host, see operations.h.
#ifndef GPU_KERNELS
#include "kernels.h"

// Returns the arguments of attention from layer `index`, see attention.c
static Heads heads_of(const Pass *pass, int index, const Saved *s) {
  const Model *m = pass->m;
  const long cache = (long)index * m->kv_heads * pass->b->capacity * m->head_dim;
  return (Heads){
      .m = m,
      .b = pass->b,
      .in_kernels = &pass->in_kernels,
      .window = m->layer[index].window,
      .scale = m->layer[index].scale,
      .score_cap = m->layer[index].score_cap,
      .keys = pass->b->keys + cache,
      .values = pass->b->values + cache,
      .q = s->q,
      .top = s->top,
      .total = s->total,
      .mixed = s->mixed,
  };
}

// From the rows of qkv to queries and the cache
static void heads_step(const Pass *pass, const Layer *l, const Heads *heads, const Saved *s) {
  const Model *m = pass->m;
  HeadRows rows = {
      .m = *m,
      .rotary = l->rotary,
      .q_norm = l->q_norm.w,
      .k_norm = l->k_norm.w,
      .position = pass->in_kernels.position,
      .sequence = pass->in_kernels.sequence,
      .base = pass->in_kernels.base,
      .capacity = pass->b->capacity,
      .qkv = s->qkv,
      .q_r = s->q_r,
      .k_r = s->k_r,
      .q = s->q,
      .keys = heads->keys,
      .values = heads->values,
  };
  const int tokens = pass->b->tokens;
  const int key_rows = head_rows(m, m->kv_heads);
  for_rows(tokens * head_rows(m, m->heads), queries_row, &rows);
  for_rows_with_memory(tokens * key_rows, kv_width(m) / key_rows, keys_row, &rows);
}

// The gradient of a norm of queries or keys, whose first head begins at column `at` of a row of qkv
static void head_norm_gradient(const Model *m, const NormWeights *w, const Saved *s, const float *d_qkv,
                               int at, int heads, const float *r, const Blocks *blocks) {
  Columns of = {
      .dy = d_qkv + at,
      .ldd = qkv_width(m),
      .x = s->qkv + at,
      .ldx = qkv_width(m),
      .r = r,
      .ldr = heads,
      .each = head_norms(m, heads),
      .cols = head_norm_width(m, heads),
  };
  column_sums(of, blocks, w->grad);
}

// From gradients of rotated queries (dq), of rotated keys and of values (d_qkv) to gradients of qkv's rows
// (d_qkv), and the gradients of norms of heads
static void heads_step_backward(const Pass *pass, const Layer *l, const Saved *s, const float *dq,
                                const Blocks *blocks, float *d_qkv) {
  const Model *m = pass->m;
  HeadsBackward back = {
      .m = *m,
      .rotary = l->rotary,
      .position = pass->in_kernels.position,
      .dq = dq,
      .d_qkv = d_qkv,
  };
  for_rows(pass->b->tokens, heads_backward_row, &back);
  if (m->qk_norm == QK_NORM_NONE) return;
  head_norm_gradient(m, &l->q_norm, s, d_qkv, m->q_at, m->heads, s->q_r, blocks);
  head_norm_gradient(m, &l->k_norm, s, d_qkv, m->k_at, m->kv_heads, s->k_r, blocks);
  HeadNormsBackward norms = {
      .m = *m,
      .q_norm = l->q_norm.w,
      .k_norm = l->k_norm.w,
      .qkv = s->qkv,
      .q_r = s->q_r,
      .k_r = s->k_r,
      .d_qkv = d_qkv,
  };
  for_rows(pass->b->tokens, head_norms_backward_row, &norms);
}
#endif
