/* What stands between the linear layers: norm, rotary positions, SwiGLU and attention over tree nodes.
 *
 * Every function treats each row by itself, in one order. Attention walks a node's positions in order, the context
 * first and then its own ancestors by depth, through a table of slots: a node sums the same numbers in the same order
 * whether it sits in a tree, in a chain or alone.
 */
#include "forerun.h"

#include <math.h>
#include <string.h>

FR_INLINE f32x4 load4(const float *p) {
    f32x4 v;
    memcpy(&v, p, 16);
    return v;
}
FR_INLINE void store4(float *p, f32x4 v) { memcpy(p, &v, 16); }
FR_INLINE f32x4 all4(float f) { return (f32x4){f, f, f, f}; }
FR_INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
    return (f32x4){__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
                   __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
}
FR_INLINE float across(f32x4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA4(a, b, c) ((f32x4)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA4(a, b, c) fma4(a, b, c)
#endif

/* exp by range reduction to [-ln2/2, ln2/2] and a polynomial of degree six; relative error about 1e-7. */
FR_INLINE f32x4 exp4(f32x4 x) {
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    i32x4 over = x > all4(88.0f), under = x < all4(-87.0f);
    x = (f32x4)(((i32x4)all4(88.0f) & over) | ((i32x4)x & ~over));
    x = (f32x4)(((i32x4)all4(-87.0f) & under) | ((i32x4)x & ~under));
    f32x4 n = FMA4(x, all4(1.44269504f), all4(12582912.0f)) - all4(12582912.0f); /* round to nearest */
    f32x4 r = FMA4(n, all4(-0.693145752f), x);
    r = FMA4(n, all4(-1.42860677e-6f), r);
    f32x4 p = all4(1.3888889e-3f);
    p = FMA4(p, r, all4(8.3333338e-3f));
    p = FMA4(p, r, all4(4.1666668e-2f));
    p = FMA4(p, r, all4(1.6666667e-1f));
    p = FMA4(p, r, all4(0.5f));
    p = FMA4(p, r, all4(1.0f));
    p = FMA4(p, r, all4(1.0f));
    i32x4 bits = (i32x4)p + (__builtin_convertvector(n, i32x4) << 23);
    return (f32x4)bits;
}

void fr_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t width) {
    int64_t whole = width / 4 * 4;
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        f32x4 sum = all4(0);
        for (int64_t i = 0; i < whole; i += 4) sum = FMA4(load4(x + i), load4(x + i), sum);
        float total = across(sum);
        for (int64_t i = whole; i < width; i++) total = __builtin_fmaf(x[i], x[i], total);
        float scale = 1.0f / sqrtf(total / (float)width + eps);
        for (int64_t i = 0; i < whole; i += 4) store4(y + i, load4(x + i) * all4(scale) * load4(weight + i));
        for (int64_t i = whole; i < width; i++) y[i] = x[i] * scale * weight[i];
    }
}

/* Rotate the first `rotary` entries of every head; cosines and sines are [rows, rotary / 2]. */
void fr_rope(float *x, const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t stride,
             int64_t head_dim, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            float *a = x + r * stride + h * head_dim, *b = a + half;
            const float *c = cosines + r * half, *s = sines + r * half;
            for (int64_t i = 0; i < half; i++) {
                float p = a[i], q = b[i];
                a[i] = p * c[i] - q * s[i];
                b[i] = q * c[i] + p * s[i];
            }
        }
}

typedef struct {
    const float *gate_up;
    float *y;
    int64_t width;
} swiglu_job;

static void swiglu_rows(void *arg, int64_t begin, int64_t end) {
    swiglu_job *job = arg;
    int64_t width = job->width, whole = width / 4 * 4;
    for (int64_t r = begin; r < end; r++) {
        const float *gate = job->gate_up + 2 * r * width, *up = gate + width;
        float *y = job->y + r * width;
        for (int64_t i = 0; i < whole; i += 4) {
            f32x4 g = load4(gate + i);
            store4(y + i, g / (all4(1.0f) + exp4(-g)) * load4(up + i));
        }
        for (int64_t i = whole; i < width; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

void fr_swiglu(const float *gate_up, float *y, int64_t rows, int64_t width) {
    swiglu_job job = {gate_up, y, width};
    fr_parallel(swiglu_rows, &job, rows, 1);
}

/* One head of one node. head_dim is a multiple of 4. */
static void attend(const fr_attention_args *a, int64_t node, int64_t head) {
    int64_t dim = a->head_dim, kv = head / (a->heads / a->kv_heads);
    const float *q = a->q + node * a->q_stride + head * dim;
    const float *keys = a->keys + kv * a->head_stride, *values = a->values + kv * a->head_stride;
    int64_t seen = a->seen[node], from = a->window && seen > a->window ? seen - a->window : 0;
    const int32_t *slots = a->slots + node * a->slot_stride;
    float *weights = a->scratch + (node * a->heads + head) * a->slot_stride;
    float most = -INFINITY;
    for (int64_t i = from; i < seen; i++) {
        const float *k = keys + (int64_t)slots[i] * dim;
        f32x4 s0 = all4(0), s1 = all4(0);
        int64_t d = 0;
        for (; d + 8 <= dim; d += 8) {
            s0 = FMA4(load4(q + d), load4(k + d), s0);
            s1 = FMA4(load4(q + d + 4), load4(k + d + 4), s1);
        }
        for (; d < dim; d += 4) s0 = FMA4(load4(q + d), load4(k + d), s0);
        weights[i] = across(s0 + s1) * a->scale;
        most = weights[i] > most ? weights[i] : most;
    }
    float total = 0;
    for (int64_t i = from; i < seen; i++) {
        /* one at a time: how positions fall into vectors must not depend on where the walk starts */
        float w = exp4(all4(weights[i] - most))[0];
        weights[i] = w;
        total += w;
    }
    float *out = a->out + (node * a->heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 16) { /* sixteen columns at a time stay in registers */
        f32x4 sum[4] = {all4(0), all4(0), all4(0), all4(0)};
        int64_t vectors = dim - d >= 16 ? 4 : (dim - d) / 4;
        for (int64_t i = from; i < seen; i++) {
            const float *v = values + (int64_t)slots[i] * dim + d;
            f32x4 w = all4(weights[i]);
            for (int64_t j = 0; j < vectors; j++) sum[j] = FMA4(w, load4(v + 4 * j), sum[j]);
        }
        for (int64_t j = 0; j < vectors; j++) store4(out + d + 4 * j, sum[j] / all4(total));
    }
}

static void attend_range(void *arg, int64_t begin, int64_t end) {
    const fr_attention_args *a = arg;
    for (int64_t i = begin; i < end; i++) attend(a, i % a->nodes, i / a->nodes);
}

void fr_attention(const fr_attention_args *args) {
    fr_parallel(attend_range, (void *)args, args->nodes * args->heads, 1);
}
