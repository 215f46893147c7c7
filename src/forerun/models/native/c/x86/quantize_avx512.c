/* Rows of activations to int8 blocks for x86-64 with AVX-512: the numbers of quantize.c, groups and tiles at once. */
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")
#include <immintrin.h>
#endif
#include "linear/quantize.h"

FR_INLINE __m512i rounded(__m512 x, __m512 inverse) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(x, inverse), _mm512_set1_ps(FR_SHIFT)));
}

/* Sums of the first and the second sixteen of 32 signed bytes. */
FR_INLINE void halves_of(__m128i low, __m128i high, int32_t *first, int32_t *last) {
    __m128i ones = _mm_set1_epi8(1), zero = _mm_setzero_si128();
    __m128i both = _mm_hadd_epi32(_mm_dpbusd_epi32(zero, ones, low), _mm_dpbusd_epi32(zero, ones, high));
    both = _mm_hadd_epi32(both, both);
    *first = _mm_cvtsi128_si32(both);
    *last = _mm_extract_epi32(both, 1);
}

/* A row's place in its group and in its tile; either may be NULL. */
FR_INLINE void quantize_block(const float *x, fr_group *out, int row, fr_tile *tile, int tile_row) {
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    float amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b))), scale = scale_of(amax);
    __m512 inverse = _mm512_set1_ps(amax > 0.0f ? 127.0f / amax : 0.0f);
    __m128i low = _mm512_cvtepi32_epi8(rounded(a, inverse)), high = _mm512_cvtepi32_epi8(rounded(b, inverse));
    int32_t first, last;
    halves_of(low, high, &first, &last);
    if (out) {
        _mm_storeu_si128((__m128i *)out->values[0][row], low);
        _mm_storeu_si128((__m128i *)out->values[1][row], high);
        set_scales(out, row, scale, first, last);
    }
    if (tile) {
        _mm_storeu_si128((__m128i *)tile->values[tile_row], low);
        _mm_storeu_si128((__m128i *)(tile->values[tile_row] + 16), high);
        tile->scales[tile_row] = scale;
        tile->sums[tile_row] = sum_scaled(scale, first, last);
    }
}

/* What lies past the last row of the last tile is zero: AMX multiplies it, and nobody reads the product. */
static void clear_rest(const fr_quants *to, int64_t first, int64_t last) {
    if (to->rows % FR_TILE_ROWS == 0) return;
    for (int64_t b = first; b < last; b++) {
        fr_tile *tile = to->tiles + to->rows / FR_TILE_ROWS * to->blocks + b;
        for (int64_t r = to->rows % FR_TILE_ROWS; r < FR_TILE_ROWS; r++) {
            memset(tile->values[r], 0, FR_BLOCK);
            tile->scales[r] = tile->sums[r] = 0;
        }
    }
}

void fr_quantize_avx512(const fr_quants *to, const float *x, int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t r = begin; r < end; r++) {
        fr_group *groups = to->groups ? to->groups + r / FR_GROUP * to->blocks : NULL;
        fr_tile *tiles = to->tiles ? to->tiles + r / FR_TILE_ROWS * to->blocks : NULL;
        for (int64_t b = first; b < last; b++)
            quantize_block(x + (r * to->blocks + b) * FR_BLOCK, groups ? groups + b : NULL, (int)(r % FR_GROUP),
                           tiles ? tiles + b : NULL, (int)(r % FR_TILE_ROWS));
    }
    if (to->tiles && end == to->rows) clear_rest(to, first, last);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_quantize_avx512_only;
