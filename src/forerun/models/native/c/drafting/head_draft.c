/* A whole draft of one sequence in one call: its new rows, then a tree that follows the head's confidence, level by level.
 *
 * The rules are those of forerun/drafters/heads/growth.py, which draft for several sequences: the same
 * numbers in the same order, so that both grow the same tree (tested). Between two levels nothing runs but this: Python
 * behind a pass, whose caches are cold, took as long as the levels themselves.
 */
#include "forerun.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double DEEPER = 0.9, ROW = 0.2; /* as in tree_builder.py */
static const int AHEAD[] = {1, 2, 4, 8, 16};

/* Candidates in the order in which they were found; the order by score has equal ones in that order too. */
typedef struct {
    double *scores;                              /* log of the survival */
    int32_t *tokens, *parents, *order, *depths, *children, *places; /* parents: -1 = the root */
    int64_t count, start;                        /* candidates, and where the last level begins */
    int32_t *frontier, *write, *paths[2], *columns; /* of a level: candidates, slots, slots of all ancestors, a pass's numbers */
    int64_t *ids;
    int64_t wide;                                /* nodes of the frontier */
    float *outs[2], *values, *totals, *scales;
    int32_t *indices;
} growth;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static char *take(char **next, int64_t bytes) {
    char *at = *next;
    *next += (bytes + 63) / 64 * 64;
    return at;
}

/* All arrays in one block; with none, only its size. */
static int64_t lay_out(const fr_head *h, const fr_draft *d, growth *g, char *block) {
    int64_t most = d->branch * (1 + d->depth * d->frontier), rows = d->frontier > d->fresh ? d->frontier : d->fresh;
    char *next = block;
    g->scores = (double *)take(&next, most * 8);
    int32_t **lists[] = {&g->tokens, &g->parents, &g->order, &g->depths, &g->children, &g->places};
    for (int i = 0; i < 6; i++) *lists[i] = (int32_t *)take(&next, most * 4);
    g->frontier = (int32_t *)take(&next, (rows + most) * 4);
    g->write = (int32_t *)take(&next, rows * 4);
    for (int i = 0; i < 2; i++) g->paths[i] = (int32_t *)take(&next, d->frontier * (d->depth + 1) * 4);
    g->columns = (int32_t *)take(&next, 6 * rows * 4);
    g->ids = (int64_t *)take(&next, rows * 8);
    for (int i = 0; i < 2; i++) g->outs[i] = (float *)take(&next, d->frontier * h->width * 4);
    g->values = (float *)take(&next, d->frontier * d->branch * 4);
    g->totals = (float *)take(&next, d->frontier * 4);
    g->scales = (float *)take(&next, d->frontier * 4);
    g->indices = (int32_t *)take(&next, d->frontier * d->branch * 4);
    return next - block;
}

/* A pass over rows whose slots are in `write`: they see `context` slots of the sequence and then their tails. */
static void set_rows(fr_head_pass *p, growth *g, int64_t base, int64_t rows, const int32_t *tails, int64_t stride) {
    int32_t *first = g->columns, *tail = first + 2 * rows;
    for (int64_t r = 0; r < rows; r++) {
        first[r] = (int32_t)base;
        tail[r] = (int32_t)stride;
    }
    p->rows = rows;
    p->write = g->write;
    p->reach.first = first;
    p->reach.context = first + rows;
    p->reach.tail = tail;
    p->position = first + 3 * rows;
    p->parents = first + 4 * rows;
    p->reach.tails = tails;
    p->reach.tail_stride = stride;
}

/* The rows of tokens that are new since the last draft, with the target's features. */
static int catch_up(const fr_head *h, const fr_draft *d, const fr_head_pass *like, growth *g) {
    fr_head_pass p = *like;
    for (int64_t r = 0; r < d->fresh; r++) {
        g->write[r] = (int32_t)(d->base + d->length + r);
        g->columns[d->fresh + r] = g->columns[3 * d->fresh + r] = (int32_t)(d->length + r);
    }
    set_rows(&p, g, d->base, d->fresh, g->write, 1);
    p.keys_only = d->fresh - 1;
    p.tokens = d->tokens;
    p.features = d->features;
    p.out = d->out;
    p.reach.most = d->length + d->fresh;
    return fr_head_run(h, &p);
}

/* The frontier through the layer: level 1 is the first below the root. */
static int step(const fr_head *h, const fr_draft *d, const fr_head_pass *like, growth *g, int64_t level, const float *before) {
    fr_head_pass p = *like;
    int64_t rows = g->wide, length = d->length + d->fresh, last = level - 1;
    int32_t *paths = g->paths[level % 2];
    const int32_t *above = g->paths[last % 2];
    for (int64_t r = 0; r < rows; r++) {
        int64_t parent = (g->frontier[r] - g->start) / d->branch;
        memcpy(paths + r * level, above + parent * last, (size_t)last * sizeof(int32_t));
        g->write[r] = paths[r * level + last] = (int32_t)(d->base + length + d->drafted + r);
        g->columns[rows + r] = (int32_t)length;
        g->columns[3 * rows + r] = (int32_t)(length + last);
        g->columns[4 * rows + r] = (int32_t)parent;
        g->ids[r] = g->tokens[g->frontier[r]];
    }
    set_rows(&p, g, d->base, rows, paths, level);
    p.keys_only = 0;
    p.tokens = g->ids;
    p.features = NULL;
    p.before = before;
    p.out = g->outs[level % 2];
    p.reach.most = length + level;
    return fr_head_run(h, &p);
}

static int rank_rows(const fr_head *h, const fr_draft *d, growth *g, const float *out) {
    for (int64_t r = 0; r < g->wide; r++) g->scales[r] = d->scale;
    fr_top top = {
        .rows = g->wide, .count = d->vocabulary, .k = d->branch, .x = d->logits, .scale = d->scale == 1.0f ? NULL : g->scales,
        .values = g->values, .indices = g->indices, .totals = g->totals,
    };
    return fr_head_rank(h, out, d->logits, &top);
}

/* Behind those that score as much or more. */
static void insert(growth *g, int32_t candidate) {
    int64_t low = 0, high = candidate;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (g->scores[g->order[middle]] >= g->scores[candidate]) low = middle + 1;
        else high = middle;
    }
    memmove(g->order + low + 1, g->order + low, (size_t)(candidate - low) * sizeof(int32_t));
    g->order[low] = candidate;
}

static void add_candidates(const fr_draft *d, growth *g) {
    int plain = d->power == 1.0 && d->shift == 0.0;
    g->start = g->count;
    for (int64_t i = 0; i < g->wide; i++) {
        int32_t place = g->frontier[i];
        double above = place >= 0 ? g->scores[place] : 0.0;
        for (int64_t j = 0; j < d->branch; j++) {
            double value = g->values[i * d->branch + j], fitted = value * d->power + d->shift;
            int32_t index = g->indices[i * d->branch + j], at = (int32_t)g->count++;
            g->scores[at] = above + (plain ? value : fitted < 0.0 ? fitted : 0.0);
            g->tokens[at] = d->ids ? d->ids[index] : index;
            g->parents[at] = place;
            insert(g, at);
        }
    }
}

/* tree_builder.best_count of the survivals of some candidates. */
static int64_t best_count(const fr_draft *d, const double *scores, const int32_t *which, int64_t count) {
    if (!d->price) return count;
    double best_gain = 0.0, gain = d->price[0];
    int64_t best = 0, most = count < d->prices - 1 ? count : d->prices - 1;
    for (int64_t n = 1; n <= most; n++) {
        gain += exp(scores[which[n - 1]]);
        if (gain - d->price[n] > best_gain) {
            best = n;
            best_gain = gain - d->price[n];
        }
    }
    return best;
}

/* tree_builder.worth_deepening: keeps those of the frontier below which nodes could pay. */
static void keep_worthy(const fr_draft *d, growth *g) {
    if (!d->price) return;
    int64_t end = d->prices - 1, last = best_count(d, g->scores, g->order, g->count < d->nodes ? g->count : d->nodes);
    if (last > end) last = end;
    double place = 1.0, together = 0.0, most = 0.0;
    for (int i = 0, found = 0; i < 5; i++) {
        int64_t n = last + AHEAD[i] < end ? last + AHEAD[i] : end;
        if (n <= last) continue;
        double each = (d->price[n] - d->price[last]) / (double)(n - last);
        if (!found++ || each < place) place = each;
    }
    for (int64_t i = 0; i < g->wide; i++) {
        double survival = exp(g->scores[g->frontier[i]]), gain = DEEPER * survival - place;
        together += gain > 0.0 ? gain : 0.0;
        if (survival > most) most = survival;
    }
    double least = place + ROW * d->level < most ? place + ROW * d->level : most;
    int64_t kept = 0;
    for (int64_t i = 0; i < g->wide && together > d->level; i++)
        if (exp(g->scores[g->frontier[i]]) >= least) g->frontier[kept++] = g->frontier[i];
    g->wide = kept;
}

/* The best of the last level, while more may pay. */
static void next_frontier(const fr_draft *d, growth *g, int64_t level) {
    g->wide = 0;
    if (level >= d->depth) return;
    for (int64_t i = 0; i < g->count && g->wide < d->frontier; i++)
        if (g->order[i] >= g->start) g->frontier[g->wide++] = g->order[i];
    keep_worthy(d, g);
}

static int by_place(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* The best of all candidates, within the budget and while they pay. */
static void cut(fr_draft *d, growth *g) {
    int32_t *kept = g->frontier, of_root = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < g->count; i++) g->depths[i] = 0; /* 0 = not taken */
    for (int64_t i = 0; i < g->count && count < d->nodes; i++) {
        int32_t at = g->order[i], parent = g->parents[at];
        if (parent >= 0 && !g->depths[parent]) continue;
        int32_t depth = parent < 0 ? 1 : g->depths[parent] + 1, *children = parent < 0 ? &of_root : &g->children[parent];
        if (depth > d->depth || *children >= d->width) continue;
        ++*children;
        g->depths[at] = depth;
        g->children[at] = 0;
        kept[count++] = at;
    }
    count = best_count(d, g->scores, kept, count);
    d->expected = 0.0;
    for (int64_t i = 0; i < count; i++) d->expected += exp(g->scores[kept[i]]);
    qsort(kept, (size_t)count, sizeof(int32_t), by_place);
    for (int64_t i = 0; i < count; i++) {
        int32_t at = kept[i], parent = g->parents[at];
        g->places[at] = (int32_t)i + 1;
        d->tree[i] = g->tokens[at];
        d->tree[d->nodes + i] = parent < 0 ? 0 : g->places[parent];
    }
    d->count = count;
}

FR_API int64_t fr_draft_layout(void) { return (int64_t)sizeof(fr_draft); }

/* 0 = done, 1 = out of memory. */
FR_API int fr_head_draft(const fr_head *h, const fr_head_pass *like, fr_draft *d) {
    growth g = {.wide = 1};
    double began = seconds();
    char *block = malloc((size_t)lay_out(h, d, &g, NULL) + 64);
    if (!block) return 1;
    lay_out(h, d, &g, block + 64 - (uintptr_t)block % 64);
    const float *out = d->fresh ? d->out + (d->fresh - 1) * h->width : d->out;
    int failed = d->fresh ? catch_up(h, d, like, &g) : 0;
    g.frontier[0] = -1;
    d->first = d->drafted = 0;
    for (d->levels = 1; !failed; d->levels++) {
        failed = rank_rows(h, d, &g, out);
        if (failed) break;
        if (d->levels == 1) d->first = seconds() - began;
        add_candidates(d, &g);
        next_frontier(d, &g, d->levels);
        if (!g.wide) break;
        failed = step(h, d, like, &g, d->levels, out);
        d->drafted += g.wide;
        out = g.outs[d->levels % 2];
    }
    if (!failed) cut(d, &g);
    d->further = seconds() - began - d->first;
    free(block);
    return failed;
}
