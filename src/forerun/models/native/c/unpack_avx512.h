/* One block of a panel of sixteen outputs into vectors: what the AVX-512 and the AMX kernels share. */
#ifndef FORERUN_UNPACK_AVX512_H
#define FORERUN_UNPACK_AVX512_H

#include "forerun.h"

enum { W = 16 };

/* Scales of the sixteen outputs: of the block (P6K: of its halves), their offsets, and what factors multiply. */
typedef struct {
    __m512 d, d2, m, super_d, super_m;
} block_scales;

FR_INLINE int has_offsets(int format) { return format != FR_P8 && format != FR_P5 && format != FR_P6K; }
FR_INLINE int is_super(int format) { return format == FR_P4K || format == FR_P5K || format == FR_P6K; }
FR_INLINE __m512 halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FR_INLINE __m512 unsigned_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FR_INLINE __m512 signed_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* `after` is where the super block's own scales lie, read only in formats that have one. */
FR_INLINE block_scales super_scales(int format, const uint8_t *after) {
    block_scales s;
    s.d = s.d2 = s.m = s.super_d = s.super_m = _mm512_setzero_ps();
    if (is_super(format)) s.super_d = halves(after);
    if (format == FR_P4K || format == FR_P5K) s.super_m = halves(after + 2 * W);
    return s;
}

FR_INLINE void read_scales(int format, const uint8_t *block, block_scales *s) {
    const uint8_t *end = block + fr_block_bytes(format, W);
    if (format == FR_P4 || format == FR_P5M) s->d = halves(end - 4 * W), s->m = halves(end - 2 * W);
    else if (format == FR_P8 || format == FR_P5) s->d = halves(end - 2 * W);
    else if (format == FR_P6K) {
        s->d = _mm512_mul_ps(s->super_d, signed_bytes(end - 2 * W));
        s->d2 = _mm512_mul_ps(s->super_d, signed_bytes(end - W));
    } else {
        s->d = _mm512_mul_ps(s->super_d, unsigned_bytes(end - 2 * W));
        s->m = _mm512_mul_ps(s->super_m, unsigned_bytes(end - W));
    }
}

/* Bits 5 and 6 of group g, at their place in a byte, with others around them. */
FR_INLINE __m512i two_bits(__m512i v, int g) {
    switch (g) {
    case 0: return _mm512_slli_epi16(v, 4);
    case 1: return _mm512_slli_epi16(v, 2);
    case 2: return v;
    default: return _mm512_srli_epi16(v, 2);
    }
}

/* Group g of a block, as bytes: zero points are added. P8 is made unsigned only where that is asked for. */
FR_INLINE __m512i group(int format, const uint8_t *block, int no_sign, int g) {
    const __m512i low = _mm512_set1_epi8(15), bit = _mm512_set1_epi8(16), bits = _mm512_set1_epi8(48);
    if (format == FR_P8)
        return _mm512_xor_si512(_mm512_loadu_si512(block + 64 * g), _mm512_set1_epi8(no_sign ? (char)0x80 : 0));
    __m512i v = _mm512_loadu_si512(block + 64 * (g % 4));
    v = _mm512_and_si512(g < 4 ? v : _mm512_srli_epi16(v, 4), low);
    if (format == FR_P5 || format == FR_P5M || format == FR_P5K) {
        uint64_t set;
        memcpy(&set, block + 256 + 8 * g, 8);
        v = _mm512_mask_add_epi8(v, set, v, bit);
    }
    if (format == FR_P6K) {
        __m512i two = two_bits(_mm512_loadu_si512(block + 256 + g / 4 * 64), g % 4);
        v = _mm512_ternarylogic_epi32(v, two, bits, 0xF8); /* v | (two & bits) */
    }
    return v;
}

/* Start loading weights; past the end of a matrix nothing happens. */
FR_INLINE void ask_for(const uint8_t *from, int64_t bytes) {
    FR_UNROLL for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

FR_INLINE void store_row(const fr_range *g, int64_t row, int64_t panel, __m512 total) {
    int64_t o = panel * W, left = g->w->outputs - o;
    __mmask16 there = left >= W ? 0xFFFF : (__mmask16)((1u << left) - 1);
    if (g->w->bias) total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(there, g->w->bias + o));
    _mm512_mask_storeu_ps(g->y + row * g->stride + o, there, total);
}

#endif
