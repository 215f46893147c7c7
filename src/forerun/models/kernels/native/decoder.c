/* A whole pass of a Llama-shaped decoder over the nodes of a round: one call, no allocation by the caller's side.
 *
 * norm, q/k/v, (norms of q and k), rotary positions, keys and values into their slots, attention, output, norm, SwiGLU,
 * and the head at the end. Families with other parts run in torch.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const float *attention_norm, *mlp_norm; /* [width] */
    const float *q_norm, *k_norm;           /* [head_dim] or NULL */
    fr_weight qkv, output, gate_up, down;
    int64_t window;
    int64_t rotate; /* 0: this layer has no positions */
} fr_layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_dim, rotary, mlp_width, vocab;
    float eps, attention_scale;
    const fr_layer *layer;
    const float *final_norm;
    fr_weight head;
} fr_decoder;

typedef struct {
    int64_t nodes;
    float *x;                     /* [nodes, width] embedded tokens in, residual stream out */
    const float *cosines, *sines; /* [nodes, rotary / 2] */
    const int32_t *write;         /* [nodes] slot that takes the node's key and value */
    const int32_t *slots, *seen;  /* [nodes, slot_stride], [nodes]: the node's own slot is its last */
    int64_t slot_stride;
    float *keys, *values; /* [layers, kv_heads, all slots, head_dim] */
    int64_t layer_stride, head_stride;
    const int64_t *hidden_layers; /* layers whose input is wanted */
    float *hidden;                /* [wanted, nodes, width] */
    int64_t hidden_count;
    float *normed; /* [nodes, width] after the last norm, or NULL */
    float *logits; /* [nodes, vocab] or NULL */
} fr_pass;

typedef struct {
    float *normed, *qkv, *attended, *gate_up, *mlp, *delta, *scores;
    void *quants;
} buffers;

static void project(const fr_weight *w, const float *x, float *y, int64_t rows, void *scratch) {
    fr_quants q = {0};
    if (w->kind > FR_BF16) {
        q = fr_quants_at(scratch, rows, w->inputs);
        fr_quantize_rows(x, rows, w->inputs, q);
    }
    fr_linear(w, x, q, y, rows);
}

static void add(float *x, const float *delta, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += delta[i];
}

static void head_norms(const fr_decoder *m, const float *weight, float *x, int64_t rows, int64_t heads, int64_t stride) {
    if (!weight) return;
    for (int64_t r = 0; r < rows; r++)
        fr_rms_norm(x + r * stride, weight, m->eps, x + r * stride, heads, m->head_dim);
}

static void write_cache(const fr_decoder *m, const fr_pass *p, int64_t layer, const float *qkv, int64_t stride) {
    float *keys = p->keys + layer * p->layer_stride, *values = p->values + layer * p->layer_stride;
    size_t bytes = (size_t)m->head_dim * sizeof(float);
    for (int64_t r = 0; r < p->nodes; r++)
        for (int64_t h = 0; h < m->kv_heads; h++) {
            int64_t at = h * p->head_stride + (int64_t)p->write[r] * m->head_dim;
            const float *k = qkv + r * stride + (m->heads + h) * m->head_dim;
            memcpy(keys + at, k, bytes);
            memcpy(values + at, k + m->kv_heads * m->head_dim, bytes);
        }
}

static void run_layer(const fr_decoder *m, const fr_pass *p, int64_t i, buffers *b) {
    const fr_layer *layer = m->layer + i;
    int64_t n = p->nodes, stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    fr_rms_norm(p->x, layer->attention_norm, m->eps, b->normed, n, m->width);
    project(&layer->qkv, b->normed, b->qkv, n, b->quants);
    float *k = b->qkv + m->heads * m->head_dim;
    head_norms(m, layer->q_norm, b->qkv, n, m->heads, stride);
    head_norms(m, layer->k_norm, k, n, m->kv_heads, stride);
    if (layer->rotate)
        fr_rope(b->qkv, p->cosines, p->sines, n, m->heads + m->kv_heads, stride, m->head_dim, m->rotary);
    write_cache(m, p, i, b->qkv, stride);
    fr_attention_args attention = {
        .q = b->qkv, .out = b->attended, .scratch = b->scores,
        .keys = p->keys + i * p->layer_stride, .values = p->values + i * p->layer_stride,
        .slots = p->slots, .seen = p->seen, .slot_stride = p->slot_stride,
        .nodes = n, .heads = m->heads, .kv_heads = m->kv_heads, .head_dim = m->head_dim,
        .q_stride = stride, .head_stride = p->head_stride, .window = layer->window, .scale = m->attention_scale,
    };
    fr_attention(&attention);
    project(&layer->output, b->attended, b->delta, n, b->quants);
    add(p->x, b->delta, n * m->width);
    fr_rms_norm(p->x, layer->mlp_norm, m->eps, b->normed, n, m->width);
    project(&layer->gate_up, b->normed, b->gate_up, n, b->quants);
    fr_swiglu(b->gate_up, b->mlp, n, m->mlp_width);
    project(&layer->down, b->mlp, b->delta, n, b->quants);
    add(p->x, b->delta, n * m->width);
}

static int take_buffers(const fr_decoder *m, const fr_pass *p, buffers *b, void **block) {
    int64_t n = p->nodes, attended = m->heads * m->head_dim;
    int64_t widest = m->mlp_width > m->width ? m->mlp_width : m->width;
    if (attended > widest) widest = attended;
    int64_t floats[] = {n * m->width, n * (attended + 2 * m->kv_heads * m->head_dim), n * attended,
                        2 * n * m->mlp_width, n * m->mlp_width, n * m->width, n * m->heads * p->slot_stride};
    float **at[] = {&b->normed, &b->qkv, &b->attended, &b->gate_up, &b->mlp, &b->delta, &b->scores};
    size_t bytes = fr_quants_bytes(n, widest);
    for (int i = 0; i < 7; i++) bytes += (size_t)floats[i] * sizeof(float);
    if (!(*block = malloc(bytes))) return 0;
    float *next = *block;
    for (int i = 0; i < 7; i++) {
        *at[i] = next;
        next += floats[i];
    }
    b->quants = next;
    return 1;
}

/* 0 = done, 1 = out of memory. */
FR_API int fr_decode(const fr_decoder *m, const fr_pass *p) {
    buffers b;
    void *block;
    if (!take_buffers(m, p, &b, &block)) return 1;
    size_t row = (size_t)(p->nodes * m->width) * sizeof(float);
    for (int64_t i = 0; i < m->layers; i++) {
        for (int64_t j = 0; j < p->hidden_count; j++)
            if (p->hidden_layers[j] == i) memcpy(p->hidden + j * p->nodes * m->width, p->x, row);
        run_layer(m, p, i, &b);
    }
    if (p->normed || p->logits) {
        float *normed = p->normed ? p->normed : b.normed;
        fr_rms_norm(p->x, m->final_norm, m->eps, normed, p->nodes, m->width);
        if (p->logits) project(&m->head, normed, p->logits, p->nodes, b.quants);
    }
    free(block);
    return 0;
}

/* One linear layer on its own, for families that run in torch. 0 = done, 1 = out of memory. */
FR_API int fr_linear_rows(const fr_weight *w, const float *x, float *y, int64_t rows) {
    void *scratch = w->kind > FR_BF16 ? malloc(fr_quants_bytes(rows, w->inputs)) : NULL;
    if (w->kind > FR_BF16 && !scratch) return 1;
    project(w, x, y, rows, scratch);
    free(scratch);
    return 0;
}
