// Precision high with AMX: the sums of a block in registers of 16 rows of 64 bytes, which Intel calls tiles.
//
// An instruction adds to each integer of a register four products of signed bytes. An integer is two bytes,
// X = 64 h + l, W = 64 h' + l' (integers.c), so the exact sum has four parts. Each has a register of its own,
// because an instruction waits for the last one that added to its register.
//
//   sum of X W = 64 (64 (sum of h h') + (sum of h l' + l h')) + sum of l l'
//
// In a register x is [ROWS][64 terms], w is [16][16 columns][4 terms], a sum is [ROWS][16 columns].
#include "kernels.h"

// The system's permission for this process to use the registers: 0, or -1 if it is refused; 0 without AMX
int ask_for_amx(void) {
#if defined(__AMX_INT8__)
  long syscall(long number, ...);                    // which unistd.h does not declare in C11
  return syscall(158L, 0x1023L, 18L) != 0 ? -1 : 0;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
#else
  return 0;
#endif
}

#if defined(__AMX_INT8__)
enum { HH, HL, LH, LL, X_HIGH, X_LOW, W_HIGH, W_LOW };  // the registers

// What the instruction that configures the registers reads
typedef struct {
  uint8_t palette;
  uint8_t start_row;
  uint8_t zeros[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Configuration;

// Before the sums of a task, and after them: other libraries configure the registers of a thread too
static void begin_amx(void) {
  static const Configuration configuration = {
      .palette = 1,
      .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
      .rows = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, 16, 16},
  };
  _tile_loadconfig(&configuration);
}

static void end_amx(void) { _tile_release(); }

// Adds the products of two blocks of `steps` floats, x [ROWS][..] and w [steps][16]
INLINE void add_products(const float *x, long x_row, const float *w, int steps) {
  const int plane = steps / 2;
  for (int k = 1; k <= plane; k += 16) {
    _tile_loadd(X_HIGH, x + k, x_row * 4);
    _tile_loadd(W_HIGH, w + k * COLS, COLS * 4);
    _tile_dpbssd(HH, X_HIGH, W_HIGH);
    _tile_loadd(W_LOW, w + (k + plane) * COLS, COLS * 4);
    _tile_dpbssd(HL, X_HIGH, W_LOW);
    _tile_loadd(X_LOW, x + k + plane, x_row * 4);
    _tile_dpbssd(LH, X_LOW, W_HIGH);
    _tile_dpbssd(LL, X_LOW, W_LOW);
  }
}

// sums[i * each] = the exact sums of row i of x, for i < rows, or of `remainders`. Of x all ROWS rows are
// read; what the last of them give is not used.
static void sum_by_amx(const float *x, long x_row, const float *w, int steps, int remainders, int rows,
                       Wide *sums, int each) {
  Ints parts[4][ROWS];
  _tile_zero(HH);
  _tile_zero(HL);
  _tile_zero(LH);
  _tile_zero(LL);
  add_products(x, x_row, remainders ? w + steps * COLS : w, steps);
  if (remainders) add_products(x + steps, x_row, w, steps);
  _tile_stored(HH, parts[HH], COLS * 4);
  _tile_stored(HL, parts[HL], COLS * 4);
  _tile_stored(LH, parts[LH], COLS * 4);
  _tile_stored(LL, parts[LL], COLS * 4);
  for (int i = 0; i < rows; i++)
    sums[i * each] = (Wide)((parts[HH][i] * 64 + parts[HL][i] + parts[LH][i]) * 64 + parts[LL][i]);
}
#else
static void begin_amx(void) {}
static void end_amx(void) {}
#endif
