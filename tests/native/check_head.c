/* The head's kernels by themselves, on exact-sized buffers: an EAGLE head of each kind, and the best of rows.
 *
 * Called by check.c; 0 where a row's output and ranking have the same bits alone and beside others, and where the best entries
 * are those that a plain search finds.
 */
#include "forerun.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, HEADS = 4, KV = 2, DIM = 8, INNER = 64, PARTS = 3, VOCAB = 4099, SLOTS = 12, ROWS = 5, K = 6,
       LAYERS = 2, LAYER_KV = 2 * KV * SLOTS * DIM };

static uint32_t state = 1;
static float number(void) { return (float)((state = state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1.0f; }

static float *floats(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) p[i] = number();
    return p;
}

static fr_weights plain(int outputs, int inputs) {
    float *data = floats((int64_t)outputs * inputs);
    for (int64_t i = 0; i < (int64_t)outputs * inputs; i++) data[i] *= 0.2f; /* so that no logit is huge */
    return (fr_weights){1, {{FR_F32, outputs, inputs, data, NULL}}};
}

/* Queries, keys and values as three matrices, or as one. */
static fr_weights qkv_of(int inputs, int parts) {
    if (parts == 1) return plain((HEADS + 2 * KV) * DIM, inputs);
    return (fr_weights){3, {plain(HEADS * DIM, inputs).part[0], plain(KV * DIM, inputs).part[0], plain(KV * DIM, inputs).part[0]}};
}

static fr_head new_head(int joins_token) {
    int features = joins_token ? WIDTH : PARTS * WIDTH;
    fr_head h = {.width = WIDTH, .heads = HEADS, .kv_heads = KV, .head_dim = DIM, .inner = INNER, .features = features,
                 .parts = joins_token ? 1 : PARTS, .joins_token = joins_token, .norm_output = !joins_token, .eps = 1e-5f,
                 .attention_scale = 0.35f, .depth = joins_token ? 1 : LAYERS,
                 .embedding = {-1, 0, floats((int64_t)VOCAB * WIDTH)}};
    if (!joins_token) {
        h.token_norm = floats(WIDTH), h.feature_norm = floats(WIDTH), h.out_norm = floats(WIDTH);
        h.input_norm = floats(features), h.part_norms = floats(features);
    }
    h.fc = plain(WIDTH, joins_token ? 2 * WIDTH : features);
    fr_head_layer *layers = malloc((size_t)h.depth * sizeof *layers);
    for (int i = 0; i < h.depth; i++)
        layers[i] = (fr_head_layer){
            .input_norm = i ? floats(WIDTH) : NULL, .mlp_norm = floats(WIDTH),
            .qkv = qkv_of(joins_token || i ? WIDTH : 2 * WIDTH, joins_token ? 1 : 3), .output = plain(WIDTH, HEADS * DIM),
            .gate_up = plain(2 * INNER, WIDTH), .down = plain(WIDTH, INNER),
        };
    h.layers = layers;
    h.lm_head = plain(VOCAB, WIDTH);
    return h;
}

static void free_head(fr_head *h) {
    for (int i = 0; i < h->depth; i++) {
        const fr_head_layer *l = h->layers + i;
        for (int j = 1; j < l->qkv.count; j++) free((void *)l->qkv.part[j].data);
        const void *own[] = {l->input_norm, l->mlp_norm, l->qkv.part[0].data, l->output.part[0].data, l->gate_up.part[0].data,
                             l->down.part[0].data};
        for (size_t j = 0; j < sizeof own / sizeof *own; j++) free((void *)own[j]);
    }
    const void *all[] = {h->token_norm, h->feature_norm, h->out_norm, h->input_norm, h->part_norms, h->embedding.rows,
                         h->fc.part[0].data, h->lm_head.part[0].data, h->layers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free((void *)all[i]);
}

/* True rows from `first` on, then a pass of drafted ones below the last; each row in a slot of its own. */
static void run(const fr_head *h, float *kv, const float *turns, const float *features, int first, int rows, int keys_only,
                float *out, const float *before) {
    int64_t tokens[ROWS];
    int32_t numbers[6][ROWS];
    const float *parts[ROWS * PARTS];
    for (int i = 0; i < rows * h->parts && !before; i++) parts[i] = features + i * (h->features / h->parts);
    for (int i = 0; i < rows; i++) {
        tokens[i] = 7 * (first + i) + 1;
        numbers[0][i] = 0;
        numbers[1][i] = before ? ROWS : first + i;
        numbers[2][i] = 1;
        numbers[3][i] = before ? ROWS : first + i;
        numbers[4][i] = before ? ROWS + first + i : first + i;
        numbers[5][i] = 0;
    }
    fr_head_pass p = {.rows = rows, .keys_only = keys_only, .tokens = tokens, .features = before ? NULL : parts, .before = before,
                      .parents = numbers[5], .out = out, .cosines = turns, .sines = turns + SLOTS * DIM / 2,
                      .position = numbers[3], .write = numbers[4],
                      .reach = {numbers[0], numbers[1], numbers[2], numbers[4], 1, ROWS + 1},
                      .keys = kv, .values = kv + LAYER_KV / 2, .head_stride = SLOTS * DIM, .layer_stride = LAYER_KV};
    if (fr_head_run(h, &p)) exit(2);
}

static int check_top(const float *x, int64_t rows, int64_t count, int64_t k, const float *values, const int32_t *indices,
                     const float *totals) {
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * count;
        double sum = 0;
        for (int64_t i = 0; i < count; i++) sum += exp((double)row[i]);
        if (fabs(log(sum) - totals[r]) > 1e-4) return 1;
        for (int64_t j = 0; j < k; j++) {
            int64_t at = indices[r * k + j], before = 0;
            for (int64_t i = 0; i < count; i++) before += row[i] > row[at] || (row[i] == row[at] && i < at);
            if (before != j || fabsf(values[r * k + j] - (row[at] - totals[r])) > 1e-4f) return 1;
        }
    }
    return 0;
}

static int check_head(int joins_token) {
    fr_head h = new_head(joins_token);
    float *features = floats(ROWS * h.features), *turns = floats(SLOTS * DIM), *kv = floats(LAYERS * LAYER_KV);
    float *together = floats(ROWS * WIDTH), *alone = floats(WIDTH), *drafted = floats(ROWS * WIDTH);
    float *logits = floats(ROWS * VOCAB), *values = floats(ROWS * K), *totals = floats(ROWS);
    int32_t *indices = malloc(ROWS * K * sizeof *indices);
    int wrong = 0;
    run(&h, kv, turns, features, 0, ROWS, 0, together, NULL);
    for (int i = 0; i < ROWS; i++) {
        run(&h, kv, turns, features + i * h.features, i, 1, 0, alone, NULL);
        wrong |= memcmp(alone, together + i * WIDTH, sizeof(float) * WIDTH) != 0;
    }
    float *kept = floats(LAYERS * LAYER_KV), *again = floats(LAYERS * LAYER_KV); /* other numbers in the slots that are written */
    memcpy(kept, kv, sizeof(float) * LAYERS * LAYER_KV);
    for (int skipped = 0; skipped <= ROWS; skipped++) { /* rows of which only keys and values are wanted */
        for (int64_t i = 0; i < LAYERS * LAYER_KV; i++) again[i] = i / DIM % SLOTS < ROWS ? 0.0f : kv[i];
        run(&h, again, turns, features, 0, ROWS, skipped, drafted, NULL);
        wrong |= memcmp(again, kept, sizeof(float) * (size_t)(h.depth * LAYER_KV)) != 0;
        int64_t from = skipped * WIDTH;
        wrong |= memcmp(drafted + from, together + from, sizeof(float) * (size_t)(ROWS * WIDTH - from)) != 0;
    }
    run(&h, kv, turns, NULL, 0, ROWS, 0, drafted, together + (ROWS - 1) * WIDTH);
    for (int i = 0; i < ROWS; i++) {
        run(&h, kv, turns, NULL, i, 1, 0, alone, together + (ROWS - 1) * WIDTH);
        wrong |= memcmp(alone, drafted + i * WIDTH, sizeof(float) * WIDTH) != 0;
    }
    fr_top top = {.rows = ROWS, .count = VOCAB, .k = K, .x = logits, .values = values, .indices = indices, .totals = totals};
    wrong |= fr_head_rank(&h, drafted, logits, &top);
    wrong |= check_top(logits, ROWS, VOCAB, K, values, indices, totals);
    void *all[] = {features, turns, kv, kept, again, together, alone, drafted, logits, values, totals, indices};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free_head(&h);
    return wrong;
}

/* A whole draft: rows in their slots, a tree whose parents come first, no more nodes than asked for; none where they are dear. */
static int check_draft(double each) {
    enum { NODES = 7, DEPTH = 4, WIDE = 3, FRESH = 2 };
    fr_head h = new_head(0);
    float *features = floats(FRESH * h.features), *turns = floats(SLOTS * DIM), *kv = floats(LAYERS * LAYER_KV);
    float *out = floats(FRESH * WIDTH), *logits = floats((int64_t)WIDE * VOCAB);
    int64_t tokens[FRESH] = {5, 9}, tree[2 * NODES], wrong = 0;
    double price[NODES + 1];
    const float *parts[FRESH * PARTS];
    for (int i = 0; i < FRESH * PARTS; i++) parts[i] = features + i * WIDTH;
    for (int i = 0; i <= NODES; i++) price[i] = 1.0 + each * i;
    fr_head_pass like = {.cosines = turns, .sines = turns + SLOTS * DIM / 2, .keys = kv, .values = kv + LAYER_KV / 2,
                         .head_stride = SLOTS * DIM, .layer_stride = LAYER_KV};
    fr_draft d = {.fresh = FRESH, .tokens = tokens, .features = parts, .out = out, .nodes = NODES, .depth = DEPTH, .width = WIDE,
                  .frontier = WIDE, .branch = WIDE, .price = price, .prices = NODES + 1, .power = 0.1, .vocabulary = VOCAB,
                  .logits = logits, .tree = tree, .scale = 0.5f};
    wrong |= fr_head_draft(&h, &like, &d);
    wrong |= each > 1.0 ? d.count != 0 || d.levels != 1 : d.count != NODES || d.levels < 2 || !(d.expected > 0.0);
    for (int64_t i = 0; i < d.count; i++) wrong |= tree[i] < 0 || tree[i] >= VOCAB || tree[NODES + i] < 0 || tree[NODES + i] > i;
    void *all[] = {features, turns, kv, out, logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free_head(&h);
    return wrong != 0;
}

/* Short rows, equal numbers, impossible ones, and the noise of ids that are no multiple of four. */
static int check_edges(void) {
    float x[] = {1, 3, 3, 2, -INFINITY, 3, 0}, values[7], totals[1], noise[7], scale[] = {0.5f};
    int32_t indices[7], ids[] = {0, 1, 2, 3, 4, 5, 49151}, row[] = {0};
    fr_top top = {.rows = 1, .count = 7, .k = 7, .x = x, .values = values, .indices = indices, .totals = totals};
    int wrong = fr_top_rows(&top);
    static const int32_t order[] = {1, 2, 5, 3, 0, 6, 4};
    wrong |= memcmp(indices, order, sizeof order) != 0;
    fr_log_noise(ids, 7, 12345, 678, noise);
    for (int i = 0; i < 7; i++) wrong |= !(noise[i] > -23 && noise[i] < 4);
    top.k = 1, top.totals = NULL, top.noise = noise, top.noise_row = row, top.scale = scale;
    wrong |= fr_top_rows(&top);
    float best = -INFINITY;
    for (int i = 0; i < 7; i++) best = fmaxf(best, x[i] * 0.5f - noise[i]);
    return wrong || values[0] != best;
}

int check_heads(void) {
    int wrong = 0;
    for (int threads = 1; threads <= 3; threads += 2) {
        fr_set_threads(threads);
        wrong |= check_head(0) | check_head(1) << 1 | check_edges() << 2 | check_draft(0.0) << 3 | check_draft(9.0) << 4;
    }
    return wrong;
}
