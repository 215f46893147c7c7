/* Linear layers for 64-bit ARM with dot-product instructions: four outputs and up to eight rows at a time.
 *
 * A panel holds four output rows interleaved by fours of inputs, so that one `sdot` by element advances four outputs
 * and no sum across a vector is ever needed. Weights of a block are unpacked once and used for all rows of the tile.
 */
#include "forerun.h"

#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod+fp16")
#include <arm_neon.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 8")

/* The eight weight vectors of a block: group g holds inputs 4g..4g+3 of the four rows. */
FR_INLINE void unpack(const uint8_t *p, int kind, int8x16_t v[8]) {
    if (kind == FR_P8 || kind == FR_P8W) {
        UNROLL for (int g = 0; g < 8; g++) v[g] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * g));
    } else {
        UNROLL for (int g = 0; g < 4; g++) {
            uint8x16_t both = vld1q_u8(p + 16 * g);
            v[g] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            v[g + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    }
}

FR_INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
FR_INLINE float32x4_t floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

/* Add half a block (sixteen inputs) of up to four rows, step by step in turn: no step waits for the one before. */
FR_INLINE void dot_half(const int8x16_t *v, const int8_t *x, int64_t stride, int rows, int32x4_t sum[4]) {
    int8x16_t row[4];
    UNROLL for (int r = 0; r < rows; r++) row[r] = vld1q_s8(x + r * stride);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdotq_laneq_s32(sum[r], v[0], row[r], 0);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdotq_laneq_s32(sum[r], v[1], row[r], 1);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdotq_laneq_s32(sum[r], v[2], row[r], 2);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdotq_laneq_s32(sum[r], v[3], row[r], 3);
}

FR_INLINE void scaled(const int32x4_t *sum, float32x4_t d, const float *scales, int64_t stride, int rows,
                      float32x4_t *total) {
    UNROLL for (int r = 0; r < rows; r++)
        total[r] = vfmaq_n_f32(total[r], vmulq_f32(vcvtq_f32_s32(sum[r]), d), scales[r * stride]);
}

/* One panel, `tile` rows: tile and kind are constants where this is inlined. */
FR_INLINE void packed_tile(const uint8_t *panel, int kind, int tile, int64_t inputs, const int8_t *x,
                           const float *scales, const float *sums, float32x4_t total[8]) {
    int64_t blocks = inputs / FR_BLOCK;
    UNROLL for (int r = 0; r < tile; r++) total[r] = vdupq_n_f32(0);
    for (int64_t b = 0; b < blocks; b++) {
        int8x16_t v[8];
        unpack(panel, kind, v);
        float32x4_t d, d2 = vdupq_n_f32(0), m = vdupq_n_f32(0);
        if (kind == FR_P4) d = halves(panel + 64), m = halves(panel + 72), panel += FR_P4_BYTES;
        else if (kind == FR_P8) d = halves(panel + 128), panel += FR_P8_BYTES;
        else if (kind == FR_P4W) d = floats(panel + 64), m = floats(panel + 80), panel += FR_P4W_BYTES;
        else d = floats(panel + 128), d2 = floats(panel + 144), panel += FR_P8W_BYTES;
        __builtin_prefetch(panel + 512);
        UNROLL for (int first = 0; first < tile; first += 4) {
            int rows = tile - first < 4 ? tile - first : 4;
            const int8_t *block = x + first * inputs + b * FR_BLOCK;
            const float *scale = scales + first * blocks + b;
            int32x4_t sum[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
            dot_half(v, block, inputs, rows, sum);
            if (kind == FR_P8W) {
                scaled(sum, d, scale, blocks, rows, total + first);
                UNROLL for (int r = 0; r < rows; r++) sum[r] = vdupq_n_s32(0);
            }
            dot_half(v + 4, block + 16, inputs, rows, sum);
            scaled(sum, kind == FR_P8W ? d2 : d, scale, blocks, rows, total + first);
            if (kind == FR_P4 || kind == FR_P4W)
                UNROLL for (int r = 0; r < rows; r++)
                    total[first + r] = vfmaq_n_f32(total[first + r], m, sums[(first + r) * blocks + b]);
        }
    }
}

FR_INLINE void store(const fr_weight *w, float *y, int64_t row, int64_t panel, float32x4_t total) {
    int64_t o = panel * FR_PANEL;
    float lanes[4];
    vst1q_f32(lanes, total);
    for (int i = 0; i < FR_PANEL && o + i < w->outputs; i++)
        y[row * w->outputs + o + i] = w->bias ? lanes[i] + w->bias[o + i] : lanes[i];
}

FR_INLINE void packed_rows(const fr_weight *w, int kind, int tile, int64_t bytes, fr_quants q, float *y,
                           int64_t first, int64_t begin, int64_t end) {
    int64_t blocks = w->inputs / FR_BLOCK;
    const int8_t *x = q.values + first * w->inputs;
    const float *scales = q.scales + first * blocks, *sums = q.sums + first * blocks;
    for (int64_t p = begin; p < end; p++) {
        float32x4_t total[8];
        packed_tile((const uint8_t *)w->data + p * bytes * blocks, kind, tile, w->inputs, x, scales, sums, total);
        for (int r = 0; r < tile; r++) store(w, y, first + r, p, total[r]);
    }
}

FR_INLINE void packed(const fr_weight *w, int kind, int64_t bytes, fr_quants q, float *y, int64_t rows, int64_t begin,
                      int64_t end) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) packed_rows(w, kind, 8, bytes, q, y, r, begin, end);
    switch (rows - r) {
    case 1: packed_rows(w, kind, 1, bytes, q, y, r, begin, end); break;
    case 2: packed_rows(w, kind, 2, bytes, q, y, r, begin, end); break;
    case 3: packed_rows(w, kind, 3, bytes, q, y, r, begin, end); break;
    case 4: packed_rows(w, kind, 4, bytes, q, y, r, begin, end); break;
    case 5: packed_rows(w, kind, 5, bytes, q, y, r, begin, end); break;
    case 6: packed_rows(w, kind, 6, bytes, q, y, r, begin, end); break;
    case 7: packed_rows(w, kind, 7, bytes, q, y, r, begin, end); break;
    default: break;
    }
}

FR_INLINE float32x4_t load_weights(const fr_weight *w, int bf16, int64_t at) {
    if (!bf16) return vld1q_f32((const float *)w->data + at);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)w->data + at), 16));
}

FR_INLINE float load_weight(const fr_weight *w, int bf16, int64_t at) {
    if (!bf16) return ((const float *)w->data)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)w->data)[at] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Plain weights: up to four outputs times `tile` rows, each sum in four lanes and then across. */
FR_INLINE void plain_tile(const fr_weight *w, int bf16, int tile, int64_t o, int outputs, const float *x, float *y) {
    float32x4_t total[4][4];
    int64_t inputs = w->inputs, whole = inputs / 4 * 4;
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int r = 0; r < tile; r++) total[i][r] = vdupq_n_f32(0);
    for (int64_t k = 0; k < whole; k += 4) {
        float32x4_t v[4];
        UNROLL for (int i = 0; i < 4; i++) v[i] = load_weights(w, bf16, (o + (i < outputs ? i : 0)) * inputs + k);
        UNROLL for (int r = 0; r < tile; r++) {
            float32x4_t row = vld1q_f32(x + r * inputs + k);
            UNROLL for (int i = 0; i < 4; i++) total[i][r] = vfmaq_f32(total[i][r], v[i], row);
        }
    }
    for (int i = 0; i < outputs; i++)
        for (int r = 0; r < tile; r++) {
            float lanes[4];
            vst1q_f32(lanes, total[i][r]);
            float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
            for (int64_t k = whole; k < inputs; k++)
                sum = __builtin_fmaf(load_weight(w, bf16, (o + i) * inputs + k), x[r * inputs + k], sum);
            y[r * w->outputs + o + i] = w->bias ? sum + w->bias[o + i] : sum;
        }
}

FR_INLINE void plain(const fr_weight *w, int bf16, const float *x, float *y, int64_t rows, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
        int64_t o = p * FR_PANEL, r = 0;
        int outputs = w->outputs - o < 4 ? (int)(w->outputs - o) : 4;
        const float *in = x;
        float *out = y;
        for (; r + 4 <= rows; r += 4, in += 4 * w->inputs, out += 4 * w->outputs) plain_tile(w, bf16, 4, o, outputs, in, out);
        switch (rows - r) {
        case 1: plain_tile(w, bf16, 1, o, outputs, in, out); break;
        case 2: plain_tile(w, bf16, 2, o, outputs, in, out); break;
        case 3: plain_tile(w, bf16, 3, o, outputs, in, out); break;
        default: break;
        }
    }
}

void fr_panels_dotprod(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows, int64_t begin,
                       int64_t end) {
    switch (w->kind) {
    case FR_P4: packed(w, FR_P4, FR_P4_BYTES, q, y, rows, begin, end); break;
    case FR_P8: packed(w, FR_P8, FR_P8_BYTES, q, y, rows, begin, end); break;
    case FR_P4W: packed(w, FR_P4W, FR_P4W_BYTES, q, y, rows, begin, end); break;
    case FR_P8W: packed(w, FR_P8W, FR_P8W_BYTES, q, y, rows, begin, end); break;
    case FR_BF16: plain(w, 1, x, y, rows, begin, end); break;
    default: plain(w, 0, x, y, rows, begin, end);
    }
}
#else
typedef int fr_not_arm;
#endif
