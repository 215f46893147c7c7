/* A whole pass of a Llama-shaped decoder over the nodes of a round, in one call.
 *
 * norm, q/k/v, (norms of q and k), rotary positions, keys and values into their slots, attention, output, norm, SwiGLU
 * or experts (experts.c), and the head at the end. Families with other parts run in torch.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { BUFFERS = 9, FR_ABI = 15 };

typedef struct {
    float *x, *normed, *qkv, *attended, *gate_up, *mlp, *delta, *scores;
    void *quants, *experts;
    int32_t *tiles;
    int64_t tile_count;
} buffers;

static void head_norms(const fr_decoder *m, const float *weight, float *x, int64_t rows, int64_t heads, int64_t stride) {
    if (!weight) return;
    for (int64_t r = 0; r < rows; r++)
        fr_rms_norm(x + r * stride, weight, m->eps, x + r * stride, heads, m->head_dim);
}

/* Number `at` of a cache. */
static void *cache_at(void *cache, int64_t half, int64_t at) { return (char *)cache + at * (half ? 2 : 4); }

static void write_row(void *cache, int64_t half, int64_t at, const float *from, int64_t dim) {
    if (half) fr_to_halves(from, cache_at(cache, half, at), dim);
    else memcpy(cache_at(cache, half, at), from, (size_t)dim * sizeof(float));
}

static void write_cache(const fr_decoder *m, const fr_pass *p, int64_t layer, const float *qkv, int64_t stride) {
    for (int64_t r = 0; r < p->nodes; r++)
        for (int64_t h = 0; h < m->kv_heads; h++) {
            int64_t at = layer * p->layer_stride + h * p->head_stride + (int64_t)p->write[r] * m->head_dim;
            const float *k = qkv + r * stride + (m->heads + h) * m->head_dim;
            write_row(p->keys, p->half, at, k, m->head_dim);
            write_row(p->values, p->half, at, k + m->kv_heads * m->head_dim, m->head_dim);
        }
}

static void attend_layer(const fr_decoder *m, const fr_pass *p, int64_t i, const buffers *b) {
    const fr_layer *layer = m->layer + i;
    int64_t n = p->nodes, stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    fr_rms_norm(b->x, layer->attention_norm, m->eps, b->normed, n, m->width);
    fr_linear(&layer->qkv, b->normed, b->qkv, n, b->quants);
    float *k = b->qkv + m->heads * m->head_dim;
    head_norms(m, layer->q_norm, b->qkv, n, m->heads, stride);
    head_norms(m, layer->k_norm, k, n, m->kv_heads, stride);
    if (layer->rotate)
        fr_rope(b->qkv, p->cosines, p->sines, p->position, n, m->heads + m->kv_heads, stride, m->head_dim, m->rotary);
    write_cache(m, p, i, b->qkv, stride);
    fr_attention_args attention = {
        .reach = p->reach, .q = b->qkv, .out = b->attended, .scratch = b->scores,
        .keys = cache_at(p->keys, p->half, i * p->layer_stride), .values = cache_at(p->values, p->half, i * p->layer_stride),
        .half = p->half,
        .tiles = b->tiles, .tile_count = b->tile_count, .heads = m->heads, .kv_heads = m->kv_heads, .head_dim = m->head_dim,
        .q_stride = stride, .head_stride = p->head_stride, .window = layer->window, .scale = m->attention_scale,
    };
    fr_attention(&attention);
    fr_linear(&layer->output, b->attended, b->delta, n, b->quants);
    fr_add(b->x, b->delta, n * m->width);
}

/* A layer without a norm for its attention, or for its MLP, leaves that part out: see fr_skips_sublayers. */
static void run_layer(const fr_decoder *m, const fr_pass *p, int64_t i, const buffers *b) {
    const fr_layer *layer = m->layer + i;
    int64_t n = p->nodes;
    if (layer->attention_norm) attend_layer(m, p, i, b);
    if (!layer->mlp_norm) return;
    fr_rms_norm(b->x, layer->mlp_norm, m->eps, b->normed, n, m->width);
    if (layer->experts) {
        int64_t woken = fr_run_experts(layer->experts, b->normed, b->delta, n, m->width, b->experts);
        if (p->woken) p->woken[i] = (int32_t)woken;
    } else {
        fr_linear(&layer->gate_up, b->normed, b->gate_up, n, b->quants);
        fr_swiglu(b->gate_up, b->mlp, n, m->inner);
        fr_linear(&layer->down, b->mlp, b->delta, n, b->quants);
    }
    fr_add(b->x, b->delta, n * m->width);
}

static void *take_buffers(const fr_decoder *m, const fr_pass *p, buffers *b) {
    int64_t n = p->nodes, attended = m->heads * m->head_dim;
    int64_t widest = m->inner > m->width ? m->inner : m->width;
    if (attended > widest) widest = attended;
    int64_t floats[BUFFERS] = {p->x ? 0 : n * m->width, n * m->width, n * (attended + 2 * m->kv_heads * m->head_dim), n * attended,
                               2 * n * m->inner, n * m->inner, n * m->width,
                               FR_MAX_THREADS * FR_TOGETHER * (p->reach.most + FR_ROOM),
                               2 * n * m->heads / m->kv_heads};
    void **at[BUFFERS] = {(void **)&b->x, (void **)&b->normed, (void **)&b->qkv, (void **)&b->attended, (void **)&b->gate_up,
                          (void **)&b->mlp, (void **)&b->delta, (void **)&b->scores, (void **)&b->tiles};
    size_t quants = (fr_quants_bytes(n, widest) + 63) / 64 * 64, bytes = quants, experts = 0;
    for (int64_t i = 0; i < m->layers; i++)
        if (m->layer[i].experts) {
            size_t more = fr_experts_bytes(m->layer[i].experts, n, m->width);
            if (more > experts) experts = more;
        }
    bytes += experts;
    for (int i = 0; i < BUFFERS; i++) bytes += (size_t)(floats[i] + 15) / 16 * 64;
    char *block = malloc(bytes + 64), *next = block;
    if (!block) return NULL;
    next += 64 - (uintptr_t)block % 64;
    for (int i = 0; i < BUFFERS; i++) {
        *at[i] = next;
        next += (floats[i] + 15) / 16 * 64;
    }
    if (p->x) b->x = p->x;
    b->quants = next;
    b->experts = next + quants;
    return block;
}

/* The rows that enter a layer, for the caller, and where they are kept beside keys and values. */
static void show_rows(const fr_decoder *m, const fr_pass *p, int64_t j, const float *x) {
    size_t bytes = (size_t)m->width * sizeof(float);
    memcpy(p->hidden[j], x, (size_t)p->nodes * bytes);
    if (!p->kept) return;
    for (int64_t r = 0; r < p->nodes; r++) memcpy(p->kept[j] + p->write[r] * m->width, x + r * m->width, bytes);
}

/* Changes with everything the caller must agree on: a library left over from another version is told apart. */
FR_API int64_t fr_layout(void) {
    return FR_ABI * 1000000000ll + (int64_t)sizeof(fr_decoder) * 1000000 + (int64_t)sizeof(fr_layer) * 1000 +
           (int64_t)sizeof(fr_pass);
}

/* Libraries without this function run every part of every layer. */
FR_API int fr_skips_sublayers(void) { return 1; }

/* 0 = done, 1 = out of memory. */
FR_API int fr_decode(const fr_decoder *m, const fr_pass *p) {
    buffers b;
    void *block = take_buffers(m, p, &b);
    if (!block) return 1;
    if (p->tokens) fr_embed(&m->embedding, m->width, p->tokens, p->nodes, b.x);
    b.tile_count = fr_attention_tiles(&p->reach, p->nodes, m->heads / m->kv_heads, m->kv_heads, b.tiles);
    for (int64_t i = 0; i < m->layers; i++) {
        for (int64_t j = 0; j < p->hidden_count; j++)
            if (p->hidden_layers[j] == i) show_rows(m, p, j, b.x);
        run_layer(m, p, i, &b);
    }
    if (p->normed || p->logits) {
        float *normed = p->normed ? p->normed : b.normed;
        fr_rms_norm(b.x, m->final_norm, m->eps, normed, p->nodes, m->width);
        if (p->logits && p->tops) fr_linear_tops(&m->head, normed, p->logits, p->scored, b.quants, p->tops);
        else if (p->logits) fr_linear(&m->head, normed, p->logits, p->scored, b.quants);
    }
    free(block);
    return 0;
}
