/* Attention for x86-64 with AVX-512: up to twelve queries in registers, in the order of sums of attention.c.
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

#include "x86/exp_avx512.h"

enum { WIDE = 16, QUADS = 3, AT_ONCE = 4 * QUADS, MANY_KEYS = 8, AHEAD = 4096 };

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

FR_INLINE __m512 sixteen_at(const char *row, int64_t i, __mmask16 there, int kind, int64_t dim) {
    if (kind == FR_BYTES) {
        __m512i bytes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(there, row + i));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(bytes), _mm512_set1_ps(scale_of(row, dim)));
    }
    if (kind == FR_HALVES) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)row + i));
    return _mm512_maskz_loadu_ps(there, (const float *)row + i);
}

/* Which of sixteen columns from d on there are. */
FR_INLINE __mmask16 columns_at(int64_t d, int64_t dim) { return dim - d < WIDE ? (__mmask16)((1u << (dim - d)) - 1) : 0xFFFF; }

FR_INLINE void widen_row(const char *row, int kind, int64_t dim, float *to) {
    for (int64_t i = 0; i < dim; i += WIDE) {
        __mmask16 there = columns_at(i, dim);
        _mm512_mask_storeu_ps(to + i, there, sixteen_at(row, i, there, kind, dim));
    }
}
static void widen_rows(const char *rows, int64_t row, int kind, int64_t dim, int64_t count, float *to) {
    for (int64_t r = 0; r < count; r++, rows += row, to += dim)
        if (kind == FR_BYTES) widen_row(rows, FR_BYTES, dim, to);
        else widen_row(rows, FR_HALVES, dim, to);
}

/* Scores of some queries of `quads` times four, of which `inputs` are the first, against `keys` keys (4 or 8). */
FR_INLINE void score_keys(const tile *t, const part *p, stretch s, const float *inputs, int quads, const char **k, int keys,
                          int64_t at) {
    __m512 sum[QUADS][MANY_KEYS];
    FR_UNROLL for (int i = 0; i < quads; i++) FR_UNROLL for (int j = 0; j < keys; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < t->dim; d += 4, inputs += 4 * p->lanes) {
        __m512 q[QUADS];
        FR_UNROLL for (int i = 0; i < quads; i++) q[i] = _mm512_loadu_ps(inputs + WIDE * i);
        FR_UNROLL for (int j = 0; j < keys; j++) {
            __m512 key = _mm512_broadcast_f32x4(_mm_loadu_ps((const float *)k[j] + d));
            FR_UNROLL for (int i = 0; i < quads; i++) sum[i][j] = _mm512_fmadd_ps(q[i], key, sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < quads; i++) FR_UNROLL for (int j = 0; j < keys; j += 4) {
        __m512 scores = _mm512_mul_ps(across_quads(sum[i] + j), _mm512_set1_ps(t->scale));
        FR_UNROLL for (int n = 0; n < 4; n++) {
            int query = s.first / 4 * 4 + 4 * i + n;
            if (query < s.first || query >= s.first + s.count) continue;
            _mm_storeu_ps(p->queries[query].weights + at + j, quarter(scores, n));
        }
    }
}

FR_INLINE void score_quads(const tile *t, const part *p, stretch s, int quads) {
    const query *q = p->queries + s.first;
    const float *inputs = p->inputs + s.first / 4 * WIDE;
    const char *run = s.rows, *k[MANY_KEYS];
    const int asks = !s.apart && t->first && p->queries == t->queries && s.kind == t->kind;
    int64_t bytes = row_of(t, s.kind);
    float memory[s.kind ? MANY_KEYS * t->dim + LINE : 1], *wide = s.kind ? at_line(memory) : memory;
    for (int64_t at = s.from, keys; at < s.to; at += keys, run += keys * bytes) {
        keys = s.to - at > 4 ? MANY_KEYS : 4;
        FR_UNROLL for (int j = 0; j < MANY_KEYS; j++) k[j] = run + j * bytes;
        if (s.apart) find_rows(t, q, t->keys, at, s, MANY_KEYS, s.kind, 1, k);
        else if (at + keys > s.to) find_rows(t, q, t->keys, at, s, MANY_KEYS, s.kind, 0, k);
        else if (asks) {
            ask_for_values(t, run, keys * bytes);
            for (int64_t i = 0; i < keys * bytes; i += 64) __builtin_prefetch(run + AHEAD + i);
        }
        for (int j = 0; s.kind && j < keys; j++) {
            widen_rows(k[j], bytes, s.kind, t->dim, 1, wide + j * t->dim);
            k[j] = (const char *)(wide + j * t->dim);
        }
        if (keys == 4) score_keys(t, p, s, inputs, quads, k, 4, at);
        else score_keys(t, p, s, inputs, quads, k, MANY_KEYS, at);
    }
}

static void score_stretch(const tile *t, const part *p, stretch s) {
    switch ((s.first + s.count - 1) / 4 - s.first / 4) {
    case 0: score_quads(t, p, s, 1); break;
    case 1: score_quads(t, p, s, 2); break;
    default: score_quads(t, p, s, QUADS);
    }
}

/* `soften` of attention.c, sixteen positions at a time. */
static void soften16(query *q) {
    float *weights = q->weights;
    int64_t i = q->from, wide = q->from + (q->seen - q->from) / WIDE * WIDE;
    __mmask16 rest = (__mmask16)((1u << (q->seen - wide)) - 1);
    __m512 highest = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), rest, weights + wide);
    for (; i < wide; i += WIDE) highest = _mm512_max_ps(highest, _mm512_loadu_ps(weights + i));
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_set1_ps(q->sink), highest));
    __m512 most = _mm512_set1_ps(largest);
    f32x4 total = all4(0);
    for (i = q->from; i < q->seen; i += WIDE) {
        __mmask16 there = i < wide ? 0xFFFF : rest;
        __m512 w = _mm512_maskz_mov_ps(there, exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, weights + i), most)));
        _mm512_mask_storeu_ps(weights + i, there, w);
        FR_UNROLL for (int j = 0; j < 4; j++) total += (f32x4)quarter(w, j);
    }
    q->total = across(total) + sink_weight(q, largest);
}

/* Sums += weighted values, `vectors` times sixteen columns at once; `there` says which of the last are. */
FR_INLINE void mix_wide(const tile *t, const query *q, stretch s, int count, int64_t column, int vectors, __mmask16 there,
                        int kind, int apart) {
    __m512 sum[AT_ONCE][4];
    const float *weights[AT_ONCE];
    const char *values = s.rows;
    const int64_t bytes = row_of(t, kind);
    FR_UNROLL for (int i = 0; i < count; i++) weights[i] = q[i].weights;
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < vectors; j++)
        sum[i][j] = _mm512_maskz_loadu_ps(there, q[i].out + column + WIDE * j);
    for (int64_t at = s.from; at < s.to; at++, values += bytes) {
        __m512 v[4];
        if (apart) values = slot_in(t, t->values, slot_at(q, at), kind);
        FR_UNROLL for (int j = 0; j < vectors; j++) v[j] = sixteen_at(values, column + WIDE * j, there, kind, t->dim);
        FR_UNROLL for (int i = 0; i < count; i++) {
            __m512 w = _mm512_set1_ps(weights[i][at]);
            FR_UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_fmadd_ps(w, v[j], sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < vectors; j++)
        _mm512_mask_storeu_ps(q[i].out + column + WIDE * j, there, sum[i][j]);
}

FR_INLINE void mix(const tile *t, const part *p, stretch s, int count, int kind, int apart) {
    const int vectors = count > 6 ? 2 : 4;
    const query *q = p->queries + s.first;
    int64_t d = 0;
    const int64_t dim = t->value_dim;
    for (; d + WIDE * vectors <= dim; d += WIDE * vectors) mix_wide(t, q, s, count, d, vectors, 0xFFFF, kind, apart);
    for (; d + WIDE <= dim; d += WIDE) mix_wide(t, q, s, count, d, 1, 0xFFFF, kind, apart);
    if (d < dim) mix_wide(t, q, s, count, d, 1, columns_at(d, dim), kind, apart);
}

FR_INLINE void mix_queries(const tile *t, const part *p, stretch s, int kind, int apart) {
    switch (s.count) {
    case 1: mix(t, p, s, 1, kind, apart); break;
    case 2: mix(t, p, s, 2, kind, apart); break;
    case 3: mix(t, p, s, 3, kind, apart); break;
    case 4: mix(t, p, s, 4, kind, apart); break;
    case 5: mix(t, p, s, 5, kind, apart); break;
    case 6: mix(t, p, s, 6, kind, apart); break;
    case 7: mix(t, p, s, 7, kind, apart); break;
    case 8: mix(t, p, s, 8, kind, apart); break;
    case 9: mix(t, p, s, 9, kind, apart); break;
    case 10: mix(t, p, s, 10, kind, apart); break;
    case 11: mix(t, p, s, 11, kind, apart); break;
    default: mix(t, p, s, AT_ONCE, kind, apart);
    }
}

static void mix_stretch(const tile *t, const part *p, stretch s) {
    if (s.kind == FR_BYTES && s.apart) mix_queries(t, p, s, FR_BYTES, 1);
    else if (s.kind == FR_BYTES) mix_queries(t, p, s, FR_BYTES, 0);
    else if (s.kind == FR_HALVES && s.apart) mix_queries(t, p, s, FR_HALVES, 1);
    else if (s.kind == FR_HALVES) mix_queries(t, p, s, FR_HALVES, 0);
    else if (s.apart) mix_queries(t, p, s, FR_FLOATS, 1);
    else mix_queries(t, p, s, FR_FLOATS, 0);
}

void fr_attend_avx512(tile *t) {
    static const kernels path = {score_stretch, mix_stretch, soften16, widen_rows, AT_ONCE, 4};
    attend_tile(t, &path);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_attend_avx512_only;
