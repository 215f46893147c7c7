/* Packed linear layers for 64-bit ARM with dot-product instructions: four outputs and up to eight rows at a time.
 *
 * A panel holds four output rows interleaved by fours of inputs, so that one `sdot` by element advances four outputs
 * and no sum across a vector is ever needed. Weights of a block are unpacked once and used for all rows of the tile.
 *
 * What a further row costs is vector instructions, and only those: eight `sdot` and as little else as possible.
 * - Converting a sum to float takes a pipe for two cycles, so sums start at the bits of SHIFT = 1.5 * 2^23 instead:
 *   read as a float such a sum is SHIFT + dot, exactly. Then (SHIFT + dot) * scale - SHIFT * scale in one fused step is
 *   dot * scale rounded once, because SHIFT * scale is exact (a row's scale has at most 16 significant bits). Both
 *   starting values come from memory, as the load pipes have nothing better to do and a register move would take a
 *   vector pipe.
 * - On a Neoverse-N1 a few multiply-adds among `sdot` were measured to cost a whole cycle each, and half of one in a long
 *   run (they take longer than an `sdot`, so results that collide at the end of a pipe would explain it). So all `sdot`
 *   of a tile come first, then all multiply-adds. Compilers mix them: hence assembly.
 */
#include "forerun.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

/* STEP for up to four rows with constant indices, so that any compiler keeps the arrays in registers. */
#define EACH_ROW(rows, STEP) \
    do { \
        if ((rows) > 0) { STEP(0) } \
        if ((rows) > 1) { STEP(1) } \
        if ((rows) > 2) { STEP(2) } \
        if ((rows) > 3) { STEP(3) } \
    } while (0)

/* One block of a tile, in pieces. %[a] and %[b] point to the two groups of rows, %[t0].. are the totals. Registers:
 *   v0-v7    weights; number g holds inputs 4g..4g+3 of the four outputs
 *   v16      scales d of the outputs
 *   v17      their offsets m, or the scales of the second half block (P8W)
 *   v18-v21  sums of the first four rows, then dot * scale of the second four
 *   v22-v25  sums of the second four rows
 *   v26-v29  inputs of four rows, then dot * scale of the first four
 *   v30, v31 scales of the rows, then their sums; before, what weights are unpacked with */
#define LOAD(to, from, at) "ldr q" #to ", [%[" #from "], #" #at "]\n\t"
#define LOAD2(to, more, from, at) "ldp q" #to ", q" #more ", [%[" #from "], #" #at "]\n\t"
#define SDOT(sum, w, x, lane) "sdot v" #sum ".4s, v" #w ".16b, v" #x ".4b[" #lane "]\n\t"
#define FMLA(to, x, y) "fmla " to ".4s, " x ".4s, " y "\n\t"

#define NIBBLES \
    LOAD2(4, 5, panel, 0) LOAD2(6, 7, panel, 32) "movi v30.16b, #15\n\t" \
    "and v0.16b, v4.16b, v30.16b\n\tand v1.16b, v5.16b, v30.16b\n\t" \
    "and v2.16b, v6.16b, v30.16b\n\tand v3.16b, v7.16b, v30.16b\n\t" \
    "ushr v4.16b, v4.16b, #4\n\tushr v5.16b, v5.16b, #4\n\tushr v6.16b, v6.16b, #4\n\tushr v7.16b, v7.16b, #4\n\t"
#define BYTES LOAD2(0, 1, panel, 0) LOAD2(2, 3, panel, 32) LOAD2(4, 5, panel, 64) LOAD2(6, 7, panel, 96)
#define HALVES(to, at) "ldr d" #to ", [%[panel], #" #at "]\n\tfcvtl v" #to ".4s, v" #to ".4h\n\t"
#define UNPACK_P4 NIBBLES HALVES(16, 64) HALVES(17, 72)
#define UNPACK_P4W LOAD2(16, 17, panel, 64) NIBBLES
#define STEP(v) "tbl v" #v ".16b, {v31.16b}, v" #v ".16b\n\t"
#define UNPACK_P4E \
    NIBBLES LOAD(31, shift, 32) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) \
    "ldr d16, [%[panel], #64]\n\tshll v16.4s, v16.4h, #16\n\t"
#define UNPACK_P8 BYTES HALVES(16, 128)
#define UNPACK_P8M LOAD2(16, 17, panel, 128) BYTES
#define UNPACK_P8W UNPACK_P8M

#define START_a1 LOAD(18, shift, 0)
#define START_a2 LOAD2(18, 19, shift, 0)
#define START_a3 START_a2 LOAD(20, shift, 0)
#define START_a4 START_a2 LOAD2(20, 21, shift, 0)
#define START_b1 LOAD(22, shift, 0)
#define START_b2 LOAD2(22, 23, shift, 0)
#define START_b3 START_b2 LOAD(24, shift, 0)
#define START_b4 START_b2 LOAD2(24, 25, shift, 0)

#define INPUTS_1(group, at) LOAD(26, group, at)
#define INPUTS_2(group, at) LOAD2(26, 27, group, at)
#define INPUTS_3(group, at) INPUTS_2(group, at) LOAD(28, group, at + 32)
#define INPUTS_4(group, at) INPUTS_2(group, at) LOAD2(28, 29, group, at + 32)

#define DOT_a1(w, lane) SDOT(18, w, 26, lane)
#define DOT_a2(w, lane) DOT_a1(w, lane) SDOT(19, w, 27, lane)
#define DOT_a3(w, lane) DOT_a2(w, lane) SDOT(20, w, 28, lane)
#define DOT_a4(w, lane) DOT_a3(w, lane) SDOT(21, w, 29, lane)
#define DOT_b1(w, lane) SDOT(22, w, 26, lane)
#define DOT_b2(w, lane) DOT_b1(w, lane) SDOT(23, w, 27, lane)
#define DOT_b3(w, lane) DOT_b2(w, lane) SDOT(24, w, 28, lane)
#define DOT_b4(w, lane) DOT_b3(w, lane) SDOT(25, w, 29, lane)

#define LOW(group, rows) \
    INPUTS_##rows(group, 0) DOT_##group##rows(0, 0) DOT_##group##rows(1, 1) DOT_##group##rows(2, 2) DOT_##group##rows(3, 3)
#define HIGH(group, rows) \
    INPUTS_##rows(group, 64) DOT_##group##rows(4, 0) DOT_##group##rows(5, 1) DOT_##group##rows(6, 2) DOT_##group##rows(7, 3)
#define WHOLE(group, rows) LOW(group, rows) HIGH(group, rows)

#define BACK_a1 LOAD(26, a, 160)
#define BACK_a2 LOAD2(26, 27, a, 160)
#define BACK_a3 BACK_a2 LOAD(28, a, 192)
#define BACK_a4 BACK_a2 LOAD2(28, 29, a, 192)
#define BACK_b1 LOAD(18, b, 160)
#define BACK_b2 LOAD2(18, 19, b, 160)
#define BACK_b3 BACK_b2 LOAD(20, b, 192)
#define BACK_b4 BACK_b2 LOAD2(20, 21, b, 192)

#define SCALE_a1 FMLA("v26", "v18", "v30.s[0]")
#define SCALE_a2 SCALE_a1 FMLA("v27", "v19", "v30.s[1]")
#define SCALE_a3 SCALE_a2 FMLA("v28", "v20", "v30.s[2]")
#define SCALE_a4 SCALE_a3 FMLA("v29", "v21", "v30.s[3]")
#define SCALE_b1 FMLA("v18", "v22", "v31.s[0]")
#define SCALE_b2 SCALE_b1 FMLA("v19", "v23", "v31.s[1]")
#define SCALE_b3 SCALE_b2 FMLA("v20", "v24", "v31.s[2]")
#define SCALE_b4 SCALE_b3 FMLA("v21", "v25", "v31.s[3]")

#define OFFSET_a1 FMLA("%[t0]", "v17", "v30.s[0]")
#define OFFSET_a2 OFFSET_a1 FMLA("%[t1]", "v17", "v30.s[1]")
#define OFFSET_a3 OFFSET_a2 FMLA("%[t2]", "v17", "v30.s[2]")
#define OFFSET_a4 OFFSET_a3 FMLA("%[t3]", "v17", "v30.s[3]")
#define OFFSET_b1 FMLA("%[t4]", "v17", "v31.s[0]")
#define OFFSET_b2 OFFSET_b1 FMLA("%[t5]", "v17", "v31.s[1]")
#define OFFSET_b3 OFFSET_b2 FMLA("%[t6]", "v17", "v31.s[2]")
#define OFFSET_b4 OFFSET_b3 FMLA("%[t7]", "v17", "v31.s[3]")

#define ADD_a1(d) FMLA("%[t0]", "v26", d ".4s")
#define ADD_a2(d) ADD_a1(d) FMLA("%[t1]", "v27", d ".4s")
#define ADD_a3(d) ADD_a2(d) FMLA("%[t2]", "v28", d ".4s")
#define ADD_a4(d) ADD_a3(d) FMLA("%[t3]", "v29", d ".4s")
#define ADD_b1(d) FMLA("%[t4]", "v18", d ".4s")
#define ADD_b2(d) ADD_b1(d) FMLA("%[t5]", "v19", d ".4s")
#define ADD_b3(d) ADD_b2(d) FMLA("%[t6]", "v20", d ".4s")
#define ADD_b4(d) ADD_b3(d) FMLA("%[t7]", "v21", d ".4s")

#define SCALES_a LOAD(30, a, 128)
#define SCALES_b SCALES_a LOAD(31, b, 128)
#define OFFSETS_a(n) LOAD(30, a, 144) OFFSET_a##n
#define OFFSETS_b(n) LOAD(30, a, 144) LOAD(31, b, 144) OFFSET_a4 OFFSET_b##n
#define NO_OFFSETS_a(n)
#define NO_OFFSETS_b(n)

/* total += dot * scale * d over the inputs of DOTS (WHOLE, LOW or HIGH), after total += m * sum for OFFSETS. */
#define FOUR(DOTS, OFFSETS, d, n) START_a##n DOTS(a, n) SCALES_a BACK_a##n SCALE_a##n OFFSETS##_a(n) ADD_a##n(d)
#define EIGHT(DOTS, OFFSETS, d, n) \
    START_a4 DOTS(a, 4) START_b##n DOTS(b, n) SCALES_b BACK_a4 SCALE_a4 BACK_b##n SCALE_b##n OFFSETS##_b(n) \
    ADD_a4(d) ADD_b##n(d)
#define BODY_P4(ROWS, n) ROWS(WHOLE, OFFSETS, "v16", n)
#define BODY_P4W BODY_P4
#define BODY_P8M BODY_P4
#define BODY_P8(ROWS, n) ROWS(WHOLE, NO_OFFSETS, "v16", n)
#define BODY_P4E BODY_P8
#define BODY_P8W(ROWS, n) ROWS(LOW, NO_OFFSETS, "v16", n) ROWS(HIGH, NO_OFFSETS, "v17", n)

#define T(r) [t##r] "+w"(total[r])
#define T1 T(0)
#define T2 T1, T(1)
#define T3 T2, T(2)
#define T4 T3, T(3)
#define T5 T4, T(4)
#define T6 T5, T(5)
#define T7 T6, T(6)
#define T8 T7, T(7)
#define BITS 0x4B400000
static const struct {
    int32_t bits[8];
    int8_t steps[16];
} shift __attribute__((aligned(32))) = {{BITS, BITS, BITS, BITS, BITS, BITS, BITS, BITS}, {FR_FLOAT_STEPS}};
_Static_assert(offsetof(fr_group, scales) == 128 && offsetof(fr_group, sums) == 144 && offsetof(fr_group, backs) == 160,
               "the assembly knows these places");

#define RUN(kind, ROWS, n, totals) \
    __asm__ volatile(UNPACK_##kind BODY_##kind(ROWS, n) \
                     : totals \
                     : [panel] "r"(panel), [a] "r"(q), [b] "r"(q + blocks), [shift] "r"(&shift) \
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22", \
                       "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory")

/* One panel, `tile` rows (a constant where this is inlined). */
#define PANEL_ROWS(kind) \
    FR_INLINE void panel_##kind(const uint8_t *panel, int tile, int64_t blocks, const fr_group *q, float32x4_t *total) { \
        EACH_ROW(4, ZERO); \
        for (int64_t i = 0; i < blocks; i++, q++, panel += fr_block_bytes(FR_##kind, FR_QUAD)) { \
            if (tile == 1) RUN(kind, FOUR, 1, T1); \
            if (tile == 2) RUN(kind, FOUR, 2, T2); \
            if (tile == 3) RUN(kind, FOUR, 3, T3); \
            if (tile == 4) RUN(kind, FOUR, 4, T4); \
            if (tile == 5) RUN(kind, EIGHT, 1, T5); \
            if (tile == 6) RUN(kind, EIGHT, 2, T6); \
            if (tile == 7) RUN(kind, EIGHT, 3, T7); \
            if (tile == 8) RUN(kind, EIGHT, 4, T8); \
        } \
    }
#define ZERO(r) total[r] = total[r + 4] = vdupq_n_f32(0);
PANEL_ROWS(P4)
PANEL_ROWS(P8)
PANEL_ROWS(P4W)
PANEL_ROWS(P8W)
PANEL_ROWS(P8M)
PANEL_ROWS(P4E)

FR_INLINE void store(const fr_range *g, int64_t row, int64_t panel, float32x4_t total) {
    int64_t o = panel * FR_QUAD;
    float *y = g->y + row * g->stride + o;
    if (o + FR_QUAD <= g->w->outputs) {
        vst1q_f32(y, g->w->bias ? vaddq_f32(total, vld1q_f32(g->w->bias + o)) : total);
        return;
    }
    float lanes[4];
    vst1q_f32(lanes, total);
    for (int i = 0; o + i < g->w->outputs; i++) y[i] = g->w->bias ? lanes[i] + g->w->bias[o + i] : lanes[i];
}

FR_INLINE void tile_rows(const fr_range *g, int kind, int tile, int64_t first) {
    int64_t blocks = g->w->inputs / FR_BLOCK, bytes = blocks * fr_block_bytes(kind, FR_QUAD);
    const uint8_t *panel = (const uint8_t *)g->w->data + g->begin * bytes;
    const fr_group *q = g->q + first / FR_GROUP * blocks;
    for (int64_t p = g->begin; p < g->end; p++, panel += bytes) {
        float32x4_t total[8];
        if (kind == FR_P4) panel_P4(panel, tile, blocks, q, total);
        else if (kind == FR_P8) panel_P8(panel, tile, blocks, q, total);
        else if (kind == FR_P4W) panel_P4W(panel, tile, blocks, q, total);
        else if (kind == FR_P8W) panel_P8W(panel, tile, blocks, q, total);
        else if (kind == FR_P4E) panel_P4E(panel, tile, blocks, q, total);
        else panel_P8M(panel, tile, blocks, q, total);
#define STORE(r) store(g, first + r, p, total[r]);
#define STORE_MORE(r) store(g, first + r + 4, p, total[r + 4]);
        EACH_ROW(tile, STORE);
        EACH_ROW(tile - 4, STORE_MORE);
    }
}

FR_INLINE void packed(const fr_range *g, int kind) {
    int64_t r = 0;
    for (; r + 8 <= g->rows; r += 8) tile_rows(g, kind, 8, r);
#define LEFT(n) case n: tile_rows(g, kind, n, r); break;
    switch (g->rows - r) {
    LEFT(1) LEFT(2) LEFT(3) LEFT(4) LEFT(5) LEFT(6) LEFT(7)
    default: break;
    }
}

void fr_packed_dotprod(const fr_range *g) { FR_BY_FORMAT(g, FR_ARM_CASES) }
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int fr_not_arm;
#endif
