// Memory of a pass: the results of each layer that the backward pass needs, and gradients of activations.
//
// The caller gives a forward pass kept_floats(..) floats, `kept`. They hold, one after the other:
//   1/r and mean of the last norm [tokens] each, inputs of layers [layers + 1][tokens][hidden], Saved of
//   layers.
// With KEEP_INPUTS there is one Saved for all layers, and the backward pass computes each layer again. With
// KEEP_NOTHING there are also only two inputs: each layer reads one and writes the other.
#include "kernels.h"

// Gives out memory in multiples of 64 bytes. If `memory` is NULL, it only counts.
typedef struct {
  float *memory;
  long used;
} Arena;

static void *take(Arena *arena, long floats) {
  float *here = arena->memory ? arena->memory + arena->used : NULL;
  arena->used += multiple_of_16(floats);
  return here;
}

INLINE int has_experts(const Layer *l) { return l->expert_up != NULL; }
INLINE int mlp_width(const Layer *l) { return has_experts(l) ? l->expert_down[0].k : l->down.k; }
INLINE int up_width(const Layer *l) { return has_experts(l) ? l->expert_up[0].n : l->up.n; }

// Rows of up and down: one for each token, or one for each expert that a token goes to
INLINE long mlp_rows(const Model *m, const Layer *l, long tokens) {
  return has_experts(l) ? tokens * m->chosen : tokens;
}

static NormFactors take_factors(long tokens, Arena *arena) {
  NormFactors of;
  of.r = take(arena, tokens);
  of.mean = take(arena, tokens);
  return of;
}

static Saved take_saved(const Model *m, const Layer *l, long tokens, Arena *arena) {
  const long rows = mlp_rows(m, l, tokens);
  const long expert_rows = has_experts(l) ? rows : 0;
  const int head_norms = m->qk_norm != QK_NORM_NONE;
  const long before = l->norms_before ? tokens : 0;
  const long after = l->norms_after ? tokens : 0;
  Saved s = {0};
  s.norm1 = take_factors(before, arena);
  s.normed1 = take(arena, tokens * m->hidden);
  s.qkv = take(arena, tokens * qkv_width(m));
  s.q_r = take(arena, head_norms ? tokens * m->heads : 0);
  s.k_r = take(arena, head_norms ? tokens * m->kv_heads : 0);
  s.q = take(arena, tokens * q_width(m));
  s.top = take(arena, tokens * m->heads);
  s.total = take(arena, tokens * m->heads);
  s.mixed = take(arena, tokens * q_width(m));
  s.attended = take(arena, after * m->hidden);
  s.norm1_after = take_factors(after, arena);
  s.x2 = take(arena, tokens * m->hidden);
  s.norm2 = take_factors(before, arena);
  s.normed2 = take(arena, tokens * m->hidden);
  s.router = take(arena, has_experts(l) ? tokens * m->experts : 0);
  s.route = take(arena, expert_rows);
  s.weights = take(arena, expert_rows);
  s.rows = take(arena, expert_rows * m->hidden);
  s.up = take(arena, rows * up_width(l));
  s.act = take(arena, rows * mlp_width(l));
  s.y = take(arena, expert_rows * m->hidden);
  s.raised = take(arena, after * m->hidden);
  s.norm2_after = take_factors(after, arena);
  return s;
}

static long saved_floats(const Model *m, const Layer *l, long tokens) {
  Arena counted = {0};
  take_saved(m, l, tokens, &counted);
  return counted.used;
}

// Input of layer `layer`; layer `layers` stands for the output of the last
INLINE float *layer_input(const Model *m, long tokens, float *kept, int layer, Keep keep) {
  int input = keep == KEEP_NOTHING ? layer % 2 : layer;
  return kept + 2 * multiple_of_16(tokens) + input * multiple_of_16(tokens * m->hidden);
}

INLINE NormFactors last_factors(float *kept, long tokens) {
  return take_factors(tokens, &(Arena){kept, 0});
}

// Floats from the beginning of `kept` to the Saved of layer 0
static long first_saved_at(const Model *m, long tokens, Keep keep) {
  int inputs = keep == KEEP_NOTHING ? 2 : m->layers + 1;
  return 2 * multiple_of_16(tokens) + inputs * multiple_of_16(tokens * m->hidden);
}

long kept_floats(const Model *m, long tokens, Keep keep) {
  long all = 0;
  long most = 0;
  for (int layer = 0; layer < m->layers; layer++) {
    long floats = saved_floats(m, &m->layer[layer], tokens);
    all += floats;
    most = floats > most ? floats : most;
  }
  return first_saved_at(m, tokens, keep) + (keep == KEEP_ALL ? all : most);
}

static Saved saved_at(const Model *m, long tokens, float *kept, int layer, Keep keep) {
  Arena arena = {kept, first_saved_at(m, tokens, keep)};
  for (int before = 0; keep == KEEP_ALL && before < layer; before++)
    arena.used += saved_floats(m, &m->layer[before], tokens);
  Saved s = take_saved(m, &m->layer[layer], tokens, &arena);
  s.x = layer_input(m, tokens, kept, layer, keep);
  s.next = layer_input(m, tokens, kept, layer + 1, keep);
  if (!m->layer[layer].norms_after) {
    s.attended = s.x2;
    s.raised = s.next;
  }
  return s;
}

// Gradients of activations in a backward pass. `wide` and `narrow` are used twice in a layer: for the MLP,
// then for attention.
typedef struct {
  float *dx;      // [tokens][hidden], of a layer's output, then of its input
  float *dx2;     // [tokens][hidden], of x2
  float *dh;      // [tokens][hidden], of a norm's result
  float *wide;    // of `up`, then of `qkv`
  float *narrow;  // of `act`, then of `mixed` and, after it, of `q`
} Deltas;

static Deltas take_deltas(const Model *m, long tokens, Arena *arena) {
  long wide = qkv_width(m);
  long narrow = 2L * q_width(m);
  for (const Layer *l = m->layer; l < m->layer + m->layers; l++) {
    if (has_experts(l)) continue;  // these have memory of their own
    wide = up_width(l) > wide ? up_width(l) : wide;
    narrow = mlp_width(l) > narrow ? mlp_width(l) : narrow;
  }
  Deltas d;
  d.dx = take(arena, tokens * m->hidden);
  d.dx2 = take(arena, tokens * m->hidden);
  d.dh = take(arena, tokens * m->hidden);
  d.wide = take(arena, tokens * wide);
  d.narrow = take(arena, tokens * narrow);
  return d;
}

static Deltas make_deltas(const Model *m, long tokens) {
  Arena counted = {0};
  take_deltas(m, tokens, &counted);
  Arena arena = {shared_scratch(SCRATCH_DELTAS, (size_t)counted.used), 0};
  return take_deltas(m, tokens, &arena);
}
