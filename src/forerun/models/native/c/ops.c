/* What stands between the linear layers, row by row in one order: norm, rotary positions, gates, the residual. */
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
    fr_added added;
    const float *weight;
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
        float *restrict delta = job->added.delta ? job->added.delta + r * width : NULL, scale = job->added.scale;
        if (delta && job->added.norm) fr_rms_norm(delta, job->added.norm, job->eps, delta, 1, width);
        if (delta && scale != 1.0f)
            for (int64_t i = 0; i < width; i++) delta[i] *= scale;
        for (int64_t i = 0; delta && i < width; i++) x[i] += delta[i];
        for (int64_t i = 0; delta && job->added.total && i < width; i++) x[i] *= job->added.total;
        if (job->weight) fr_rms_norm(x, job->weight, job->eps, job->y + r * width, 1, width);
    }
}

void fr_add_norm(float *x, fr_added added, const float *weight, float eps, float *y, int64_t rows, int64_t width) {
    norm_job job = {x, added, weight, y, width, eps};
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

/* The gate opened by an activation: g / (1 + exp(..)). */
FR_INLINE f32x4 open4(f32x4 g, int activation) {
    f32x4 power = activation == FR_SILU ? -g : -(g * fma4(g * g, all4(FR_GELU_CUBIC), all4(FR_GELU_LINEAR)));
    return g / (all4(1.0f) + exp4(power));
}

FR_INLINE void gate_row(const float *gate, const float *up, float *y, int64_t width, int activation) {
    int64_t whole = width / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4) store4(y + i, open4(load4(gate + i), activation) * load4(up + i));
    for (int64_t i = whole; i < width; i++) y[i] = open4(all4(gate[i]), activation)[0] * up[i];
}

void fr_gate_row_least(const float *gate, const float *up, float *y, int64_t width, int activation) {
    if (activation == FR_SILU) gate_row(gate, up, y, width, FR_SILU);
    else gate_row(gate, up, y, width, FR_GELU_TANH);
}

void fr_square_row(const float *restrict x, float *restrict y, int64_t width) {
    for (int64_t i = 0; i < width; i++) y[i] = x[i] < 0.0f ? 0.0f : x[i] * x[i]; /* what is not a number stays so */
}

typedef struct {
    const float *gate_up;
    float *y;
    int64_t width;
    int activation;
    fr_gate_row *row;
} gate_job;

static void gate_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const gate_job *job = arg;
    int64_t width = job->width;
    for (int64_t r = begin; r < end; r++) {
        if (job->activation == FR_RELU2) {
            fr_square_row(job->gate_up + r * width, job->y + r * width, width);
            continue;
        }
        const float *gate = job->gate_up + 2 * r * width;
        job->row(gate, gate + width, job->y + r * width, width, job->activation);
    }
}

void fr_gate(const float *gate_up, float *y, int64_t rows, int64_t width, int activation) {
    gate_job job = {gate_up, y, width, activation, fr_chosen_gate()};
    fr_parallel(gate_rows, &job, rows, 2);
}

static void open_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const gate_job *job = arg;
    int64_t width = job->width, whole = width / 4 * 4;
    for (int64_t r = begin; r < end; r++) {
        const float *gate = job->gate_up + r * width;
        float *y = job->y + r * width;
        for (int64_t i = 0; i < whole; i += 4) store4(y + i, load4(y + i) / (all4(1.0f) + exp4(-load4(gate + i))));
        for (int64_t i = whole; i < width; i++) y[i] /= 1.0f + exp4(all4(-gate[i]))[0];
    }
}

void fr_open_gates(const float *gates, float *y, int64_t rows, int64_t width) {
    gate_job job = {gates, y, width, 0, NULL};
    fr_parallel(open_rows, &job, rows, 2);
}

typedef struct {
    float *x, scale, cap;
} cap_job;

static void cap_some(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const cap_job *job = arg;
    for (int64_t i = begin; i < end; i += 4) {
        f32x4 x = all4(0);
        size_t bytes = (size_t)(end - i < 4 ? end - i : 4) * sizeof(float);
        memcpy(&x, job->x + i, bytes);
        x *= all4(job->scale);
        if (job->cap) x = cap4(x, job->cap);
        memcpy(job->x + i, &x, bytes);
    }
}

void fr_scale_and_cap(float *x, int64_t count, float scale, float cap) {
    cap_job job = {x, scale, cap};
    fr_parallel(cap_some, &job, count, FR_AT_ONCE);
}

void fr_to_bytes(const float *x, int8_t *y, int64_t count) {
    const f32x4 shift = all4(12582912.0f); /* rounds to the nearest integer, which is in the low bits of the sum */
    f32x4 most = all4(0), strange = all4(0);
    for (int64_t i = 0; i < count; i += 4) {
        f32x4 v = load4(x + i), minus = -v;
        most = max4(most, max4(v, minus));
        strange += v * all4(0);
    }
    float largest = 0.0f, scale;
    for (int i = 0; i < 4; i++) largest = most[i] > largest ? most[i] : largest;
    scale = across(strange) == 0.0f ? largest / 127.0f : NAN; /* what is not a number is not lost */
    f32x4 steps = all4(scale > 1e-30f ? 127.0f / largest : 0.0f);
    for (int64_t i = 0; i < count; i += 4) {
        i32x4 rounded = (i32x4)fma4(scale > 1e-30f ? load4(x + i) : all4(0), steps, shift);
        for (int j = 0; j < 4; j++) y[i + j] = (int8_t)rounded[j];
    }
    memcpy(y + count, &scale, sizeof scale);
}

void fr_to_halves(const float *x, uint16_t *y, int64_t count) {
    for (int64_t i = 0; i < count; i += 4) store4_halves(y + i, load4(x + i));
}
FR_POP_TARGET
