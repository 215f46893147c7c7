/* exp on four floats: the same bits for a number whatever lane it is in. Include after vector.h. */
#ifndef FORERUN_EXP_H
#define FORERUN_EXP_H

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
