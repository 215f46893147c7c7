/* Attention over the nodes of a round.
 *
 * A query (one head of one node) walks its positions in order, the context first and then its own ancestors by depth:
 * it sums the same numbers in the same order whether its node sits in a tree, in a chain or alone. Up to four queries
 * that read the same keys (heads of one group, nodes of one sequence) walk together, so that each key and value is
 * loaded once for all of them: that, and not arithmetic, is what a long context costs.
 */
#include "vector.h"
#include "exp.h"

#include <math.h>

enum { TOGETHER = FR_TOGETHER, KEYS = 4, COLUMNS = 4 };

/* One query of a tile. Positions lo..hi are the same slots for all queries of the tile. */
typedef struct {
    const float *q;
    const int32_t *tail;
    int64_t first, context, from, seen;
    float *weights, *out;
    float total;
} query;

typedef struct {
    const float *keys, *values;
    query queries[TOGETHER];
    int64_t dim, lo, hi;
    float scale;
} tile;

FR_INLINE int64_t slot_at(const query *q, int64_t i) {
    return i < q->context ? q->first + i : q->tail[i - q->context];
}

FR_INLINE int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* Scores of `count` queries against `keys` keys in a row (1 or KEYS), each summed in four lanes. */
FR_INLINE void dot_keys(const tile *t, const query *queries, int count, const float *k, int keys, int64_t at) {
    f32x4 sum[TOGETHER][KEYS];
    int64_t dim = t->dim;
    FR_UNROLL for (int i = 0; i < count; i++) FR_UNROLL for (int j = 0; j < keys; j++) sum[i][j] = all4(0);
    for (int64_t d = 0; d < dim; d += 4) {
        f32x4 key[KEYS];
        FR_UNROLL for (int j = 0; j < keys; j++) key[j] = load4(k + j * dim + d);
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

FR_INLINE void score_alone(const tile *t, const query *q, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) dot_keys(t, q, 1, t->keys + slot_at(q, i) * t->dim, 1, i);
}

FR_INLINE void score_together(const tile *t, int count) {
    int64_t i = t->lo, start = t->queries[0].first * t->dim;
    const float *keys = t->keys + start, *values = t->values + start;
    for (; i + KEYS <= t->hi; i += KEYS) {
        /* values are read in stripes, which no prefetcher foresees: ask for them while the keys come in */
        for (int64_t d = 0; d < KEYS * t->dim; d += 16) __builtin_prefetch(values + i * t->dim + d);
        dot_keys(t, t->queries, count, keys + i * t->dim, KEYS, i);
    }
    for (; i < t->hi; i++) dot_keys(t, t->queries, count, keys + i * t->dim, 1, i);
}

/* Scores to weights, and their sum: each lane adds every fourth position, whatever else is in the pass. */
static void soften(query *q) {
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

/* out += weighted values of positions from..to, `vectors` times four columns at once, in registers. */
FR_INLINE void mix(const tile *t, const query *queries, int count, int alone, int64_t from, int64_t to, int64_t column,
                   int vectors) {
    f32x4 sum[TOGETHER][COLUMNS];
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = load4(queries[i].out + column + 4 * j);
    int64_t p = from;
    for (; !alone && p + 4 <= to; p += 4) { /* four weights at a time, so that they come as one vector */
        const float *values = t->values + (queries->first + p) * t->dim + column;
        f32x4 w[TOGETHER];
        FR_UNROLL for (int i = 0; i < count; i++) w[i] = load4(queries[i].weights + p);
        FR_UNROLL for (int k = 0; k < 4; k++)
            FR_UNROLL for (int j = 0; j < vectors; j++) {
                f32x4 v = load4(values + k * t->dim + 4 * j);
                FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(w[i][k]), v, sum[i][j]);
            }
    }
    for (; p < to; p++) {
        int64_t slot = alone ? slot_at(queries, p) : queries->first + p;
        const float *values = t->values + slot * t->dim + column;
        FR_UNROLL for (int j = 0; j < vectors; j++) {
            f32x4 v = load4(values + 4 * j);
            FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(queries[i].weights[p]), v, sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) store4(queries[i].out + column + 4 * j, sum[i][j]);
}

FR_INLINE void mix_columns(const tile *t, const query *queries, int count, int alone, int64_t from, int64_t to) {
    if (from >= to) return;
    int64_t d = 0;
    for (; d + 4 * COLUMNS <= t->dim; d += 4 * COLUMNS) mix(t, queries, count, alone, from, to, d, COLUMNS);
    for (; d < t->dim; d += 4) mix(t, queries, count, alone, from, to, d, 1);
}

FR_INLINE void attend(tile *t, int count) {
    FR_UNROLL for (int i = 0; i < count; i++) score_alone(t, &t->queries[i], t->queries[i].from, t->lo);
    score_together(t, count);
    for (int i = 0; i < count; i++) {
        query *q = &t->queries[i];
        score_alone(t, q, later(t->hi, q->from), q->seen);
        soften(q);
        for (int64_t d = 0; d < t->dim; d += 4) store4(q->out + d, all4(0));
        mix_columns(t, q, 1, 1, q->from, t->lo);
    }
    mix_columns(t, t->queries, count, 0, t->lo, t->hi);
    for (int i = 0; i < count; i++) {
        query *q = &t->queries[i];
        mix_columns(t, q, 1, 1, later(t->hi, q->from), q->seen);
        for (int64_t d = 0; d < t->dim; d += 4) store4(q->out + d, load4(q->out + d) / all4(q->total));
    }
}

/* Queries of a key head are numbered node by node, heads of the group within; a tile is a few in a row. */
static void set_up(const fr_attention_args *a, int64_t kv_head, int64_t first_query, int count, float *scratch, tile *t) {
    int64_t group = a->heads / a->kv_heads, most = INT64_MAX;
    *t = (tile){.keys = a->keys + kv_head * a->head_stride, .values = a->values + kv_head * a->head_stride,
                .dim = a->head_dim, .scale = a->scale, .lo = 0};
    for (int i = 0; i < count; i++) {
        int64_t node = (first_query + i) / group, head = kv_head * group + (first_query + i) % group;
        const fr_reach *reach = &a->reach;
        query *q = &t->queries[i];
        q->q = a->q + node * a->q_stride + head * a->head_dim;
        q->out = a->out + (node * a->heads + head) * a->head_dim;
        q->tail = reach->tails + node * reach->tail_stride;
        q->first = reach->first[node], q->context = reach->context[node];
        q->seen = q->context + reach->tail[node];
        q->from = a->window && q->seen > a->window ? q->seen - a->window : 0;
        q->weights = scratch + i * (reach->most + 4);
        if (q->from > t->lo) t->lo = q->from;
        if (q->context < most) most = q->context;
    }
    t->hi = most > t->lo ? most : t->lo;
    for (int i = 0; i < count; i++) /* so short a window that they share nothing: each walks alone */
        if (t->lo > t->queries[i].seen) t->lo = t->hi = t->queries[i].seen;
}

static void attend_range(void *arg, int64_t begin, int64_t end, int worker) {
    const fr_attention_args *a = arg;
    float *scratch = a->scratch + worker * TOGETHER * (a->reach.most + 4);
    for (int64_t i = begin; i < end; i++) {
        const int32_t *range = a->tiles + i % a->tile_count * 2;
        tile t;
        set_up(a, i / a->tile_count, range[0], range[1], scratch, &t);
        switch (range[1]) {
        case 1: attend(&t, 1); break;
        case 2: attend(&t, 2); break;
        case 3: attend(&t, 3); break;
        default: attend(&t, TOGETHER);
        }
    }
}

/* Cut the queries of a key head into tiles of nodes of one sequence: (first query, how many) for each. */
int64_t fr_attention_tiles(const fr_reach *reach, int64_t nodes, int64_t group, int32_t *tiles) {
    int64_t count = 0;
    for (int64_t node = 0, end; node < nodes; node = end) {
        for (end = node + 1; end < nodes && reach->first[end] == reach->first[node];) end++;
        for (int64_t q = node * group; q < end * group; q += TOGETHER, count++) {
            tiles[2 * count] = (int32_t)q;
            tiles[2 * count + 1] = (int32_t)(end * group - q < TOGETHER ? end * group - q : TOGETHER);
        }
    }
    return count;
}

void fr_attention(const fr_attention_args *args) {
    int64_t items = args->tile_count * args->kv_heads;
    fr_parallel(attend_range, (void *)args, items, items / (fr_threads() * 8));
}
FR_POP_TARGET
