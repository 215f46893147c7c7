/* One tile of attention: a few queries that read the same keys, and the steps that every path shares. */
#ifndef FORERUN_ATTENTION_H
#define FORERUN_ATTENTION_H

#include "vector.h"

#include <math.h>

/* One query of a tile. Those of one node lie side by side and have the same tail. */
typedef struct {
    const float *q;
    const int32_t *tail, *pages; /* pages of its context, or NULL: then it starts at slot `first` */
    int64_t first, context, from, seen;
    float *weights, *out;
    float total, sink; /* sink: a score that is no position's; -INFINITY = none */
} query;

typedef struct fr_queries {
    const char *keys, *values; /* of one key head */
    query queries[FR_TOGETHER];
    int64_t dim, value_dim, row; /* row: bytes from a slot's numbers to the next one's */
    int count, kind, first; /* is it the first of its sequence? Then it brings keys and values into the caches */
    float scale, cap;
} tile;

/* Queries whose sums are in registers together. Positions lo..hi are the same slots for all of them. */
typedef struct {
    query *queries;
    int count, lanes; /* lanes of inputs: at least as many, the rest are zero */
    int64_t lo, hi;
    float *inputs; /* of the queries by fours, [dim / 4, lanes, 4] */
} part;

/* Some queries of a part, and positions that are the same slots for these; not `apart`: rows that follow each other. */
typedef struct {
    int first, count, apart, kind;
    int64_t from, to;
    const char *rows; /* keys or values of the first position, of that kind */
} stretch;

/* What a path is made of: the scores of a stretch, its weighted values into the sums, scores to weights, rows to floats. */
typedef void (*on_stretch)(const tile *t, const part *p, stretch s);
typedef struct {
    on_stretch score, mix;
    void (*soften)(query *q);
    void (*widen)(const char *rows, int64_t row, int kind, int64_t dim, int64_t count, float *to);
    int within, lanes; /* queries of a part at most, and what its lanes are a multiple of */
} kernels;

FR_INLINE int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }
FR_INLINE int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where the first cache line behind `memory` starts: vectors of 64 bytes across two lines take twice as long. */
enum { LINE = 16 };
FR_INLINE float *at_line(float *memory) { return (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }

/* Where a slot's row starts, what its integers are multiplied by, and four of its numbers: whoever reads a row, one or a
 * whole tile at once, reads the same floats. */
FR_INLINE int64_t row_of(const tile *t, int kind) { return kind == t->kind ? t->row : fr_row_bytes(kind, t->dim); }
FR_INLINE const char *slot_in(const tile *t, const char *all, int64_t slot, int kind) { return all + slot * row_of(t, kind); }
FR_INLINE float scale_of(const char *row, int64_t dim) {
    float scale;
    memcpy(&scale, row + dim, sizeof scale);
    return scale;
}
FR_INLINE f32x4 four_at(const char *row, int64_t i, int kind, int64_t dim) {
    if (kind == FR_BYTES) return load4_bytes((const int8_t *)row + i) * all4(scale_of(row, dim));
    return kind == FR_HALVES ? load4_halves((const uint16_t *)row + i) : load4((const float *)row + i);
}

FR_INLINE int64_t slot_at(const query *q, int64_t i) {
    if (i >= q->context) return q->tail[i - q->context];
    return q->pages ? (int64_t)q->pages[i / FR_PAGE] * FR_PAGE + i % FR_PAGE : q->first + i;
}

/* What a query's sink adds to the sum of its weights; `most` is its largest score, the sink's included. */
FR_INLINE float sink_weight(const query *q, float most) {
    f32x4 weight = all4(q->sink - most);
    if (q->sink == -INFINITY) return 0.0f;
    exp_below(&weight, 1);
    return weight[0];
}

/* Ask for the values of keys that are read now: they are read in stripes, which no prefetcher foresees. */
FR_INLINE void ask_for_values(const tile *t, const char *key, int64_t bytes) {
    const char *value = t->values + (key - t->keys);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(value + i);
}

/* Where the run of slots that starts at position i of the context ends, at `end` at the latest. */
FR_INLINE int64_t run_end(const query *q, int64_t i, int64_t end) {
    if (!q->pages) return end;
    int64_t page = i / FR_PAGE;
    while ((page + 1) * FR_PAGE < end && q->pages[page + 1] == q->pages[page] + 1) page++;
    return earlier((page + 1) * FR_PAGE, end);
}

/* Where the rows of `count` positions from `at` on start; in place of those behind the end of the stretch, the last. */
FR_INLINE void find_rows(const tile *t, const query *q, const char *all, int64_t at, stretch s, int count, int kind, int apart,
                         const char **rows) {
    FR_UNROLL for (int j = 0; j < count; j++) {
        int64_t i = earlier(at + j, s.to - 1);
        rows[j] = apart ? slot_in(t, all, slot_at(q, i), kind) : slot_in(t, s.rows, i - s.from, kind);
    }
}

/* What these queries share; nothing where a window is so short. */
FR_INLINE part part_of(query *queries, int count, int lanes, int64_t dim, float *inputs) {
    part p = {queries, count, lanes, 0, INT64_MAX, inputs};
    for (int i = 0; i < count; i++) p.lo = later(p.lo, queries[i].from), p.hi = earlier(p.hi, queries[i].context);
    p.hi = later(p.hi, p.lo);
    for (int i = 0; i < count; i++)
        if (p.lo > queries[i].seen) p.lo = p.hi = queries[i].seen;
    for (int64_t d = 0; d < dim; d += 4)
        for (int i = 0; i < lanes; i++)
            store4(inputs + d * lanes + 4 * i, i < count ? in_register(load4(queries[i].q + d)) : all4(0));
    return p;
}

/* Positions that queries of one node have for themselves, before or behind those of their part. */
FR_INLINE void walk_apart(const tile *t, const part *p, const char *all, int behind, on_stretch step) {
    for (int i = 0, n; i < p->count; i += n) {
        const query *q = &p->queries[i];
        for (n = 1; i + n < p->count && q[n].tail == q->tail;) n++;
        stretch s = {i, n, 1, t->kind, behind ? later(p->hi, q->from) : q->from, behind ? q->seen : p->lo, NULL};
        if (s.from >= s.to) continue;
        s.rows = slot_in(t, all, slot_at(q, s.from), t->kind);
        step(t, p, s);
    }
}

/* Positions that parts share. Several read them page by page, so that all find a page in the first cache, as floats. */
FR_INLINE void walk_together(const tile *t, const part *parts, int count, const char *all, on_stretch step, const kernels *path) {
    const int widens = t->kind != FR_FLOATS && count > 1;
    float memory[widens ? FR_PAGE * t->dim + LINE : 1], *wide = widens ? at_line(memory) : memory;
    const part *furthest = parts;
    int64_t lo = INT64_MAX;
    for (int i = 0; i < count; i++) {
        lo = earlier(lo, parts[i].lo);
        if (parts[i].hi > furthest->hi) furthest = &parts[i];
    }
    for (int64_t at = lo, end; at < furthest->hi; at = end) {
        end = count > 1 ? earlier((at / FR_PAGE + 1) * FR_PAGE, furthest->hi) : run_end(furthest->queries, at, furthest->hi);
        const char *rows = slot_in(t, all, slot_at(furthest->queries, at), t->kind);
        if (widens) path->widen(rows, t->row, t->kind, t->dim, end - at, wide), rows = (const char *)wide;
        for (int i = 0; i < count; i++) {
            stretch s = {0, parts[i].count, 0, widens ? FR_FLOATS : t->kind, later(at, parts[i].lo), earlier(end, parts[i].hi), NULL};
            s.rows = slot_in(t, rows, s.from - at, s.kind);
            if (s.from < s.to) step(t, &parts[i], s);
        }
    }
}

/* In the order of positions, since what is written behind the end of a stretch is written again by the next. */
FR_INLINE void walk(const tile *t, const part *parts, int count, const char *all, on_stretch step, const kernels *path) {
    for (int i = 0; i < count; i++) walk_apart(t, &parts[i], all, 0, step);
    walk_together(t, parts, count, all, step, path);
    for (int i = 0; i < count; i++) walk_apart(t, &parts[i], all, 1, step);
}

/* A whole tile on one path. */
FR_INLINE void attend_tile(tile *t, const kernels *path) {
    float memory[(FR_TOGETHER + 4) * t->dim + LINE], *inputs = at_line(memory);
    part parts[FR_TOGETHER];
    int count = 0;
    for (int i = 0; i < t->count; i += path->within, count++) {
        int n = (int)earlier(t->count - i, path->within);
        parts[count] = part_of(t->queries + i, n, (n + path->lanes - 1) / path->lanes * path->lanes, t->dim, inputs + i * t->dim);
    }
    walk(t, parts, count, t->keys, path->score, path);
    for (int i = 0; i < t->count; i++) {
        query *q = &t->queries[i];
        for (int64_t at = q->from; t->cap && at < q->seen; at += 4) /* there is room behind the last */
            store4(q->weights + at, cap4(load4(q->weights + at), t->cap));
        path->soften(q);
        for (int64_t d = 0; d < t->value_dim; d += 4) store4(t->queries[i].out + d, all4(0));
    }
    walk(t, parts, count, t->values, path->mix, path);
    for (int i = 0; i < t->count; i++) {
        float *out = t->queries[i].out;
        f32x4 total = all4(t->queries[i].total);
        for (int64_t d = 0; d < t->value_dim; d += 4) store4(out + d, load4(out + d) / total);
    }
}

#endif
