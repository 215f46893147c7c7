/* exp on four floats: the same bits for a number whatever lane it is in. Include after vector.h. */
#ifndef FORERUN_EXP_H
#define FORERUN_EXP_H

/* Range reduction to [-ln2/2, ln2/2] and a polynomial of degree six, by halves so that steps overlap; relative error
 * about 1e-7. Of `count` vectors side by side, none of whose numbers is above 88. */
FR_INLINE void exp_below(f32x4 *x, int count) {
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    f32x4 shifted[4], r[4], r2[4], high[4], middle[4];
    FR_UNROLL for (int i = 0; i < count; i++) x[i] = max4(all4(-87.0f), x[i]);
    FR_UNROLL for (int i = 0; i < count; i++) shifted[i] = fma4(x[i], all4(1.44269504f), all4(12582912.0f)); /* rounds to the nearest integer */
    FR_UNROLL for (int i = 0; i < count; i++) r2[i] = shifted[i] - all4(12582912.0f);
    FR_UNROLL for (int i = 0; i < count; i++) r[i] = fma4(r2[i], all4(-0.693145752f), x[i]);
    FR_UNROLL for (int i = 0; i < count; i++) r[i] = fma4(r2[i], all4(-1.42860677e-6f), r[i]);
    FR_UNROLL for (int i = 0; i < count; i++) r2[i] = r[i] * r[i];
    FR_UNROLL for (int i = 0; i < count; i++) high[i] = fma4(r[i], all4(8.3333338e-3f), all4(4.1666668e-2f));
    FR_UNROLL for (int i = 0; i < count; i++) middle[i] = fma4(r[i], all4(1.6666667e-1f), all4(0.5f));
    FR_UNROLL for (int i = 0; i < count; i++) high[i] = fma4(r2[i], all4(1.3888889e-3f), high[i]);
    FR_UNROLL for (int i = 0; i < count; i++) r[i] = r[i] + all4(1.0f);
    FR_UNROLL for (int i = 0; i < count; i++) middle[i] = fma4(r2[i], high[i], middle[i]);
    FR_UNROLL for (int i = 0; i < count; i++) x[i] = fma4(r2[i], middle[i], r[i]);
    FR_UNROLL for (int i = 0; i < count; i++) x[i] = (f32x4)((u32x4)x[i] + ((u32x4)shifted[i] << 23));
}

/* Range reduction to [-ln2/2, ln2/2] and a polynomial of degree six, by halves so that steps overlap; relative error
 * about 1e-7. */
FR_INLINE f32x4 exp4(f32x4 x) {
    x = max4(all4(-87.0f), min4(all4(88.0f), x));
    f32x4 shifted = fma4(x, all4(1.44269504f), all4(12582912.0f)); /* rounds to the nearest integer */
    f32x4 n = shifted - all4(12582912.0f);
    f32x4 r = fma4(n, all4(-0.693145752f), x);
    r = fma4(n, all4(-1.42860677e-6f), r);
    f32x4 r2 = r * r;
    f32x4 high = fma4(r2, all4(1.3888889e-3f), fma4(r, all4(8.3333338e-3f), all4(4.1666668e-2f)));
    f32x4 middle = fma4(r2, high, fma4(r, all4(1.6666667e-1f), all4(0.5f)));
    f32x4 p = fma4(r2, middle, r + all4(1.0f));
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    return (f32x4)((u32x4)p + ((u32x4)shifted << 23)); /* the integer is in the low bits of `shifted` */
}

#endif
