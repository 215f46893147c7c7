/* Packed linear layers for 64-bit ARM with dot-product instructions: four outputs and up to eight rows at a time.
 *
 * A panel holds four output rows interleaved by fours of inputs, so that one `sdot` by element advances four outputs
 * and no sum across a vector is ever needed. Weights of a block are unpacked once and used for all rows of the tile.
 *
 * What a further row costs is vector instructions, and only those: eight `sdot` and as little else as possible.
 * Converting a sum to float takes a pipe for two cycles, so sums start at the bits of 1.5 * 2^23 instead: read as a
 * float such a sum is SHIFT + dot, exactly. Then (SHIFT + dot) * d - SHIFT * d in one fused step is dot * d rounded
 * once, because SHIFT * d is exact (d has at most 18 significant bits). Both starting values come from memory each
 * time, as the load pipes have nothing better to do and a register move would take a vector pipe.
 */
#include "forerun.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

/* sum += v . four inputs of x. Older clang offers the intrinsic only where the whole file is built for it. */
#if defined(__clang__) && !defined(__ARM_FEATURE_DOTPROD)
#define DOT(sum, v, x, lane) __asm__("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(v), "w"(x))
#else
#define DOT(sum, v, x, lane) ((sum) = vdotq_laneq_s32(sum, v, x, lane))
#endif

/* STEP for up to four rows with constant indices, so that any compiler keeps the arrays in registers. */
#define EACH_ROW(rows, STEP) \
    do { \
        STEP(0) \
        if ((rows) > 1) { STEP(1) } \
        if ((rows) > 2) { STEP(2) } \
        if ((rows) > 3) { STEP(3) } \
    } while (0)

FR_INLINE int has_offset(int kind) { return kind == FR_P4 || kind == FR_P4W || kind == FR_P8M; }

/* The eight weight vectors of a block: group g holds inputs 4g..4g+3 of the four rows. */
FR_INLINE void unpack(const uint8_t *p, int kind, int8x16_t v[8]) {
#define NIBBLES(g) \
    uint8x16_t both##g = vld1q_u8(p + 16 * g); \
    v[g] = vreinterpretq_s8_u8(vandq_u8(both##g, vdupq_n_u8(15))); \
    v[g + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both##g, 4));
#define BYTES(g) \
    v[g] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * g)); \
    v[g + 4] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * g + 64));
    if (kind == FR_P4 || kind == FR_P4W) EACH_ROW(4, NIBBLES);
    else EACH_ROW(4, BYTES);
}

FR_INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
FR_INLINE float32x4_t floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

/* A load the compiler cannot replace by a register move. */
FR_INLINE int32x4_t load_again(const int32x4_t *p) {
    int32x4_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*p));
    return v;
}

/* Add half a block (sixteen inputs) of up to four rows. */
FR_INLINE void dot_half(const int8x16_t *v, const int8_t *x, int rows, int32x4_t sum[4]) {
    int8x16_t row[4];
#define LOAD(r) row[r] = vld1q_s8(x + r * FR_BLOCK);
#define DOT0(r) DOT(sum[r], v[0], row[r], 0);
#define DOT1(r) DOT(sum[r], v[1], row[r], 1);
#define DOT2(r) DOT(sum[r], v[2], row[r], 2);
#define DOT3(r) DOT(sum[r], v[3], row[r], 3);
    EACH_ROW(rows, LOAD);
    EACH_ROW(rows, DOT0);
    EACH_ROW(rows, DOT1);
    EACH_ROW(rows, DOT2);
    EACH_ROW(rows, DOT3);
}

/* total += dot * d * scale for up to four rows; `back` is -SHIFT * d in memory. */
FR_INLINE void add_scaled(const int32x4_t *sum, float32x4_t d, const int32x4_t *back, float32x4_t scales, int rows,
                          float32x4_t *total) {
    float32x4_t dot[4];
#define SCALE(r) dot[r] = vfmaq_f32(vreinterpretq_f32_s32(load_again(back)), vreinterpretq_f32_s32(sum[r]), d);
#define ADD(r) total[r] = vfmaq_laneq_f32(total[r], dot[r], scales, r);
    EACH_ROW(rows, SCALE);
    EACH_ROW(rows, ADD);
}

/* What a block adds to the totals of one group of rows. */
typedef struct {
    int8x16_t v[8];
    float32x4_t d, d2, m; /* scale, scale of the second half (P8W), offset */
} panel_block;

/* What sums start from, kept apart because it must be in memory: SHIFT, -SHIFT * d and -SHIFT * d2. */
typedef struct {
    int32x4_t shift, back, back2;
} starts;

FR_INLINE void add_block(const panel_block *p, const starts *s, int kind, int rows, const fr_quants *q, int64_t at,
                         float32x4_t *total) {
    const int8_t *block = q->values + at * FR_BLOCK;
    float32x4_t scales = vld1q_f32(q->scales + at);
    int32x4_t sum[4];
#define START(r) sum[r] = load_again(&s->shift);
    EACH_ROW(rows, START);
    dot_half(p->v, block, rows, sum);
    if (kind == FR_P8W) {
        add_scaled(sum, p->d, &s->back, scales, rows, total);
        EACH_ROW(rows, START);
    }
    dot_half(p->v + 4, block + 16, rows, sum);
    if (kind == FR_P8W) add_scaled(sum, p->d2, &s->back2, scales, rows, total);
    else add_scaled(sum, p->d, &s->back, scales, rows, total);
    if (has_offset(kind)) {
        float32x4_t sums = vld1q_f32(q->sums + at);
#define OFFSET(r) total[r] = vfmaq_laneq_f32(total[r], p->m, sums, r);
        EACH_ROW(rows, OFFSET);
    }
}

/* One panel, `tile` rows: tile and kind are constants where this is inlined. */
FR_INLINE void panel_rows(const uint8_t *panel, int kind, int tile, int64_t blocks, const fr_quants *q,
                          float32x4_t total[8]) {
    const float32x4_t minus_shift = vdupq_n_f32(-12582912.0f);
    panel_block p;
    starts s;
    s.shift = vdupq_n_s32(0x4B400000);
#define ZERO(r) total[r] = total[r + 4] = vdupq_n_f32(0);
    EACH_ROW(4, ZERO);
    for (int64_t b = 0; b < blocks; b++) {
        unpack(panel, kind, p.v);
        p.d2 = p.m = vdupq_n_f32(0);
        if (kind == FR_P4) p.d = halves(panel + 64), p.m = halves(panel + 72);
        else if (kind == FR_P8) p.d = halves(panel + 128);
        else if (kind == FR_P4W) p.d = floats(panel + 64), p.m = floats(panel + 80);
        else if (kind == FR_P8M) p.d = floats(panel + 128), p.m = floats(panel + 144);
        else p.d = floats(panel + 128), p.d2 = floats(panel + 144);
        panel += fr_block_bytes(kind);
        s.back = vreinterpretq_s32_f32(vmulq_f32(p.d, minus_shift));
        if (kind == FR_P8W) s.back2 = vreinterpretq_s32_f32(vmulq_f32(p.d2, minus_shift));
        add_block(&p, &s, kind, tile < 4 ? tile : 4, q, b * FR_GROUP, total);
        if (tile > 4) add_block(&p, &s, kind, tile - 4, q, (blocks + b) * FR_GROUP, total + 4);
    }
}

FR_INLINE void store(const fr_range *g, int64_t row, int64_t panel, float32x4_t total) {
    int64_t o = panel * FR_PANEL;
    float *y = g->y + row * g->stride + o;
    if (o + FR_PANEL <= g->w->outputs) {
        vst1q_f32(y, g->w->bias ? vaddq_f32(total, vld1q_f32(g->w->bias + o)) : total);
        return;
    }
    float lanes[4];
    vst1q_f32(lanes, total);
    for (int i = 0; o + i < g->w->outputs; i++) y[i] = g->w->bias ? lanes[i] + g->w->bias[o + i] : lanes[i];
}

FR_INLINE void tile_rows(const fr_range *g, int kind, int tile, int64_t first) {
    int64_t blocks = g->w->inputs / FR_BLOCK, at = first * blocks, bytes = blocks * fr_block_bytes(kind);
    fr_quants q = {g->q.values + at * FR_BLOCK, g->q.scales + at, g->q.sums + at};
    for (int64_t p = g->begin; p < g->end; p++) {
        float32x4_t total[8];
        panel_rows((const uint8_t *)g->w->data + p * bytes, kind, tile, blocks, &q, total);
#define STORE(r) store(g, first + r, p, total[r]);
#define STORE_MORE(r) store(g, first + r + 4, p, total[r + 4]);
        EACH_ROW(tile, STORE);
        if (tile > 4) EACH_ROW(tile - 4, STORE_MORE);
    }
}

FR_INLINE void packed(const fr_range *g, int kind) {
    int64_t r = 0;
    for (; r + 8 <= g->rows; r += 8) tile_rows(g, kind, 8, r);
    if (r + 4 <= g->rows) tile_rows(g, kind, 4, r), r += 4;
    switch (g->rows - r) {
    case 1: tile_rows(g, kind, 1, r); break;
    case 2: tile_rows(g, kind, 2, r); break;
    case 3: tile_rows(g, kind, 3, r); break;
    default: break;
    }
}

void fr_packed_dotprod(const fr_range *g) {
    switch (g->w->kind) {
    case FR_P4: packed(g, FR_P4); break;
    case FR_P8: packed(g, FR_P8); break;
    case FR_P4W: packed(g, FR_P4W); break;
    case FR_P8W: packed(g, FR_P8W); break;
    case FR_P8M: packed(g, FR_P8M); break;
    default: break;
    }
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int fr_not_arm;
#endif
