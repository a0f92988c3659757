// All kernels of a GPU as one unit, which ../../build_ptx.py compiles to PTX. GPU_KERNELS says that this is
// code for a GPU: row functions become kernels (lanes.h), and code of the host is left out.
//
// Files of row functions are one text for CPU and GPU. These sums differ from the table of ../all.c:
//   rule 1  chain in tiles.c, add_blocks in products.c, attend_queries in attention.c (scores and values);
//           in high add_integer_block in integers.c
//   rule 2  close_tile_slots, column_block, close_element_slots and table_rows in gradients.c
//   rule 3  exponentiate_scores in attention.c
//   rule 4  attend_backward_keys in attention.c
#define GPU_KERNELS
#include "../operations.h"
#include "arguments.h"
#include "machine.h"

// row functions
#include "../rounding.c"
#include "../rows.c"
#include "../tokens.c"
#include "../optimizer.c"
#include "../shapes.h"
#include "../heads.c"
#include "../experts.c"

// what has another form here than on a CPU
#include "tiles.c"      // a small product in registers
#include "products.c"   // linear layers, and the gradient of their input
#include "gradients.c"  // gradients of weights, biases, embeddings: sums over tokens
#include "integers.c"   // products and gradients of weights in precision high
#include "attention.c"  // attention over a cache, and its gradients
