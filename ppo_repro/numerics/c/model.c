// A decoder-only language model, forward and backward. A family is data (Model, Layer), and no code asks for
// the family. A layer computes next from x, in these steps:
//   x2   = x + norm1_after(out(attend(heads(qkv(norm1(x))))))
//     1 norm1  2 qkv  3 heads  4 attend  5 out  6 norm1_after
//   next = x2 + norm2_after(down(act(up(norm2(x2)))))
//     7 norm2  8 up  9 act  10 down, or a mixture of experts  11 norm2_after
// A layer may lack the norms before, or the norms after. With a residual_scale other than 1, what is added to
// x and to x2 is multiplied by it. A `parallel` layer has norm2(x) in the second line. The backward pass
// takes the steps in reverse. Each one turns the gradient of its result into the gradients of its input and
// of its weights.
//
// This file only says which step follows which. Products and norms of whole layers are in steps.c, step 3 is
// in heads.c, step 4 in attention.c, mixtures are in experts.c, memory is in saved.c. The same passes are
// definition: network.forward and definition: network.backward.
#include "kernels.h"

// ---------------------------------------------------------------------------------------------------- layers

enum { LAYER_NORMS = 4 };  // of a layer, at most

// The input of attention or of the MLP from the residual stream x: the norm by `w`, or else a copy, because
// products round their inputs in place
static void input_step(const Pass *pass, const Layer *l, const NormWeights *w, const float *x,
                       NormFactors factors, float *input, int number, int *not_finite) {
  const Model *m = pass->m;
  if (l->norms_before) {
    norm_step(pass, w, x, factors, input, number, not_finite);
  } else {
    const Scaling copy = {.n = m->hidden, .scale = 1.0f, .x = x, .y = input};
    for_rows(pass->b->tokens, scale_row, &copy);
  }
}

// y = x + residual_scale (the result of attention or of the MLP, normed by `w`). Without norms after them, y
// is the result, to which the last product has added x.
static void result_step(const Pass *pass, const Layer *l, const NormWeights *w, const float *x,
                        const float *result, NormFactors factors, float *y, int number, int *not_finite) {
  const Model *m = pass->m;
  if (!l->norms_after) return;
  norm_step(pass, w, result, factors, y, number, not_finite);
  add_step(m, x, pass->b->tokens, m->hidden, y);
}

static void mlp_forward(const Pass *pass, const Layer *l, const Saved *s, const float *residual) {
  const Model *m = pass->m;
  const int tokens = pass->b->tokens;
  linear_step(m, &l->up, s->normed2, tokens, NULL, s->up);        // 8
  activation_step(m, s->up, tokens, mlp_width(l), s->act);        // 9
  linear_step(m, &l->down, s->act, tokens, residual, s->raised);  // 10
}

// From s->x to s->next. The number of a norm: see model_forward.
static void layer_forward(const Pass *pass, int index, const Saved *s, int *not_finite) {
  const Model *m = pass->m;
  const Layer *l = &m->layer[index];
  const int tokens = pass->b->tokens;
  const int number = 1 + LAYER_NORMS * index;
  const Heads heads = heads_of(pass, index, s);
  input_step(pass, l, &l->norm1, s->x, s->norm1, s->normed1, number, not_finite);  // 1
  linear_step(m, &l->qkv, s->normed1, tokens, NULL, s->qkv);                       // 2
  heads_step(pass, l, &heads, s);                                                  // 3
  attend(&heads);                                                                  // 4
  round_rows(m->round_activations, s->mixed, tokens, q_width(m));
  linear_step(m, &l->out, s->mixed, tokens, l->norms_after ? NULL : s->x, s->attended);  // 5
  result_step(pass, l, &l->norm1_after, s->x, s->attended, s->norm1_after, s->x2, number + 1,
              not_finite);  // 6
  const float *x2 = m->parallel ? s->x : s->x2;
  input_step(pass, l, &l->norm2, x2, s->norm2, s->normed2, number + 2, not_finite);  // 7
  const float *residual = l->norms_after ? NULL : s->x2;
  if (has_experts(l)) {
    mixture_forward(pass, l, s, residual);
  } else {
    mlp_forward(pass, l, s, residual);
  }
  result_step(pass, l, &l->norm2_after, s->x2, s->raised, s->norm2_after, s->next, number + 3,
              not_finite);  // 11
}

// dx = d + the gradient of the input of attention or of the MLP, `d_input`, through its norm
static void input_step_backward(const Model *m, const Layer *l, const NormWeights *w, const float *x,
                                NormFactors factors, const float *d_input, const float *d,
                                const Blocks *blocks, float *dx) {
  if (l->norms_before) {
    norm_step_backward(m, w, x, factors, d_input, d, blocks, dx);
  } else {
    for_rows(blocks->rows, add_row, &(Addition){.n = m->hidden, .x = d, .change = d_input, .y = dx});
  }
}

// Returns the gradient of the result of attention or of the MLP. dy is the gradient of the sum to which the
// result was added. If a scale or a norm follows the result, its gradient is written to d_result, else it is
// dy itself.
static const float *result_step_backward(const Model *m, const Layer *l, const NormWeights *w,
                                         const float *result, NormFactors factors, const float *dy,
                                         const Blocks *blocks, float *d_result) {
  const float scale = m->residual_scale;
  if (scale != 1.0f) {
    for_rows(blocks->rows, scale_row, &(Scaling){.n = m->hidden, .scale = scale, .x = dy, .y = d_result});
    dy = d_result;
  }
  if (!l->norms_after) return dy;
  norm_step_backward(m, w, result, factors, dy, NULL, blocks, d_result);
  return d_result;
}

// From the gradient of the layer's output to that of its input, both d->dx
static void layer_backward(const Pass *pass, int index, const Saved *s, const Blocks *blocks,
                           const Deltas *d) {
  const Model *m = pass->m;
  const Layer *l = &m->layer[index];
  const int tokens = pass->b->tokens;
  const float *d_raised = result_step_backward(m, l, &l->norm2_after, s->raised, s->norm2_after, d->dx,
                                               blocks, d->dh);  // 11
  if (has_experts(l)) {
    mixture_backward(pass, l, s, blocks, d_raised, d->dh);
  } else {
    linear_step_backward(&l->down, d_raised, s->act, blocks, d->narrow);           // 10
    activation_step_backward(m, s->up, d->narrow, tokens, mlp_width(l), d->wide);  // 9
    linear_step_backward(&l->up, d->wide, s->normed2, blocks, d->dh);              // 8
  }
  const float *x2 = m->parallel ? s->x : s->x2;
  input_step_backward(m, l, &l->norm2, x2, s->norm2, d->dh, d->dx, blocks, d->dx2);  // 7
  // d->dx2 is now the gradient of x2. In a parallel layer the MLP reads x, and this is a part of the gradient
  // of x.
  const float *d_x2 = m->parallel ? d->dx : d->dx2;
  const float *d_attended = result_step_backward(m, l, &l->norm1_after, s->attended, s->norm1_after, d_x2,
                                                 blocks, d->dh);  // 6
  linear_step_backward(&l->out, d_attended, s->mixed, blocks, d->narrow);  // 5
  Heads heads = heads_of(pass, index, s);
  heads.d_mixed = d->narrow;
  heads.dq = d->narrow + (long)tokens * q_width(m);
  heads.d_raw = d->wide;
  attend_backward(&heads);                                                             // 4
  heads_step_backward(pass, l, s, heads.dq, blocks, d->wide);                          // 3
  linear_step_backward(&l->qkv, d->wide, s->normed1, blocks, d->dh);                   // 2
  input_step_backward(m, l, &l->norm1, s->x, s->norm1, d->dh, d->dx2, blocks, d->dx);  // 1
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

// Writes the hidden states [tokens][hidden] after the last norm. `kept` has kept_floats(..) floats. With
// KEEP_NOTHING it may be NULL, and the library uses memory of its own. Returns 0, or, if the input of a norm
// is not finite, the number of the first such norm: 1 + 4 layer + (0: norm1, 1: norm1_after, 2: norm2, 3:
// norm2_after). The last norm counts as norm1 of layer `layers`.
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
  const NormFactors factors = last_factors(kept, b->tokens);
  norm_step(&pass, &m->last_norm, x, factors, hidden, 1 + LAYER_NORMS * m->layers, not_finite);
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
  const NormFactors factors = last_factors(kept, b->tokens);
  norm_step_backward(m, &m->last_norm, x, factors, d_hidden, NULL, &blocks, d.dx);
  for (int index = m->layers - 1; index >= 0; index--) {
    const Saved s = saved_at(m, b->tokens, kept, index, keep);
    if (keep == KEEP_INPUTS) {  // computes the layer again, with the same output
      Pass again = pass;
      again.in_kernels.seen = NULL;
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
