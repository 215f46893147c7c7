/* What stands between the linear layers, row by row in one order: norm, rotary positions, SwiGLU, the residual. */
#include "vector.h"

#include <math.h>

void fr_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t width) {
    int64_t whole = width / 4 * 4;
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        f32x4 sum = all4(0), more = all4(0);
        int64_t i = 0;
        for (; i + 8 <= whole; i += 8) {
            f32x4 a = load4(x + i), b = load4(x + i + 4);
            sum = fma4(a, a, sum);
            more = fma4(b, b, more);
        }
        for (; i < whole; i += 4) sum = fma4(load4(x + i), load4(x + i), sum);
        float total = across(sum + more);
        for (; i < width; i++) total = __builtin_fmaf(x[i], x[i], total);
        float scale = 1.0f / sqrtf(total / (float)width + eps);
        for (i = 0; i < whole; i += 4) store4(y + i, load4(x + i) * all4(scale) * load4(weight + i));
        for (; i < width; i++) y[i] = x[i] * scale * weight[i];
    }
}

typedef struct {
    float *x;
    const float *delta, *weight;
    float *y;
    int64_t width;
    float eps;
} norm_job;

static void norm_some(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const norm_job *job = arg;
    int64_t width = job->width;
    for (int64_t r = begin; r < end; r++) {
        float *restrict x = job->x + r * width;
        const float *restrict delta = job->delta ? job->delta + r * width : NULL;
        for (int64_t i = 0; delta && i < width; i++) x[i] += delta[i];
        if (job->weight) fr_rms_norm(x, job->weight, job->eps, job->y + r * width, 1, width);
    }
}

void fr_add_norm(float *x, const float *delta, const float *weight, float eps, float *y, int64_t rows, int64_t width) {
    norm_job job = {x, delta, weight, y, width, eps};
    fr_parallel(norm_some, &job, rows, fr_rows_at_once(width));
}

/* Rotate the first `rotary` entries of every head; cosines and sines are [positions, rotary / 2]. */
void fr_rope(float *x, const float *cosines, const float *sines, const int32_t *position, int64_t rows, int64_t heads,
             int64_t stride, int64_t head_dim, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict a = x + r * stride + h * head_dim, *restrict b = a + half;
            const float *c = cosines + position[r] * half, *s = sines + position[r] * half;
            for (int64_t i = 0; i < half; i++) {
                float p = a[i], q = b[i];
                a[i] = p * c[i] - q * s[i];
                b[i] = q * c[i] + p * s[i];
            }
        }
}

void fr_swiglu_row(const float *gate, const float *up, float *y, int64_t width) {
    int64_t whole = width / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4) {
        f32x4 g = load4(gate + i);
        store4(y + i, g / (all4(1.0f) + exp4(-g)) * load4(up + i));
    }
    for (int64_t i = whole; i < width; i++) y[i] = gate[i] / (1.0f + exp4(all4(-gate[i]))[0]) * up[i];
}

typedef struct {
    const float *gate_up;
    float *y;
    int64_t width;
    fr_swiglu_of_row row;
} swiglu_job;

static void swiglu_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const swiglu_job *job = arg;
    int64_t width = job->width;
    for (int64_t r = begin; r < end; r++) {
        const float *gate = job->gate_up + 2 * r * width;
        job->row(gate, gate + width, job->y + r * width, width);
    }
}

void fr_swiglu(const float *gate_up, float *y, int64_t rows, int64_t width) {
    swiglu_job job = {gate_up, y, width, fr_chosen_swiglu()};
    fr_parallel(swiglu_rows, &job, rows, 2);
}

void fr_to_halves(const float *x, uint16_t *y, int64_t count) {
    for (int64_t i = 0; i < count; i += 4) store4_halves(y + i, load4(x + i));
}
FR_POP_TARGET
