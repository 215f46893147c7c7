/* Mixture of experts: a router picks a few experts for each row, and each expert that is picked is read once.
 *
 * Rows are copied into segments, one for each expert that some row picked, so that an expert's weights multiply all of
 * its rows at once; all segments share the pool, panel by panel. Which experts a row picks, and in which order their
 * outputs are added up (by number), depends on that row alone, so its bits do not depend on the rows beside it.
 */
#include "forerun.h"

#include <math.h>

/* Where everything lies while a layer runs. */
typedef struct {
    float *logits, *weights;       /* [rows, count], [rows, per_token] */
    float *choice;                 /* [count + groups] of the row that picks now */
    int32_t *picked, *place;       /* [rows, per_token] experts in order; rows of the segments */
    fr_segment *into, *out;        /* [count] */
    float *x, *gate_up, *mlp, *y;  /* [room, ..] rows by segment */
    float *shared, *gates;         /* [rows, width], [rows] */
    void *quants;
} room;

FR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows of all segments, each of which begins at a multiple of FR_APART. */
static int64_t most_rows(const fr_experts *e, int64_t rows) {
    int64_t pairs = rows * e->per_token, segments = pairs < e->count ? pairs : e->count;
    return pairs + segments * (FR_APART - 1);
}

/* Lay everything out from `memory` on, and return how many bytes that is. */
static size_t lay_out(const fr_experts *e, int64_t rows, int64_t width, void *memory, room *r) {
    int64_t most = most_rows(e, rows), pairs = rows * e->per_token, shared = e->shared_inner;
    int64_t inner = larger(most * e->inner, rows * shared);
    struct {
        void **at;
        int64_t bytes;
    } parts[] = {
        {(void **)&r->logits, rows * e->count * 4},   {(void **)&r->weights, pairs * 4},
        {(void **)&r->choice, (e->count + e->groups) * 4},
        {(void **)&r->picked, pairs * 4},             {(void **)&r->place, pairs * 4},
        {(void **)&r->into, e->count * (int64_t)sizeof(fr_segment)},
        {(void **)&r->out, e->count * (int64_t)sizeof(fr_segment)},
        {(void **)&r->x, most * width * 4},           {(void **)&r->gate_up, 2 * inner * 4},
        {(void **)&r->mlp, inner * 4},                {(void **)&r->y, most * width * 4},
        {(void **)&r->shared, shared ? rows * width * 4 : 0}, {(void **)&r->gates, rows * 4},
        {&r->quants, (int64_t)fr_quants_bytes(most, larger(larger(width, e->inner), shared))},
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = (void *)((uintptr_t)memory + used);
        used += (size_t)(parts[i].bytes + 63) / 64 * 64;
    }
    return used;
}

size_t fr_experts_bytes(const fr_experts *e, int64_t rows, int64_t width) {
    room r;
    return lay_out(e, rows, width, NULL, &r);
}

/* The scores of one row's experts, in place; returns what they must be divided by. */
static float score(const fr_experts *e, float *laws) {
    float most = laws[0], total = 0.0f;
    for (int64_t i = 0; i < e->count && e->sigmoid; i++) laws[i] = 1.0f / (1.0f + expf(-laws[i]));
    if (e->sigmoid) return 1.0f;
    for (int64_t i = 1; i < e->count; i++)
        if (laws[i] > most) most = laws[i];
    for (int64_t i = 0; i < e->count; i++) total += laws[i] = expf(laws[i] - most);
    return total;
}

/* Takes the experts outside the best groups out of the choice; a group counts for its best score, or its best two. */
static void keep_groups(const fr_experts *e, float *choice, float *best) {
    int64_t size = e->count / e->groups;
    for (int64_t g = 0; g < e->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) second = first, first = choice[i];
            else if (choice[i] > second) second = choice[i];
        }
        best[g] = e->sigmoid ? first + second : first;
    }
    for (int64_t g = 0; g < e->groups; g++) {
        int64_t before = 0;
        for (int64_t other = 0; other < e->groups; other++)
            before += best[other] > best[g] || (best[other] == best[g] && other < g);
        for (int64_t i = g * size; i < (g + 1) * size && before >= e->kept_groups; i++) choice[i] = -INFINITY;
    }
}

/* The likeliest experts of one row, the first on a tie, in the order of their numbers; and their weights. */
static void pick(const fr_experts *e, float *laws, float *choice, int32_t *picked, float *weights) {
    int64_t k = e->per_token;
    float total = score(e, laws), kept = e->sigmoid ? 1e-20f : 0.0f;
    for (int64_t i = 0; i < e->count; i++) choice[i] = laws[i] + (e->correction ? e->correction[i] : 0.0f);
    if (e->groups > 1) keep_groups(e, choice, choice + e->count);
    for (int64_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < e->count; i++) {
            int taken = 0;
            for (int64_t t = 0; t < j; t++) taken |= picked[t] == i;
            if (!taken && (best < 0 || choice[i] > choice[best])) best = i;
        }
        int64_t t = j; /* keep them sorted */
        for (; t > 0 && picked[t - 1] > best; t--) picked[t] = picked[t - 1];
        picked[t] = (int32_t)best;
    }
    for (int64_t j = 0; j < k; j++) {
        weights[j] = laws[picked[j]] / total;
        kept += weights[j];
    }
    for (int64_t j = 0; j < k; j++) weights[j] = (e->renormalise ? weights[j] / kept : weights[j]) * e->scale;
    for (int64_t j = 0; e->scales && j < k; j++) weights[j] *= e->scales[picked[j]];
}

/* Segments of the experts that were picked, in order, and the place of every pick in them; returns how many. */
static int64_t sort_rows(const fr_experts *e, int64_t rows, room *r) {
    int64_t count = 0, first = 0;
    for (int64_t i = 0; i < e->count; i++) {
        int64_t own = 0;
        for (int64_t p = 0; p < rows * e->per_token; p++)
            if (r->picked[p] == i) r->place[p] = (int32_t)(first + own++);
        if (!own) continue;
        r->into[count] = (fr_segment){&e->gate_up[i], first, own, 0};
        r->out[count++] = (fr_segment){&e->down[i], first, own, 0};
        first += (own + FR_APART - 1) / FR_APART * FR_APART;
    }
    return count;
}

static void run_shared(const fr_experts *e, const float *x, int64_t rows, room *r) {
    fr_linear(&e->shared_gate_up, x, r->gate_up, rows, r->quants);
    fr_gate(r->gate_up, r->mlp, rows, e->shared_inner, (int)e->activation);
    fr_linear(&e->shared_down, r->mlp, r->shared, rows, r->quants);
    if (e->shared_gate.count) fr_linear(&e->shared_gate, x, r->gates, rows, r->quants);
    for (int64_t i = 0; i < rows; i++) r->gates[i] = e->shared_gate.count ? 1.0f / (1.0f + expf(-r->gates[i])) : 1.0f;
}

typedef struct {
    const fr_experts *e;
    const room *r;
    const float *x;
    float *delta;
    int64_t width;
} rows_job;

static void copy_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const rows_job *job = arg;
    int64_t k = job->e->per_token, width = job->width;
    for (int64_t p = begin * k; p < end * k; p++)
        memcpy(job->r->x + job->r->place[p] * width, job->x + p / k * width, (size_t)width * sizeof(float));
}

/* Limits a row's gates and ups so that the plain gate behind it gives gate sigmoid(alpha gate) (up + 1). What is not a
 * number stays so. */
static void limit_row(float *restrict gate, float *restrict up, int64_t width, float limit, float alpha) {
    for (int64_t i = 0; i < width; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i];
        gate[i] = alpha * g;
        up[i] = ((u < -limit ? -limit : u) + 1.0f) / alpha;
    }
}

static void gate_segments(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const rows_job *job = arg;
    int64_t k = job->e->per_token, inner = job->e->inner;
    fr_gate_row *row = fr_chosen_gate();
    for (int64_t p = begin * k; p < end * k; p++) {
        int64_t at = job->r->place[p];
        if (job->e->activation == FR_RELU2) {
            fr_square_row(job->r->gate_up + at * inner, job->r->mlp + at * inner, inner);
            continue;
        }
        float *gate = job->r->gate_up + 2 * at * inner;
        if (job->e->limit) limit_row(gate, gate + inner, inner, job->e->limit, job->e->alpha);
        row(gate, gate + inner, job->r->mlp + at * inner, inner, (int)job->e->activation);
    }
}

static void add_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const rows_job *job = arg;
    int64_t k = job->e->per_token, width = job->width;
    for (int64_t i = begin; i < end; i++) {
        float *out = job->delta + i * width;
        for (int64_t j = 0; j < k; j++) {
            const float *y = job->r->y + job->r->place[i * k + j] * width, weight = job->r->weights[i * k + j];
            if (j == 0)
                for (int64_t d = 0; d < width; d++) out[d] = weight * y[d];
            else
                for (int64_t d = 0; d < width; d++) out[d] += weight * y[d];
        }
        if (!job->e->shared_inner) continue;
        const float *shared = job->r->shared + i * width, gate = job->r->gates[i];
        for (int64_t d = 0; d < width; d++) out[d] += gate * shared[d];
    }
}

int64_t fr_run_experts(const fr_experts *e, const float *x, float *delta, int64_t rows, int64_t width, void *scratch) {
    room r;
    lay_out(e, rows, width, scratch, &r);
    if (e->shared_inner) run_shared(e, x, rows, &r); /* first: it uses the buffers of the segments */
    fr_linear(&e->router, x, r.logits, rows, r.quants);
    for (int64_t i = 0; i < rows; i++)
        pick(e, r.logits + i * e->count, r.choice, r.picked + i * e->per_token, r.weights + i * e->per_token);
    int64_t count = sort_rows(e, rows, &r), most = most_rows(e, rows);
    rows_job job = {e, &r, x, delta, width};
    fr_parallel(copy_rows, &job, rows, 4);
    fr_linear_segments(r.into, count, r.x, r.gate_up, most, r.quants);
    fr_parallel(gate_segments, &job, rows, 2);
    fr_linear_segments(r.out, count, r.mlp, r.y, most, r.quants);
    fr_parallel(add_rows, &job, rows, 4);
    return count;
}
