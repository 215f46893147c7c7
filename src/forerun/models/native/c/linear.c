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

void fr_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch) {
    linear_job job = {.weights = w, .x = x, .y = y, .rows = rows};
    int64_t panels = 0, inputs = w->part[0].inputs, packed = 0, least = 1; /* panels worth a turn: 16 outputs */
    for (int64_t i = 0; i < w->count; i++) {
        panels += panels_of(&w->part[i]);
        job.stride += w->part[i].outputs;
        packed |= w->part[i].kind > FR_BF16;
        if (16 / fr_width(w->part[i].kind) > least) least = 16 / fr_width(w->part[i].kind);
    }
    if (packed) {
        fr_quants quants = fr_quantize_rows(x, rows, inputs, scratch);
        job.q = quants.groups, job.tiles = quants.tiles;
    }
    int64_t grain = panels / (fr_threads() * 4);
    fr_parallel(run_panels, &job, panels, grain < least ? least : grain > 32 * least ? 32 * least : grain);
}

/* One linear layer on its own, for families that run in torch. 0 = done, 1 = out of memory. */
FR_API int fr_linear_rows(const fr_weights *w, const float *x, float *y, int64_t rows) {
    void *scratch = malloc(fr_quants_bytes(rows, w->part[0].inputs));
    if (!scratch) return 1;
    fr_linear(w, x, y, rows, scratch);
    free(scratch);
    return 0;
}
