/* Attention over the nodes of a round.
 *
 * A query (one head of one node) walks its positions in order, the context first and then its own ancestors by depth:
 * it sums the same numbers in the same order whether its node sits in a tree, in a chain or alone. Queries that read the
 * same keys (heads of one group, nodes of one sequence) walk together, block by block of positions: up to four have
 * their sums in registers, and all of a tile read a block while it is in the first cache.
 */
#include "attention.h"

enum { KEYS = 4, WITHIN = 4, TILES_PER_THREAD = 8 }; /* keys in registers at once, and queries */
#if defined(__aarch64__)
enum { SUMS = 16 }; /* of weighted values in registers, by fours of columns */
#else
enum { SUMS = 8 };
#endif

/* Adds the products of four inputs of `count` queries and KEYS keys. */
FR_INLINE void dot_step(f32x4 (*sum)[KEYS], const float *inputs, const char **k, int64_t d, int64_t dim, int count, int kind, int first) {
    f32x4 key[KEYS];
    FR_UNROLL for (int j = 0; j < KEYS; j++) key[j] = four_at(k[j], d, kind, dim);
    FR_UNROLL for (int i = 0; i < count; i++) {
        f32x4 q = load4(inputs + 4 * i);
        FR_UNROLL for (int j = 0; j < KEYS; j++) sum[i][j] = first ? q * key[j] : fma4(q, key[j], sum[i][j]);
    }
}

/* Scores of `count` queries, KEYS keys at a time, each summed in four lanes. */
FR_INLINE void score(const tile *t, const part *p, stretch s, int count, int kind, int apart) {
    const query *queries = p->queries + s.first;
    const char *run = s.rows, *k[KEYS];
    int64_t dim = t->dim, step = 4 * (apart ? p->lanes : count), bytes = row_of(t, kind);
    f32x4 scale = all4(t->scale), sum[WITHIN][KEYS];
    float *weights[WITHIN];
    const int asks = !apart && t->first && p->queries == t->queries && kind == t->kind;
    FR_UNROLL for (int i = 0; i < count; i++) weights[i] = queries[i].weights;
    for (int64_t at = s.from; at < s.to; at += KEYS, run += KEYS * bytes) {
        const float *inputs = p->inputs + 4 * s.first;
        if (asks) ask_for_values(t, run, earlier(KEYS, s.to - at) * bytes);
        FR_UNROLL for (int j = 0; j < KEYS; j++) k[j] = run + j * bytes;
        if (apart || at + KEYS > s.to) find_rows(t, queries, t->keys, at, s, KEYS, kind, apart, k);
        dot_step(sum, inputs, k, 0, dim, count, kind, 1);
        for (int64_t d = 4; d < dim; d += 4) dot_step(sum, inputs += step, k, d, dim, count, kind, 0);
        FR_UNROLL for (int i = 0; i < count; i++)
            store4(weights[i] + at, across4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]) * scale);
    }
}

/* Scores to weights, and their sum: each lane adds every fourth position, whatever else is in the pass. Exponentials of
 * sixteen positions are computed side by side, since each waits for itself most of the time. */
static void soften(query *q) {
    float *weights = q->weights, most = q->sink;
    int64_t i = q->from, whole = i + (q->seen - i) / 4 * 4, wide = i + (q->seen - i) / 16 * 16;
    f32x4 highest[4], total = all4(0);
    FR_UNROLL for (int j = 0; j < 4; j++) highest[j] = all4(-INFINITY);
    for (; i < wide; i += 16) FR_UNROLL for (int j = 0; j < 4; j++) highest[j] = max4(highest[j], load4(weights + i + 4 * j));
    for (; i < whole; i += 4) highest[0] = max4(highest[0], load4(weights + i));
    for (; i < q->seen; i++) most = weights[i] > most ? weights[i] : most;
    highest[0] = max4(max4(highest[0], highest[1]), max4(highest[2], highest[3]));
    for (int j = 0; j < 4; j++) most = highest[0][j] > most ? highest[0][j] : most;
    for (i = q->from; i < wide; i += 16) {
        f32x4 w[4];
        FR_UNROLL for (int j = 0; j < 4; j++) w[j] = load4(weights + i + 4 * j) - all4(most);
        exp_below(w, 4);
        FR_UNROLL for (int j = 0; j < 4; j++) store4(weights + i + 4 * j, w[j]), total += w[j];
    }
    for (; i < q->seen; i += 4) { /* there is room behind the last position; it has no weight */
        f32x4 w = load4(weights + i) - all4(most);
        exp_below(&w, 1);
        for (int64_t j = q->seen - i; j < 4; j++) w[j] = 0.0f;
        store4(weights + i, w);
        total += w;
    }
    q->total = across(total) + sink_weight(q, most);
}

/* Sums += weighted values of a stretch, `vectors` times four columns at once, position by position. */
FR_INLINE void mix_columns(const tile *t, const part *p, stretch s, int count, int64_t column, int vectors, int kind, int apart) {
    const query *queries = p->queries + s.first;
    const char *run = s.rows, *rows[4];
    int64_t dim = t->dim, at = s.from, bytes = row_of(t, kind);
    f32x4 sum[WITHIN][SUMS / 2], w[WITHIN];
    float *weights[WITHIN];
    FR_UNROLL for (int i = 0; i < count; i++) weights[i] = queries[i].weights;
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = load4(queries[i].out + column + 4 * j);
    for (; at + 4 <= s.to; at += 4, run += 4 * bytes) {
        if (apart) find_rows(t, queries, t->values, at, s, 4, kind, apart, rows);
        FR_UNROLL for (int i = 0; i < count; i++) w[i] = in_register(load4(weights[i] + at));
        FR_UNROLL for (int k = 0; k < 4; k++)
            FR_UNROLL for (int j = 0; j < vectors; j++) {
                f32x4 v = four_at(apart ? rows[k] : run + k * bytes, column + 4 * j, kind, dim);
                FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(w[i][k]), v, sum[i][j]);
            }
    }
    for (; at < s.to; at++) {
        find_rows(t, queries, t->values, at, s, 1, kind, apart, rows);
        FR_UNROLL for (int j = 0; j < vectors; j++) {
            f32x4 v = four_at(rows[0], column + 4 * j, kind, dim);
            FR_UNROLL for (int i = 0; i < count; i++) sum[i][j] = fma4(all4(weights[i][at]), v, sum[i][j]);
        }
    }
    FR_UNROLL for (int i = 0; i < count; i++)
        FR_UNROLL for (int j = 0; j < vectors; j++) store4(queries[i].out + column + 4 * j, sum[i][j]);
}

FR_INLINE void mix(const tile *t, const part *p, stretch s, int count, int kind, int apart) {
    const int vectors = count > 2 ? 4 : SUMS / 2;
    int64_t d = 0;
    for (; d + 4 * vectors <= t->value_dim; d += 4 * vectors) mix_columns(t, p, s, count, d, vectors, kind, apart);
    for (; d < t->value_dim; d += 4) mix_columns(t, p, s, count, d, 1, kind, apart);
}

/* Calls a step with numbers that are known when it is compiled. */
#define FOR_COUNT(step, kind, apart)                                                                                            \
    switch (s.count) {                                                                                                          \
    case 1: step(t, p, s, 1, kind, apart); break;                                                                               \
    case 2: step(t, p, s, 2, kind, apart); break;                                                                               \
    case 3: step(t, p, s, 3, kind, apart); break;                                                                               \
    default: step(t, p, s, 4, kind, apart);                                                                                     \
    }

#define FOR_KIND(step)                                                                                                          \
    if (s.kind == FR_BYTES && s.apart) FOR_COUNT(step, FR_BYTES, 1)                                                             \
    else if (s.kind == FR_BYTES) FOR_COUNT(step, FR_BYTES, 0)                                                                   \
    else if (s.kind == FR_HALVES && s.apart) FOR_COUNT(step, FR_HALVES, 1)                                                      \
    else if (s.kind == FR_HALVES) FOR_COUNT(step, FR_HALVES, 0)                                                                 \
    else if (s.apart) FOR_COUNT(step, FR_FLOATS, 1)                                                                             \
    else FOR_COUNT(step, FR_FLOATS, 0)

static void score_stretch(const tile *t, const part *p, stretch s) {
    FOR_KIND(score)
}

static void mix_stretch(const tile *t, const part *p, stretch s) {
    FOR_KIND(mix)
}

static void widen(const char *rows, int64_t row, int kind, int64_t dim, int64_t count, float *to) {
    for (int64_t r = 0; r < count; r++, rows += row, to += dim) {
        if (kind == FR_BYTES) for (int64_t i = 0; i < dim; i += 4) store4(to + i, four_at(rows, i, FR_BYTES, dim));
        else for (int64_t i = 0; i < dim; i += 4) store4(to + i, four_at(rows, i, FR_HALVES, dim));
    }
}

void fr_attend(tile *t) {
    static const kernels path = {score_stretch, mix_stretch, soften, widen, WITHIN, 1};
    attend_tile(t, &path);
}

/* Queries of a key head are numbered node by node, heads of the group within; a tile is a few in a row. */
static void set_up(const fr_attention_args *a, int64_t kv_head, int64_t first_query, int count, float *scratch, tile *t) {
    int64_t group = a->heads / a->kv_heads;
    int64_t offset = kv_head * a->head_stride * fr_number_bytes(a->kind);
    t->keys = (const char *)a->keys + offset, t->values = (const char *)a->values + offset;
    t->dim = a->head_dim, t->value_dim = a->value_dim ? a->value_dim : a->head_dim;
    t->kind = (int)a->kind, t->scale = a->scale, t->cap = a->cap, t->count = count;
    const int64_t own = fr_row_bytes(a->kind, a->head_dim);
    t->row = a->row_stride ? a->row_stride * fr_number_bytes(a->kind) : own;
    t->first = first_query < group || a->reach.first[first_query / group - 1] != a->reach.first[first_query / group];
    t->first &= t->row == own;
    for (int i = 0; i < count; i++) {
        int64_t node = (first_query + i) / group, head = kv_head * group + (first_query + i) % group;
        const fr_reach *reach = &a->reach;
        query *q = &t->queries[i];
        q->q = a->q + node * a->q_stride + head * a->head_dim;
        q->out = a->out + (node * a->heads + head) * t->value_dim;
        q->tail = reach->tails + node * reach->tail_stride;
        q->pages = reach->pages ? reach->pages + reach->first[node] : NULL;
        q->first = reach->first[node], q->context = reach->context[node];
        q->seen = q->context + reach->tail[node];
        q->from = a->window && q->seen > a->window ? q->seen - a->window : 0;
        q->weights = scratch + i * (reach->most + FR_ROOM);
        q->sink = a->sinks ? a->sinks[head] : -INFINITY;
    }
}

static void attend_range(void *arg, int64_t begin, int64_t end, int worker) {
    const fr_attention_args *a = arg;
    const fr_attend_tile attend = fr_chosen_attention()->attend;
    float *scratch = a->scratch + worker * FR_TOGETHER * (a->reach.most + FR_ROOM);
    for (int64_t i = begin; i < end; i++) {
        const int32_t *range = a->tiles + i % a->tile_count * 2;
        tile t;
        set_up(a, i / a->tile_count, range[0], range[1], scratch, &t);
        attend(&t);
    }
}

/* How many queries a tile has: as many as the path likes, but so few that every thread has several tiles. */
static int64_t tile_size(int64_t queries, int64_t kv_heads) {
    const fr_attention_path *path = fr_chosen_attention();
    int64_t size = path->most;
    while (size > path->least && queries * kv_heads < size * TILES_PER_THREAD * fr_threads()) size /= 2;
    return size;
}

/* Cut the queries of a key head into tiles of nodes of one sequence: (first query, how many) for each. */
int64_t fr_attention_tiles(const fr_reach *reach, int64_t nodes, int64_t group, int64_t kv_heads, int32_t *tiles) {
    int64_t count = 0, together = tile_size(nodes * group, kv_heads);
    for (int64_t node = 0, end; node < nodes; node = end) {
        for (end = node + 1; end < nodes && reach->first[end] == reach->first[node];) end++;
        for (int64_t q = node * group; q < end * group; q += together, count++) {
            tiles[2 * count] = (int32_t)q;
            tiles[2 * count + 1] = (int32_t)earlier(end * group - q, together);
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
