// The gradients of a linear layer: which sums over rows belong to its weight and its bias.
#include "kernels.h"

// The gradients of w and bias: dy [rows][n], x [rows][k]
static void linear_backward_weight(const Matrix *w, const float *dy, const float *x, const Blocks *blocks) {
  if (w->transposed) weight_gradient(x, w->k, dy, w->n, blocks, w->grad);
  else weight_gradient(dy, w->n, x, w->k, blocks, w->grad);
  if (!w->bias) return;
  column_sums((ColumnSums){
      .dy = dy,
      .ldd = w->n,
      .each = 1,
      .cols = w->n,
      .blocks = blocks,
      .grad = w->bias_grad,
  });
}

// The backward pass of a linear layer that stands alone: sequence and position [rows], slots [sequences + 1];
// dx may be NULL, and the rest too where neither w nor bias is trained. definition: linear.linear_backward
void linear_backward(const Matrix *w, const float *dy, const float *x, int rows, const int *sequence,
                     const int *position, const int *slots, const Sums *sums, float *dx) {
  if (dx) linear_backward_input(w, dy, rows, dx);
  if (w->grad < 0 && w->bias_grad < 0) return;
  Blocks blocks = make_blocks(rows, sequence, position, slots, sums);
  linear_backward_weight(w, dy, x, &blocks);
  free_blocks(&blocks);
}
