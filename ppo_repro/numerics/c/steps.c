// The steps of a layer, forward and backward. Models with deliberate rounding (rounding.c) round after each
// step. x, y and all gradients are rows of tokens.
#include "kernels.h"

// -------------------------------------------------------------------------------------------------- products

// y [rows][n] = x + residual_scale y, rounded after each operation
static void add_step(const Model *m, const float *x, int rows, int n, float *y) {
  if (m->residual_scale != 1.0f) {
    for_rows(rows, scale_row, &(Scaling){.n = n, .scale = m->residual_scale, .x = y, .y = y});
    round_rows(m->round_activations, y, rows, n);
  }
  for_rows(rows, add_row, &(Addition){.n = n, .x = x, .change = y, .y = y});
  round_rows(m->round_activations, y, rows, n);
}

// Rule 1, definition: linear.layer_linear: y [rows][n] = x w^T + bias; unless residual [rows][n] is NULL,
// residual + residual_scale y. Inputs are rounded in place, y is rounded after each operation.
static void linear_step(const Model *m, const Matrix *w, float *x, int rows, const float *residual,
                        float *y) {
  round_rows(m->round_inputs, x, rows, w->k);
  const int is_scaled = residual && m->residual_scale != 1.0f;
  if (m->round_activations == FORMAT_FLOAT32 && !is_scaled) {
    linear(w, x, rows, residual, y);
    return;
  }
  linear(w, x, rows, NULL, y);
  round_rows(m->round_activations, y, rows, w->n);
  if (!residual) return;
  add_step(m, residual, rows, w->n, y);
}

// The gradients of w and bias: dy [rows][n], x [rows][k]
static void linear_backward_weight(const Matrix *w, const float *dy, const float *x, const Blocks *blocks) {
  if (w->transposed) weight_gradient(w->precision, x, w->k, dy, w->n, blocks, w->grad);
  else weight_gradient(w->precision, dy, w->n, x, w->k, blocks, w->grad);
  if (w->bias) column_sums((Columns){.dy = dy, .ldd = w->n, .each = 1, .cols = w->n}, blocks, w->bias_grad);
}

// Rules 1 and 2, definition: linear.linear_backward: dx [rows][k] from dy [rows][n], and the gradients
// of w and bias
static void linear_step_backward(const Matrix *w, const float *dy, const float *x, const Blocks *blocks,
                                 float *dx) {
  linear_backward_weight(w, dy, x, blocks);
  linear_backward_input(w, dy, blocks->rows, dx);
}

// The backward pass of a linear layer that stands alone: sequence and position [rows], slots [sequences + 1];
// dx may be NULL; x, sequence, position, slots and sums too if neither w nor bias is trained.
// definition: linear.linear_backward
void linear_backward(const Matrix *w, const float *dy, const float *x, int rows, const int *sequence,
                     const int *position, const int *slots, const Sums *sums, float *dx) {
  if (dx) linear_backward_input(w, dy, rows, dx);
  if (w->grad < 0 && w->bias_grad < 0) return;
  Blocks blocks = make_blocks(rows, sequence, position, slots, sums);
  linear_backward_weight(w, dy, x, &blocks);
  free_blocks(&blocks);
}

// ----------------------------------------------------------------------------------------------------- norms

// definition: rows.layer_norm: y and factors of x [tokens][hidden]. `number`, the norm's, is the result of
// the pass if x is not finite.
static void norm_step(const Pass *pass, const NormWeights *w, const float *x, NormFactors factors, float *y,
                      int number, int *not_finite) {
  const Model *m = pass->m;
  Norm norm = {
      .kind = m->norm,
      .eps = m->eps,
      .n = m->hidden,
      .number = number,
      .not_finite = not_finite,
      .w = w->w,
      .b = w->b,
      .x = x,
      .r = factors.r,
      .mean = factors.mean,
      .y = y,
  };
  for_rows(pass->b->tokens, norm_row, &norm);
  round_rows(m->round_activations, y, pass->b->tokens, m->hidden);
}

// definition: rows.norm_backward: dx = residual + the derivative, and the gradients of the norm's
// weights
static void norm_step_backward(const Model *m, const NormWeights *w, const float *x, NormFactors factors,
                               const float *dy, const float *residual, const Blocks *blocks, float *dx) {
  const int n = m->hidden;
  Columns weight = {
      .dy = dy,
      .ldd = n,
      .x = x,
      .ldx = n,
      .r = factors.r,
      .mean = m->norm == NORM_LAYER ? factors.mean : NULL,
      .ldr = 1,
      .each = 1,
      .cols = n,
  };
  column_sums(weight, blocks, w->grad);
  if (w->b) column_sums((Columns){.dy = dy, .ldd = n, .each = 1, .cols = n}, blocks, w->b_grad);
  NormBackward back = {
      .kind = m->norm,
      .n = n,
      .w = w->w,
      .x = x,
      .r = factors.r,
      .mean = factors.mean,
      .dy = dy,
      .residual = residual,
      .dx = dx,
  };
  for_rows(blocks->rows, norm_backward_row, &back);
}

// ----------------------------------------------------------------------------------------------- activations

// act [rows][width] from up [rows][width], or [rows][2 width] with gates
static void activation_step(const Model *m, const float *up, int rows, int width, float *act) {
  Activation activation = {.kind = m->activation, .gated = m->gated, .n = width, .x = up, .y = act};
  for_rows(rows * activation_rows(width), activation_row, &activation);
  round_rows(m->round_activations, act, rows, width);
}

static void activation_step_backward(const Model *m, const float *up, const float *d_act, int rows, int width,
                                     float *d_up) {
  ActivationBackward back = {
      .kind = m->activation,
      .gated = m->gated,
      .n = width,
      .x = up,
      .dy = d_act,
      .dx = d_up,
  };
  for_rows(rows, activation_backward_row, &back);
}
