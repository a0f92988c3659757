// The kernels as one unit of compilation, from the machine up to the model. "Rule 3" is in ../README.md.
// "definition: rows.norm" is the function `norm` of ../definition/rows.py, which computes the same bits. All
// functions are static: one compiler sees all. To begin, read interface.h, then tiles.c, then model.c.
//
// Which operations are sums, so that their order is a rule?
//   rule 1  products, gradients of inputs         add_tile in tiles.c; in high add_pairs in integers.c
//   rule 2  gradients of weights                  chain_block and close_slots in gradients.c
//           of norm weights and biases            column_chain and column_sums_task in gradients.c
//           of embeddings                         table_gradient_row in gradients.c
//           the slots of several backward passes  join_row in optimizer.c
//   rule 3  norms, softmax, dot products          IN_LANES and join_lanes
//           norm of all gradients                 squares_row and gradient_squares in optimizer.c
//   rule 4  attention                             exponentiate_scores and add_queries_to_keys in attention.c,
//                                                 and add_tile
//   rule 7  experts                               combine_row and add_experts_row in experts.c
//   rule 8  mass of top-p                         cut_row in tokens.c
// What is left adds two numbers: a bias, a residual, a position, the two uses of one weight.
//
// Names: m model, l layer, b batch, s what a layer saved, a the struct of a row function; t token, h head, d
// element of a head, n outputs or width, k terms of a product, v vocabulary, e expert, i and j in loops; in
// tiles p panel, s strip, c column; in attention p probability, s sequence. y is computed from x and w, and
// dx is the gradient of x. Numbers [rows][n] follow row after row, and two rows are `ld` floats apart. Rows
// [a, b) are a, a + 1, .. b - 1. Block, slot, lane, seat, tile, strip and panel: ../README.md#words.
#include "kernels.h"

// the machine
#include "failure.c"     // what a call could not do
#include "memory.c"      // memory of the host
#include "scratch.c"     // memory that is kept from call to call
#include "threads.c"     // a pool of threads
#include "operations.c"  // row functions and the two memories on a CPU, see operations.h

// rows: functions of one row, see lanes.h
#include "rounding.c"     // rounding on purpose
#include "rows.c"         // row sums, norms, rotations, activations, embeddings
#include "elementwise.c"  // elementary functions of arrays

// sums over products and tokens
#include "integers.c"   // blocks of integers, for precision high
#include "tiles.c"      // a small product in registers
#include "linear.c"     // linear layers, and the gradient of their input
#include "blocks.c"     // blocks of rows
#include "gradients.c"  // gradients of weights, biases, embeddings: sums over tokens
#include "attention.c"  // attention over a cache, and its gradients

// operations outside the model
#include "tokens.c"     // rows of logits: probabilities, sampling
#include "optimizer.c"  // the join of gradients, their norm, AdamW

// the model
#include "saved.c"     // memory of a pass
#include "steps.c"     // linear layers, norms and activations: with rounding, forward and backward
#include "heads.c"     // queries, keys and values on their way to attention
#include "experts.c"   // mixtures of experts
#include "model.c"     // the forward and the backward pass
#include "validity.c"  // the rules that a model must follow

#include "checks.c"  // the known answer
