/* The native kernels by themselves: every variant of this machine against the plain one, on exact-sized buffers.
 *
 * Built with the library's own files, also with sanitizers and for other architectures. Prints the variants seen and
 * exits with 0 where every variant gives the same bits and a node's logits do not depend on what stands beside it.
 */
#include "forerun.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }
static float number(void) { return (float)(next() >> 8) / (1 << 23) - 1.0f; }

static float *floats(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) p[i] = number();
    return p;
}

typedef struct {
    int type, weights, bytes, halves[2];
} layout;

static const layout layouts[] = {{2, 32, 18, {0, -1}},   {3, 32, 20, {0, 2}},    {6, 32, 22, {0, -1}}, {7, 32, 24, {0, 2}},
                                 {8, 32, 34, {0, -1}},   {12, 256, 144, {0, 2}}, {13, 256, 176, {0, 2}},
                                 {14, 256, 210, {208, -1}}, {20, 32, 18, {0, -1}}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* Random blocks of a type, with scales that are small and finite. */
static uint8_t *random_blocks(const layout *l, int outputs, int64_t row) {
    uint8_t *raw = malloc((size_t)(outputs * row));
    for (int64_t i = 0; i < outputs * row; i++) raw[i] = (uint8_t)(next() >> 24);
    for (int64_t b = 0; b < outputs * row / l->bytes; b++)
        for (int j = 0; j < 2; j++)
            if (l->halves[j] >= 0) {
                uint16_t half = (uint16_t)(0x1000 + (next() >> 16) % 0x1800);
                memcpy(raw + b * l->bytes + l->halves[j], &half, 2);
            }
    return raw;
}

/* Blocks packed for the path that is chosen now. */
static fr_weight pack(const layout *l, const uint8_t *raw, int outputs, int inputs) {
    fr_weight w = {fr_packed_kind(l->type), outputs, inputs, NULL, NULL};
    void *data = malloc((size_t)fr_packed_bytes(w.kind, outputs, inputs));
    fr_pack(l->type, raw, inputs / l->weights * l->bytes, outputs, inputs, data);
    w.data = data;
    return w;
}

static fr_weight packed_weight(const layout *l, int outputs, int inputs) {
    uint8_t *raw = random_blocks(l, outputs, inputs / l->weights * l->bytes);
    fr_weight w = pack(l, raw, outputs, inputs);
    free(raw);
    return w;
}

static fr_weight float_weight(int kind, int outputs, int inputs) {
    float *f = floats((int64_t)outputs * inputs);
    if (kind == FR_BF16) {
        uint16_t *h = malloc((size_t)outputs * (size_t)inputs * 2);
        for (int64_t i = 0; i < (int64_t)outputs * inputs; i++) memcpy(h + i, (char *)(f + i) + 2, 2);
        free(f);
        return (fr_weight){kind, outputs, inputs, h, NULL};
    }
    return (fr_weight){kind, outputs, inputs, f, NULL};
}

static int differ(const char *what, const float *a, const float *b, int64_t count) {
    if (!memcmp(a, b, (size_t)count * sizeof(float))) return 0;
    printf("%s differs\n", what);
    return 1;
}

/* A weight on the chosen path against wanted numbers: all rows at once, and each alone. */
static int check_rows(const char *path, fr_weight w, const float *x, const float *wanted, int rows) {
    fr_weights all = {1, {w}};
    float *z = floats((int64_t)rows * w.outputs);
    int bad = fr_linear_rows(&all, x, z, rows) | differ(path, wanted, z, (int64_t)rows * w.outputs);
    for (int r = 0; r < rows; r++) fr_linear_rows(&all, x + r * w.inputs, z + r * w.outputs, 1);
    bad |= differ("a row alone", wanted, z, (int64_t)rows * w.outputs);
    free(z);
    return bad;
}

/* Every path gives the bits of the plain one, from its own panels; and the plain one reads those too. */
static int check_packed(const layout *l, int outputs, int inputs, int rows) {
    uint8_t *raw = random_blocks(l, outputs, inputs / l->weights * l->bytes);
    float *bias = floats(outputs), *x = floats((int64_t)rows * inputs), *wanted = floats((int64_t)rows * outputs);
    fr_choose("generic");
    fr_weights plain = {1, {pack(l, raw, outputs, inputs)}};
    plain.part[0].bias = rows % 2 ? bias : NULL;
    int bad = fr_linear_rows(&plain, x, wanted, rows);
    for (int i = 0; fr_variant(i); i++) {
        if (fr_choose(fr_variant(i))) continue;
        fr_weight w = pack(l, raw, outputs, inputs);
        w.bias = plain.part[0].bias;
        bad |= check_rows(fr_variant(i), w, x, wanted, rows);
        fr_choose("generic");
        bad |= check_rows("generic on others' panels", w, x, wanted, rows);
        free((void *)w.data);
    }
    if (bad) printf("type %d, %d outputs, %d inputs, %d rows\n", l->type, outputs, inputs, rows);
    free(raw), free(bias), free(x), free(wanted), free((void *)plain.part[0].data);
    return bad;
}

static int check_floats(fr_weight w, int rows) {
    fr_weights all = {1, {w}};
    float *x = floats((int64_t)rows * w.inputs), *wanted = floats((int64_t)rows * w.outputs);
    int bad = fr_linear_rows(&all, x, wanted, rows);
    bad |= check_rows("floats", w, x, wanted, rows);
    free(x), free(wanted), free((void *)w.data);
    return bad;
}

/* heads of 64 + 16 + 4 numbers and a context of 32 + 8 + 4 + 1: every width that a kernel walks in */
enum { LAYERS = 2, WIDTH = 64, HEADS = 6, DIM = 84, INNER = 96, VOCAB = 37, SLOTS = 60, NODES = 7, OWN = 20 };

static int KV;   /* key heads */
static int KIND; /* of numbers that the cache holds */

static fr_weights one(fr_weight w) { return (fr_weights){1, {w}}; }

/* A pass over `count` of the nodes listed; parents are given as places in a tree behind CONTEXT slots. The last
 * `keys_only` of them have no logits, and only keys and values in the last layer. */
enum { CONTEXT = 45 };
static void run(const fr_decoder *m, void *kv, const float *rows, const int *parents, const int *nodes, int count,
                int keys_only, float *logits) {
    float *x = malloc(sizeof(float) * WIDTH * (size_t)count), *turns = malloc(sizeof(float) * 8 * (size_t)count);
    int32_t first[NODES], context[NODES], tail[NODES], tails[NODES * NODES], write[NODES], position[NODES], tops[NODES];
    int64_t tokens[NODES];
    for (int i = 0; i < count; i++) {
        int node = nodes[i], depth = 0, path[NODES];
        for (int at = node; at >= 0; at = parents[at]) path[depth++] = at;
        for (int j = 0; j < depth; j++) tails[i * NODES + j] = CONTEXT + path[depth - 1 - j];
        tokens[i] = node, first[i] = 0, context[i] = CONTEXT, tail[i] = depth, write[i] = CONTEXT + node, position[i] = i;
        memcpy(x + i * WIDTH, rows + node * WIDTH, sizeof(float) * WIDTH);
        for (int j = 0; j < 8; j++) turns[i * 8 + j] = 1.0f / (float)(1 + j + depth);
    }
    int scored = count - keys_only;
    int64_t row_bytes = fr_row_bytes(KIND, DIM), numbers = row_bytes / fr_number_bytes(KIND);
    fr_pass pass = {.nodes = count, .scored = scored, .keys_only = keys_only, .tokens = tokens, .x = x, .cosines = turns, .sines = turns,
                    .position = position, .write = write,
                    .reach = {first, context, tail, tails, NODES, CONTEXT + NODES}, .keys = kv,
                    .values = (char *)kv + KV * SLOTS * row_bytes, .kind = KIND, .layer_stride = 2 * KV * SLOTS * numbers,
                    .slot_stride = numbers, .head_stride = SLOTS * numbers, .logits = scored ? logits : NULL, .tops = tops};
    if (fr_decode(m, &pass)) exit(2);
    for (int i = 0; i < scored; i++)
        for (int64_t j = 0; j < m->vocab; j++) {
            float other = logits[i * m->vocab + j], top = logits[i * m->vocab + tops[i]];
            if (other > top || (other == top && j < tops[i])) exit(3);
        }
    free(x), free(turns);
}

static void *cache(int64_t rows) {
    float *f = floats(rows * DIM);
    if (KIND == FR_FLOATS) return f;
    int64_t bytes = fr_row_bytes(KIND, DIM);
    char *made = malloc((size_t)(rows * bytes));
    for (int64_t r = 0; r < rows; r++)
        if (KIND == FR_BYTES) fr_to_bytes(f + r * DIM, (int8_t *)made + r * bytes, DIM);
        else fr_to_halves(f + r * DIM, (uint16_t *)(made + r * bytes), DIM);
    free(f);
    return made;
}

/* Integers of 8 bits: within half a step of the number, the largest is 127, and what is not a number stays none. */
static int check_bytes(void) {
    int bad = 0;
    for (int i = 0; i < 1 << 12; i++) {
        float x[8], most = 0, scale, size = exp2f((float)(i % 80 - 40));
        int8_t y[12];
        for (int j = 0; j < 8; j++) x[j] = size * ((float)(next() >> 8) / (1 << 23) - 1.0f), most = fmaxf(most, fabsf(x[j]));
        fr_to_bytes(x, y, 8);
        memcpy(&scale, y + 8, 4);
        for (int j = 0; j < 8; j++) {
            if (!(fabsf(x[j] - scale * y[j]) <= 0.501f * scale)) bad = 1;
            if (fabsf(x[j]) == most && abs(y[j]) != 127) bad = 1;
        }
        x[i % 8] = i % 3 ? INFINITY : NAN;
        fr_to_bytes(x, y, 8);
        memcpy(&scale, y + 8, 4);
        if (!isnan(scale)) bad = 1;
    }
    static const float zeros[4];
    int8_t y[8];
    fr_to_bytes(zeros, y, 4);
    for (int j = 0; j < 8; j++) bad |= y[j] != 0;
    if (bad) puts("bytes differ");
    return bad;
}

/* Numbers of 16 bits, one by one and by four, to the nearest and back. */
static int check_halves(void) {
    int bad = 0;
    for (int i = 0; i < 1 << 18; i++) {
        float x[4], back[4];
        uint16_t h[4];
        for (int j = 0; j < 4; j++) {
            uint32_t bits = next() ^ next() >> 7;
            if (i % 2) bits = (bits & 0x807fffff) | (100 + (bits >> 8) % 50) << 23; /* near the ends of the range */
            if ((bits & 0x7f800000) == 0x7f800000) bits = 0;
            memcpy(&x[j], &bits, 4);
        }
        fr_to_halves(x, h, 4);
        for (int j = 0; j < 4; j++) {
            back[j] = fr_half(h[j]);
            if (h[j] != fr_to_half(x[j]) || fr_to_half(back[j]) != h[j]) bad = 1;
        }
    }
    if (bad) puts("halves differ");
    return bad;
}

/* The same model on every path: `wanted` [NODES * VOCAB] is filled by the first and compared with by the others. */
static int check_decoder(const char *path, int key_heads, int kind, int64_t window, float *wanted, int first) {
    KIND = kind;
    state = (uint32_t)(1 + key_heads + 100 * window);
    static const int parents[NODES] = {-1, 0, 0, 1, 1, 3, 2}, all[NODES] = {0, 1, 2, 3, 4, 5, 6};
    fr_layer layers[LAYERS];
    const int borrows = window % 4 == 1; /* the last layer the first one's keys and values */
    KV = key_heads;
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (fr_layer){
            .attention_norm = floats(WIDTH), .mlp_norm = floats(WIDTH), .q_norm = floats(DIM), .k_norm = floats(DIM),
            .qkv = {i && borrows ? 1 : 3, {packed_weight(&layouts[0], HEADS * DIM, WIDTH), packed_weight(&layouts[4], KV * DIM, WIDTH),
                        float_weight(FR_F32, KV * DIM, WIDTH)}},
            .output = one(float_weight(FR_BF16, WIDTH, HEADS * DIM)),
            .gate_up = {2, {packed_weight(&layouts[1], INNER, WIDTH), packed_weight(&layouts[3], INNER, WIDTH)}},
            .down = one(packed_weight(&layouts[2], WIDTH, INNER)), .window = window, .rotate = 1 - i, .kv_heads = KV,
            .head_dim = DIM, .rotary = 16, .cache = borrows ? 0 : i, .borrows = i && borrows};
    fr_decoder m = {LAYERS, WIDTH, HEADS, VOCAB, INNER, 16, LAYERS - borrows, 1e-5f, 0.2f, layers, floats(WIDTH),
                    one(packed_weight(&layouts[4], VOCAB, WIDTH))};
    const float *inputs = floats(NODES * LAYERS * OWN);
    const fr_weights gate = one(float_weight(FR_F32, OWN, WIDTH)), back = one(float_weight(FR_BF16, WIDTH, OWN));
    const fr_weights made = one(float_weight(FR_F32, LAYERS * OWN, WIDTH));
    if (window % 2) { /* parts that not every family has */
        m.activation = FR_GELU_TANH, m.attention_cap = 2.0f, m.logit_cap = 3.0f, m.logit_scale = 0.7f, m.residual_scale = 0.6f;
        layers[0].after_attention = layers[1].attention_norm, layers[1].after_mlp = layers[0].mlp_norm;
        m.input_width = OWN, m.inputs = (fr_table){-1, 0, inputs}, m.input_projection = made, m.input_norm = inputs, m.input_scale = 0.7f;
        for (int i = 0; i < LAYERS; i++)
            layers[i].input_gate = gate, layers[i].input_output = back, layers[i].after_input = layers[0].mlp_norm,
            layers[i].scale = 0.9f, layers[i].v_norm = layers[1 - i].k_norm;
    }
    size_t bytes = (size_t)(LAYERS * 2 * KV * SLOTS * fr_row_bytes(KIND, DIM));
    void *kv = cache(LAYERS * 2 * KV * SLOTS), *before = malloc(bytes), *after = malloc(bytes);
    float *rows = floats(NODES * WIDTH);
    float *tree = floats(NODES * VOCAB), *alone = floats(NODES * VOCAB);
    memcpy(before, kv, bytes);
    run(&m, kv, rows, parents, all, NODES, 0, tree);
    memcpy(after, kv, bytes);
    for (int i = 0; i < NODES; i++) run(&m, kv, rows, parents, all + i, 1, 0, alone + i * VOCAB);
    int bad = differ("a node alone", tree, alone, NODES * VOCAB);
    for (int n = 0; n < NODES; n++) { /* rows with logits */
        memcpy(kv, before, bytes);
        run(&m, kv, rows, parents, all, NODES, NODES - n, alone);
        bad |= differ("keys and values of rows without logits", kv, after, (int64_t)(bytes / 4));
        bad |= differ("rows beside those without logits", alone, tree, n * VOCAB);
    }
    if (first) memcpy(wanted, tree, NODES * VOCAB * sizeof(float));
    bad |= differ(path, tree, wanted, NODES * VOCAB);
    for (int i = 0; i < LAYERS; i++) {
        const fr_layer *l = &layers[i];
        const float *const norms[] = {l->attention_norm, l->mlp_norm, l->q_norm, l->k_norm};
        const fr_weights *const all_weights[] = {&l->qkv, &l->output, &l->gate_up, &l->down};
        for (int j = 0; j < 4; j++) {
            free((void *)norms[j]);
            for (int k = 0; k < FR_MOST_PARTS; k++) free((void *)all_weights[j]->part[k].data);
        }
    }
    free((void *)inputs), free((void *)gate.part[0].data), free((void *)back.part[0].data), free((void *)made.part[0].data);
    free((void *)m.final_norm), free((void *)m.head.part[0].data), free(kv), free(before), free(after), free(rows), free(tree), free(alone);
    return bad;
}

int check_heads(void); /* check_head.c */
int check_attention(void); /* check_attention.c */
int check_experts(void); /* check_experts.c */
int check_runs(void); /* check_run.c */

int main(void) {
    int bad = check_heads() | check_halves() | check_bytes() | check_attention();
    fr_set_threads(3);
    for (int i = 0; i < LAYOUTS; i++)
        for (int n = 0; n < 16; n++) /* up to twelve rows, and four that fill more than one tile, by a part or a whole */
            bad |= check_packed(&layouts[i], 1 + (int)(next() >> 16) % 41, layouts[i].weights * (1 + (int)(next() >> 16) % 3),
                                n < 12 ? 1 + n : 17 * n - 181);
    for (int i = 0; i < LAYOUTS; i++)
        for (int n = 0; n < 8; n++) { /* several tiles of rows, chunks of blocks with and without a rest, odd and even panels */
            int blocks = layouts[i].weights == 32 ? 5 + (int)(next() >> 16) % 16 : 1 + n % 4;
            bad |= check_packed(&layouts[i], 1 + (int)(next() >> 16) % 100, layouts[i].weights * blocks, 9 + (int)(next() >> 16) % 62);
        }
    for (int n = 0; n < 12; n++)
        bad |= check_floats(float_weight(n % 2, 1 + (int)(next() >> 16) % 21, 1 + (int)(next() >> 16) % 70), 1 + n);
    for (int heads = 2; heads <= HEADS; heads += HEADS - 2) /* several queries to a key head, and one */
        for (int n = 0; n < 27; n++) {
            static const int windows[] = {0, 1, 2, 3, 4, 5, 13, 30, 47};
            static float wanted[NODES * VOCAB];
            fr_choose("generic");
            bad |= check_decoder("generic", heads, n / 9, windows[n % 9], wanted, 1);
            for (int i = 0; fr_variant(i); i++)
                if (!fr_choose(fr_variant(i))) bad |= check_decoder(fr_variant(i), heads, n / 9, windows[n % 9], wanted, 0);
        }
    for (int i = 0; fr_variant(i); i++)
        if (!fr_choose(fr_variant(i)) && check_experts()) bad = 1, printf("experts differ on %s\n", fr_variant(i));
    for (int i = 0; fr_variant(i); i++)
        if (!fr_choose(fr_variant(i)) && check_runs()) bad = 1, printf("runs differ on %s\n", fr_variant(i));
    for (int i = 0; fr_variant(i); i++)
        if (fr_has(fr_variant(i))) puts(fr_variant(i));
    fr_set_threads(1);
    puts(bad ? "bad" : "ok");
    return bad;
}
