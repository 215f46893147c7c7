/* One level of an EAGLE head in two calls: its layers over some rows, and the likeliest tokens after some outputs.
 *
 * A true row carries the target's features, a drafted one the output of the row before it. EAGLE-1 puts token and
 * feature side by side through `fc`; EAGLE-3 fuses the features of three layers with it and norms both instead. Layers
 * behind the first are ordinary ones.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    float *embedded, *features, *carried, *into, *qkv, *attended, *normed, *gate_up, *mlp, *delta, *scores;
    int32_t *tiles;
    void *quants;
} buffers;

enum { BUFFERS = 12 };

static int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void *take_buffers(const fr_head *h, const fr_head_pass *p, buffers *b) {
    int64_t n = p->rows, attended = h->heads * h->head_dim;
    int64_t widest = most_of(most_of(h->features, 2 * h->width), most_of(h->inner, attended));
    int64_t floats[BUFFERS] = {n * h->width,
                               p->features ? n * h->features : 0,
                               n * h->width,
                               2 * n * h->width,
                               n * (attended + 2 * h->kv_heads * h->head_dim),
                               n * attended,
                               n * h->width,
                               2 * n * h->inner,
                               n * h->inner,
                               n * h->width,
                               FR_MAX_THREADS * FR_TOGETHER * (p->reach.most + FR_ROOM),
                               2 * n * h->heads / h->kv_heads};
    void **at[BUFFERS] = {(void **)&b->embedded, (void **)&b->features, (void **)&b->carried, (void **)&b->into,
                          (void **)&b->qkv,      (void **)&b->attended, (void **)&b->normed,  (void **)&b->gate_up,
                          (void **)&b->mlp,      (void **)&b->delta,    (void **)&b->scores,  (void **)&b->tiles};
    size_t bytes = fr_quants_bytes(n, widest);
    for (int i = 0; i < BUFFERS; i++) bytes += (size_t)(floats[i] + 15) / 16 * 64;
    char *block = malloc(bytes + 64), *next = block;
    if (!block) return NULL;
    next += 64 - (uintptr_t)block % 64;
    for (int i = 0; i < BUFFERS; i++) {
        *at[i] = next;
        next += (floats[i] + 15) / 16 * 64;
    }
    b->quants = next;
    return block;
}

static void copy_rows(const float *from, float *to, int64_t count) { memcpy(to, from, (size_t)count * sizeof(float)); }

/* The target's features as a row carries them. */
static const float *fuse(const fr_head *h, const fr_head_pass *p, const buffers *b) {
    int64_t part = h->features / h->parts;
    float *features = b->features;
    for (int64_t r = 0; r < p->rows * h->parts; r++) copy_rows(p->features[r], features + r * part, part);
    if (h->joins_token) return features;
    if (h->input_norm) fr_rms_norm(features, h->input_norm, h->eps, features, p->rows, h->features);
    for (int64_t r = 0; h->part_norms && r < p->rows * h->parts; r++)
        fr_rms_norm(features + r * part, h->part_norms + r % h->parts * part, h->eps, features + r * part, 1, part);
    fr_linear(&h->fc, features, b->carried, p->rows, b->quants);
    return b->carried;
}

/* What a row carries after the row before it. */
static const float *carry(const fr_head *h, const fr_head_pass *p, const buffers *b) {
    for (int64_t r = 0; r < p->rows; r++) {
        const float *before = p->before + (int64_t)p->parents[r] * h->width;
        if (h->norm_output && h->out_norm) fr_rms_norm(before, h->out_norm, h->eps, b->carried + r * h->width, 1, h->width);
        else copy_rows(before, b->carried + r * h->width, h->width);
    }
    return b->carried;
}

/* What the first layer reads, and into p->out the residual stream. */
static const float *enter(const fr_head *h, const fr_head_pass *p, const buffers *b, const float *carried) {
    int64_t n = p->rows, d = h->width;
    if (!p->embedded) fr_embed(&h->embedding, d, p->tokens, n, b->embedded);
    const float *tokens = p->embedded ? p->embedded : b->embedded;
    for (int64_t r = 0; r < n; r++) {
        const float *token = tokens + r * d, *feature = carried + r * d;
        float *into = b->into + 2 * r * d;
        if (h->joins_token) {
            copy_rows(token, into, d);
            copy_rows(feature, into + d, d);
        } else {
            fr_rms_norm(token, h->token_norm, h->eps, into, 1, d);
            fr_rms_norm(feature, h->feature_norm, h->eps, into + d, 1, d);
            copy_rows(h->norm_before_residual ? into + d : feature, p->out + r * d, d);
        }
    }
    if (!h->joins_token) return b->into;
    fr_linear(&h->fc, b->into, p->out, n, b->quants);
    return p->out;
}

/* Rotations of keys, and they and the values into their slots. */
static void write_cache(const fr_head *h, const fr_head_pass *p, const fr_projected *made, int64_t layer) {
    float *keys = p->keys + layer * p->layer_stride, *values = p->values + layer * p->layer_stride;
    size_t bytes = (size_t)h->head_dim * sizeof(float);
    fr_rope(made->k, p->cosines, p->sines, p->position, p->rows, h->kv_heads, made->k_stride, h->head_dim, h->head_dim);
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t g = 0; g < h->kv_heads; g++) {
            int64_t at = g * p->head_stride + (int64_t)p->write[r] * h->head_dim;
            const float *k = made->k + r * made->k_stride + g * h->head_dim;
            memcpy(keys + at, k, bytes);
            memcpy(values + at, k + h->kv_heads * h->head_dim, bytes);
        }
}

/* Attention of the rows from `first` on. */
static void attend(const fr_head *h, const fr_head_pass *p, const buffers *b, const fr_projected *made, int64_t layer,
                   int64_t first) {
    int64_t n = p->rows - first;
    fr_reach reach = p->reach;
    reach.first += first, reach.context += first, reach.tail += first, reach.tails += first * reach.tail_stride;
    fr_rope(made->q, p->cosines, p->sines, p->position + first, n, h->heads, made->q_stride, h->head_dim, h->head_dim);
    fr_attention_args args = {
        .reach = reach, .q = made->q, .out = b->attended, .scratch = b->scores,
        .keys = p->keys + layer * p->layer_stride, .values = p->values + layer * p->layer_stride,
        .tiles = b->tiles, .tile_count = fr_attention_tiles(&reach, n, h->heads / h->kv_heads, h->kv_heads, b->tiles),
        .heads = h->heads, .kv_heads = h->kv_heads, .head_dim = h->head_dim, .q_stride = made->q_stride,
        .head_stride = p->head_stride, .window = h->layers[layer].window, .scale = h->attention_scale,
    };
    fr_attention(&args);
}

/* Changes with everything the caller must agree on. */
FR_API int64_t fr_head_layout(void) {
    return (int64_t)sizeof(fr_head_layer) * 1000000000 + (int64_t)sizeof(fr_head) * 1000000 +
           (int64_t)sizeof(fr_head_pass) * 1000 + (int64_t)sizeof(fr_top);
}

/* A layer that reads `into` and adds to the residual stream in p->out; the last one only where its output is wanted. */
static void run_layer(const fr_head *h, const fr_head_pass *p, const buffers *b, int64_t layer, const float *into) {
    const fr_head_layer *l = h->layers + layer;
    int64_t first = layer + 1 < h->depth ? 0 : p->keys_only, n = p->rows - first;
    float *x = p->out + first * h->width;
    fr_projected made = fr_project(&l->qkv, h->heads * h->head_dim, into, p->rows, first, n, b->qkv, b->quants);
    write_cache(h, p, &made, layer);
    if (!n) return;
    attend(h, p, b, &made, layer, first);
    fr_linear(&l->output, b->attended, b->delta, n, b->quants);
    fr_add_norm(x, (fr_added){b->delta, NULL, 1.0f}, l->mlp_norm, h->eps, b->normed, n, h->width);
    fr_linear(&l->gate_up, b->normed, b->gate_up, n, b->quants);
    fr_gate(b->gate_up, b->mlp, n, h->inner, FR_SILU);
    fr_linear(&l->down, b->mlp, b->delta, n, b->quants);
    fr_add_norm(x, (fr_added){b->delta, NULL, 1.0f}, NULL, 0.0f, NULL, n, h->width);
}

/* All layers over some rows. 0 = done, 1 = out of memory. */
FR_API int fr_head_run(const fr_head *h, const fr_head_pass *p) {
    buffers b;
    void *block = take_buffers(h, p, &b);
    if (!block) return 1;
    run_layer(h, p, &b, 0, enter(h, p, &b, p->features ? fuse(h, p, &b) : carry(h, p, &b)));
    for (int64_t layer = 1; layer < h->depth; layer++) {
        fr_add_norm(p->out, (fr_added){0}, h->layers[layer].input_norm, h->eps, b.normed, p->rows, h->width);
        run_layer(h, p, &b, layer, b.normed);
    }
    free(block);
    return 0;
}

/* Logits after rows with the outputs given, into top->x, and the best of them. 0 = done, 1 = out of memory. */
FR_API int fr_head_rank(const fr_head *h, const float *out, float *logits, const fr_top *top) {
    int64_t n = top->rows;
    size_t normed = ((size_t)(n * h->width) * sizeof(float) + 63) / 64 * 64;
    char *block = malloc(normed + fr_quants_bytes(n, h->width));
    if (!block) return 1;
    const float *rows = out;
    if (h->out_norm) {
        fr_rms_norm(out, h->out_norm, h->eps, (float *)block, n, h->width);
        rows = (float *)block;
    }
    fr_linear(&h->lm_head, rows, logits, n, block + normed);
    free(block);
    return fr_top_rows(top);
}
