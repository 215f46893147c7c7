/* exp on vectors of four floats: the same bits for a number whatever lane it is in. Include after vector.h. */
#ifndef FORERUN_EXP_H
#define FORERUN_EXP_H

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

#endif
