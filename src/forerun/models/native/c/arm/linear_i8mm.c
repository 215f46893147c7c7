/* Packed linear layers for 64-bit ARM with matrix instructions (i8mm): four outputs and up to eight rows at a time.
 *
 * `smmla` multiplies two rows of eight inputs by two outputs of eight inputs. Panels are those of the dot-product path,
 * interleaved by fours of inputs; two such groups are brought into pairs of outputs once for all rows of the tile. Sums of
 * a block are integers and scales come in as in linear_dotprod.c, so a row has the same bits there, here and in plain C.
 */
#include "forerun.h"

#if defined(__aarch64__) && FR_HAS_I8MM
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

enum { TILE = 8, PAIRS = TILE / 2 };

/* Weights of a block: [eight inputs][pair of outputs], and the scales and offsets of its four outputs. */
typedef struct {
    int8x16_t v[4][2];
    float32x4_t d, d2, m;
} block;

FR_INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
FR_INLINE float32x4_t floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

/* Groups 2g and 2g + 1 hold fours of inputs of outputs 0-3: now eights, of outputs 0 and 1, and of 2 and 3. */
FR_INLINE void pair_up(int8x16_t low, int8x16_t high, int8x16_t out[2]) {
    int32x4_t a = vreinterpretq_s32_s8(low), b = vreinterpretq_s32_s8(high);
    out[0] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    out[1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
}

FR_INLINE void read_block(int format, const uint8_t *p, block *out) {
    int8x16_t groups[8];
    static const int8_t steps[16] = {FR_FLOAT_STEPS};
    int four = format == FR_P4 || format == FR_P4W || format == FR_P4E;
    for (int g = 0; g < (four ? 4 : 8); g++) {
        uint8x16_t bytes = vld1q_u8(p + 16 * g);
        groups[g] = vreinterpretq_s8_u8(four ? vandq_u8(bytes, vdupq_n_u8(15)) : bytes);
        if (four) groups[g + 4] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    }
    for (int g = 0; g < 8 && format == FR_P4E; g++)
        groups[g] = vqtbl1q_s8(vld1q_s8(steps), vreinterpretq_u8_s8(groups[g]));
    for (int g = 0; g < 4; g++) pair_up(groups[2 * g], groups[2 * g + 1], out->v[g]);
    p += four ? 64 : 128;
    out->d2 = out->m = vdupq_n_f32(0);
    if (format == FR_P4) out->d = halves(p), out->m = halves(p + 8);
    else if (format == FR_P8) out->d = halves(p);
    else if (format == FR_P4E) out->d = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    else if (format == FR_P8W) out->d = floats(p), out->d2 = floats(p + 16);
    else out->d = floats(p), out->m = floats(p + 16);
}

/* Products of a pair of rows with both pairs of outputs, over eights of inputs from..to: sums of each row, by output. */
FR_INLINE void dot_pair(const block *w, const fr_group *q, int row, int from, int to, int32x4_t sums[2]) {
    int32x4_t first = vdupq_n_s32(0), second = vdupq_n_s32(0); /* [row, output] */
    for (int g = from; g < to; g++) {
        int8x8_t a = vld1_s8(q->values[g / 2][row] + g % 2 * 8), b = vld1_s8(q->values[g / 2][row + 1] + g % 2 * 8);
        int8x16_t x = vcombine_s8(a, b);
        first = vmmlaq_s32(first, x, w->v[g][0]);
        second = vmmlaq_s32(second, x, w->v[g][1]);
    }
    sums[0] = vcombine_s32(vget_low_s32(first), vget_low_s32(second));
    sums[1] = vcombine_s32(vget_high_s32(first), vget_high_s32(second));
}

FR_INLINE float32x4_t add_scaled(int32x4_t sum, float scale, float32x4_t d, float32x4_t total) {
    return vfmaq_f32(total, vmulq_n_f32(vcvtq_f32_s32(sum), scale), d);
}

FR_INLINE void add_pair(int format, const block *w, const fr_group *q, int row, float32x4_t *total) {
    int split = format == FR_P8W;
    for (int from = 0; from < 4; from += split ? 2 : 4) {
        int32x4_t sums[2];
        dot_pair(w, q, row, from, split ? from + 2 : 4, sums);
        for (int r = 0; r < 2; r++) {
            if (format != FR_P8 && format != FR_P4E && !split) total[r] = vfmaq_n_f32(total[r], w->m, q->sums[row + r]);
            total[r] = add_scaled(sums[r], q->scales[row + r], from ? w->d2 : w->d, total[r]);
        }
    }
}

FR_INLINE void store(const fr_range *g, int64_t row, int64_t panel, float32x4_t total) {
    int64_t o = panel * FR_QUAD;
    float lanes[4], *y = g->y + row * g->stride + o;
    vst1q_f32(lanes, total);
    for (int i = 0; i < FR_QUAD && o + i < g->w->outputs; i++) y[i] = g->w->bias ? lanes[i] + g->w->bias[o + i] : lanes[i];
}

/* `pairs` pairs of rows (a constant where this is inlined); the odd last row has an unused neighbour, which is dropped. */
FR_INLINE void tile_rows(const fr_range *g, int format, int pairs, int64_t first, int64_t rows, int64_t p) {
    int64_t blocks = g->w->inputs / FR_BLOCK, bytes = fr_block_bytes(format, FR_QUAD);
    const uint8_t *panel = (const uint8_t *)g->w->data + p * blocks * bytes;
    const fr_group *q = g->q + first / FR_GROUP * blocks;
    float32x4_t total[TILE];
    for (int r = 0; r < 2 * pairs; r++) total[r] = vdupq_n_f32(0);
    for (int64_t b = 0; b < blocks; b++, q++, panel += bytes) {
        block w;
        read_block(format, panel, &w);
        for (int i = 0; i < pairs; i++) add_pair(format, &w, q + i / 2 * blocks, i % 2 * 2, total + 2 * i);
    }
    for (int r = 0; r < rows; r++) store(g, first + r, p, total[r]);
}

FR_INLINE void packed(const fr_range *g, int format) {
    for (int64_t p = g->begin; p < g->end; p++)
        for (int64_t r = 0; r < g->rows; r += TILE) {
            int64_t rows = g->rows - r < TILE ? g->rows - r : TILE;
            switch ((rows + 1) / 2) {
            case 1: tile_rows(g, format, 1, r, rows, p); break;
            case 2: tile_rows(g, format, 2, r, rows, p); break;
            case 3: tile_rows(g, format, 3, r, rows, p); break;
            default: tile_rows(g, format, PAIRS, r, rows, p);
            }
        }
}

/* One row has no neighbour to share an instruction with: the dot product is as good for it. */
void fr_packed_i8mm(const fr_range *g) {
    if (g->rows == 1) {
        fr_packed_dotprod(g);
        return;
    }
    FR_BY_FORMAT(g, FR_ARM_CASES)
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_i8mm_only;
