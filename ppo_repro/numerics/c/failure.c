// What happens where memory is full, or a GPU refuses an operation. The call has failed from there on: its
// operations compute nothing, its functions free their memory and return, and Python, which compares `count`
// before and after each call, raises an error. No code unwinds: a thread of the pool could not, and a call
// that runs to its end leaks nothing. What a failed call wrote is of no use; the next call begins anew.
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels.h"

static Failure failure;
static atomic_int has_failed;  // whether the present call has

static int failed(void) { return atomic_load_explicit(&has_failed, memory_order_relaxed); }

static void forget_failure(void) { atomic_store(&has_failed, 0); }

// Any thread may fail; the first one's reason is written.
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
