/* Packed linear layers by the definition, in plain C: for machines without better, and the measure of the others.
 *
 * Every kernel for packed weights gives exactly these bits: sums of a block are integers, so their order is free;
 * scales, activations' scales and offsets come in through the same roundings in the same order.
 */
#include "vector.h"

FR_INLINE float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff, bits;
    if (mag >= 0x7c00) bits = 0x7f800000u | ((mag & 0x3ff) << 13);
    else if (mag >= 0x400) bits = (mag << 13) + 0x38000000u;
    else {
        float f = (float)mag * 0x1p-24f;
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

FR_INLINE float float_at(const uint8_t *p) {
    float f;
    memcpy(&f, p, 4);
    return f;
}

/* The sums of both half blocks for the four rows of a panel. */
FR_INLINE void dot_block(int four, const uint8_t *panel, const int8_t *x, const int8_t *x2, int32_t low[4], int32_t high[4]) {
    for (int i = 0; i < 4; i++) low[i] = high[i] = 0;
    for (int k = 0; k < 16; k++) {
        const uint8_t *at = panel + k / 4 * 16 + k % 4;
        for (int i = 0; i < 4; i++) {
            int v = four ? at[4 * i] & 15 : (int8_t)at[4 * i];
            int h = four ? at[4 * i] >> 4 : (int8_t)at[64 + 4 * i];
            low[i] += v * x[k];
            high[i] += h * x2[k];
        }
    }
}

FR_INLINE void panel_row(int kind, const uint8_t *panel, int64_t blocks, const fr_group *q, int row, float total[4]) {
    int four = kind == FR_P4 || kind == FR_P4W, halves = kind == FR_P4 || kind == FR_P8;
    int values = four ? 64 : 128;
    for (int i = 0; i < 4; i++) total[i] = 0;
    for (int64_t b = 0; b < blocks; b++, q++, panel += fr_block_bytes(kind)) {
        int32_t low[4], high[4];
        float s = q->scales[row], u = q->sums[row];
        dot_block(four, panel, q->values[0][row], q->values[1][row], low, high);
        for (int i = 0; i < 4; i++) {
            float d = halves ? half_at(panel + values + 2 * i) : float_at(panel + values + 4 * i);
            if (kind == FR_P4) total[i] = __builtin_fmaf(half_at(panel + 72 + 2 * i), u, total[i]);
            if (kind == FR_P4W) total[i] = __builtin_fmaf(float_at(panel + 80 + 4 * i), u, total[i]);
            if (kind == FR_P8M) total[i] = __builtin_fmaf(float_at(panel + 144 + 4 * i), u, total[i]);
            if (kind == FR_P8W) {
                total[i] = __builtin_fmaf((float)low[i] * s, d, total[i]);
                total[i] = __builtin_fmaf((float)high[i] * s, float_at(panel + 144 + 4 * i), total[i]);
            } else total[i] = __builtin_fmaf((float)(low[i] + high[i]) * s, d, total[i]);
        }
    }
}

FR_INLINE void packed(const fr_range *g, int kind) {
    const fr_weight *w = g->w;
    int64_t blocks = w->inputs / FR_BLOCK;
    for (int64_t p = g->begin; p < g->end; p++) {
        const uint8_t *panel = (const uint8_t *)w->data + p * blocks * fr_block_bytes(kind);
        for (int64_t r = 0; r < g->rows; r++) {
            float total[4];
            panel_row(kind, panel, blocks, g->q + r / FR_GROUP * blocks, (int)(r % FR_GROUP), total);
            for (int i = 0; i < FR_PANEL && p * FR_PANEL + i < w->outputs; i++) {
                int64_t o = p * FR_PANEL + i;
                g->y[r * g->stride + o] = w->bias ? total[i] + w->bias[o] : total[i];
            }
        }
    }
}

void fr_packed_generic(const fr_range *g) {
    switch (g->w->kind) {
    case FR_P4: packed(g, FR_P4); break;
    case FR_P8: packed(g, FR_P8); break;
    case FR_P4W: packed(g, FR_P4W); break;
    case FR_P8W: packed(g, FR_P8W); break;
    case FR_P8M: packed(g, FR_P8M); break;
    default: break;
    }
}
FR_POP_TARGET
