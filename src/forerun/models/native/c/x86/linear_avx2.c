/* Packed linear layers for x86-64 with AVX2, FMA and F16C (any desktop or server since 2013). */
#include "vector.h"

#if defined(__x86_64__)
#define FR_PACKED fr_packed_avx2
#define FR_VNNI 0
#include "x86/linear_x86.h"
#endif
FR_POP_TARGET
typedef int fr_avx2_only;
