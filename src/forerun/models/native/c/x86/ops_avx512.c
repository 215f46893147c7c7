/* Gates for x86-64 with AVX-512: the numbers of ops.c. */
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f")
#include <immintrin.h>
#endif
#include "forerun.h"
#include "x86/exp_avx512.h"

FR_INLINE void gate_row(const float *gate, const float *up, float *y, int64_t width, int activation) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    const __m512 linear = _mm512_set1_ps(FR_GELU_LINEAR), cubic = _mm512_set1_ps(FR_GELU_CUBIC);
    for (int64_t i = 0; i < width; i += 16) {
        __mmask16 there = width - i >= 16 ? 0xFFFF : (__mmask16)((1u << (width - i)) - 1);
        __m512 g = _mm512_maskz_loadu_ps(there, gate + i);
        __m512 power = activation == FR_SILU ? g : _mm512_mul_ps(g, _mm512_fmadd_ps(_mm512_mul_ps(g, g), cubic, linear));
        __m512i minus = _mm512_xor_si512(_mm512_castps_si512(power), _mm512_castps_si512(sign));
        __m512 half = _mm512_div_ps(g, _mm512_add_ps(one, exp16(_mm512_castsi512_ps(minus))));
        _mm512_mask_storeu_ps(y + i, there, _mm512_mul_ps(half, _mm512_maskz_loadu_ps(there, up + i)));
    }
}

void fr_gate_row_avx512(const float *gate, const float *up, float *y, int64_t width, int activation) {
    if (activation == FR_SILU) gate_row(gate, up, y, width, FR_SILU);
    else gate_row(gate, up, y, width, FR_GELU_TANH);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_ops_avx512_only;
