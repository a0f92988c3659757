// Rows of a batch on the host, in the order in which their gradients are added: blocks of a sequence, see
// Blocks, and the rows of each id of a table, see TableGradient.
#include "kernels.h"

// The blocks of `rows` rows, see Blocks: sequence and position [rows], slots as in Batch. slot[count] is the
// slot with which the pass ends. definition: gradients.blocks_of
static Blocks make_blocks(int rows, const int *sequence, const int *position, const int *slots,
                          const Sums *sums) {
  int most = rows + 1;
  int *memory = allocate_zeros(3 * (size_t)most, sizeof(int));
  if (!memory) return (Blocks){.sums = sums};
  Blocks b = {
      .rows = rows,
      .start = memory,
      .length = memory + most,
      .slot = memory + 2 * most,
      .sums = sums,
  };
  for (int t = 0; t < rows; t++) {
    int goes_on = t && sequence[t] == sequence[t - 1] && position[t] / BLOCK == position[t - 1] / BLOCK;
    if (!goes_on) {
      b.start[b.count] = t;
      b.slot[b.count] = slots[sequence[t]];
      b.count++;
    }
    b.length[b.count - 1]++;
  }
  b.slot[b.count] = sums->last;
  b.start_in_kernels = integers_for_kernels(b.start, b.count);
  b.length_in_kernels = integers_for_kernels(b.length, b.count);
  b.slot_in_kernels = integers_for_kernels(b.slot, b.count + 1L);
  return b;
}

static void free_blocks(Blocks *b) { free(b->start); }

// A counting sort of the indices 0 .. n - 1 by ids [n], which are below `entries`: the indices with one id
// are sorted[start[id]] .. sorted[start[id + 1] - 1], rising. start [entries + 2] is zeros before.
static void sort_by_id(const int *ids, int n, int entries, int *start, int *sorted) {
  // count, add up, distribute: the counts stand two places further, and end where the indices of an id begin
  for (int i = 0; i < n; i++) start[ids[i] + 2]++;
  for (int id = 0; id < entries; id++) start[id + 2] += start[id + 1];
  for (int i = 0; i < n; i++) sorted[start[ids[i] + 1]++] = i;
}

// The gradient of a table, see TableGradient: ids [rows] are below `entries`.
static void table_gradient(const float *dx, int width, float scale, const int *ids, int entries, int skipped,
                           const Blocks *blocks, long grad) {
  if (grad < 0) return;
  const int rows = blocks->rows;
  int *start = allocate_zeros((size_t)entries + 2 + 2 * (size_t)rows, sizeof(int));
  if (!start) return;
  int *sorted = start + entries + 2;
  int *slot = sorted + rows;  // of each row
  sort_by_id(ids, rows, entries, start, sorted);
  for (int i = 0; i < blocks->count; i++)
    for (int t = 0; t < blocks->length[i]; t++) slot[blocks->start[i] + t] = blocks->slot[i];
  TableGradient of = {
      .dx = dx,
      .width = width,
      .scale = scale,
      .entries = entries,
      .skipped = skipped,
      .start = integers_for_kernels(start, entries + 1L),
      .sorted = integers_for_kernels(sorted, rows),
      .slot = integers_for_kernels(slot, rows),
      .grad = grad,
      .sums = *blocks->sums,
  };
  sum_table_rows(&of);
  free(start);
}
