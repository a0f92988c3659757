// The library that drives a GPU as one unit of compilation: the passes of ../all.c over launches in place of
// loops. It exports the functions of driver.h and of ../interface.h, except threads, elementary functions of
// arrays and row_dot. The kernels themselves are in kernels.c, which the driver gets as PTX.
#define GPU_HOST
#include "../kernels.h"

// the machine
#include "../failure.c"
#include "../memory.c"
#include "driver.c"
#include "../scratch.c"
#include "operations.c"

// rows
#include "../rounding.c"
#include "../rows.c"

// sums over products and tokens
#include "../blocks.c"
#include "launches.c"

// what is left outside the model
#include "../tokens.c"
#include "../optimizer.c"

// the model
#include "../saved.c"
#include "../steps.c"
#include "../heads.c"
#include "../experts.c"
#include "../model.c"
#include "../validity.c"

#include "../checks.c"
