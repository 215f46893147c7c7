/* One block of a panel of sixteen outputs into vectors: what the AVX-512 and the AMX kernels share. */
#ifndef FORERUN_UNPACK_AVX512_H
#define FORERUN_UNPACK_AVX512_H

#include "forerun.h"

enum { W = 16 };

typedef __m512 vec;
#define vec_zero _mm512_setzero_ps
#define vec_mul _mm512_mul_ps
FR_INLINE __m512 halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FR_INLINE __m512 bf16s(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
FR_INLINE __m512 unsigned_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FR_INLINE __m512 signed_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#include "x86/block_scales.h"

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
    if (format == FR_P4E)
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(FR_FLOAT_STEPS_UP)), v);
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
