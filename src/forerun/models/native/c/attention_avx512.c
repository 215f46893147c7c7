/* Attention for x86-64 with AVX-512: up to eight queries walk together, in the order of sums of attention.c.
 *
 * Scores are summed in four lanes, so a vector holds those of four queries; each key is broadcast by fours against it.
 * Values are mixed sixteen columns at a time, position by position. Every number is rounded as in attention.c.
 */
#include "attention.h"
FR_POP_TARGET

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")
#endif

#include "exp_avx512.h"

enum { WIDE = 16, MANY_KEYS = 8, AHEAD = 4096 };

/* Queries by fours of inputs, [dim / 4, 4 * quads, 4]; those that are not there are zero. */
FR_INLINE void interleave(const tile *t, int count, int quads, float *to) {
    for (int64_t d = 0; d < t->dim; d += 4)
        for (int i = 0; i < 4 * quads; i++, to += 4) store4(to, i < count ? load4(t->queries[i].q + d) : all4(0));
}

/* The sums across the lanes of four keys, for four queries, each in the order of `across`. */
FR_INLINE __m512 across_quads(const __m512 *k) {
    __m512 a = _mm512_add_ps(_mm512_shuffle_ps(k[0], k[1], 0x88), _mm512_shuffle_ps(k[0], k[1], 0xDD));
    __m512 b = _mm512_add_ps(_mm512_shuffle_ps(k[2], k[3], 0x88), _mm512_shuffle_ps(k[2], k[3], 0xDD));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}

FR_INLINE __m128 quarter(__m512 v, int i) {
    switch (i) { /* the instruction wants a constant */
    case 0: return _mm512_castps512_ps128(v);
    case 1: return _mm512_extractf32x4_ps(v, 1);
    case 2: return _mm512_extractf32x4_ps(v, 2);
    default: return _mm512_extractf32x4_ps(v, 3);
    }
}

/* Keys in a row from a slot on, as floats: where they lie, or as `wide` [keys * dim]. */
FR_INLINE const float *keys_at(const tile *t, int64_t slot, int keys, float *wide) {
    const char *k = slot_in(t, t->keys, slot, t->half);
    if (!t->half) return (const float *)k;
    int64_t i = 0, count = keys * t->dim;
    for (; i + WIDE <= count; i += WIDE)
        _mm512_storeu_ps(wide + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(k + 2 * i))));
    for (; i < count; i += 4) store4(wide + i, load4_halves((const uint16_t *)k + i));
    return wide;
}

/* Scores against `keys` keys in a row (1, 4 or 8), from position `at`, which is slot base + at. */
FR_INLINE void score_keys(const tile *t, const float *queries, int count, int quads, int keys, int64_t base, int64_t at) {
    float wide[t->half ? MANY_KEYS * t->dim : 1];
    const float *k = keys_at(t, base + at, keys, wide);
    __m512 sum[2][MANY_KEYS];
    FR_UNROLL for (int i = 0; i < quads; i++) FR_UNROLL for (int j = 0; j < 8; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < t->dim; d += 4, queries += WIDE * quads) {
        __m512 q[2];
        FR_UNROLL for (int i = 0; i < quads; i++) q[i] = _mm512_loadu_ps(queries + WIDE * i);
        FR_UNROLL for (int j = 0; j < keys; j++) {
            __m512 key = _mm512_broadcast_f32x4(_mm_loadu_ps(k + j * t->dim + d));
            FR_UNROLL for (int i = 0; i < quads; i++) sum[i][j] = _mm512_fmadd_ps(q[i], key, sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < quads; i++) FR_UNROLL for (int j = 0; j < keys; j += 4) {
        __m512 scores = _mm512_mul_ps(across_quads(sum[i] + j), _mm512_set1_ps(t->scale)); /* of one key: in lane 0 */
        FR_UNROLL for (int n = 0; n < 4; n++) {
            if (4 * i + n >= count) continue;
            float *to = t->queries[4 * i + n].weights + at + j;
            if (keys > 1) _mm_storeu_ps(to, quarter(scores, n));
            else _mm_store_ss(to, quarter(scores, n));
        }
    }
}

FR_INLINE void score_run(const tile *t, const float *queries, int count, int quads, int64_t base, int64_t i, int64_t end) {
    for (; i + 8 <= end; i += 8) {
        /* values are read in stripes, which no prefetcher foresees: ask for them while the keys come in */
        const char *values = slot_in(t, t->values, base + i, t->half);
        const char *keys = slot_in(t, t->keys, base + i, t->half) + AHEAD;
        for (int64_t d = 0; d < 8 * t->dim * (t->half ? 2 : 4); d += 64) {
            __builtin_prefetch(values + d);
            __builtin_prefetch(keys + d);
        }
        score_keys(t, queries, count, quads, 8, base, i);
    }
    for (; i + 4 <= end; i += 4) score_keys(t, queries, count, quads, 4, base, i);
    for (; i < end; i++) score_keys(t, queries, count, quads, 1, base, i);
}

FR_INLINE void score_together(const tile *t, int count, int quads) {
    float queries[t->dim * 4 * quads];
    if (t->lo < t->hi) interleave(t, count, quads, queries);
    for (int64_t i = t->lo, end; i < t->hi; i = end) {
        end = run_end(t->queries, i, t->hi);
        score_run(t, queries, count, quads, slot_at(t->queries, i) - i, i, end);
    }
}

/* `soften` of attention.h, sixteen positions at a time while there are as many. */
FR_INLINE void soften16(query *q) {
    float *weights = q->weights, most = -INFINITY;
    int64_t i = q->from, wide = q->from + (q->seen - q->from) / WIDE * WIDE, whole = q->from + (q->seen - q->from) / 4 * 4;
    __m512 highest = _mm512_set1_ps(-INFINITY);
    for (; i < wide; i += WIDE) highest = _mm512_max_ps(highest, _mm512_loadu_ps(weights + i));
    for (; i < q->seen; i++) most = weights[i] > most ? weights[i] : most;
    float found = _mm512_reduce_max_ps(highest);
    most = found > most ? found : most;
    f32x4 total = all4(0);
    for (i = q->from; i < wide; i += WIDE) {
        __m512 w = exp16(_mm512_sub_ps(_mm512_loadu_ps(weights + i), _mm512_set1_ps(most)));
        _mm512_storeu_ps(weights + i, w);
        FR_UNROLL for (int j = 0; j < 4; j++) total += (f32x4)quarter(w, j);
    }
    for (; i < whole; i += 4) {
        f32x4 w = exp4(load4(weights + i) - all4(most));
        store4(weights + i, w);
        total += w;
    }
    for (int j = 0; i < q->seen; i++, j++) {
        weights[i] = exp4(all4(weights[i] - most))[0];
        total[j] += weights[i];
    }
    q->total = across(total);
}

FR_INLINE __m512 sixteen_at(const char *numbers, int64_t i, __mmask16 there, int half) {
    if (!half) return _mm512_maskz_loadu_ps(there, (const float *)numbers + i);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)numbers + i));
}

/* A run of positions: slot base + p for p from `from` to `to`. */
typedef struct {
    int64_t base, from, to;
} run;

/* out += weighted values of a run, `vectors` times sixteen columns at once; `there` says which of the last are. */
FR_INLINE void mix_wide(const tile *t, int count, run r, int64_t column, int vectors, __mmask16 there, int half) {
    __m512 sum[FR_TOGETHER][4];
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < vectors; j++)
        sum[i][j] = _mm512_maskz_loadu_ps(there, t->queries[i].out + column + WIDE * j);
    for (int64_t p = r.from; p < r.to; p++) {
        __m512 v[4];
        const char *values = slot_in(t, t->values, r.base + p, half);
        FR_UNROLL for (int j = 0; j < vectors; j++) v[j] = sixteen_at(values, column + WIDE * j, there, half);
        FR_UNROLL for (int i = 0; i < count; i++) {
            __m512 w = _mm512_set1_ps(t->queries[i].weights[p]);
            FR_UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_fmadd_ps(w, v[j], sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < vectors; j++)
        _mm512_mask_storeu_ps(t->queries[i].out + column + WIDE * j, there, sum[i][j]);
}

FR_INLINE void mix_run(const tile *t, int count, run r, int half) {
    const int vectors = count > 4 ? 2 : 4;
    int64_t d = 0;
    for (; d + WIDE * vectors <= t->dim; d += WIDE * vectors) mix_wide(t, count, r, d, vectors, 0xFFFF, half);
    for (; d + WIDE <= t->dim; d += WIDE) mix_wide(t, count, r, d, 1, 0xFFFF, half);
    if (d < t->dim) mix_wide(t, count, r, d, 1, (__mmask16)((1u << (t->dim - d)) - 1), half);
}

FR_INLINE void mix_all(const tile *t, int count, int half) {
    for (int64_t i = t->lo, end; i < t->hi; i = end) {
        end = run_end(t->queries, i, t->hi);
        mix_run(t, count, (run){slot_at(t->queries, i) - i, i, end}, half);
    }
}

FR_INLINE void mix_together(const tile *t, int count) {
    if (t->half) mix_all(t, count, 1);
    else mix_all(t, count, 0);
}

static void score_all(tile *t, int count) {
    for (int i = 0; i < count; i++) score_alone(t, &t->queries[i], t->queries[i].from, t->lo, t->half);
    if (count > 4) score_together(t, count, 2);
    else score_together(t, count, 1);
    for (int i = 0; i < count; i++) {
        score_rest(t, &t->queries[i], t->half);
        soften16(&t->queries[i]);
        mix_before(t, &t->queries[i], t->half);
    }
}

void fr_attend_avx512(tile *t, int count) {
    score_all(t, count);
    switch (count) {
    case 1: mix_together(t, 1); break;
    case 2: mix_together(t, 2); break;
    case 3: mix_together(t, 3); break;
    case 4: mix_together(t, 4); break;
    case 5: mix_together(t, 5); break;
    case 6: mix_together(t, 6); break;
    case 7: mix_together(t, 7); break;
    default: mix_together(t, 8);
    }
    for (int i = 0; i < count; i++) mix_rest(t, &t->queries[i], t->half);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_attend_avx512_only;
