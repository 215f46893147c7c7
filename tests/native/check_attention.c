/* Attention by itself: a node sums the same numbers in the same order in a prompt, as a leaf of a tree and alone.
 *
 * Chains of many nodes that cross pages, the same nodes with their last ancestors as tails, and each node alone: the bits
 * must be equal on every path, with one thread and with several, and near those of a sum in double precision.
 */
#include "forerun.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGES = 5, SLOTS = PAGES * FR_PAGE, MOST_NODES = 64, KV_HEADS = 2 };
static const int32_t page_list[PAGES] = {3, 0, 4, 1, 2}; /* pages of a sequence need not follow each other */

static uint32_t state = 5;
static float number(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1.0f;
}

typedef struct {
    int64_t group, dim, window, kind, context;
    int64_t beside; /* heads of a slot lie side by side */
    int64_t latent; /* numbers at the end of a row that are no part of its value; then a row is both; 0 = values are apart */
    int nodes;
    void *keys, *values; /* [KV_HEADS, SLOTS] rows, or [SLOTS, KV_HEADS] */
    float *q;            /* [MOST_NODES, KV_HEADS * group * dim] */
    const float *sinks;  /* [KV_HEADS * group] or NULL */
} problem;

static int32_t slot_of(int64_t position) { return page_list[position / FR_PAGE] * FR_PAGE + (int32_t)(position % FR_PAGE); }

/* Attention of `count` nodes from `first` on; of each, the last `own` positions are its tail. */
static void attend(const problem *p, int first, int count, int own, float *out) {
    int64_t width = KV_HEADS * p->group * p->dim, most = p->context + first + count;
    int32_t start[MOST_NODES], context[MOST_NODES], tail[MOST_NODES], *tails = calloc((size_t)(count * own), sizeof *tails);
    for (int i = 0; i < count; i++) {
        int64_t seen = p->context + first + i + 1;
        start[i] = 0, tail[i] = seen < own ? (int32_t)seen : own, context[i] = (int32_t)seen - tail[i];
        for (int j = 0; j < tail[i]; j++) tails[i * own + j] = slot_of(context[i] + j);
    }
    int32_t *tiles = malloc((size_t)(2 * count * p->group) * sizeof *tiles);
    int64_t row = fr_row_bytes(p->kind, p->dim) / fr_number_bytes(p->kind);
    fr_attention_args a = {.reach = {start, context, tail, tails, own, most, page_list}, .q = p->q + first * width, .out = out,
                           .keys = p->keys, .values = p->values, .kind = p->kind, .tiles = tiles, .heads = KV_HEADS * p->group,
                           .kv_heads = KV_HEADS, .head_dim = p->dim, .q_stride = width, .head_stride = p->beside ? row : SLOTS * row,
                           .row_stride = p->beside ? KV_HEADS * row : 0, .window = p->window, .scale = 0.2f, .sinks = p->sinks,
                           .value_dim = p->latent ? p->dim - p->latent : 0};
    a.scratch = malloc(sizeof(float) * FR_MAX_THREADS * FR_TOGETHER * (size_t)(most + FR_ROOM));
    a.tile_count = fr_attention_tiles(&a.reach, count, p->group, KV_HEADS, tiles);
    fr_attention(&a);
    free(tails), free(tiles), free(a.scratch);
}

static double at(const problem *p, const void *cache, int64_t head, int64_t position, int64_t d) {
    int64_t place = p->beside ? slot_of(position) * KV_HEADS + head : head * SLOTS + slot_of(position);
    const char *row = (const char *)cache + place * fr_row_bytes(p->kind, p->dim);
    float scale;
    memcpy(&scale, row + p->dim, sizeof scale);
    if (p->kind == FR_BYTES) return (double)scale * ((const int8_t *)row)[d];
    return p->kind == FR_HALVES ? fr_half(((const uint16_t *)row)[d]) : ((const float *)row)[d];
}

/* The largest distance of a node's outputs from those in double precision. */
static double error(const problem *p, int node, const float *out) {
    int64_t seen = p->context + node + 1, from = p->window && seen > p->window ? seen - p->window : 0, heads = KV_HEADS * p->group;
    double worst = 0, score[SLOTS], total;
    for (int64_t h = 0; h < heads; h++) {
        const float *q = p->q + (node * heads + h) * p->dim;
        total = p->sinks ? exp(p->sinks[h]) : 0;
        for (int64_t i = from; i < seen; i++) {
            score[i] = 0;
            for (int64_t d = 0; d < p->dim; d++) score[i] += q[d] * at(p, p->keys, h / p->group, i, d);
            total += score[i] = exp(0.2 * score[i]);
        }
        for (int64_t d = 0; d < p->dim - p->latent; d++) {
            double sum = 0;
            for (int64_t i = from; i < seen; i++) sum += score[i] * at(p, p->values, h / p->group, i, d);
            worst = fmax(worst, fabs(sum / total - out[h * (p->dim - p->latent) + d]));
        }
    }
    return worst;
}

static int differ(const char *what, const float *a, const float *b, int64_t count) {
    if (!memcmp(a, b, (size_t)count * sizeof(float))) return 0;
    printf("attention: %s differs\n", what);
    return 1;
}

static int check_paths(const problem *p) {
    int64_t width = KV_HEADS * p->group * (p->dim - p->latent), all = p->nodes * width;
    float *wanted = malloc(sizeof(float) * (size_t)all), *found = malloc(sizeof(float) * (size_t)all);
    int bad = 0;
    fr_choose("generic");
    for (int i = 0; i < p->nodes; i++) attend(p, i, 1, 1, wanted + i * width);
    for (int i = 0; i < p->nodes; i += 7)
        if (!(error(p, i, wanted + i * width) < 2e-5)) bad = 1, printf("attention: node %d is far from the true sum\n", i);
    for (int v = 0; fr_variant(v); v++) {
        if (fr_choose(fr_variant(v))) continue;
        for (int threads = 1; threads <= 3; threads += 2) {
            fr_set_threads(threads);
            attend(p, 0, p->nodes, 1, found);
            bad |= differ(fr_variant(v), wanted, found, all);
            attend(p, 0, p->nodes, 11, found);
            bad |= differ("a tree's nodes", wanted, found, all);
        }
        for (int i = 0; i < p->nodes; i++) attend(p, i, 1, 1 + i % 5, found + i * width);
        bad |= differ("a node alone", wanted, found, all);
    }
    if (bad) printf("%d nodes, group %d, dim %d, window %d, kind %d\n", p->nodes, (int)p->group, (int)p->dim, (int)p->window, (int)p->kind);
    free(wanted), free(found);
    return bad;
}

static void *cache(const problem *p) {
    int64_t bytes = fr_row_bytes(p->kind, p->dim);
    float f[p->dim];
    char *rows = malloc((size_t)(KV_HEADS * SLOTS * bytes)), *row = rows;
    for (int64_t r = 0; r < KV_HEADS * SLOTS; r++, row += bytes) {
        for (int64_t i = 0; i < p->dim; i++) f[i] = number();
        if (p->kind == FR_BYTES) fr_to_bytes(f, (int8_t *)row, p->dim);
        else if (p->kind == FR_HALVES) fr_to_halves(f, (uint16_t *)row, p->dim);
        else memcpy(row, f, sizeof f);
    }
    return rows;
}

/* Tiles of one to sixteen queries, groups that they cut, short and long windows, every width that a kernel walks in. */
int check_attention(void) {
    static const int64_t groups[] = {1, 3, 5}, dims[] = {64, 84}, windows[] = {0, 6, 70};
    static const float sinks[KV_HEADS * 5] = {0.5f, -3.0f, 9.0f, 2.0f, -60.0f, 1.0f, -0.25f, 6.0f, -1.0f, 3.0f};
    int bad = 0;
    for (int n = 0; n < 36; n++) {
        problem p = {.group = groups[n % 3], .dim = dims[n / 3 % 2], .window = windows[n / 6 % 3], .kind = n < 18 ? n % 2 : FR_BYTES, .context = n % 4 ? 130 + n : 0};
        p.beside = n / 2 % 2;
        p.sinks = n % 4 == 1 ? sinks : NULL;
        p.nodes = n % 5 ? 1 + 9 * (n % 7) : MOST_NODES;
        p.latent = n % 3 ? 0 : 12;
        p.keys = cache(&p), p.values = p.latent ? p.keys : cache(&p);
        p.q = malloc(sizeof(float) * (size_t)(MOST_NODES * KV_HEADS * p.group * p.dim));
        for (int64_t i = 0; i < MOST_NODES * KV_HEADS * p.group * p.dim; i++) p.q[i] = 2 * number();
        bad |= check_paths(&p);
        if (p.values != p.keys) free(p.values);
        free(p.keys), free(p.q);
    }
    return bad;
}
