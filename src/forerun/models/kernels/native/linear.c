/* Linear layers: quantising activations, the generic kernels, and the choice of kernels for this machine. */
#include "forerun.h"

#include <math.h>
#include <string.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

size_t fr_quants_bytes(int64_t rows, int64_t inputs) {
    return (size_t)(rows * inputs) + (size_t)(2 * rows * (inputs / FR_BLOCK)) * sizeof(float) + 64;
}

fr_quants fr_quants_at(void *scratch, int64_t rows, int64_t inputs) {
    fr_quants q;
    q.scales = (float *)scratch;
    q.sums = q.scales + rows * (inputs / FR_BLOCK);
    q.values = (int8_t *)(q.sums + rows * (inputs / FR_BLOCK));
    return q;
}

/* Nearest multiple of amax/127 per block of 32; ties to even, as rintf rounds by default. */
static void quantize_block(const float *x, int8_t *values, float *scale, float *sum) {
    float amax = 0.0f;
    for (int i = 0; i < FR_BLOCK; i++) {
        float a = fabsf(x[i]);
        amax = a > amax ? a : amax;
    }
    float s = amax / 127.0f, inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < FR_BLOCK; i++) {
        int32_t v = (int32_t)rintf(x[i] * inverse);
        values[i] = (int8_t)v;
        total += v;
    }
    *scale = s;
    *sum = s * (float)total;
}

void fr_quantize_rows(const float *x, int64_t rows, int64_t inputs, fr_quants out) {
    int64_t blocks = rows * (inputs / FR_BLOCK);
    for (int64_t b = 0; b < blocks; b++)
        quantize_block(x + b * FR_BLOCK, out.values + b * FR_BLOCK, out.scales + b, out.sums + b);
}

FR_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff, bits;
    if (mag >= 0x7c00) bits = sign | 0x7f800000u | ((mag & 0x3ff) << 13);
    else if (mag >= 0x400) bits = sign | ((mag << 13) + 0x38000000u);
    else {
        float f = (float)mag * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

FR_INLINE float load_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

FR_INLINE float load_float(const uint8_t *p) {
    float f;
    memcpy(&f, p, 4);
    return f;
}

/* One output of a packed panel by the definition: the reference for every faster kernel, in the same order. */
static float packed_dot(const fr_weight *w, const uint8_t *panel, int row, const int8_t *x, const float *scales,
                        const float *sums) {
    int64_t blocks = w->inputs / FR_BLOCK;
    float total = 0.0f;
    for (int64_t b = 0; b < blocks; b++, x += FR_BLOCK) {
        int32_t low = 0, high = 0;
        float d = 0, d2 = 0, m = 0;
        int four = w->kind == FR_P4 || w->kind == FR_P4W;
        for (int k = 0; k < FR_BLOCK; k++) {
            int group = k / 4, at = row * 4 + k % 4, v;
            if (four) v = group < 4 ? panel[group * 16 + at] & 15 : panel[(group - 4) * 16 + at] >> 4;
            else v = (int8_t)panel[group * 16 + at];
            if (group < 4) low += v * x[k];
            else high += v * x[k];
        }
        switch (w->kind) {
        case FR_P4: d = d2 = load_half(panel + 64 + 2 * row); m = load_half(panel + 72 + 2 * row); panel += FR_P4_BYTES; break;
        case FR_P8: d = d2 = load_half(panel + 128 + 2 * row); panel += FR_P8_BYTES; break;
        case FR_P4W: d = d2 = load_float(panel + 64 + 4 * row); m = load_float(panel + 80 + 4 * row); panel += FR_P4W_BYTES; break;
        default: d = load_float(panel + 128 + 4 * row); d2 = load_float(panel + 144 + 4 * row); panel += FR_P8W_BYTES;
        }
        if (w->kind == FR_P8W) {
            total = fmaf((float)low * d, scales[b], total);
            total = fmaf((float)high * d2, scales[b], total);
        } else total = fmaf((float)(low + high) * d, scales[b], total);
        if (four) total = fmaf(m, sums[b], total);
    }
    return total;
}

FR_INLINE float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Four partial sums, then pairs: the order that vector units of width four have. */
static float float_dot(const fr_weight *w, int64_t row, const float *x) {
    float lanes[4] = {0, 0, 0, 0};
    const float *f = (const float *)w->data + row * w->inputs;
    const uint16_t *h = (const uint16_t *)w->data + row * w->inputs;
    int64_t whole = w->inputs / 4 * 4;
    for (int64_t k = 0; k < whole; k++) {
        float v = w->kind == FR_F32 ? f[k] : bf16_to_float(h[k]);
        lanes[k % 4] = fmaf(v, x[k], lanes[k % 4]);
    }
    float total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (int64_t k = whole; k < w->inputs; k++)
        total = fmaf(w->kind == FR_F32 ? f[k] : bf16_to_float(h[k]), x[k], total);
    return total;
}

static int64_t panel_bytes(const fr_weight *w) {
    static const int64_t bytes[] = {0, 0, FR_P4_BYTES, FR_P8_BYTES, FR_P4W_BYTES, FR_P8W_BYTES};
    return bytes[w->kind] * (w->inputs / FR_BLOCK);
}

void fr_panels_generic(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows, int64_t begin,
                       int64_t end) {
    int64_t blocks = w->inputs / FR_BLOCK;
    for (int64_t p = begin; p < end; p++) {
        const uint8_t *panel = (const uint8_t *)w->data + p * panel_bytes(w);
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < FR_PANEL && p * FR_PANEL + i < w->outputs; i++) {
                int64_t o = p * FR_PANEL + i;
                float v = w->kind <= FR_BF16
                              ? float_dot(w, o, x + r * w->inputs)
                              : packed_dot(w, panel, i, q.values + r * w->inputs, q.scales + r * blocks, q.sums + r * blocks);
                y[r * w->outputs + o] = w->bias ? v + w->bias[o] : v;
            }
    }
}

static fr_panels best_panels(void) {
#if defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return fr_panels_dotprod;
#endif
    return fr_panels_generic;
}

FR_API const char *fr_isa(void) { return best_panels() == fr_panels_generic ? "generic" : "neon-dotprod"; }

typedef struct {
    fr_panels panels;
    const fr_weight *w;
    const float *x;
    fr_quants q;
    float *y;
    int64_t rows;
} linear_job;

static void run_panels(void *arg, int64_t begin, int64_t end) {
    linear_job *job = arg;
    job->panels(job->w, job->x, job->q, job->y, job->rows, begin, end);
}

void fr_linear(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows) {
    static fr_panels panels; /* every thread would find the same */
    if (!panels) panels = best_panels();
    linear_job job = {panels, w, x, q, y, rows};
    int64_t count = (w->outputs + FR_PANEL - 1) / FR_PANEL;
    int64_t grain = count / (fr_threads() * 4);
    fr_parallel(run_panels, &job, count, grain < 4 ? 4 : grain);
}
