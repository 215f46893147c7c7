/* Rows of activations to int8 blocks: the steps that every path shares. */
#ifndef FORERUN_QUANTIZE_H
#define FORERUN_QUANTIZE_H

#include "forerun.h"

/* amax/127 to the nearest number of 16 significant bits, so that small integers times it are exact. */
FR_INLINE float scale_of(float amax) {
    float scale = amax * (1.0f / 127.0f);
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x80) & 0xffffff00u;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* The sum of a block's integers, given by halves, times its scale. */
FR_INLINE float sum_scaled(float scale, int32_t low, int32_t high) {
    return scale * (float)(int32_t)((uint32_t)low + (uint32_t)high);
}

/* What kernels want to know of a row's block beside its integers: its scale, and the sums of both halves. */
FR_INLINE void set_scales(fr_group *out, int row, float scale, int32_t low, int32_t high) {
    out->scales[row] = scale;
    out->sums[row] = sum_scaled(scale, low, high);
#if defined(__aarch64__)
    for (int i = 0; i < 4; i++) out->backs[row][i] = -FR_SHIFT * scale;
#else
    out->backs[row] = -FR_SHIFT * scale;
    uint32_t first = (uint32_t)low, last = (uint32_t)high; /* anything in rows that are not numbers */
    out->starts[FR_ZERO_8][row] = (int32_t)(FR_SHIFT_BITS - 128 * (first + last));
    out->starts[FR_ZERO_5][row] = (int32_t)(FR_SHIFT_BITS - 16 * (first + last));
    out->starts[FR_ZERO_6][row] = (int32_t)(FR_SHIFT_BITS - 32 * first);
    out->starts[FR_ZERO_6_LAST][row] = (int32_t)(FR_SHIFT_BITS - 32 * last);
#endif
}

FR_INLINE int64_t fr_tiles_of(int64_t rows) { return (rows + FR_TILE_ROWS - 1) / FR_TILE_ROWS; }

#endif
