/* LoRA adapters for x86-64 with AVX-512: the numbers of adapters.c. */
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f")
#include <immintrin.h>
#endif
#include "forerun.h"

typedef __m512 v16;
#define zero16 _mm512_setzero_ps
#define all16 _mm512_set1_ps
#define load16 _mm512_loadu_ps
#define store16 _mm512_storeu_ps
#define fma16 _mm512_fmadd_ps
FR_INLINE __m512 halves16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FR_INLINE float across16(__m512 v) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#define DOWN_ROWS fr_adapt_down_avx512
#define UP_ROWS fr_adapt_up_avx512
#include "adapters.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_adapters_avx512_only;
