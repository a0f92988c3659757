// The kernels as one unit of compilation, from the machine up to the model. "Rule 3" is in ../README.md.
// "definition: rows.norm" is the function `norm` of ../definition/rows.py, which computes the same bits.
//
// Where is a sum, so that its order is a rule? Products (rule 1): one chain in the innermost tile. Gradients
// of weights (rule 2): blocks and slots. Rows (rule 3): IN_LANES and join_lanes. Attention (rule 4):
// attention.c. Norm of all gradients (rule 3): gradient_squares. Experts (rule 7): combine_row and
// add_experts_row. Mass of top-p: cut_row. There is no other sum.
//
// Names: m model, l layer, b batch, s what a layer saved, a the struct of a row function; t token, h head,
// d element of a head, n outputs or width, k terms of a product, v vocabulary, e expert, i and j in loops.
// y is computed from x, and dx is the gradient of x. Numbers [rows][n] follow row after row.
#include "kernels.h"

// the machine
#include "threads.c"     // a pool of threads, and scratch memory
#include "operations.c"  // row functions and the two memories on a CPU, see operations.h

// rows: functions of one row, see lanes.h
#include "rounding.c"     // rounding on purpose
#include "rows.c"         // row sums, norms, rotations, activations, embeddings
#include "elementwise.c"  // elementary functions of arrays

// sums over products and tokens
#include "products.c"   // linear layers, their gradients, sums over tokens
#include "attention.c"  // attention over a cache, and its gradients

// what is left outside the model
#include "tokens.c"     // rows of logits: probabilities, sampling
#include "optimizer.c"  // the join of gradients, their norm, AdamW

// the model
#include "saved.c"     // memory of a pass
#include "steps.c"     // products, norms and activations with rounding
#include "heads.c"     // queries, keys and values on their way to attention
#include "experts.c"   // mixtures of experts
#include "model.c"     // the forward and the backward pass
#include "validity.c"  // what the kernels need of a model

#include "checks.c"  // the known answer
