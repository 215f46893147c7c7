/* Linear layers with float weights as they lie: four outputs times up to four rows, each sum in four lanes.
 *
 * Rows of prompts are taken APART at a time through all panels, so that they stay in the second cache; two outputs share a
 * register where registers hold eight floats: the same sums, two at a time. */
#include "vector.h"

FR_INLINE float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

FR_INLINE f32x4 load_weights(const fr_weight *w, int bf16, int64_t at) {
    if (!bf16) return load4((const float *)w->data + at);
    const uint16_t *p = (const uint16_t *)w->data + at;
#if defined(__aarch64__)
    return (f32x4)vshll_n_u16(vld1_u16(p), 16);
#elif defined(__x86_64__)
    return (f32x4)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p)), 16);
#else
    return (f32x4){from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
#endif
}

FR_INLINE float load_weight(const fr_weight *w, int bf16, int64_t at) {
    return bf16 ? from_bf16(((const uint16_t *)w->data)[at]) : ((const float *)w->data)[at];
}

/* Ask for a weight of the next panel: its rows lie behind this one's, where the processor does not look by itself. */
FR_INLINE void ask_ahead(const fr_weight *w, int bf16, int64_t at) {
    __builtin_prefetch((const char *)w->data + at * (bf16 ? 2 : 4));
}

FR_INLINE void tile(const fr_range *g, int bf16, int rows, int64_t o, int outputs, int64_t row) {
    const fr_weight *w = g->w;
    f32x4 total[4][4];
    int64_t inputs = w->inputs, whole = inputs / 4 * 4, at[4];
    const float *x = g->x + row * inputs;
    FR_UNROLL for (int i = 0; i < 4; i++) {
        at[i] = (o + (i < outputs ? i : 0)) * inputs; /* past the last output: the first again, and dropped */
        FR_UNROLL for (int r = 0; r < rows; r++) total[i][r] = all4(0);
    }
    for (int64_t k = 0; k < whole; k += 4) {
        f32x4 v[4];
        FR_UNROLL for (int i = 0; i < 4; i++) v[i] = load_weights(w, bf16, at[i] + k);
        if (row == 0 && k % 16 == 0) /* the first rows of a pass read the weights, the others find them near */
            FR_UNROLL for (int i = 0; i < 4; i++) ask_ahead(w, bf16, at[i] + 4 * inputs + k);
        FR_UNROLL for (int r = 0; r < rows; r++) {
            f32x4 in = load4(x + r * inputs + k);
            FR_UNROLL for (int i = 0; i < 4; i++) total[i][r] = fma4(v[i], in, total[i][r]);
        }
    }
    float sums[4][4]; /* of their own, so that the totals are never indexed by a variable and stay in registers */
    FR_UNROLL for (int i = 0; i < 4; i++) FR_UNROLL for (int r = 0; r < rows; r++) sums[i][r] = across(total[i][r]);
    for (int i = 0; i < outputs; i++)
        for (int r = 0; r < rows; r++) {
            float sum = sums[i][r];
            for (int64_t k = whole; k < inputs; k++)
                sum = __builtin_fmaf(load_weight(w, bf16, at[i] + k), x[r * inputs + k], sum);
            g->y[(row + r) * g->stride + o + i] = w->bias ? sum + w->bias[o + i] : sum;
        }
}

#if defined(__x86_64__)
enum { MANY = 6 }; /* rows of a tile whose registers hold two outputs */
FR_INLINE void wide_tile(const fr_range *g, int bf16, int64_t o, int outputs, int64_t row) {
    const fr_weight *w = g->w;
    __m256 total[2][MANY];
    int64_t inputs = w->inputs, whole = inputs / 4 * 4, at[4];
    const float *x = g->x + row * inputs;
    FR_UNROLL for (int i = 0; i < 4; i++) at[i] = (o + (i < outputs ? i : 0)) * inputs;
    FR_UNROLL for (int r = 0; r < MANY; r++) total[0][r] = total[1][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < whole; k += 4) {
        __m256 v[2];
        FR_UNROLL for (int i = 0; i < 2; i++)
            v[i] = _mm256_set_m128((__m128)load_weights(w, bf16, at[2 * i + 1] + k), (__m128)load_weights(w, bf16, at[2 * i] + k));
        FR_UNROLL for (int r = 0; r < MANY; r++) {
            __m256 in = _mm256_broadcast_ps((const __m128 *)(x + r * inputs + k));
            FR_UNROLL for (int i = 0; i < 2; i++) total[i][r] = _mm256_fmadd_ps(v[i], in, total[i][r]);
        }
    }
    float sums[4][MANY];
    FR_UNROLL for (int r = 0; r < MANY; r++)
        FR_UNROLL for (int i = 0; i < 2; i++) {
            sums[2 * i][r] = across((f32x4)_mm256_castps256_ps128(total[i][r]));
            sums[2 * i + 1][r] = across((f32x4)_mm256_extractf128_ps(total[i][r], 1));
        }
    for (int i = 0; i < outputs; i++)
        for (int r = 0; r < MANY; r++) {
            float sum = sums[i][r];
            for (int64_t k = whole; k < inputs; k++)
                sum = __builtin_fmaf(load_weight(w, bf16, at[i] + k), x[r * inputs + k], sum);
            g->y[(row + r) * g->stride + o + i] = w->bias ? sum + w->bias[o + i] : sum;
        }
}
#endif

enum { APART = 48 };

FR_INLINE void plain(const fr_range *g, int bf16) {
#if defined(__x86_64__)
    for (int64_t first = 0; g->rows >= APART && first < g->rows / MANY * MANY; first += APART)
        for (int64_t p = g->begin; p < g->end; p++) {
            int64_t o = p * FR_QUAD;
            int outputs = g->w->outputs - o < 4 ? (int)(g->w->outputs - o) : 4;
            for (int64_t r = first; r < first + APART && r + MANY <= g->rows; r += MANY) wide_tile(g, bf16, o, outputs, r);
        }
    const int64_t done = g->rows >= APART ? g->rows / MANY * MANY : 0;
#else
    const int64_t done = 0;
#endif
    for (int64_t p = g->begin; p < g->end; p++) {
        int64_t o = p * FR_QUAD, r = done;
        int outputs = g->w->outputs - o < 4 ? (int)(g->w->outputs - o) : 4;
        for (; r + 4 <= g->rows; r += 4) tile(g, bf16, 4, o, outputs, r);
        switch (g->rows - r) {
        case 1: tile(g, bf16, 1, o, outputs, r); break;
        case 2: tile(g, bf16, 2, o, outputs, r); break;
        case 3: tile(g, bf16, 3, o, outputs, r); break;
        default: break;
        }
    }
}

void fr_plain(const fr_range *g) {
    if (g->w->kind == FR_BF16) plain(g, 1);
    else plain(g, 0);
}
FR_POP_TARGET
