/* LoRA adapters: low-rank changes of linear layers, added row by row, each row by the adapter of its own sequence.
 *
 * y += up (down x). Both matrices are laid out so that the inner loop runs over what is written: every number is summed
 * in one order, whatever rows are beside it and however many threads there are.
 */
#include "forerun.h"

typedef struct {
    const fr_adapter_layer *const *of; /* [rows] */
    int64_t layer, which, inputs, outputs, stride;
    const float *x;
    float *y;
} adapt_job;

static void adapt_row(const fr_change *change, const float *restrict x, int64_t inputs, float *restrict y, int64_t outputs) {
    float middle[FR_MOST_RANK] = {0};
    const int64_t rank = change->rank;
    for (int64_t i = 0; i < inputs; i++) {
        const float *restrict row = change->down + i * rank;
        for (int64_t k = 0; k < rank; k++) middle[k] += x[i] * row[k];
    }
    for (int64_t k = 0; k < rank; k++) {
        const float *restrict row = change->up + k * outputs;
        for (int64_t j = 0; j < outputs; j++) y[j] += middle[k] * row[j];
    }
}

static void adapt_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const adapt_job *job = arg;
    for (int64_t r = begin; r < end; r++) {
        if (!job->of[r]) continue;
        const fr_change *change = job->of[r][job->layer].changes + job->which;
        if (change->rank) adapt_row(change, job->x + r * job->inputs, job->inputs, job->y + r * job->stride, job->outputs);
    }
}

void fr_adapt(const fr_adapter_layer *const *of, int64_t layer, int64_t which, const float *x, int64_t inputs, float *y,
              int64_t stride, int64_t outputs, int64_t rows) {
    if (!of) return;
    adapt_job job = {of, layer, which, inputs, outputs, stride, x, y};
    fr_parallel(adapt_rows, &job, rows, 1);
}
