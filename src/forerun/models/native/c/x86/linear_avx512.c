/* Packed linear layers for x86-64 with AVX-512 VNNI: sixteen outputs and up to twelve rows at a time.
 *
 * A vector holds four inputs of each of the panel's sixteen outputs; four inputs of a row are broadcast against it, so
 * no vector is ever half empty and no sum across one is needed. Weights of a block are unpacked once for all rows of
 * the tile, group by group: the sums of eight rows that follow each other do not wait for each other, where the sums of
 * one row do, and a processor looks only so far ahead (eight rows took 1.4 times as long row by row). Sums start at the bits of SHIFT = 1.5 * 2^23: read as a float such a sum is SHIFT + dot, exactly, and
 * (SHIFT + dot) * scale - SHIFT * scale in one fused step is dot * scale rounded once, because SHIFT * scale is exact (a
 * row's scale has at most 16 significant bits). The instruction multiplies unsigned by signed bytes: formats with
 * negative weights are unpacked with their zero point added, and the sum starts lower by it (fr_group.starts).
 */
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#include <immintrin.h>
#endif
#include "x86/unpack_avx512.h"

enum { TILE = 12, AHEAD = 4096 }; /* bytes of weights asked for before they are needed: a third of one row's time */

FR_INLINE __m512i start(int format, const fr_group *q, int row, int last) {
    if (format == FR_P8) return _mm512_set1_epi32(q->starts[FR_ZERO_8][row]);
    if (format == FR_P5 || format == FR_P4E) return _mm512_set1_epi32(q->starts[FR_ZERO_5][row]);
    if (format == FR_P6K) return _mm512_set1_epi32(q->starts[last ? FR_ZERO_6_LAST : FR_ZERO_6][row]);
    return _mm512_set1_epi32(FR_SHIFT_BITS);
}

/* sum += sixteen dot products of four weights and four inputs of a row, which one instruction loads and broadcasts: GCC's
 * intrinsic takes two, and then what the processor can decode is the limit. */
FR_INLINE __m512i add_products(__m512i sum, __m512i weights, const int8_t *inputs) {
#if defined(__clang__)
    int32_t four;
    memcpy(&four, inputs, 4);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
#else
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int8_t(*)[4])inputs));
    return sum;
#endif
}

FR_INLINE __m512 add_scaled(__m512i sum, const fr_group *q, int row, __m512 d, __m512 total) {
    __m512 scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(q->scales[row]), _mm512_set1_ps(q->backs[row]));
    return _mm512_fmadd_ps(scaled, d, total);
}

/* One block, all rows of the tile; rows of the next group lie `blocks` groups further on. */
FR_INLINE void add_block(int format, const uint8_t *block, const block_scales *s, const fr_group *q, int64_t blocks, int rows,
                         __m512 *total) {
    const int step = format == FR_P6K ? 4 : 8;
    FR_UNROLL for (int from = 0; from < 8; from += step) {
        __m512i sum[TILE];
        FR_UNROLL for (int r = 0; r < rows; r++) sum[r] = start(format, q + r / FR_GROUP * blocks, r % FR_GROUP, from > 0);
        FR_UNROLL for (int i = 0; i < step; i++) {
            int g = from + (step == 8 ? i / 2 + i % 2 * 4 : i); /* both halves of a byte in turn */
            __m512i v = group(format, block, 1, g);
            FR_UNROLL for (int r = 0; r < rows; r++)
                sum[r] = add_products(sum[r], v, q[r / FR_GROUP * blocks].values[g / 4][r % FR_GROUP] + g % 4 * 4);
        }
        if (has_offsets(format))
            FR_UNROLL for (int r = 0; r < rows; r++)
                total[r] = _mm512_fmadd_ps(s->m, _mm512_set1_ps(q[r / FR_GROUP * blocks].sums[r % FR_GROUP]), total[r]);
        FR_UNROLL for (int r = 0; r < rows; r++)
            total[r] = add_scaled(sum[r], q + r / FR_GROUP * blocks, r % FR_GROUP, from ? s->d2 : s->d, total[r]);
    }
}

/* One panel, `rows` rows from the start of a group (both constants where this is inlined). */
FR_INLINE void panel_rows(const uint8_t *panel, int format, int rows, int64_t blocks, const fr_group *q, __m512 *total) {
    int64_t run = is_super(format) ? FR_SUPER : blocks;
    FR_UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t first = 0; first < blocks; first += run) {
        block_scales s = super_scales(format, panel + FR_SUPER * fr_block_bytes(format, W));
        for (int64_t b = 0; b < run; b++, q++, panel += fr_block_bytes(format, W)) {
            ask_for(panel + AHEAD, fr_block_bytes(format, W));
            read_scales(format, panel, &s);
            add_block(format, panel, &s, q, blocks, rows, total);
        }
        panel += fr_super_bytes(format, W);
    }
}

FR_INLINE void tile_rows(const fr_range *g, int format, int rows, int64_t first, int64_t p) {
    int64_t blocks = g->w->inputs / FR_BLOCK;
    const uint8_t *panel = (const uint8_t *)g->w->data + p * fr_panel_bytes(fr_kind(format, W), g->w->inputs);
    __m512 total[TILE];
    panel_rows(panel, format, rows, blocks, g->q + first / FR_GROUP * blocks, total);
    FR_UNROLL for (int r = 0; r < rows; r++) store_row(g, first + r, p, total[r]);
}

FR_INLINE void packed(const fr_range *g, int format) {
    for (int64_t p = g->begin; p < g->end; p++) { /* a panel stays in the first caches for all tiles of rows */
        int64_t r = 0;
        for (; r + TILE <= g->rows; r += TILE) tile_rows(g, format, TILE, r, p);
#define LEFT(n) case n: tile_rows(g, format, n, r, p); break;
        switch (g->rows - r) {
        LEFT(1) LEFT(2) LEFT(3) LEFT(4) LEFT(5) LEFT(6) LEFT(7) LEFT(8) LEFT(9) LEFT(10) LEFT(11)
        default: break;
        }
    }
}

void fr_packed_avx512(const fr_range *g) { FR_BY_FORMAT(g, FR_X86_CASES) }
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_avx512_only;
