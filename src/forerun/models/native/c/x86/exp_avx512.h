/* exp on sixteen floats: the bits of exp.h. Include where AVX-512 is the target. */
#ifndef FORERUN_EXP_AVX512_H
#define FORERUN_EXP_AVX512_H

/* exp4 in sixteen lanes. */
FR_INLINE __m512 exp16(__m512 x) {
    const __m512 shift = _mm512_set1_ps(FR_SHIFT);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), x));
    __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), shift), n = _mm512_sub_ps(shifted, shift);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693145752f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-1.42860677e-6f), r);
    __m512 r2 = _mm512_mul_ps(r, r);
    __m512 high = _mm512_fmadd_ps(r2, _mm512_set1_ps(1.3888889e-3f),
                                  _mm512_fmadd_ps(r, _mm512_set1_ps(8.3333338e-3f), _mm512_set1_ps(4.1666668e-2f)));
    __m512 middle = _mm512_fmadd_ps(r2, high, _mm512_fmadd_ps(r, _mm512_set1_ps(1.6666667e-1f), _mm512_set1_ps(0.5f)));
    __m512 p = _mm512_fmadd_ps(r2, middle, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

#endif
