/* A whole pass of a decoder over the nodes of a round, in one call.
 *
 * norm, q/k/v, (norms of q and k), rotary positions, keys and values into their slots, attention, output, (norm), norm,
 * gated feed-forward layer or experts (experts.c), (norm), and the head at the end.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { BUFFERS = 15, FR_ABI = 25 };

typedef struct {
    float *x, *normed, *qkv, *attended, *gate_up, *mlp, *delta, *scores, *middle, *gates, *inputs, *found, *given, *projected;
    void *quants, *experts, *mixing, *latent;
    int32_t *tiles;
    float *replay;
    int pending; /* delta is not in x yet; `after` norms it first */
    const float *after;
    float total; /* what multiplies the sum, or 0 */
} buffers;

/* Number `at` of a cache. */
static void *cache_at(void *cache, int64_t kind, int64_t at) { return (char *)cache + at * fr_number_bytes(kind); }

void fr_write_head(void *cache, int64_t kind, int64_t at, const float *from, int64_t dim) {
    void *row = cache_at(cache, kind, at);
    if (kind == FR_BYTES) fr_to_bytes(from, row, dim);
    else if (kind == FR_HALVES) fr_to_halves(from, row, dim);
    else memcpy(row, from, (size_t)dim * sizeof(float));
}

fr_projected fr_project(const fr_weights *qkv, int64_t queries, const float *x, int64_t rows, int64_t first, int64_t count,
                        float *into, void *scratch) {
    int64_t all = 0;
    for (int64_t i = 0; i < qkv->count; i++) all += qkv->part[i].outputs;
    if (count == rows || qkv->count < 3) { /* weights that are one matrix stay whole */
        fr_linear(qkv, x, into, rows, scratch);
        return (fr_projected){into + first * all, into + queries, all, all};
    }
    fr_weights q = {1, {qkv->part[0]}}, kv = {2, {qkv->part[1], qkv->part[2]}};
    fr_projected to = {into, into + count * queries, queries, all - queries};
    if (count) fr_linear(&q, x + first * q.part[0].inputs, to.q, count, scratch);
    fr_linear(&kv, x, to.k, rows, scratch);
    return to;
}

typedef struct {
    const fr_decoder *m;
    const fr_pass *p;
    fr_projected made;
    int64_t layer, n;
} heads_job;

/* From a head's numbers in the cache to the next one's. */
static int64_t head_stride(const fr_pass *p, const fr_layer *layer) {
    return p->head_stride ? p->head_stride : fr_row_bytes(p->kind, layer->head_dim) / fr_number_bytes(p->kind);
}

static void write_row(const fr_pass *p, const fr_layer *layer, int64_t r, const float *k) {
    const int64_t dim = layer->head_dim;
    for (int64_t h = 0; h < layer->kv_heads; h++, k += dim) {
        int64_t at = layer->cache * p->layer_stride + h * head_stride(p, layer) + p->write[r] * p->slot_stride;
        fr_write_head(p->keys, p->kind, at, k, dim);
        fr_write_head(p->values, p->kind, at, k + layer->kv_heads * dim, dim);
    }
}

/* Norms and rotations of the heads of some rows, queries of the first n only; keys and values go into their slots. */
static void place_heads(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const heads_job *job = arg;
    const fr_decoder *m = job->m;
    const fr_pass *p = job->p;
    const fr_layer *layer = m->layer + job->layer;
    const int64_t dim = layer->head_dim;
    const int32_t here = 0;
    for (int64_t r = begin; r < end; r++) {
        float *k = job->made.k + r * job->made.k_stride;
        float *const of[3] = {k + layer->kv_heads * dim, k, job->made.q + r * job->made.q_stride};
        const float *const norms[3] = {layer->v_norm, layer->k_norm, layer->q_norm};
        const int64_t heads[3] = {layer->kv_heads, layer->kv_heads, m->heads};
        const int64_t turn = (layer->rotate - 1) * p->rope_stride + p->position[r] * m->rotary / 2;
        for (int i = layer->borrows ? 2 : 0; i < (r < job->n ? 3 : 2); i++) {
            int64_t alone = m->whole_norms ? 1 : heads[i];
            if (norms[i]) fr_rms_norm(of[i], norms[i], m->eps, of[i], alone, heads[i] / alone * dim);
            if (i && layer->rotate)
                fr_rope(of[i], p->cosines + turn, p->sines + turn, &here, 1, heads[i], 0, dim, layer->rotary);
        }
        if (!layer->borrows) write_row(p, layer, r, k);
    }
}

/* Add what the last part of a layer gave, and norm the sum for the next part where it has a weight: what that reads. */
static const float *norm_rows(const fr_decoder *m, const float *weight, float *into, int64_t n, buffers *b) {
    fr_added added = {b->pending ? b->delta : NULL, b->after, m->residual_scale ? m->residual_scale : 1.0f, b->total};
    if (added.delta || weight) fr_add_norm(b->x, added, weight, m->eps, into, n, m->width);
    b->pending = 0;
    return weight ? into : b->x;
}

/* A part of a layer has left in b->delta what it adds. */
static void leave(buffers *b, const float *after) { b->pending = 1, b->after = after, b->total = 0; }

/* Queries of the first n rows, and keys and values of all, which go into their slots. */
static fr_projected project_layer(const fr_decoder *m, const fr_pass *p, int64_t i, const float *rows, int64_t nodes, int64_t n,
                                  buffers *b) {
    const fr_layer *layer = m->layer + i;
    const int64_t queries = m->heads * layer->head_dim, keys = layer->kv_heads * layer->head_dim;
    if (layer->latent) {
        fr_latent_project(m, p, layer, rows, n, b->qkv, b->latent);
        return (fr_projected){b->qkv, NULL, queries, 0};
    }
    fr_projected made = fr_project(&layer->qkv, queries, rows, nodes, 0, n, b->qkv, b->quants);
    const fr_adapted changed[] = {{FR_K, made.k, made.k_stride, keys, nodes},
                                  {FR_V, made.k + keys, made.k_stride, keys, nodes},
                                  {FR_Q, made.q, made.q_stride, queries, n}};
    fr_adapt(p->adapters, i, changed, 3, rows, m->width, b->middle);
    heads_job job = {m, p, made, i, n};
    fr_parallel(place_heads, &job, nodes, fr_rows_at_once(queries));
    return made;
}

/* Attention of the first n rows, which see the keys and values of all. */
static void attend_layer(const fr_decoder *m, const fr_pass *p, int64_t i, int64_t n, buffers *b) {
    const fr_layer *layer = m->layer + i;
    const int64_t queries = m->heads * layer->head_dim, cache = layer->cache * p->layer_stride;
    const int64_t nodes = layer->borrows ? n : p->nodes;
    const float *rows = norm_rows(m, layer->attention_norm, b->normed, nodes, b), *found = b->attended;
    fr_projected made = project_layer(m, p, i, rows, nodes, n, b);
    if (!n) return;
    fr_attention_args attention = {
        .reach = p->reach, .q = made.q, .out = b->attended, .scratch = b->scores,
        .keys = cache_at(p->keys, p->kind, cache), .values = cache_at(p->values, p->kind, cache), .kind = p->kind,
        .tiles = b->tiles, .heads = m->heads, .kv_heads = layer->kv_heads, .head_dim = layer->head_dim,
        .value_dim = layer->latent ? layer->latent->rank : 0,
        .tile_count = fr_attention_tiles(&p->reach, n, m->heads / layer->kv_heads, layer->kv_heads, b->tiles),
        .q_stride = made.q_stride, .head_stride = head_stride(p, layer), .row_stride = p->slot_stride, .window = layer->window, .scale = m->attention_scale,
        .cap = m->attention_cap, .sinks = layer->sinks,
    };
    fr_attention(&attention);
    if (layer->gate.count) {
        fr_linear(&layer->gate, rows, b->gates, n, b->quants);
        fr_open_gates(b->gates, b->attended, n, queries);
    }
    if (layer->latent) found = fr_latent_expand(m, p, layer, found, n, b->latent);
    fr_linear(&layer->output, found, b->delta, n, b->quants);
    const fr_adapted output = {FR_OUTPUT, b->delta, m->width, m->width, n};
    fr_adapt(p->adapters, i, &output, 1, found, queries, b->middle);
    leave(b, layer->after_attention);
}

/* A recurrent layer: the state needs all rows, what leaves the layer the first n. */
static void mix_layer(const fr_decoder *m, const fr_pass *p, int64_t i, int64_t n, buffers *b) {
    const fr_layer *layer = m->layer + i;
    const fr_mixer *mixer = layer->mixer;
    const float *rows = norm_rows(m, layer->attention_norm, b->normed, p->nodes, b);
    fr_linear(&mixer->inputs, rows, b->inputs, p->nodes, b->quants);
    fr_mix(mixer, m->eps, b->inputs, p->walks, p->walk_count, p->nodes, b->found, b->mixing);
    if (p->replayed) {
        memcpy(b->replay, b->inputs, (size_t)(p->replayed * mixer->wide) * sizeof(float));
        b->replay += p->replayed * mixer->wide;
    }
    if (!n) return;
    fr_linear(&mixer->output, b->found, b->delta, n, b->quants);
    leave(b, layer->after_attention);
}

/* The layer's own input, opened by a gate that reads the rows. */
static void add_input(const fr_decoder *m, int64_t i, int64_t n, buffers *b) {
    const fr_layer *layer = m->layer + i;
    const int64_t width = m->input_width;
    const float *rows = norm_rows(m, NULL, NULL, n, b);
    fr_gate_row *open = fr_chosen_gate();
    fr_linear(&layer->input_gate, rows, b->gate_up, n, b->quants);
    for (int64_t r = 0; r < n; r++)
        open(b->gate_up + r * width, b->given + (r * m->layers + i) * width, b->mlp + r * width, width, (int)m->activation);
    fr_linear(&layer->input_output, b->mlp, b->delta, n, b->quants);
    leave(b, layer->after_input);
}

/* A dense feed-forward layer of these rows, into b->delta. */
static void run_dense(const fr_decoder *m, const fr_pass *p, int64_t i, const float *rows, int64_t n, buffers *b) {
    const fr_layer *layer = m->layer + i;
    int64_t inner = layer->down.part[0].inputs;
    fr_linear(&layer->gate_up, rows, b->gate_up, n, b->quants);
    const fr_adapted changed[] = {{FR_GATE, b->gate_up, 2 * inner, inner, n},
                                  {FR_UP, b->gate_up + inner, 2 * inner, inner, n}};
    fr_adapt(p->adapters, i, changed, 2, rows, m->width, b->middle);
    fr_gate(b->gate_up, b->mlp, n, inner, (int)m->activation);
    fr_linear(&layer->down, b->mlp, b->delta, n, b->quants);
    const fr_adapted down = {FR_DOWN, b->delta, m->width, m->width, n};
    fr_adapt(p->adapters, i, &down, 1, b->mlp, inner, b->middle);
}

/* Experts of the same rows by another norm; what they give is normed, and added to the normed b->delta. */
static int64_t run_beside(const fr_decoder *m, const fr_layer *layer, int64_t n, buffers *b) {
    size_t numbers = (size_t)(n * m->width);
    float *given = b->experts;
    void *scratch = given + (numbers + 15) / 16 * 16;
    fr_rms_norm(b->delta, layer->after_dense, m->eps, b->delta, n, m->width);
    fr_rms_norm(b->x, layer->experts_norm, m->eps, b->normed, n, m->width);
    int64_t active_experts = fr_run_experts(layer->experts, b->normed, given, n, m->width, scratch);
    fr_rms_norm(given, layer->after_experts, m->eps, given, n, m->width);
    for (size_t k = 0; k < numbers; k++) b->delta[k] += given[k];
    return active_experts;
}

/* The last layer with keys
 * goes no further than these with rows of which nobody reads what leaves the last of all. */
static void run_layer(const fr_decoder *m, const fr_pass *p, int64_t i, buffers *b) {
    const fr_layer *layer = m->layer + i;
    int64_t n = i + 1 < m->keyed ? p->nodes : p->nodes - p->keys_only;
    if (!n && i >= m->keyed) return;
    if (layer->mixer) mix_layer(m, p, i, n, b);
    else if (layer->qkv.count || layer->latent) attend_layer(m, p, i, n, b);
    if (p->active_experts && layer->experts) p->active_experts[i] = 0;
    if (!(layer->gate_up.count || layer->experts) || !n) return;
    const float *rows = norm_rows(m, layer->mlp_norm, b->normed, n, b);
    int64_t active_experts = 0;
    if (layer->gate_up.count) run_dense(m, p, i, rows, n, b);
    if (layer->experts_norm) active_experts = run_beside(m, layer, n, b);
    else if (layer->experts) active_experts = fr_run_experts(layer->experts, rows, b->delta, n, m->width, b->experts);
    if (p->active_experts && layer->experts) p->active_experts[i] = (int32_t)active_experts;
    leave(b, layer->after_mlp);
    if (layer->input_gate.count) add_input(m, i, n, b);
    b->total = layer->scale;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static void *take_buffers(const fr_decoder *m, const fr_pass *p, buffers *b) {
    int64_t n = p->nodes, given = n * m->layers * m->input_width;
    int64_t widest = m->inner > m->width ? m->inner : m->width;
    int64_t inputs = 0, found = 0, gates = 0, attended = 0, keys = 0, group = 0;
    size_t experts = 0, mixing = 0, latent = 0;
    for (int64_t i = 0; i < m->layers; i++) {
        const fr_layer *layer = m->layer + i;
        const fr_mixer *mixer = layer->mixer;
        size_t beside = layer->experts_norm ? (size_t)(n * m->width + 15) / 16 * 64 : 0;
        if (layer->experts) experts = larger(experts, beside + fr_experts_bytes(layer->experts, n, m->width));
        attended = larger(attended, m->heads * layer->head_dim), keys = larger(keys, layer->kv_heads * layer->head_dim);
        if (layer->kv_heads) group = larger(group, m->heads / layer->kv_heads);
        if (layer->latent) {
            latent = larger(latent, fr_latent_bytes(layer->latent, m->heads, n, m->width));
            widest = larger(widest, layer->output.part[0].inputs);
        }
        if (layer->gate.count) gates = attended;
        if (!mixer) continue;
        inputs = mixer->wide > inputs ? mixer->wide : inputs;
        found = mixer->output.part[0].inputs > found ? mixer->output.part[0].inputs : found;
        mixing = larger(mixing, fr_mixer_bytes(mixer, p->walks, p->walk_count, n));
    }
    widest = larger(widest, larger(attended, found));
    int64_t floats[BUFFERS] = {p->x ? 0 : n * m->width, n * m->width, n * (attended + 2 * keys), n * attended,
                               2 * n * m->inner, n * m->inner, n * m->width,
                               FR_MAX_THREADS * FR_TOGETHER * (p->reach.most + FR_ROOM),
                               2 * n * group, p->adapters ? n * FR_MOST_PARTS * FR_MOST_RANK : 0,
                               n * gates, n * inputs, n * found, given, given};
    void **at[BUFFERS] = {(void **)&b->x, (void **)&b->normed, (void **)&b->qkv, (void **)&b->attended, (void **)&b->gate_up,
                          (void **)&b->mlp, (void **)&b->delta, (void **)&b->scores, (void **)&b->tiles, (void **)&b->middle,
                          (void **)&b->gates, (void **)&b->inputs, (void **)&b->found, (void **)&b->given,
                          (void **)&b->projected};
    size_t quants = (fr_quants_bytes(n, widest) + 63) / 64 * 64, bytes = quants + experts + mixing + latent;
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
    b->mixing = next + quants + experts;
    b->latent = next + quants + experts + mixing;
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

/* What the tokens give every layer: [nodes, layers, input_width]. The norm is of the projection over the root of the
 * width: a larger epsilon does the same. */
static void take_inputs(const fr_decoder *m, const fr_pass *p, buffers *b) {
    const int64_t width = m->layers * m->input_width;
    fr_embed(&m->inputs, width, p->tokens, p->nodes, b->given);
    fr_scale_and_cap(b->given, p->nodes * width, m->input_scale, 0.0f);
    fr_linear(&m->input_projection, b->x, b->projected, p->nodes, b->quants);
    fr_added made = {b->projected, m->input_norm, 1.0f, 0.0f};
    fr_add_norm(b->given, made, NULL, m->eps * (float)m->width, NULL, p->nodes * m->layers, m->input_width);
}

/* 0 = done, 1 = out of memory. */
FR_API int fr_decode(const fr_decoder *m, const fr_pass *p) {
    buffers b;
    void *block = take_buffers(m, p, &b);
    if (!block) return 1;
    const int looks_up = p->tokens && m->embedding.rows;
    if (looks_up) fr_embed(&m->embedding, m->width, p->tokens, p->nodes, b.x);
    if (looks_up && m->embedding_scale) fr_scale_and_cap(b.x, p->nodes * m->width, m->embedding_scale, 0.0f);
    if (m->input_width) take_inputs(m, p, &b);
    b.pending = 0, b.after = NULL, b.total = 0;
    b.replay = p->inputs;
    for (int64_t i = 0; i < m->layers; i++) {
        for (int64_t j = 0; j < p->hidden_count; j++)
            if (p->hidden_layers[j] == i) {
                if (b.pending) norm_rows(m, NULL, NULL, p->nodes, &b);
                show_rows(m, p, j, b.x);
            }
        run_layer(m, p, i, &b);
    }
    float *normed = p->normed ? p->normed : b.normed;
    norm_rows(m, m->final_norm, normed, p->nodes - p->keys_only, &b);
    int finish = m->logit_scale || m->logit_cap;
    if (p->logits && p->tops && !finish) fr_linear_tops(&m->head, normed, p->logits, p->scored, b.quants, p->tops);
    else if (p->logits) fr_linear(&m->head, normed, p->logits, p->scored, b.quants);
    if (p->logits && finish) {
        fr_scale_and_cap(p->logits, p->scored * m->vocab, m->logit_scale ? m->logit_scale : 1.0f, m->logit_cap);
        if (p->tops) fr_argmax_rows(p->logits, p->scored, m->vocab, p->tops);
    }
    free(block);
    return 0;
}

FR_API int fr_replay(const fr_decoder *m, const float *inputs, int64_t replayed, const int32_t *path, int64_t length,
                     const float *start, float *state) {
    const int32_t last[] = {(int32_t)length - 1};
    float *const states[] = {state};
    const fr_walk walk = {0, length, NULL, start, 1, last, states};
    for (const fr_layer *layer = m->layer; layer < m->layer + m->layers; layer++) {
        const fr_mixer *mixer = layer->mixer;
        if (!mixer) continue;
        size_t wide = (size_t)mixer->wide * sizeof(float), rows = ((size_t)length * wide + 63) / 64 * 64;
        char *block = malloc(rows + fr_mixer_bytes(mixer, &walk, 1, length));
        if (!block) return 1;
        for (int64_t i = 0; i < length; i++) memcpy(block + (size_t)i * wide, inputs + path[i] * mixer->wide, wide);
        fr_mix(mixer, m->eps, (float *)block, &walk, 1, length, NULL, block + rows);
        free(block);
        inputs += replayed * mixer->wide;
    }
    return 0;
}
