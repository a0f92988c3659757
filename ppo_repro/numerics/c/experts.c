// Mixtures of experts in place of an MLP. Rule 7: a token goes to the experts with the largest router logits.
// If two logits are equal, the lower index wins. The weights are p = exp(z - top) / (sum by rule 3), over the
// token's experts if `normalised`, else over all experts. The result is a chain fma(p, y, sum) from +0 over
// the token's experts by rising index.
//
// Forward:  1 router logits, 2 routes and weights, 3 rows in the order of experts, 4 up, 5 act, 6 down,
//           7 combine
// Backward: 7 gradients of the experts' results, 2 of the router logits, 6 5 4 expert by expert, 1 router,
//           3 add up
#include "elementary.h"
#include "operations.h"

// ---------------------------------------------------------------------------------- routes and their weights

// definition: experts.softmax. p [n] = softmax of z over the experts of[0] .. of[n - 1], or over 0 .. n - 1
// if `of` is NULL
INLINE void routing_weights(const float *z, const int *of, int n, float *p) {
  LANE_VALUES(float, tops, z[of ? of[0] : 0]);
  IN_LANES(i, n, {
    float logit = z[of ? of[i] : i];
    LANE(tops) = logit > LANE(tops) ? logit : LANE(tops);
  });
  const float top = largest_lane(tops);
  EACH(i, n) p[i] = exp32(z[of ? of[i] : i] - top);
  const float total = (float)sum_row(p, n);
  EACH(i, n) p[i] = p[i] / total;
}

// definition: experts.choose: the experts with the largest logits, by rising index
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
  for (int i = 1; i < chosen; i++) {
    for (int j = i; j && route[j] < route[j - 1]; j--) {
      int other = route[j];
      route[j] = route[j - 1];
      route[j - 1] = other;
    }
  }
}

typedef struct {
  int experts;
  int chosen;
  int normalised;
  NumberFormat format;
  int given_step;       // integers from a token's routes to the next token's in `given` and `seen`
  const int *given;     // routes of this layer to replay; NULL: the router chooses
  int *seen;            // receives the routes too, or NULL
  const float *router;  // [tokens][experts]
  int *route;           // [tokens][chosen]
  float *weights;       // [tokens][chosen]
} Routing;

// `memory` [experts]: weights of all experts, or of the chosen ones
ROW(route_row, Routing) {
  const int chosen = a->chosen;
  const float *z = a->router + (long)row * a->experts;
  int *route = a->route + (long)row * chosen;
  float *weights = a->weights + (long)row * chosen;
  float *p = memory;
  if (a->given) {
    const int *given = a->given + (long)row * a->given_step;
    EACH(j, chosen) route[j] = given[j];
  } else {
    ONE_LANE {
      choose(z, a->experts, chosen, route);
    }
  }
  MEET_LANES;
  if (a->seen) {
    int *seen = a->seen + (long)row * a->given_step;
    EACH(j, chosen) seen[j] = route[j];
  }
  if (a->normalised) {
    routing_weights(z, route, chosen, p);
    EACH(j, chosen) weights[j] = p[j];
  } else {
    routing_weights(z, NULL, a->experts, p);
    MEET_LANES;
    EACH(j, chosen) weights[j] = p[route[j]];
  }
  MEET_LANES;
  round_row(a->format, 0, weights, chosen);
}

// --------------------------------------------------------------------------------- into the order of experts

// y [rows][n]: row r is row from[r] of x
typedef struct {
  int n;
  const int *from;
  const float *x;
  float *y;
} Gather;

ROW(gather_row, Gather) {
  const float *x = a->x + (long)a->from[row] * a->n;
  float *y = a->y + (long)row * a->n;
  EACH(i, a->n) y[i] = x[i];
}

// ---------------------------------------------------------------------------------------------- the way back

typedef struct {
  int hidden;
  int chosen;
  NumberFormat format;
  float scale;
  const int *row_of;     // [tokens][chosen], the row of each choice
  const float *weights;  // [tokens][chosen]
  const float *y;        // [tokens chosen][hidden]
  const float *residual;  // [tokens][hidden], or NULL
  float *out;            // [tokens][hidden]
} Combination;

// Rule 7, definition: experts.mixture: out = chain of weight y over the token's experts; unless residual is
// NULL, residual + scale (chain)
ROW(combine_row, Combination) {
  const int n = a->hidden;
  float *out = a->out + (long)row * n;
  EACH(i, n) out[i] = 0.0f;
  for (int j = 0; j < a->chosen; j++) {
    const float weight = a->weights[(long)row * a->chosen + j];
    const float *y = a->y + (long)a->row_of[(long)row * a->chosen + j] * n;
    EACH(i, n) out[i] = fma32(weight, y[i], out[i]);
  }
  round_row(a->format, 0, out, n);
  if (!a->residual) return;
  if (a->scale != 1.0f) {
    EACH(i, n) out[i] = a->scale * out[i];
    round_row(a->format, 0, out, n);
  }
  const float *residual = a->residual + (long)row * n;
  EACH(i, n) out[i] = residual[i] + out[i];
  round_row(a->format, 0, out, n);
}

typedef struct {
  int hidden;
  int chosen;
  const int *row_of;
  const float *weights;
  const float *dy;  // [tokens][hidden], of the mixture's result
  float *d_rows;    // [tokens chosen][hidden], of the experts' results
} Spread;

ROW(spread_row, Spread) {
  const int n = a->hidden;
  const float *dy = a->dy + (long)row * n;
  for (int j = 0; j < a->chosen; j++) {
    const float weight = a->weights[(long)row * a->chosen + j];
    float *d_row = a->d_rows + (long)a->row_of[(long)row * a->chosen + j] * n;
    EACH(i, n) d_row[i] = weight * dy[i];
  }
}

typedef struct {
  int experts;
  int chosen;
  int normalised;
  int hidden;
  const float *router;  // [tokens][experts]
  const int *route;     // [tokens][chosen]
  const int *row_of;
  const float *y;   // [tokens chosen][hidden]
  const float *dy;  // [tokens][hidden]
  float *d_router;  // [tokens][experts]
} RouteBackward;

// Rule 7, definition: experts.mixture_backward: dz = p (g - sum p g), with g = dy . y of an expert of the
// token and 0 of another one. `memory`: p and g, [experts] each
ROW(route_backward_row, RouteBackward) {
  const int n = a->normalised ? a->chosen : a->experts;
  const int *route = a->route + (long)row * a->chosen;
  const float *dy = a->dy + (long)row * a->hidden;
  float *dz = a->d_router + (long)row * a->experts;
  float *p = memory;
  float *g = memory + a->experts;
  routing_weights(a->router + (long)row * a->experts, a->normalised ? route : NULL, n, p);
  EACH(i, n) g[i] = 0.0f;
  EACH(e, a->experts) dz[e] = 0.0f;
  MEET_LANES;
  for (int j = 0; j < a->chosen; j++) {
    const float *y = a->y + (long)a->row_of[(long)row * a->chosen + j] * a->hidden;
    float product = (float)dot_rows(dy, y, a->hidden);
    ONE_LANE {
      g[a->normalised ? j : route[j]] = product;
    }
  }
  MEET_LANES;
  const float mean = (float)dot_rows(p, g, n);
  EACH(i, n) dz[a->normalised ? route[i] : i] = p[i] * (g[i] - mean);
}

typedef struct {
  int hidden;
  int chosen;
  const int *row_of;
  const float *d_rows;  // [tokens chosen][hidden], of the experts' inputs
  float *dh;            // [tokens][hidden]: has the gradient through the router
} AddExperts;

// The gradients through the token's experts are added by rising index.
ROW(add_experts_row, AddExperts) {
  const int n = a->hidden;
  float *dh = a->dh + (long)row * n;
  for (int j = 0; j < a->chosen; j++) {
    const float *d_row = a->d_rows + (long)a->row_of[(long)row * a->chosen + j] * n;
    EACH(i, n) dh[i] = dh[i] + d_row[i];
  }
}

// ===================================================================================================== calls
// The code below runs on the host, see operations.h.
#ifndef GPU_KERNELS
#include "kernels.h"

// The rows of experts: the rows of expert e are start[e] .. start[e + 1] - 1, by rising token
typedef struct {
  int *start;                   // host: [experts + 2]
  int *token;                   // host: [rows], the token of each row
  int *row_of;                  // host: [tokens][chosen], the row of each choice
  const int *token_in_kernels;  // the same in memory of kernels
  const int *row_of_in_kernels;
} Dispatch;

// Choices i of route [tokens][chosen], sorted by expert
static Dispatch make_dispatch(const Model *m, const int *route_in_kernels, int tokens) {
  const int rows = tokens * m->chosen;
  const int *route = on_host(route_in_kernels, (size_t)rows * sizeof(int));
  Dispatch d = {.start = allocate_zeros((size_t)(m->experts + 2 + 2 * (long)rows), sizeof(int))};
  if (failed()) return d;
  d.token = d.start + m->experts + 2;
  d.row_of = d.token + rows;
  sort_by_id(route, rows, m->experts, d.start, d.token);
  for (int row = 0; row < rows; row++) {
    const int i = d.token[row];  // the choice that has this row
    d.row_of[i] = row;
    d.token[row] = i / m->chosen;
  }
  d.token_in_kernels = integers_for_kernels(d.token, rows);
  d.row_of_in_kernels = integers_for_kernels(d.row_of, rows);
  return d;
}

static void free_dispatch(Dispatch d) { free(d.start); }

INLINE int rows_of_expert(const Dispatch *d, int e) { return d->start[e + 1] - d->start[e]; }

// Blocks of the rows of one expert
static Blocks expert_blocks(const Batch *b, const Dispatch *d, int e, const Sums *sums) {
  const int rows = rows_of_expert(d, e);
  int *sequence = allocate_zeros(2 * (size_t)rows + 1, sizeof(int));
  if (!sequence) return (Blocks){.sums = sums};
  int *position = sequence + rows;
  for (int i = 0; i < rows; i++) {
    int token = d->token[d->start[e] + i];
    sequence[i] = b->sequence[token];
    position[i] = b->position[token];
  }
  Blocks blocks = make_blocks(rows, sequence, position, b->slots, sums);
  free(sequence);
  return blocks;
}

// definition: experts.mixture: raised [tokens][hidden] = mixture(normed2), and + residual unless NULL
static void mixture_forward(const Pass *pass, const Layer *l, const Saved *s, const float *residual) {
  const Model *m = pass->m;
  const int tokens = pass->b->tokens;
  const int hidden = m->hidden;
  const int up = up_width(l);
  const int mlp = mlp_width(l);
  const long layer_routes = (long)l->mixture * m->chosen;

  // 1, 2
  linear(&l->router, s->normed2, tokens, NULL, s->router);
  round_rows(m->round_activations, s->router, tokens, m->experts);
  Routing routing = {
      .experts = m->experts,
      .chosen = m->chosen,
      .normalised = m->normalised,
      .format = m->round_activations,
      .given_step = m->mixtures * m->chosen,
      .given = pass->in_kernels.routes ? pass->in_kernels.routes + layer_routes : NULL,
      .seen = pass->in_kernels.seen ? pass->in_kernels.seen + layer_routes : NULL,
      .router = s->router,
      .route = s->route,
      .weights = s->weights,
  };
  for_rows_with_memory(tokens, m->experts, route_row, &routing);

  // 3
  Dispatch d = make_dispatch(m, s->route, tokens);
  if (failed()) {
    free_dispatch(d);
    return;
  }
  const int rows = tokens * m->chosen;
  for_rows(rows, gather_row,
           &(Gather){.n = hidden, .from = d.token_in_kernels, .x = s->normed2, .y = s->rows});

  // 4, 5, 6
  for (int e = 0; e < m->experts; e++) {
    const long first = d.start[e];
    linear_step(m, &l->expert_up[e], s->rows + first * hidden, rows_of_expert(&d, e), NULL,
                s->up + first * up);
  }
  activation_step(m, s->up, rows, mlp, s->act);
  for (int e = 0; e < m->experts; e++) {
    const long first = d.start[e];
    linear_step(m, &l->expert_down[e], s->act + first * mlp, rows_of_expert(&d, e), NULL,
                s->y + first * hidden);
  }

  // 7
  Combination combination = {
      .hidden = hidden,
      .chosen = m->chosen,
      .format = m->round_activations,
      .scale = m->residual_scale,
      .row_of = d.row_of_in_kernels,
      .weights = s->weights,
      .y = s->y,
      .residual = residual,
      .out = s->raised,
  };
  for_rows(tokens, combine_row, &combination);
  free_dispatch(d);
}

// definition: experts.mixture_backward: from dy [tokens][hidden], the gradient of the mixture's result,
// to dh, the gradient of normed2, and the gradients of router and experts; dh may be dy
static void mixture_backward(const Pass *pass, const Layer *l, const Saved *s, const Blocks *blocks,
                             const float *dy, float *dh) {
  const Model *m = pass->m;
  const int tokens = pass->b->tokens;
  const int hidden = m->hidden;
  const int up = up_width(l);
  const int mlp = mlp_width(l);
  const long rows = (long)tokens * m->chosen;
  const long floats = rows * (hidden + mlp + up) + (long)tokens * m->experts;
  float *d_rows = shared_scratch(SCRATCH_EXPERTS, (size_t)floats);
  Dispatch d = make_dispatch(m, s->route, tokens);
  if (failed()) {
    free_dispatch(d);
    return;
  }
  float *d_act = d_rows + rows * hidden;
  float *d_up = d_act + rows * mlp;
  float *d_router = d_up + rows * up;

  // 7
  Spread spread = {
      .hidden = hidden,
      .chosen = m->chosen,
      .row_of = d.row_of_in_kernels,
      .weights = s->weights,
      .dy = dy,
      .d_rows = d_rows,
  };
  for_rows(tokens, spread_row, &spread);

  // 2
  RouteBackward route = {
      .experts = m->experts,
      .chosen = m->chosen,
      .normalised = m->normalised,
      .hidden = hidden,
      .router = s->router,
      .route = s->route,
      .row_of = d.row_of_in_kernels,
      .y = s->y,
      .dy = dy,
      .d_router = d_router,
  };
  for_rows_with_memory(tokens, 2 * m->experts, route_backward_row, &route);

  // 6, 5, 4
  for (int e = 0; e < m->experts; e++) {
    Blocks own = expert_blocks(pass->b, &d, e, blocks->sums);
    const long first = d.start[e];
    float *d_own = d_rows + first * hidden;  // of the expert's results, then of its inputs
    float *d_own_act = d_act + first * mlp;
    float *d_own_up = d_up + first * up;
    linear_step_backward(&l->expert_down[e], d_own, s->act + first * mlp, &own, d_own_act);
    activation_step_backward(m, s->up + first * up, d_own_act, own.rows, mlp, d_own_up);
    linear_step_backward(&l->expert_up[e], d_own_up, s->rows + first * hidden, &own, d_own);
    free_blocks(&own);
  }

  // 1, 3
  linear_step_backward(&l->router, d_router, s->normed2, blocks, dh);
  AddExperts add = {
      .hidden = hidden,
      .chosen = m->chosen,
      .row_of = d.row_of_in_kernels,
      .d_rows = d_rows,
      .dh = dh,
  };
  for_rows(tokens, add_experts_row, &add);
  free_dispatch(d);
}
#endif
