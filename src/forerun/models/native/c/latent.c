/* Multi-head latent attention: a token's cached row is a latent, normed, and one rotated key, both of all heads.
 *
 * The weight that makes keys of latents is applied to the queries, and the one that makes values to what attention finds:
 * heads read the cached rows themselves. Both differ by head, so rows are copied into segments, one for each head.
 */
#include "forerun.h"

static const float EPS = 1e-6f; /* of the norms within attention, whatever the model's is */

/* Where everything lies while a layer runs. */
typedef struct {
    float *shorts, *queries, *made;  /* [rows, query_rank], [rows, heads * (key_dim + rope_dim)], [rows, rank + rope_dim] */
    float *x, *y, *expanded;         /* [heads, apart, ..] rows by segment; [rows, heads * value_dim] */
    fr_segment *segments;            /* [heads] */
    void *quants;
} room;

typedef struct {
    const fr_decoder *m;
    const fr_pass *p;
    const fr_layer *layer;
    const room *r;
    const float *from;
    float *to;
    int64_t n, apart; /* rows that have queries; rows from a head's segment to the next one's */
} latent_job;

FR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FR_INLINE int64_t rows_apart(int64_t rows) { return (rows + FR_APART - 1) / FR_APART * FR_APART; }

/* Lay everything out from `memory` on, and return how many bytes that is. */
static size_t lay_out(const fr_latent *l, int64_t heads, int64_t rows, int64_t width, void *memory, room *r) {
    const int64_t most = heads * rows_apart(rows), wide = larger(l->key_dim, l->rank);
    struct {
        void **at;
        int64_t bytes;
    } parts[] = {
        {(void **)&r->shorts, rows * l->query_rank * 4},
        {(void **)&r->queries, rows * heads * (l->key_dim + l->rope_dim) * 4},
        {(void **)&r->made, rows * (l->rank + l->rope_dim) * 4},
        {(void **)&r->x, most * wide * 4}, {(void **)&r->y, most * larger(l->rank, l->value_dim) * 4},
        {(void **)&r->expanded, rows * heads * l->value_dim * 4},
        {(void **)&r->segments, heads * (int64_t)sizeof(fr_segment)},
        {&r->quants, (int64_t)larger((int64_t)fr_quants_bytes(most, wide), (int64_t)fr_quants_bytes(rows, larger(width, l->query_rank)))},
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = (void *)((uintptr_t)memory + used);
        used += (size_t)(parts[i].bytes + 63) / 64 * 64;
    }
    return used;
}

size_t fr_latent_bytes(const fr_latent *l, int64_t heads, int64_t rows, int64_t width) {
    room r;
    return lay_out(l, heads, rows, width, NULL, &r);
}

/* Cached rows, normed and rotated, into their slots; of queries, what rotates, and what is multiplied by head. */
static void place_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const latent_job *job = arg;
    const fr_layer *layer = job->layer;
    const fr_latent *l = layer->latent;
    const fr_pass *p = job->p;
    const int64_t row = l->rank + l->rope_dim, query = l->key_dim + l->rope_dim;
    const int32_t here = 0;
    for (int64_t i = begin; i < end; i++) {
        const int64_t turn = (layer->rotate - 1) * p->rope_stride + p->position[i] * job->m->rotary / 2;
        float *made = job->r->made + i * row, *q = job->r->queries + i * job->m->heads * query;
        fr_rms_norm(made, l->latent_norm, EPS, made, 1, l->rank);
        if (layer->rotate) fr_rope(made + l->rank, p->cosines + turn, p->sines + turn, &here, 1, 1, 0, l->rope_dim, layer->rotary);
        fr_write_head(p->keys, p->kind, layer->cache * p->layer_stride + p->write[i] * p->slot_stride, made, row);
        if (i >= job->n) continue;
        if (layer->rotate) fr_rope(q + l->key_dim, p->cosines + turn, p->sines + turn, &here, 1, job->m->heads, 0, query, layer->rotary);
        for (int64_t h = 0; h < job->m->heads; h++)
            memcpy(job->r->x + (h * job->apart + i) * l->key_dim, q + h * query, (size_t)l->key_dim * sizeof(float));
    }
}

/* [heads, apart, rank] and what rotates -> [n, heads, rank + rope_dim]. */
static void join_queries(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const latent_job *job = arg;
    const fr_latent *l = job->layer->latent;
    const int64_t heads = job->m->heads, query = l->key_dim + l->rope_dim;
    float *to = job->to + begin * heads * (l->rank + l->rope_dim);
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++, to += l->rank + l->rope_dim) {
            memcpy(to, job->r->y + (h * job->apart + i) * l->rank, (size_t)l->rank * sizeof(float));
            memcpy(to + l->rank, job->r->queries + (i * heads + h) * query + l->key_dim, (size_t)l->rope_dim * sizeof(float));
        }
}

/* [n, heads, rank] -> [heads, apart, rank]. */
static void part_heads(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const latent_job *job = arg;
    const int64_t heads = job->m->heads, rank = job->layer->latent->rank;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(job->r->x + (h * job->apart + i) * rank, job->from + (i * heads + h) * rank, (size_t)rank * sizeof(float));
}

/* [heads, apart, value_dim] -> [n, heads * value_dim]. */
static void join_values(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const latent_job *job = arg;
    const int64_t heads = job->m->heads, dim = job->layer->latent->value_dim;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(job->r->expanded + (i * heads + h) * dim, job->r->y + (h * job->apart + i) * dim, (size_t)dim * sizeof(float));
}

/* Each head's rows by its own weights. */
static void run_heads(const latent_job *job, const fr_weights *by_head) {
    for (int64_t h = 0; h < job->m->heads; h++) job->r->segments[h] = (fr_segment){by_head + h, h * job->apart, job->n, 0};
    fr_linear_segments(job->r->segments, job->m->heads, job->r->x, job->r->y, job->m->heads * job->apart, job->r->quants);
}

void fr_latent_project(const fr_decoder *m, const fr_pass *p, const fr_layer *layer, const float *rows, int64_t n, float *q,
                       void *scratch) {
    const fr_latent *l = layer->latent;
    room r;
    lay_out(l, m->heads, p->nodes, m->width, scratch, &r);
    fr_linear(&l->latents, rows, r.made, p->nodes, r.quants);
    if (n && l->query_rank) {
        fr_linear(&l->short_queries, rows, r.shorts, n, r.quants);
        fr_rms_norm(r.shorts, l->query_norm, EPS, r.shorts, n, l->query_rank);
    }
    if (n) fr_linear(&l->queries, l->query_rank ? r.shorts : rows, r.queries, n, r.quants);
    latent_job job = {m, p, layer, &r, NULL, q, n, rows_apart(n)};
    fr_parallel(place_rows, &job, p->nodes, fr_rows_at_once(m->heads * l->key_dim));
    if (!n) return;
    run_heads(&job, l->absorb);
    fr_parallel(join_queries, &job, n, fr_rows_at_once(m->heads * l->rank));
}

const float *fr_latent_expand(const fr_decoder *m, const fr_pass *p, const fr_layer *layer, const float *found, int64_t n,
                              void *scratch) {
    room r;
    lay_out(layer->latent, m->heads, p->nodes, m->width, scratch, &r);
    latent_job job = {m, p, layer, &r, found, NULL, n, rows_apart(n)};
    fr_parallel(part_heads, &job, n, fr_rows_at_once(m->heads * layer->latent->rank));
    run_heads(&job, layer->latent->expand);
    fr_parallel(join_values, &job, n, fr_rows_at_once(m->heads * layer->latent->rank));
    return r.expanded;
}
