// A decoder-only language model, forward and backward. Every family is data (Model, Layer); none has a code path.
//   x2 = x + out(attention(qkv(norm1(x))));  next = x2 + down(act(up(norm2(x2))))
// or, in parallel, next = (x + out(..)) + down(act(up(norm2(x)))). In place of up and down there may be experts.
// Rounding on purpose follows each of these steps.
#include "kernels.h"

// ----------------------------------------------------------------------------------------------------------- memory

static void *take(float **from, long floats) {
  float *here = *from;
  *from += round16(floats);
  return here;
}

// What a layer computes and its backward pass needs. Rows of experts: `chosen` for each token.
typedef struct {
  float *x, *next;  // input and output [tokens][hidden]; they lie apart
  float *r1, *m1, *h1, *raw, *q_r, *k_r, *q, *top, *total, *mixed, *x2, *r2, *m2, *h2, *up, *act;
  float *router, *weights, *rows, *y;
  int *route;
} Saved;

INLINE int has_experts(const Layer *l) { return l->expert_up != NULL; }
INLINE int mlp_width(const Layer *l) { return has_experts(l) ? l->expert_down[0].k : l->down.k; }
INLINE int up_width(const Layer *l) { return has_experts(l) ? l->expert_up[0].n : l->up.n; }
INLINE long mlp_rows(const Model *m, const Layer *l, long tokens) { return has_experts(l) ? tokens * m->chosen : tokens; }

static Saved take_saved(const Model *m, const Layer *l, long t, float **at) {
  long rows = mlp_rows(m, l, t);
  Saved s = {0};
  s.r1 = take(at, t), s.m1 = take(at, t), s.r2 = take(at, t), s.m2 = take(at, t);
  s.h1 = take(at, t * m->hidden), s.h2 = take(at, t * m->hidden), s.x2 = take(at, t * m->hidden);
  s.raw = take(at, t * qkv_width(m)), s.q = take(at, t * q_width(m)), s.mixed = take(at, t * q_width(m));
  s.q_r = take(at, m->qk_norm ? t * m->heads : 0), s.k_r = take(at, m->qk_norm ? t * m->kv_heads : 0);
  s.top = take(at, t * m->heads), s.total = take(at, t * m->heads);
  s.up = take(at, rows * up_width(l)), s.act = take(at, rows * mlp_width(l));
  if (has_experts(l)) {
    s.router = take(at, t * m->experts), s.weights = take(at, rows), s.route = take(at, rows);
    s.rows = take(at, rows * m->hidden), s.y = take(at, rows * m->hidden);
  }
  return s;
}

static long saved_floats(const Model *m, const Layer *l, long t) {
  float *start = (float *)64, *at = start;
  take_saved(m, l, t, &at);
  return at - start;
}

static long most_saved_floats(const Model *m, long t) {
  long most = 0;
  for (int i = 0; i < m->layers; i++) {
    long here = saved_floats(m, &m->layer[i], t);
    most = here > most ? here : most;
  }
  return most;
}

// Floats that a pass over `tokens` rows keeps: 1/r and mean of the last norm, inputs of layers, and what is in Saved
long kept_floats(const Model *m, long tokens, Keep keep) {
  long floats = 2 * round16(tokens) + (keep ? m->layers + 1 : 2) * round16(tokens * m->hidden);
  if (keep != KEEP_ALL) return floats + most_saved_floats(m, tokens);
  for (int i = 0; i < m->layers; i++) floats += saved_floats(m, &m->layer[i], tokens);
  return floats;
}

// Where the input of a layer lies in the memory of a pass; that of layer `layers` is the output of the last one.
long layer_input_at(const Model *m, long tokens, int layer, Keep keep) {
  return 2 * round16(tokens) + (keep ? layer : layer % 2) * round16(tokens * m->hidden);
}

INLINE float *layer_input(const Model *m, long tokens, float *kept, int layer, Keep keep) {
  return kept + layer_input_at(m, tokens, layer, keep);
}

static Saved saved_at(const Model *m, long tokens, float *kept, int index, Keep keep) {
  float *at = kept + 2 * round16(tokens) + (keep ? m->layers + 1 : 2) * round16(tokens * m->hidden);
  if (keep == KEEP_ALL)
    for (int i = 0; i < index; i++) at += saved_floats(m, &m->layer[i], tokens);
  Saved s = take_saved(m, &m->layer[index], tokens, &at);
  s.x = layer_input(m, tokens, kept, index, keep), s.next = layer_input(m, tokens, kept, index + 1, keep);
  return s;
}

// ------------------------------------------------------------------------------------------------------------ steps

// y = x w^T + bias with x rounded where inputs are, y rounded where activations are, + residual, rounded again
static void layer_linear(const Model *m, const Matrix *w, float *x, int rows, const float *residual, float *y) {
  int format = m->round_activations;
  round_rows(m->round_inputs, x, rows, w->k);
  linear(w, x, rows, format ? NULL : residual, y);
  round_rows(format, y, rows, w->n);
  if (!format || !residual) return;
  add_vector(y, residual, (long)rows * w->n);
  round_rows(format, y, rows, w->n);
}

static void layer_norm(const Model *m, const NormWeights *w, const float *x, int rows, float *r, float *mean, float *y, int place) {
  for_rows(rows, norm_row, &(Norm){m->norm, m->eps, w, m->hidden, place, x, r, mean, y, NULL, NULL, NULL});
  round_rows(m->round_activations, y, rows, m->hidden);
}

// dx = residual + the derivative of the norm, and the gradients of its weights
static void layer_norm_backward(const Model *m, const NormWeights *w, const float *x, const float *r, const float *mean,
                                const float *dy, const float *residual, const Blocks *blocks, float *dx) {
  int n = m->hidden;
  column_sums((ColumnSums){dy, n, x, n, r, m->norm == NORM_LAYER ? mean : NULL, 1, 1, n, blocks, w->grad});
  if (w->b) column_sums((ColumnSums){dy, n, NULL, 0, NULL, NULL, 0, 1, n, blocks, w->b_grad});
  for_rows(blocks->rows, norm_backward_row, &(Norm){m->norm, m->eps, w, n, 0, x, (float *)r, (float *)mean, NULL, dy, residual, dx});
}

// dx of a linear layer, and the gradients of its weights
static void layer_linear_backward(const Matrix *w, const float *dy, const float *x, const Blocks *blocks, float *dx) {
  linear_backward_weight(w, dy, x, blocks);
  linear_backward_input(w, dy, blocks->rows, dx);
}

// ---------------------------------------------------------------------------------------------- queries, keys, values

typedef struct { Heads h; const Layer *l; Saved s; } Place;

static Heads heads_of(const Model *m, const Batch *b, int index, Saved s) {
  long layer = (long)index * m->kv_heads * b->capacity * m->head_dim;
  return (Heads){m, b, m->layer[index].window, m->layer[index].scale, b->keys + layer, b->values + layer, s.q, s.top, s.total, s.mixed, NULL, NULL, NULL};
}

// One head of a row as it goes to attention: rotated, rounded
INLINE void turn(const Model *m, const float *x, const float *c, const float *s, float *y) {
  if (m->rotary) rotate(x, c, s, 1.0f, m->rotary / 2, y);
  if (x != y) memcpy(y + m->rotary, x + m->rotary, sizeof(float) * (size_t)(m->head_dim - m->rotary));
  round_row(m->round_activations, 0, y, m->head_dim);
}

INLINE const float *normed_heads(const Model *m, const NormWeights *w, const float *x, int heads, float *r, float *to) {
  float unused;
  int d = m->head_dim, each = m->qk_norm == QK_NORM_HEAD ? d : heads * d;
  if (m->qk_norm == QK_NORM_NONE) return x;
  for (int i = 0; i < heads * d / each; i++) norm(NORM_RMS, m->eps, w, x + i * each, each, r + i, &unused, to + i * each);
  return to;
}

// Queries and keys are normed and rotated where the family does; keys and values go to the cache.
static void place_row(const void *argument, int t) {
  const Place *a = argument;
  const Heads *h = &a->h;
  const Model *m = h->m;
  int d = m->head_dim, position = h->b->position[t], s = h->b->sequence[t], normed = m->qk_norm != QK_NORM_NONE;
  const float *raw = a->s.raw + (long)t * qkv_width(m), *c = m->cosine + (long)position * (m->rotary / 2);
  const float *sn = m->sine + (long)position * (m->rotary / 2);
  float *memory = scratch((size_t)(q_width(m) + kv_width(m) + d)), *key = memory + q_width(m) + kv_width(m);
  const float *q = normed_heads(m, &a->l->q_norm, raw + m->q_at, m->heads, a->s.q_r + (long)t * m->heads, memory);
  const float *k = normed_heads(m, &a->l->k_norm, raw + m->k_at, m->kv_heads, a->s.k_r + (long)t * m->kv_heads, memory + q_width(m));
  for (int i = 0; i < m->heads; i++) turn(m, q + (long)i * (normed ? d : m->q_step), c, sn, a->s.q + (long)t * q_width(m) + i * d);
  for (int i = 0; i < m->kv_heads; i++) {
    turn(m, k + (long)i * (normed ? d : m->k_step), c, sn, key);
    round_row(m->round_cache, 0, key, d);
    float *panel = h->keys + head_at(h, i, s) + key_at(position, d), *value = h->values + head_at(h, i, s) + (long)position * d;
    for (int j = 0; j < d; j++) panel[j * COLS] = key[j];
    memcpy(value, raw + m->v_at + (long)i * m->v_step, sizeof(float) * (size_t)d);
    round_row(m->round_cache, 0, value, d);
  }
}

// Gradients of rotated queries (dq) and keys (in d_raw) turned back, into d_raw
static void place_backward_row(const void *argument, int t) {
  const Place *a = argument;
  const Heads *h = &a->h;
  const Model *m = h->m;
  int d = m->head_dim, position = h->b->position[t];
  const float *c = m->cosine + (long)position * (m->rotary / 2), *s = m->sine + (long)position * (m->rotary / 2);
  float *row = h->d_raw + (long)t * qkv_width(m);
  for (int i = 0; i < m->heads; i++) {
    const float *dq = h->dq + (long)t * q_width(m) + i * d;
    float *out = row + m->q_at + i * m->q_step;
    if (m->rotary) rotate(dq, c, s, -1.0f, m->rotary / 2, out);
    memcpy(out + m->rotary, dq + m->rotary, sizeof(float) * (size_t)(d - m->rotary));
  }
  for (int i = 0; i < m->kv_heads; i++) {
    float *out = row + m->k_at + i * m->k_step;
    if (m->rotary) rotate(out, c, s, -1.0f, m->rotary / 2, out);
  }
}

INLINE void heads_backward(const Model *m, const NormWeights *w, const float *x, int heads, const float *r, float *d_out, float *memory) {
  int d = m->head_dim, each = m->qk_norm == QK_NORM_HEAD ? d : heads * d;
  memcpy(memory, d_out, sizeof(float) * (size_t)(heads * d));
  for (int i = 0; i < heads * d / each; i++)
    norm_backward(NORM_RMS, w, memory + i * each, x + i * each, each, r[i], 0.0f, NULL, d_out + i * each);
}

static void qk_norm_backward_row(const void *argument, int t) {
  const Place *a = argument;
  const Model *m = a->h.m;
  const float *raw = a->s.raw + (long)t * qkv_width(m);
  float *row = a->h.d_raw + (long)t * qkv_width(m), *memory = scratch((size_t)q_width(m));
  heads_backward(m, &a->l->q_norm, raw + m->q_at, m->heads, a->s.q_r + (long)t * m->heads, row + m->q_at, memory);
  heads_backward(m, &a->l->k_norm, raw + m->k_at, m->kv_heads, a->s.k_r + (long)t * m->kv_heads, row + m->k_at, memory);
}

static void qk_norm_gradient(const Model *m, const NormWeights *w, const Saved *s, const float *d_raw, int at, int heads,
                             const float *r, const Blocks *blocks) {
  int each = m->qk_norm == QK_NORM_HEAD ? heads : 1, n = heads * m->head_dim / each, width = qkv_width(m);
  column_sums((ColumnSums){d_raw + at, width, s->raw + at, width, r, NULL, heads, each, n, blocks, w->grad});
}

// ---------------------------------------------------------------------------------------------------------- experts

// Law: a token's experts are those with the largest logits, of equal ones the lower index; p = exp(z - top) / (row sum)
// over its experts where normalised, else over all; out = chain of fma(p, y, out) over its experts by rising index.
typedef struct { const Model *m; const Batch *b; int mixture; Saved s; const float *d; float *d_rows, *d_router; const int *place; float *to; } Mixture;

INLINE void routing_weights(const float *z, const int *of, int n, float *p) {
  float top = z[of ? of[0] : 0];
  for (int i = 0; i < n; i++) top = z[of ? of[i] : i] > top ? z[of ? of[i] : i] : top;
  for (int i = 0; i < n; i++) p[i] = exp32(z[of ? of[i] : i] - top);
  float total = (float)sum_row(p, n);
  for (int i = 0; i < n; i++) p[i] = p[i] / total;
}

static void choose(const float *z, int experts, int chosen, int *route) {
  for (int j = 0; j < chosen; j++) {
    int best = -1;
    for (int e = 0; e < experts; e++) {
      int taken = 0;
      for (int i = 0; i < j; i++) taken |= route[i] == e;
      if (!taken && (best < 0 || z[e] > z[best])) best = e;
    }
    route[j] = best;
  }
  for (int i = 1; i < chosen; i++)  // by rising index
    for (int j = i; j && route[j] < route[j - 1]; j--) {
      int other = route[j];
      route[j] = route[j - 1], route[j - 1] = other;
    }
}

static void route_row(const void *argument, int t) {
  const Mixture *a = argument;
  const Model *m = a->m;
  const float *z = a->s.router + (long)t * m->experts;
  int *route = a->s.route + (long)t * m->chosen, at = (t * m->mixtures + a->mixture) * m->chosen;
  float *weights = a->s.weights + (long)t * m->chosen, *p = scratch((size_t)m->experts);
  if (a->b->routes) memcpy(route, a->b->routes + at, sizeof(int) * (size_t)m->chosen);
  else choose(z, m->experts, m->chosen, route);
  if (a->b->seen) memcpy(a->b->seen + at, route, sizeof(int) * (size_t)m->chosen);
  routing_weights(z, m->normalised ? route : NULL, m->normalised ? m->chosen : m->experts, p);
  for (int j = 0; j < m->chosen; j++) weights[j] = m->normalised ? p[j] : p[route[j]];
  round_row(m->round_activations, 0, weights, m->chosen);
}

// dz = p (g - sum p g), g of the experts that are not chosen is 0
static void route_backward_row(const void *argument, int t) {
  const Mixture *a = argument;
  const Model *m = a->m;
  int n = m->normalised ? m->chosen : m->experts;
  const int *route = a->s.route + (long)t * m->chosen, *place = a->place + (long)t * m->chosen;
  float *p = scratch(2 * (size_t)m->experts), *g = p + m->experts, *dz = a->d_router + (long)t * m->experts;
  routing_weights(a->s.router + (long)t * m->experts, m->normalised ? route : NULL, n, p);
  memset(g, 0, sizeof(float) * (size_t)n);
  memset(dz, 0, sizeof(float) * (size_t)m->experts);
  for (int j = 0; j < m->chosen; j++)
    g[m->normalised ? j : route[j]] = (float)dot_rows(a->d + (long)t * m->hidden, a->s.y + (long)place[j] * m->hidden, m->hidden);
  float mean = (float)dot_rows(p, g, n);
  for (int i = 0; i < n; i++) dz[m->normalised ? route[i] : i] = p[i] * (g[i] - mean);
}

static void combine_row(const void *argument, int t) {
  const Mixture *a = argument;
  const Model *m = a->m;
  float *out = a->to + (long)t * m->hidden;
  const float *x2 = a->s.x2 + (long)t * m->hidden;
  for (int i = 0; i < m->hidden; i++) {
    float sum = 0.0f;
    for (int j = 0; j < m->chosen; j++)
      sum = fma32(a->s.weights[(long)t * m->chosen + j], a->s.y[(long)a->place[t * m->chosen + j] * m->hidden + i], sum);
    out[i] = sum;
  }
  round_row(m->round_activations, 0, out, m->hidden);
  for (int i = 0; i < m->hidden; i++) out[i] = x2[i] + out[i];
  round_row(m->round_activations, 0, out, m->hidden);
}

// Gradients of the experts' results: p d
static void spread_row(const void *argument, int t) {
  const Mixture *a = argument;
  int n = a->m->hidden, chosen = a->m->chosen;
  for (int j = 0; j < chosen; j++) {
    float *row = a->d_rows + (long)a->place[t * chosen + j] * n, w = a->s.weights[(long)t * chosen + j];
    for (int i = 0; i < n; i++) row[i] = w * a->d[(long)t * n + i];
  }
}

// To the gradient that came through the router, those through the experts are added by rising index.
static void gather_backward_row(const void *argument, int t) {
  const Mixture *a = argument;
  int n = a->m->hidden;
  for (int j = 0; j < a->m->chosen; j++)
    for (int i = 0; i < n; i++) a->to[(long)t * n + i] = a->to[(long)t * n + i] + a->d_rows[(long)a->place[t * a->m->chosen + j] * n + i];
}

// Rows of the experts, one expert after the other: start[e] .. start[e + 1]; the token of each, and the row of each choice
typedef struct { int *start, *token, *place; } Dispatch;

static Dispatch dispatch(const Model *m, const int *route, int tokens) {
  int rows = tokens * m->chosen;
  Dispatch d;
  d.start = calloc((size_t)(m->experts + 2 + 2 * rows), sizeof(int));
  d.token = d.start + m->experts + 2, d.place = d.token + rows;
  for (int i = 0; i < rows; i++) d.start[route[i] + 2]++;
  for (int e = 0; e < m->experts; e++) d.start[e + 2] += d.start[e + 1];
  for (int i = 0; i < rows; i++) d.place[i] = d.start[route[i] + 1]++, d.token[d.place[i]] = i / m->chosen;
  return d;
}

static void mixture_forward(const Model *m, const Batch *b, const Layer *l, Saved s) {
  int t = b->tokens, n = m->hidden, up = up_width(l), mlp = mlp_width(l), rows = t * m->chosen;
  linear(&l->router, s.h2, t, NULL, s.router);
  round_rows(m->round_activations, s.router, t, m->experts);
  Mixture a = {m, b, l->mixture, s, NULL, NULL, NULL, NULL, s.next};
  for_rows(t, route_row, &a);
  Dispatch d = dispatch(m, s.route, t);
  a.place = d.place;
  for (int i = 0; i < rows; i++) memcpy(s.rows + (long)i * n, s.h2 + (long)d.token[i] * n, sizeof(float) * (size_t)n);
  for (int e = 0; e < m->experts; e++)
    layer_linear(m, &l->expert_up[e], s.rows + (long)d.start[e] * n, d.start[e + 1] - d.start[e], NULL, s.up + (long)d.start[e] * up);
  for_rows(rows, activation_row, &(Activation){m->activation, m->gated, mlp, s.up, s.act, NULL, NULL});
  round_rows(m->round_activations, s.act, rows, mlp);
  for (int e = 0; e < m->experts; e++)
    layer_linear(m, &l->expert_down[e], s.act + (long)d.start[e] * mlp, d.start[e + 1] - d.start[e], NULL, s.y + (long)d.start[e] * n);
  for_rows(t, combine_row, &a);
  free(d.start);
}

// Blocks of the rows of one expert
static Blocks expert_blocks(const Batch *b, const Dispatch *d, int e, const Sums *sums) {
  int rows = d->start[e + 1] - d->start[e], *at = malloc(sizeof(int) * (size_t)(2 * rows + 1));
  for (int i = 0; i < rows; i++) {
    int token = d->token[d->start[e] + i];
    at[i] = b->sequence[token], at[rows + i] = b->position[token];
  }
  Blocks blocks = make_blocks(rows, at, at + rows, b->slots, sums);
  free(at);
  return blocks;
}

// dh: gradient of the mixture's input
static void mixture_backward(const Model *m, const Batch *b, const Layer *l, Saved s, const Blocks *blocks, const float *dy, float *dh) {
  int t = b->tokens, n = m->hidden, up = up_width(l), mlp = mlp_width(l);
  long rows = (long)t * m->chosen;
  float *d_rows = shared_scratch(SCRATCH_EXPERTS, (size_t)(rows * (n + mlp + up) + (long)t * m->experts)), *d_act = d_rows + rows * n;
  float *d_up = d_act + rows * mlp, *d_router = d_up + rows * up;
  Dispatch d = dispatch(m, s.route, t);
  Mixture a = {m, b, 0, s, dy, d_rows, d_router, d.place, dh};
  for_rows(t, spread_row, &a);
  for_rows(t, route_backward_row, &a);
  for (int e = 0; e < m->experts; e++) {
    Blocks own = expert_blocks(b, &d, e, blocks->sums);
    long first = d.start[e];
    layer_linear_backward(&l->expert_down[e], d_rows + first * n, s.act + first * mlp, &own, d_act + first * mlp);
    for_rows(own.rows, activation_backward_row, &(Activation){m->activation, m->gated, mlp, s.up + first * up, NULL, d_act + first * mlp, d_up + first * up});
    layer_linear_backward(&l->expert_up[e], d_up + first * up, s.rows + first * n, &own, d_rows + first * n);
    free_blocks(&own);
  }
  layer_linear_backward(&l->router, d_router, s.h2, blocks, dh);
  for_rows(t, gather_backward_row, &a);
  free(d.start);
}

// ----------------------------------------------------------------------------------------------------------- layers

static void mlp_forward(const Model *m, const Batch *b, const Layer *l, Saved s) {
  int t = b->tokens, mlp = mlp_width(l);
  if (has_experts(l)) {
    mixture_forward(m, b, l, s);
    return;
  }
  layer_linear(m, &l->up, s.h2, t, NULL, s.up);
  for_rows(t, activation_row, &(Activation){m->activation, m->gated, mlp, s.up, s.act, NULL, NULL});
  round_rows(m->round_activations, s.act, t, mlp);
  layer_linear(m, &l->down, s.act, t, s.x2, s.next);
}

static void layer_forward(const Model *m, const Batch *b, int index, Saved s) {
  const Layer *l = &m->layer[index];
  Place place = {heads_of(m, b, index, s), l, s};
  int t = b->tokens;
  layer_norm(m, &l->norm1, s.x, t, s.r1, s.m1, s.h1, 1 + 2 * index);
  layer_linear(m, &l->qkv, s.h1, t, NULL, s.raw);
  for_rows(t, place_row, &place);
  attend(&place.h);
  round_rows(m->round_activations, s.mixed, t, q_width(m));
  layer_linear(m, &l->out, s.mixed, t, s.x, s.x2);
  layer_norm(m, &l->norm2, m->parallel ? s.x : s.x2, t, s.r2, s.m2, s.h2, 2 + 2 * index);
  mlp_forward(m, b, l, s);
}

// Memory of a backward pass
typedef struct { float *dx, *dx2, *dh, *wide, *narrow; } Deltas;

static Deltas make_deltas(const Model *m, long tokens) {
  long wide = qkv_width(m), narrow = 2L * q_width(m);
  for (int i = 0; i < m->layers; i++)
    if (!has_experts(&m->layer[i])) {
      wide = up_width(&m->layer[i]) > wide ? up_width(&m->layer[i]) : wide;
      narrow = mlp_width(&m->layer[i]) > narrow ? mlp_width(&m->layer[i]) : narrow;
    }
  float *at = shared_scratch(SCRATCH_DELTAS, (size_t)(5 * 16 + tokens * (3L * m->hidden + wide + narrow)));
  Deltas d;
  d.dx = take(&at, tokens * m->hidden), d.dx2 = take(&at, tokens * m->hidden), d.dh = take(&at, tokens * m->hidden);
  d.wide = take(&at, tokens * wide), d.narrow = at;
  return d;
}

// d.dx: gradient of the layer's output, then of its input
static void layer_backward(const Model *m, const Batch *b, int index, Saved s, const Blocks *blocks, Deltas d) {
  const Layer *l = &m->layer[index];
  Place place = {heads_of(m, b, index, s), l, s};
  int t = b->tokens, mlp = mlp_width(l), q = q_width(m);
  if (has_experts(l)) {
    mixture_backward(m, b, l, s, blocks, d.dx, d.dh);
  } else {
    layer_linear_backward(&l->down, d.dx, s.act, blocks, d.narrow);
    for_rows(t, activation_backward_row, &(Activation){m->activation, m->gated, mlp, s.up, NULL, d.narrow, d.wide});
    layer_linear_backward(&l->up, d.wide, s.h2, blocks, d.dh);
  }
  layer_norm_backward(m, &l->norm2, m->parallel ? s.x : s.x2, s.r2, s.m2, d.dh, d.dx, blocks, d.dx2);
  layer_linear_backward(&l->out, m->parallel ? d.dx : d.dx2, s.mixed, blocks, d.narrow);
  place.h.d_mixed = d.narrow, place.h.dq = d.narrow + (long)t * q, place.h.d_raw = d.wide;
  attend_backward(&place.h);
  for_rows(t, place_backward_row, &place);
  if (m->qk_norm) {
    qk_norm_gradient(m, &l->q_norm, &s, d.wide, m->q_at, m->heads, s.q_r, blocks);
    qk_norm_gradient(m, &l->k_norm, &s, d.wide, m->k_at, m->kv_heads, s.k_r, blocks);
    for_rows(t, qk_norm_backward_row, &place);
  }
  layer_linear_backward(&l->qkv, d.wide, s.h1, blocks, d.dh);
  layer_norm_backward(m, &l->norm1, s.x, s.r1, s.m1, d.dh, d.dx2, blocks, d.dx);
}

// ------------------------------------------------------------------------------------------------------------ model

typedef struct { const Model *m; const Batch *b; float *out; } Lookup;
static void lookup_row(const void *argument, int t) {
  const Lookup *a = argument;
  const Model *m = a->m;
  const float *row = m->embedding + (long)a->b->ids[t] * m->hidden;
  float *out = a->out + (long)t * m->hidden;
  for (int i = 0; i < m->hidden; i++) out[i] = row[i] * m->embedding_scale;
  if (m->positions) {
    const float *position = m->positions + (long)a->b->position[t] * m->hidden;
    for (int i = 0; i < m->hidden; i++) out[i] = out[i] + position[i];
  }
  round_row(m->round_activations, 0, out, m->hidden);
}

// Hidden states [tokens][hidden] after the last norm. `kept` has kept_floats(..); NULL where nothing is kept.
// 0, or 1 + 2 layer + (0: first, 1: second norm) where the input of a norm is not finite; the last norm has 1 + 2 layers.
int model_forward(const Model *m, const Batch *b, float *kept, Keep keep, float *hidden) {
  if (!kept) kept = shared_scratch(SCRATCH_PASS, (size_t)kept_floats(m, b->tokens, keep = KEEP_NOTHING));
  not_finite = 0;
  for_rows(b->tokens, lookup_row, &(Lookup){m, b, layer_input(m, b->tokens, kept, 0, keep)});
  for (int i = 0; i < m->layers; i++) layer_forward(m, b, i, saved_at(m, b->tokens, kept, i, keep));
  const float *x = layer_input(m, b->tokens, kept, m->layers, keep);
  layer_norm(m, &m->last_norm, x, b->tokens, kept, kept + round16(b->tokens), hidden, 1 + 2 * m->layers);
  return not_finite;
}

// From the gradient of the hidden states to those of all parameters
void model_backward(const Model *m, const Batch *b, float *kept, Keep keep, const float *d_hidden, const Sums *sums) {
  Blocks blocks = make_blocks(b->tokens, b->sequence, b->position, b->slots, sums);
  Deltas d = make_deltas(m, b->tokens);
  const float *x = layer_input(m, b->tokens, kept, m->layers, keep);
  layer_norm_backward(m, &m->last_norm, x, kept, kept + round16(b->tokens), d_hidden, NULL, &blocks, d.dx);
  for (int i = m->layers - 1; i >= 0; i--) {
    Saved s = saved_at(m, b->tokens, kept, i, keep);
    Batch again = *b;
    if (keep == KEEP_INPUTS) {
      again.seen = NULL;
      s.next = d.dh;  // a layer's output is known
      layer_forward(m, &again, i, s);
    }
    layer_backward(m, b, i, s, &blocks, d);
  }
  table_gradient(d.dx, m->hidden, m->embedding_scale, b->ids, m->vocabulary, m->padding, &blocks, m->embedding_grad);
  if (m->positions) table_gradient(d.dx, m->hidden, 1.0f, b->position, m->position_entries, -1, &blocks, m->positions_grad);
  free_blocks(&blocks);
}

// Copies a prefix of a sequence's keys and values in a cache
void copy_prefix(const Model *m, float *keys, float *values, long capacity, long from, long to, int positions) {
  size_t floats = (size_t)round16(positions) * (size_t)m->head_dim;
  for (long i = 0; i < (long)m->layers * m->kv_heads; i++) {
    memcpy(keys + (i * capacity + to) * m->head_dim, keys + (i * capacity + from) * m->head_dim, sizeof(float) * floats);
    memcpy(values + (i * capacity + to) * m->head_dim, values + (i * capacity + from) * m->head_dim, sizeof(float) * floats);
  }
}
