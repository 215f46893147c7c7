/* Vectors of four floats, the width that both architectures have: fused multiply-add and exp on them.
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
FR_INLINE f32x4 load4_bytes(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int16x8_t wider = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return (f32x4)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wider)));
}
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
FR_INLINE f32x4 load4_bytes(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (f32x4)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
}
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
FR_INLINE f32x4 load4_bytes(const int8_t *p) { return (f32x4){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
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

/* exp of the numbers of `count` vectors side by side, none of which is above 88. Range reduction to [-ln2/2, ln2/2] and a
 * polynomial of degree six, by halves so that steps overlap; relative error about 1e-7. */
FR_INLINE void exp_below(f32x4 *x, int count) {
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    f32x4 shifted[4], r[4], r2[4], high[4], middle[4];
    FR_UNROLL for (int i = 0; i < count; i++) x[i] = max4(all4(-87.0f), x[i]);
    FR_UNROLL for (int i = 0; i < count; i++)
        shifted[i] = fma4(x[i], all4(1.44269504f), all4(12582912.0f)); /* rounds to the nearest integer */
    FR_UNROLL for (int i = 0; i < count; i++) {
        f32x4 n = shifted[i] - all4(12582912.0f);
        r[i] = fma4(n, all4(-1.42860677e-6f), fma4(n, all4(-0.693145752f), x[i]));
    }
    FR_UNROLL for (int i = 0; i < count; i++) r2[i] = r[i] * r[i];
    FR_UNROLL for (int i = 0; i < count; i++)
        high[i] = fma4(r2[i], all4(1.3888889e-3f), fma4(r[i], all4(8.3333338e-3f), all4(4.1666668e-2f)));
    FR_UNROLL for (int i = 0; i < count; i++) middle[i] = fma4(r2[i], high[i], fma4(r[i], all4(1.6666667e-1f), all4(0.5f)));
    FR_UNROLL for (int i = 0; i < count; i++) {
        f32x4 p = fma4(r2[i], middle[i], r[i] + all4(1.0f));
        x[i] = (f32x4)((u32x4)p + ((u32x4)shifted[i] << 23)); /* the integer is in the low bits of `shifted` */
    }
}

FR_INLINE f32x4 exp4(f32x4 x) {
    x = min4(all4(88.0f), x);
    exp_below(&x, 1);
    return x;
}

/* cap tanh(x / cap) */
FR_INLINE f32x4 cap4(f32x4 x, float cap) {
    return all4(cap) - all4(2.0f * cap) / (exp4(x * all4(2.0f / cap)) + all4(1.0f));
}

#endif
