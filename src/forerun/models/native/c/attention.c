/* Attention over the nodes of a round.
 *
 * A query (one head of one node) walks its positions in order, the context first and then its own ancestors by depth:
 * it sums the same numbers in the same order whether its node sits in a tree, in a chain or alone. Up to four queries
 * that read the same keys (heads of one group, nodes of one sequence) walk together, so that each key and value is
 * loaded once for all of them: that, and not arithmetic, is what a long context costs.
 */
#include "attention.h"

/* Scores of positions i..end, which are the slots from base + i on. */
FR_INLINE void score_run(const tile *t, int count, int64_t base, int64_t i, int64_t end, int half) {
    for (; i + KEYS <= end; i += KEYS) {
        /* values are read in stripes, which no prefetcher foresees: ask for them while the keys come in */
        const char *values = slot_in(t, t->values, base + i, half), *last = slot_in(t, t->values, base + i + KEYS, half);
        for (; values < last; values += 64) __builtin_prefetch(values);
        dot_keys(t, t->queries, count, slot_in(t, t->keys, base + i, half), KEYS, i, half);
    }
    for (; i < end; i++) dot_keys(t, t->queries, count, slot_in(t, t->keys, base + i, half), 1, i, half);
}

FR_INLINE void score_together(const tile *t, int count, int half) {
    for (int64_t i = t->lo, end; i < t->hi; i = end) {
        end = run_end(t->queries, i, t->hi);
        score_run(t, count, slot_at(t->queries, i) - i, i, end, half);
    }
}

FR_INLINE void mix_together(const tile *t, int count, int half) {
    for (int64_t i = t->lo, end; i < t->hi; i = end) {
        end = run_end(t->queries, i, t->hi);
        mix_columns(t, t->queries, count, 0, slot_at(t->queries, i) - i, i, end, half);
    }
}

FR_INLINE void attend_queries(tile *t, int count, int half) {
    FR_UNROLL for (int i = 0; i < count; i++) score_alone(t, &t->queries[i], t->queries[i].from, t->lo, half);
    score_together(t, count, half);
    for (int i = 0; i < count; i++) {
        score_rest(t, &t->queries[i], half);
        soften(&t->queries[i]);
        mix_before(t, &t->queries[i], half);
    }
    mix_together(t, count, half);
    for (int i = 0; i < count; i++) mix_rest(t, &t->queries[i], half);
}

FR_INLINE void attend(tile *t, int count, int half) {
    switch (count) {
    case 1: attend_queries(t, 1, half); break;
    case 2: attend_queries(t, 2, half); break;
    case 3: attend_queries(t, 3, half); break;
    default: attend_queries(t, 4, half);
    }
}

void fr_attend(tile *t, int count) {
    if (t->half) attend(t, count, 1);
    else attend(t, count, 0);
}

/* Queries of a key head are numbered node by node, heads of the group within; a tile is a few in a row. */
static void set_up(const fr_attention_args *a, int64_t kv_head, int64_t first_query, int count, float *scratch, tile *t) {
    int64_t group = a->heads / a->kv_heads, most = INT64_MAX;
    int64_t offset = kv_head * a->head_stride * (a->half ? 2 : 4);
    *t = (tile){.keys = (const char *)a->keys + offset, .values = (const char *)a->values + offset, .dim = a->head_dim,
                .half = (int)a->half, .scale = a->scale, .lo = 0};
    for (int i = 0; i < count; i++) {
        int64_t node = (first_query + i) / group, head = kv_head * group + (first_query + i) % group;
        const fr_reach *reach = &a->reach;
        query *q = &t->queries[i];
        q->q = a->q + node * a->q_stride + head * a->head_dim;
        q->out = a->out + (node * a->heads + head) * a->head_dim;
        q->tail = reach->tails + node * reach->tail_stride;
        q->pages = reach->pages ? reach->pages + reach->first[node] : NULL;
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
    const fr_attend_tile attend = fr_chosen_attention()->attend;
    float *scratch = a->scratch + worker * FR_TOGETHER * (a->reach.most + 4);
    for (int64_t i = begin; i < end; i++) {
        const int32_t *range = a->tiles + i % a->tile_count * 2;
        tile t;
        set_up(a, i / a->tile_count, range[0], range[1], scratch, &t);
        attend(&t, range[1]);
    }
}

/* Cut the queries of a key head into tiles of nodes of one sequence: (first query, how many) for each. */
int64_t fr_attention_tiles(const fr_reach *reach, int64_t nodes, int64_t group, int32_t *tiles) {
    int64_t count = 0, together = fr_chosen_attention()->together;
    for (int64_t node = 0, end; node < nodes; node = end) {
        for (end = node + 1; end < nodes && reach->first[end] == reach->first[node];) end++;
        for (int64_t q = node * group; q < end * group; q += together, count++) {
            tiles[2 * count] = (int32_t)q;
            tiles[2 * count + 1] = (int32_t)(end * group - q < together ? end * group - q : together);
        }
    }
    return count;
}

void fr_attention(const fr_attention_args *args) {
    int64_t items = args->tile_count * args->kv_heads;
    /* later tiles of a prompt take longer: in few large chunks one thread is left with the last of them */
    fr_parallel(attend_range, (void *)args, items, items / (fr_threads() * 32));
}
FR_POP_TARGET
