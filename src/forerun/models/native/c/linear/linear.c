/* Linear layers: the panels of all weights of a projection over the pool. */
#include "forerun.h"

#include <stdlib.h>

typedef struct {
    const fr_weights *weights;
    const float *x;
    const fr_group *q;
    const fr_tile *tiles;
    float *y;
    int64_t rows, stride;
    fr_best *bests; /* [threads, rows] or NULL */
} linear_job;

FR_INLINE int64_t panels_of(const fr_weight *w) { return (w->outputs + fr_width(w->kind) - 1) / fr_width(w->kind); }

/* Panels are numbered through all parts; a range may span several. */
static void run_panels(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const linear_job *job = arg;
    float *y = job->y;
    for (int64_t i = 0; i < job->weights->count && end > 0; i++) {
        const fr_weight *w = &job->weights->part[i];
        int64_t panels = panels_of(w), last = end < panels ? end : panels;
        if (begin < last) {
            fr_range range = {w, job->x, job->q, job->tiles, y, job->rows, job->stride, begin, last};
            if (w->kind <= FR_BF16) fr_plain(&range);
            else fr_packed_kernel(w->kind)(&range);
        }
        begin = begin > panels ? begin - panels : 0;
        end -= panels;
        y += w->outputs;
    }
}

/* Panels of one weight, some at a time, and the largest of what they gave. */
static void run_panels_and_look(void *arg, int64_t begin, int64_t end, int worker) {
    enum { LOOK = 32 };
    const linear_job *job = arg;
    const fr_weight *w = job->weights->part;
    for (int64_t p = begin, to; p < end; p = to) {
        to = p + LOOK < end ? p + LOOK : end;
        run_panels(arg, p, to, worker);
        int64_t first = p * fr_width(w->kind), last = to * fr_width(w->kind);
        if (last > w->outputs) last = w->outputs;
        for (int64_t r = 0; r < job->rows; r++)
            fr_note_best(job->y + r * job->stride + first, last - first, first, job->bests + worker * job->rows + r);
    }
}

static void run_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch, fr_best *bests) {
    linear_job job = {.weights = w, .x = x, .y = y, .rows = rows, .bests = bests};
    int64_t panels = 0, inputs = w->part[0].inputs, least = 1; /* panels worth a turn: 16 outputs */
    int packed = 0, groups = 0;
    for (int64_t i = 0; i < w->count; i++) {
        panels += panels_of(&w->part[i]);
        job.stride += w->part[i].outputs;
        packed |= w->part[i].kind > FR_BF16;
        groups |= w->part[i].kind > FR_BF16 && !fr_reads_tiles(w->part[i].kind, rows);
        if (16 / fr_width(w->part[i].kind) > least) least = 16 / fr_width(w->part[i].kind);
    }
    if (packed) {
        fr_quants quants = fr_quantize_rows(x, rows, inputs, scratch, groups);
        job.q = quants.groups, job.tiles = quants.tiles;
    }
    int64_t grain = panels / (fr_threads() * 4);
    grain = grain < least ? least : grain > 32 * least ? 32 * least : grain;
    fr_parallel(bests ? run_panels_and_look : run_panels, &job, panels, grain);
}

void fr_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch) {
    run_linear(w, x, y, rows, scratch, NULL);
}

void fr_linear_tops(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch, int32_t *tops) {
    int64_t threads = fr_threads();
    fr_best *bests = w->count == 1 ? malloc((size_t)(threads * rows) * sizeof(fr_best)) : NULL;
    for (int64_t i = 0; bests && i < threads * rows; i++) bests[i] = (fr_best)FR_NO_BEST;
    run_linear(w, x, y, rows, scratch, bests);
    for (int64_t r = 0; bests && r < rows; r++) tops[r] = fr_best_of(bests + r, threads, rows);
    if (!bests) {
        int64_t outputs = 0;
        for (int64_t i = 0; i < w->count; i++) outputs += w->part[i].outputs;
        fr_argmax_rows(y, rows, outputs, tops);
    }
    free(bests);
}

typedef struct {
    const fr_segment *segments;
    int64_t count, inputs, stride;
    const float *x;
    float *y;
    fr_quants quants;
    fr_quantize_range quantize; /* NULL where no weight is packed */
} segments_job;

static void quantize_segments(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const segments_job *job = arg;
    for (const fr_segment *s = job->segments + begin; s < job->segments + end; s++)
        job->quantize(&job->quants, job->x, s->first, s->first + s->rows, 0, job->quants.blocks);
}

/* Panels are numbered through all segments; a range may span several. */
static void run_segments(void *arg, int64_t begin, int64_t end, int worker) {
    const segments_job *job = arg;
    int64_t low = 0, high = job->count, blocks = job->inputs / FR_BLOCK;
    while (high - low > 1) { /* the last segment that begins no later */
        int64_t middle = (low + high) / 2;
        if (job->segments[middle].before <= begin) low = middle;
        else high = middle;
    }
    for (int64_t i = low; i < job->count && job->segments[i].before < end; i++) {
        const fr_segment *s = job->segments + i;
        linear_job one = {.weights = s->w, .x = job->x + s->first * job->inputs, .y = job->y + s->first * job->stride,
                          .rows = s->rows, .stride = job->stride};
        if (job->quantize) one.q = job->quants.groups + s->first / FR_GROUP * blocks;
        if (job->quants.tiles && fr_uses_tiles(s->rows)) one.tiles = job->quants.tiles + s->first / FR_TILE_ROWS * blocks;
        run_panels(&one, begin > s->before ? begin - s->before : 0, end - s->before, worker);
    }
}

void fr_linear_segments(fr_segment *segments, int64_t count, const float *x, float *y, int64_t room, void *scratch) {
    const fr_weights *first = segments->w;
    segments_job job = {.segments = segments, .count = count, .inputs = first->part[0].inputs, .x = x, .y = y};
    int64_t panels = 0, longest = 0;
    for (int64_t i = 0; i < first->count; i++) {
        job.stride += first->part[i].outputs;
        if (first->part[i].kind > FR_BF16) job.quantize = fr_chosen_quantize();
    }
    for (int64_t i = 0; i < count; i++) {
        segments[i].before = panels;
        if (segments[i].rows > longest) longest = segments[i].rows;
        for (int64_t j = 0; j < segments[i].w->count; j++) panels += panels_of(&segments[i].w->part[j]);
    }
    if (job.quantize) {
        job.quants = fr_quants_in(scratch, room, job.inputs);
        if (!fr_uses_tiles(longest)) job.quants.tiles = NULL;
        fr_parallel(quantize_segments, &job, count, 1);
    }
    int64_t grain = panels / (fr_threads() * 4), least = 16 / fr_width(first->part[0].kind);
    if (least < 1) least = 1;
    fr_parallel(run_segments, &job, panels, grain < least ? least : grain > 32 * least ? 32 * least : grain);
}

/* One linear layer on its own, for families that run in torch. 0 = done, 1 = out of memory. */
FR_API int fr_linear_rows(const fr_weights *w, const float *x, float *y, int64_t rows) {
    void *scratch = malloc(fr_quants_bytes(rows, w->part[0].inputs));
    if (!scratch) return 1;
    fr_linear(w, x, y, rows, scratch);
    free(scratch);
    return 0;
}
