// Rows of a batch on the host, in the order in which their gradients are added: blocks of a sequence, see
// Blocks, and the rows of each id of a table.
#include "kernels.h"

// The blocks of `rows` rows, see Blocks: sequence and position [rows], slots as in Batch. slot[count] is the
// slot with which the pass ends. definition: gradients.blocks_of
static Blocks make_blocks(int rows, const int *sequence, const int *position, const int *slots,
                          const Sums *sums) {
  int most = rows + 1;
  int *memory = allocate_zeros(3 * (size_t)most, sizeof(int));
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

// The rows of each id stand together in `sorted`, in order: those of an id are sorted[start[id]] ..
// sorted[start[id + 1] - 1]. slot [rows] is the slot of each row. To be freed: `start`.
typedef struct {
  int *start;   // [entries + 1]
  int *sorted;  // [rows]
  int *slot;
} SortedRows;

// A counting sort of ids [rows], which are below `entries`
static SortedRows sort_rows(const int *ids, int entries, const Blocks *blocks) {
  const int rows = blocks->rows;
  SortedRows of;
  of.start = allocate_zeros((size_t)entries + 2 + 2 * (size_t)rows, sizeof(int));
  of.sorted = of.start + entries + 2;
  of.slot = of.sorted + rows;
  // count, add up, distribute: the counts stand two places further, and end where the rows of an id begin
  for (int t = 0; t < rows; t++) of.start[ids[t] + 2]++;
  for (int id = 0; id < entries; id++) of.start[id + 2] += of.start[id + 1];
  for (int t = 0; t < rows; t++) of.sorted[of.start[ids[t] + 1]++] = t;
  for (int i = 0; i < blocks->count; i++)
    for (int t = 0; t < blocks->length[i]; t++) of.slot[blocks->start[i] + t] = blocks->slot[i];
  return of;
}

// The gradient of a table, see TableGradient: ids [rows] are below `entries`.
static void table_gradient(const float *dx, int width, float scale, const int *ids, int entries, int skipped,
                           const Blocks *blocks, long grad) {
  if (grad < 0) return;
  SortedRows rows = sort_rows(ids, entries, blocks);
  TableGradient of = {
      .dx = dx,
      .width = width,
      .scale = scale,
      .entries = entries,
      .skipped = skipped,
      .start = integers_for_kernels(rows.start, entries + 1L),
      .sorted = integers_for_kernels(rows.sorted, blocks->rows),
      .slot = integers_for_kernels(rows.slot, blocks->rows),
      .grad = grad,
      .sums = *blocks->sums,
  };
  sum_table_rows(&of);
  free(rows.start);
}
