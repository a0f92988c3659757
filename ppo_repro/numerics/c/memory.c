// Memory of the host. If the system has none, the process ends with one line on standard error and
// status 2. A kernel has no way back, and a run that ends here goes on from its last checkpoint like one that
// was killed.
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
#ifdef __linux__
#include <malloc.h>
#endif

#include "kernels.h"

__attribute__((format(printf, 1, 2), noreturn)) static void end_process(const char *format, ...) {
  va_list values;
  va_start(values, format);
  fputs("error: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  fflush(stderr);
  _exit(2);
}

static void *checked(void *memory, size_t bytes) {
  if (!memory)
    end_process("no memory: the kernels asked for %.3f GB; see `ppo-repro plan`", (double)bytes / 1e9);
  return memory;
}

static void *allocate_zeros(size_t count, size_t size) {
  return checked(calloc(count ? count : 1, size), count * size);
}

// Give free memory back to the system: memory that was freed may stay in the heap of the C library.
void trim_heap(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
