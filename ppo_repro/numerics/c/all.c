// The kernels as one unit of compilation.
#include "kernels.h"

#include "threads.c"
#include "rows.c"
#include "products.c"
#include "attention.c"
#include "tokens.c"
#include "elementwise.c"
#include "rounding.c"
#include "optimizer.c"
#include "model.c"
#include "validity.c"
#include "checks.c"
