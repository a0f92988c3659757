// If memory is full, or a GPU refuses an operation, the call has failed. From then on its operations compute
// nothing, and its functions free their memory and return. Python compares `count` before and after each
// call, and raises an error. No code unwinds: a thread of the pool could not unwind the caller, and a call
// that runs to its end leaks nothing. The results of a failed call are of no use. The next call begins anew.
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels.h"

static Failure failure;
static atomic_int has_failed;  // whether the present call has

static int failed(void) { return atomic_load_explicit(&has_failed, memory_order_relaxed); }

static void forget_failure(void) { atomic_store(&has_failed, 0); }

// Several threads may fail. The reason of the first is written.
__attribute__((format(printf, 2, 3))) static void fail(int of_memory, const char *format, ...) {
  if (atomic_exchange(&has_failed, 1)) return;
  va_list values;
  va_start(values, format);
  vsnprintf(failure.text, sizeof failure.text, format, values);
  va_end(values);
  failure.of_memory = of_memory;
  failure.count++;
}

const Failure *last_failure(void) { return &failure; }
