/* Vectors of four floats, the width that both architectures have, and the fused multiply-add on them.
 *
 * Everything that is not a packed linear layer is written with these, so that the bits are the same everywhere.
 * On x86-64 it needs AVX2 and FMA; dispatch.c, which does not include this, asks the machine first.
 */
#ifndef FORERUN_VECTOR_H
#define FORERUN_VECTOR_H

#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#define FR_POP_TARGET _Pragma("clang attribute pop")
#else
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#define FR_POP_TARGET
#endif
#else
#define FR_POP_TARGET
#endif

#include "forerun.h"
#include <string.h>

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

FR_INLINE f32x4 load4(const float *p) {
    f32x4 v;
    memcpy(&v, p, 16);
    return v;
}
FR_INLINE void store4(float *p, f32x4 v) { memcpy(p, &v, 16); }
FR_INLINE f32x4 all4(float f) { return (f32x4){f, f, f, f}; }
FR_INLINE f32x4 choose4(i32x4 where, f32x4 a, f32x4 b) { return (f32x4)(((i32x4)a & where) | ((i32x4)b & ~where)); }
/* The same vector, of which the compiler may not load parts elsewhere again. */
FR_INLINE f32x4 in_register(f32x4 v) {
#if defined(__aarch64__)
    __asm__("" : "+w"(v));
#elif defined(__x86_64__)
    __asm__("" : "+x"(v));
#endif
    return v;
}
FR_INLINE float across(f32x4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#if defined(__aarch64__)
#include <arm_neon.h>
FR_INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
    return (f32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
FR_INLINE f32x4 load4_halves(const uint16_t *p) { return (f32x4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
FR_INLINE void store4_halves(uint16_t *p, f32x4 v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
/* The larger and the smaller of two numbers; where `x` is not a number they give x. */
FR_INLINE f32x4 max4(f32x4 y, f32x4 x) { return (f32x4)vmaxq_f32((float32x4_t)y, (float32x4_t)x); }
FR_INLINE f32x4 min4(f32x4 y, f32x4 x) { return (f32x4)vminq_f32((float32x4_t)y, (float32x4_t)x); }
/* The sums across four vectors, each in the order of `across`. */
FR_INLINE f32x4 across4(f32x4 a, f32x4 b, f32x4 c, f32x4 d) {
    return (f32x4)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
}
#elif defined(__x86_64__)
FR_INLINE f32x4 load4_halves(const uint16_t *p) { return (f32x4)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p)); }
FR_INLINE void store4_halves(uint16_t *p, f32x4 v) {
    _mm_storel_epi64((__m128i *)p, _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FR_INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) { return (f32x4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
FR_INLINE f32x4 max4(f32x4 y, f32x4 x) { return (f32x4)_mm_max_ps((__m128)y, (__m128)x); }
FR_INLINE f32x4 min4(f32x4 y, f32x4 x) { return (f32x4)_mm_min_ps((__m128)y, (__m128)x); }
FR_INLINE f32x4 across4(f32x4 a, f32x4 b, f32x4 c, f32x4 d) {
    return (f32x4)_mm_hadd_ps(_mm_hadd_ps((__m128)a, (__m128)b), _mm_hadd_ps((__m128)c, (__m128)d));
}
#else
FR_INLINE f32x4 load4_halves(const uint16_t *p) { return (f32x4){fr_half(p[0]), fr_half(p[1]), fr_half(p[2]), fr_half(p[3])}; }
FR_INLINE void store4_halves(uint16_t *p, f32x4 v) {
    for (int i = 0; i < 4; i++) p[i] = fr_to_half(v[i]);
}
FR_INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
    return (f32x4){__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
                   __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
}
FR_INLINE f32x4 max4(f32x4 y, f32x4 x) { return choose4(y > x, y, x); }
FR_INLINE f32x4 min4(f32x4 y, f32x4 x) { return choose4(y < x, y, x); }
FR_INLINE f32x4 across4(f32x4 a, f32x4 b, f32x4 c, f32x4 d) {
    return (f32x4){across(a), across(b), across(c), across(d)};
}
#endif

#endif
