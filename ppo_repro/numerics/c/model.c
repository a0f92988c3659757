// A decoder-only language model, forward and backward. Every family is data (Model, Layer); none has a code
// path. A layer, x -> next, with the numbers of its steps:
//   x2   = x + out(attend(heads(qkv(norm1(x)))))      1 norm1  2 qkv  3 heads  4 attend  5 out
//   next = x2 + down(act(up(norm2(x2))))              6 norm2  7 up  8 act  9 down; or a mixture of experts
// A `parallel` layer has norm2(x) in the second line. With a residual_scale other than 1, out(..) and down(..)
// are multiplied by it. The backward pass takes the steps in reverse. Each one
// turns the gradient of its result into the gradients of its input and of its weights.
//
// Here is only which step follows which. Products and norms of whole layers are in steps.c, step 3 is in
// heads.c, step 4 in attention.c, mixtures are in experts.c, memory is in saved.c. The same passes are
// definition: network.forward and definition: network.backward.
#include "kernels.h"

// ---------------------------------------------------------------------------------------------------- layers

static void mlp_forward(const Pass *pass, const Layer *l, const Saved *s) {
  const Model *m = pass->m;
  const int tokens = pass->b->tokens;
  linear_step(m, &l->up, s->normed2, tokens, NULL, s->up);   // 7
  activation_step(m, s->up, tokens, mlp_width(l), s->act);   // 8
  linear_step(m, &l->down, s->act, tokens, s->x2, s->next);  // 9
}

// From s->x to s->next. The number of a norm: see model_forward.
static void layer_forward(const Pass *pass, int index, const Saved *s, int *not_finite) {
  const Model *m = pass->m;
  const Layer *l = &m->layer[index];
  const int tokens = pass->b->tokens;
  const Heads heads = heads_of(pass, index, s);
  norm_step(pass, &l->norm1, s->x, s->r1, s->mean1, s->normed1, 1 + 2 * index, not_finite);  // 1
  linear_step(m, &l->qkv, s->normed1, tokens, NULL, s->qkv);                                 // 2
  heads_step(pass, l, &heads, s);                                                            // 3
  attend(&heads);                                                                            // 4
  round_rows(m->round_activations, s->mixed, tokens, q_width(m));
  linear_step(m, &l->out, s->mixed, tokens, s->x, s->x2);  // 5
  const float *x2 = m->parallel ? s->x : s->x2;
  norm_step(pass, &l->norm2, x2, s->r2, s->mean2, s->normed2, 2 + 2 * index, not_finite);  // 6
  if (has_experts(l)) {
    mixture_forward(pass, l, s);
  } else {
    mlp_forward(pass, l, s);
  }
}

// The gradient of out(..) or down(..) from d, the gradient of the sum to which it was added: d itself, or a
// multiple in `memory`
static const float *addend_gradient(const Model *m, const float *d, int tokens, float *memory) {
  if (m->residual_scale == 1.0f) return d;
  for_rows(tokens, scale_row, &(Scaling){.n = m->hidden, .scale = m->residual_scale, .x = d, .y = memory});
  return memory;
}

// From the gradient of the layer's output to that of its input, both d->dx
static void layer_backward(const Pass *pass, int index, const Saved *s, const Blocks *blocks,
                           const Deltas *d) {
  const Model *m = pass->m;
  const Layer *l = &m->layer[index];
  const int tokens = pass->b->tokens;
  const float *d_mlp = addend_gradient(m, d->dx, tokens, d->dh);
  if (has_experts(l)) {
    mixture_backward(pass, l, s, blocks, d_mlp, d->dh);
  } else {
    linear_step_backward(&l->down, d_mlp, s->act, blocks, d->narrow);              // 9
    activation_step_backward(m, s->up, d->narrow, tokens, mlp_width(l), d->wide);  // 8
    linear_step_backward(&l->up, d->wide, s->normed2, blocks, d->dh);              // 7
  }
  const float *x2 = m->parallel ? s->x : s->x2;
  norm_step_backward(m, &l->norm2, x2, s->r2, s->mean2, d->dh, d->dx, blocks, d->dx2);  // 6
  // d->dx2 is now the gradient of x2. In a parallel layer norm2 reads x, and this is a part of the gradient
  // of x.
  const float *d_out = addend_gradient(m, m->parallel ? d->dx : d->dx2, tokens, d->dh);
  linear_step_backward(&l->out, d_out, s->mixed, blocks, d->narrow);  // 5
  Heads heads = heads_of(pass, index, s);
  heads.d_mixed = d->narrow;
  heads.dq = d->narrow + (long)tokens * q_width(m);
  heads.d_raw = d->wide;
  attend_backward(&heads);                                                                // 4
  heads_step_backward(pass, l, s, heads.dq, blocks, d->wide);                             // 3
  linear_step_backward(&l->qkv, d->wide, s->normed1, blocks, d->dh);                      // 2
  norm_step_backward(m, &l->norm1, s->x, s->r1, s->mean1, d->dh, d->dx2, blocks, d->dx);  // 1
}

// ------------------------------------------------------------------------------------------------ embeddings

static void embed(const Pass *pass, float *x) {
  const Model *m = pass->m;
  Embedding embedding = {
      .hidden = m->hidden,
      .format = m->round_activations,
      .scale = m->embedding_scale,
      .embedding = m->embedding,
      .positions = m->positions,
      .ids = pass->in_kernels.ids,
      .position = pass->in_kernels.position,
      .out = x,
  };
  for_rows(pass->b->tokens, embedding_row, &embedding);
}

// From dx [tokens][hidden] to the gradients of the tables
static void embed_backward(const Pass *pass, const float *dx, const Blocks *blocks) {
  const Model *m = pass->m;
  const Batch *b = pass->b;
  table_gradient(dx, m->hidden, m->embedding_scale, b->ids, m->vocabulary, m->padding, blocks,
                 m->embedding_grad);
  if (m->positions)
    table_gradient(dx, m->hidden, 1.0f, b->position, m->position_entries, -1, blocks, m->positions_grad);
}

// ---------------------------------------------------------------------------------------------- whole passes

INLINE long routes_of(const Model *m, const Batch *b) { return (long)b->tokens * m->mixtures * m->chosen; }

// A pass over a batch, whose integers go to memory of kernels once
static Pass pass_over(const Model *m, const Batch *b) {
  Pass pass = {.m = m, .b = b, .in_kernels = *b};
  pass.in_kernels.ids = integers_for_kernels(b->ids, b->tokens);
  pass.in_kernels.position = integers_for_kernels(b->position, b->tokens);
  pass.in_kernels.sequence = integers_for_kernels(b->sequence, b->tokens);
  pass.in_kernels.start = integers_for_kernels(b->start, b->sequences + 1L);
  pass.in_kernels.base = integers_for_kernels(b->base, b->sequences);
  if (b->routes) pass.in_kernels.routes = integers_for_kernels(b->routes, routes_of(m, b));
  if (b->seen) pass.in_kernels.seen = integers_from_kernels(b->seen, routes_of(m, b));
  return pass;
}

// Hidden states [tokens][hidden] after the last norm. `kept` has kept_floats(..); NULL with KEEP_NOTHING is
// memory of this library. Returns 0, or, for the first norm whose input is not finite, 1 + 2 layer + (0:
// norm1, 1: norm2); the last norm stands for norm1 of layer `layers`.
int model_forward(const Model *m, const Batch *b, float *kept, Keep keep, float *hidden) {
  if (!kept) {
    keep = KEEP_NOTHING;
    kept = shared_scratch(SCRATCH_PASS, (size_t)kept_floats(m, b->tokens, keep));
    if (!kept) return 0;
  }
  const Pass pass = pass_over(m, b);
  int *not_finite = clear_flag();
  embed(&pass, layer_input(m, b->tokens, kept, 0, keep));
  for (int index = 0; index < m->layers; index++) {
    const Saved s = saved_at(m, b->tokens, kept, index, keep);
    layer_forward(&pass, index, &s, not_finite);
  }
  const float *x = layer_input(m, b->tokens, kept, m->layers, keep);
  float *mean = last_mean(kept, b->tokens);
  norm_step(&pass, &m->last_norm, x, last_r(kept), mean, hidden, 1 + 2 * m->layers, not_finite);
  if (b->seen) fetch_integers(b->seen, pass.in_kernels.seen, routes_of(m, b));
  return flag_value(not_finite);
}

// From d_hidden [tokens][hidden], the gradient of the hidden states, to the gradients of all parameters,
// which are added to `sums`. `kept` and `keep` are from the forward pass.
void model_backward(const Model *m, const Batch *b, float *kept, Keep keep, const float *d_hidden,
                    const Sums *sums) {
  const Pass pass = pass_over(m, b);
  Blocks blocks = make_blocks(b->tokens, b->sequence, b->position, b->slots, sums);
  const Deltas d = make_deltas(m, b->tokens);
  if (failed()) {
    free_blocks(&blocks);
    return;
  }
  const float *x = layer_input(m, b->tokens, kept, m->layers, keep);
  const float *mean = last_mean(kept, b->tokens);
  norm_step_backward(m, &m->last_norm, x, last_r(kept), mean, d_hidden, NULL, &blocks, d.dx);
  for (int index = m->layers - 1; index >= 0; index--) {
    Saved s = saved_at(m, b->tokens, kept, index, keep);
    if (keep == KEEP_INPUTS) {  // computes the layer again; its output is known, and goes to d.dh
      Pass again = pass;
      again.in_kernels.seen = NULL;
      s.next = d.dh;
      layer_forward(&again, index, &s, clear_flag());
    }
    layer_backward(&pass, index, &s, &blocks, &d);
  }
  embed_backward(&pass, d.dx, &blocks);
  free_blocks(&blocks);
}

// ------------------------------------------------------------------------------------------------- the cache

// Copies the keys and values of the first positions of a sequence that begins at `from` to one that begins at
// `to`
void copy_prefix(const Model *m, float *keys, float *values, long capacity, long from, long to,
                 int positions) {
  PrefixCopy copy = {
      .step = capacity * m->head_dim,
      .from = from * m->head_dim,
      .to = to * m->head_dim,
      .n = (int)multiple_of_16(positions) * m->head_dim,
      .keys = keys,
      .values = values,
  };
  for_rows(m->layers * m->kv_heads, copy_prefix_row, &copy);
}
