/* One tile of attention: a few queries that read the same keys, and the steps that every path shares. */
#ifndef FORERUN_ATTENTION_H
#define FORERUN_ATTENTION_H

#include "vector.h"
#include "exp.h"

#include <math.h>

enum { KEYS = 4, COLUMNS = 4 }; /* in registers at once, by fours of floats */

/* One query of a tile. Positions lo..hi are the same slots for all queries of the tile. */
typedef struct {
    const float *q;
    const int32_t *tail, *pages; /* pages of its context, or NULL: then it starts at slot `first` */
    int64_t first, context, from, seen;
    float *weights, *out;
    float total;
} query;

typedef struct fr_queries {
    const char *keys, *values; /* of one key head: floats, or halves */
    query queries[FR_TOGETHER];
    int64_t dim, lo, hi;
    int half;
    float scale;
} tile;

/* Where a slot's numbers start, and four of them. */
FR_INLINE const char *slot_in(const tile *t, const char *all, int64_t slot, int half) { return all + slot * t->dim * (half ? 2 : 4); }
FR_INLINE f32x4 four_at(const char *numbers, int64_t i, int half) {
    return half ? load4_halves((const uint16_t *)numbers + i) : load4((const float *)numbers + i);
}

FR_INLINE int64_t slot_at(const query *q, int64_t i) {
    if (i >= q->context) return q->tail[i - q->context];
    return q->pages ? (int64_t)q->pages[i / FR_PAGE] * FR_PAGE + i % FR_PAGE : q->first + i;
}

/* Where the run of slots that starts at position i of the context ends, at `end` at the latest. */
FR_INLINE int64_t run_end(const query *q, int64_t i, int64_t end) {
    if (!q->pages) return end;
    int64_t page = i / FR_PAGE;
    while ((page + 1) * FR_PAGE < end && q->pages[page + 1] == q->pages[page] + 1) page++;
    return (page + 1) * FR_PAGE < end ? (page + 1) * FR_PAGE : end;
}

FR_INLINE int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* Scores of `count` queries against `keys` keys in a row (1 or KEYS), each summed in four lanes. */
FR_INLINE void dot_keys(const tile *t, const query *queries, int count, const char *k, int keys, int64_t at, int half) {
    f32x4 sum[4][KEYS];
    int64_t dim = t->dim;
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < keys; j++) sum[i][j] = all4(0);
    for (int64_t d = 0; d < dim; d += 4) {
        f32x4 key[KEYS];
        FR_UNROLL for (int j = 0; j < keys; j++) key[j] = four_at(k, j * dim + d, half);
        FR_UNROLL for (int i = 0; i < count; i++) {
            f32x4 q = load4(queries[i].q + d);
            FR_UNROLL for (int j = 0; j < keys; j++) sum[i][j] = fma4(q, key[j], sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++) {
        if (keys == KEYS) store4(queries[i].weights + at, across4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]) * all4(t->scale));
        else queries[i].weights[at] = across(sum[i][0]) * t->scale;
    }
}

FR_INLINE void score_alone(const tile *t, const query *q, int64_t from, int64_t to, int half) {
    for (int64_t i = from; i < to; i++) dot_keys(t, q, 1, slot_in(t, t->keys, slot_at(q, i), half), 1, i, half);
}

/* Scores to weights, and their sum: each lane adds every fourth position, whatever else is in the pass. */
FR_INLINE void soften(query *q) {
    float *weights = q->weights, most = -INFINITY;
    int64_t i = q->from, whole = q->from + (q->seen - q->from) / 4 * 4;
    f32x4 highest = all4(-INFINITY), total = all4(0);
    for (; i < whole; i += 4) highest = max4(highest, load4(weights + i));
    for (; i < q->seen; i++) most = weights[i] > most ? weights[i] : most;
    for (int j = 0; j < 4; j++) most = highest[j] > most ? highest[j] : most;
    for (i = q->from; i < whole; i += 4) {
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

/* out += weighted values of positions from..to, `vectors` times four columns at once, in registers. Position p of a
 * run is slot base + p; a query alone finds its slots itself. */
FR_INLINE void mix(const tile *t, const query *queries, int count, int alone, int64_t base, int64_t from, int64_t to,
                   int64_t column, int vectors, int half) {
    f32x4 sum[4][COLUMNS];
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = load4(queries[i].out + column + 4 * j);
    int64_t p = from;
    for (; !alone && p + 4 <= to; p += 4) { /* four weights at a time, so that they come as one vector */
        const char *values = slot_in(t, t->values, base + p, half);
        f32x4 w[4];
        FR_UNROLL for (int i = 0; i < count; i++) w[i] = load4(queries[i].weights + p);
        FR_UNROLL for (int k = 0; k < 4; k++)
            FR_UNROLL for (int j = 0; j < vectors; j++) {
                f32x4 v = four_at(values, k * t->dim + column + 4 * j, half);
                FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(w[i][k]), v, sum[i][j]);
            }
    }
    for (; p < to; p++) {
        int64_t slot = alone ? slot_at(queries, p) : base + p;
        const char *values = slot_in(t, t->values, slot, half);
        FR_UNROLL for (int j = 0; j < vectors; j++) {
            f32x4 v = four_at(values, column + 4 * j, half);
            FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(queries[i].weights[p]), v, sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) store4(queries[i].out + column + 4 * j, sum[i][j]);
}

FR_INLINE void mix_columns(const tile *t, const query *queries, int count, int alone, int64_t base, int64_t from,
                           int64_t to, int half) {
    if (from >= to) return;
    int64_t d = 0;
    for (; d + 4 * COLUMNS <= t->dim; d += 4 * COLUMNS) mix(t, queries, count, alone, base, from, to, d, COLUMNS, half);
    for (; d < t->dim; d += 4) mix(t, queries, count, alone, base, from, to, d, 1, half);
}

/* The positions that a query has for itself, after those of the tile: its scores, its weights. */
FR_INLINE void score_rest(const tile *t, query *q, int half) { score_alone(t, q, later(t->hi, q->from), q->seen, half); }

FR_INLINE void mix_before(const tile *t, query *q, int half) {
    for (int64_t d = 0; d < t->dim; d += 4) store4(q->out + d, all4(0));
    mix_columns(t, q, 1, 1, 0, q->from, t->lo, half);
}

FR_INLINE void mix_rest(const tile *t, query *q, int half) {
    mix_columns(t, q, 1, 1, 0, later(t->hi, q->from), q->seen, half);
    for (int64_t d = 0; d < t->dim; d += 4) store4(q->out + d, load4(q->out + d) / all4(q->total));
}

#endif
