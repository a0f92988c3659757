// The emulator as libcuda.c uses it
#include <stdint.h>

typedef enum { RISING, FALLING, SHUFFLED } Order;  // in which threads take turns

typedef void (*Function)(const void *first, const void *second);  // a kernel of one or two structs

// Runs `blocks` [3] thread blocks
void emulate(Function function, const void *const *arguments, const int *blocks, int threads,
             long shared_bytes, Order order);
