/* Plain passes behind another in one call, on exact-sized buffers: the same bits as pass by pass, and where they end.
 *
 * Called by check.c on every path; 0 where all agree. The context crosses from one page to another that lies before it.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, HEADS = 2, DIM = 16, INNER = 48, VOCAB = 29, PAGES = 3, SLOTS = PAGES * FR_PAGE, CONTEXT = 62, MOST = 6, CHAIN = 3 };
enum { CACHE = 2 * HEADS * SLOTS * DIM };

static uint32_t state = 5;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

static float *floats(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) p[i] = (float)(next() >> 8) / (1 << 23) - 1.0f;
    return p;
}

static fr_weights plain(int outputs, int inputs) {
    return (fr_weights){1, {{FR_F32, outputs, inputs, floats((int64_t)outputs * inputs), NULL}}};
}

/* The pass over a chain of tokens behind `at` positions, in columns that the caller has: six for each node. */
static fr_pass pass_at(const int64_t *tokens, int nodes, int32_t *columns, const int32_t *pages, int32_t at, float *kv,
                       const float *turns) {
    for (int i = 0; i < nodes; i++) {
        int32_t here = at + i;
        columns[i] = 0, columns[nodes + i] = columns[3 * nodes + i] = here, columns[2 * nodes + i] = 1;
        columns[4 * nodes + i] = columns[5 * nodes + i] = pages[here / FR_PAGE] * FR_PAGE + here % FR_PAGE;
    }
    return (fr_pass){.nodes = nodes, .scored = nodes, .tokens = tokens, .cosines = turns, .sines = turns,
                     .position = columns + 3 * nodes, .write = columns + 4 * nodes,
                     .reach = {columns, columns + nodes, columns + 2 * nodes, columns + 5 * nodes, 1, at + nodes, pages},
                     .keys = kv, .values = kv + CACHE / 2, .layer_stride = CACHE, .slot_stride = DIM,
                     .head_stride = SLOTS * DIM};
}

typedef struct {
    const fr_decoder *m;
    const float *before, *turns; /* the cache as it was, and rotations */
    float *kv, *logits;          /* [MOST, VOCAB] of the passes behind the first */
    float *shown, *rows;         /* [MOST, WIDTH] rows that entered layer 0 of these, and [SLOTS, WIDTH] those of all by slot */
    int32_t tops[MOST], text[2 + CHAIN + MOST];
    fr_run run;
} trial;

/* Passes behind one over these tokens, the first of which ends a text of two tokens. Returns how many there were. */
static int64_t run_it(trial *t, const int64_t *given, int nodes, int64_t match, int64_t stop, double seconds, float *own) {
    int32_t *pages = malloc(2 * sizeof *pages), *columns = malloc(6 * (size_t)nodes * sizeof *columns);
    int64_t *stops = malloc(sizeof *stops), *tokens = malloc((size_t)nodes * sizeof *tokens);
    int32_t *tops = malloc((size_t)nodes * sizeof *tops), *text = calloc((size_t)(2 + nodes + MOST), sizeof *text);
    pages[0] = 2, pages[1] = 0, *stops = stop, text[0] = 3, text[1] = (int32_t)given[0];
    memcpy(tokens, given, (size_t)nodes * sizeof *tokens);
    memcpy(t->kv, t->before, CACHE * sizeof(float));
    fr_pass first = pass_at(tokens, nodes, columns, pages, CONTEXT, t->kv, t->turns);
    first.logits = own, first.tops = tops;
    float *entered = malloc((size_t)nodes * WIDTH * sizeof(float)), **hidden = malloc(MOST * sizeof *hidden);
    const int64_t layer = 0;
    for (int i = 0; i < MOST; i++) hidden[i] = t->shown + i * WIDTH;
    first.hidden_layers = &layer, first.hidden = &entered, first.hidden_count = 1, first.kept = &t->rows;
    t->run = (fr_run){.most = MOST, .seconds = seconds, .stops = stops, .stop_count = stop >= 0, .match = match, .text = text,
                      .length = 2, .logits = t->logits, .tops = t->tops, .hidden = hidden};
    if (fr_decode_run(t->m, &first, &t->run)) exit(4);
    memcpy(t->text, text, (size_t)(2 + nodes + MOST) * sizeof *text);
    free(pages), free(columns), free(stops), free(tokens), free(tops), free(text), free(entered), free(hidden);
    return t->run.count;
}

static int check_model(const fr_decoder *m) {
    float *before = floats(CACHE), *other = floats(CACHE), *turns = floats(SLOTS * DIM / 2), single[VOCAB], own[CHAIN * VOCAB];
    int32_t pages[2] = {2, 0}, columns[6], found[1 + MOST];
    int64_t token = 8, chain[CHAIN];
    trial t = {.m = m, .before = before, .turns = turns, .kv = floats(CACHE), .logits = malloc(MOST * VOCAB * sizeof(float)),
               .shown = malloc(MOST * WIDTH * sizeof(float)), .rows = calloc(SLOTS * WIDTH, sizeof(float))};
    float *entered = malloc(WIDTH * sizeof(float)), *rows = calloc(SLOTS * WIDTH, sizeof(float));
    const int64_t layer = 0;
    int bad = run_it(&t, &token, 1, 0, -1, 1e9, own) != MOST || t.run.kept;
    memcpy(other, before, CACHE * sizeof(float));
    for (int i = 0; i <= MOST; i++) { /* pass by pass */
        fr_pass pass = pass_at(&token, 1, columns, pages, CONTEXT + i, other, turns);
        pass.logits = single, pass.tops = found + i;
        pass.hidden_layers = &layer, pass.hidden = &entered, pass.hidden_count = 1, pass.kept = &rows;
        if (fr_decode(m, &pass)) exit(4);
        bad |= i && memcmp(entered, t.shown + (i - 1) * WIDTH, WIDTH * sizeof(float));
        bad |= memcmp(single, i ? t.logits + (i - 1) * VOCAB : own, sizeof single) || (i && found[i] != t.tops[i - 1]);
        token = found[i];
    }
    bad |= memcmp(t.kv, other, CACHE * sizeof(float)) || memcmp(t.rows, rows, SLOTS * WIDTH * sizeof(float));
    for (int right = 0; right < CHAIN; right++) { /* behind chains of which so many nodes are right */
        for (int i = 0; i < CHAIN; i++) chain[i] = i ? (found[i - 1] + (i > right)) % VOCAB : 8;
        bad |= run_it(&t, chain, CHAIN, 0, -1, 1e9, own) != MOST || t.run.kept != right;
        bad |= !!memcmp(t.tops, found + 1 + right, (size_t)(MOST - right) * sizeof *found);
        bad |= right && run_it(&t, chain, CHAIN, 0, found[0], 1e9, own) != 0; /* the chain ends the text */
        bad |= run_it(&t, chain, CHAIN, 0, found[right], 1e9, own) != 0 || run_it(&t, chain, CHAIN, 0, -1, 0.0, own) != 0;
        for (int match = 1; match <= 2; match++) { /* ends where the text's end first came before */
            int64_t count = run_it(&t, chain, CHAIN, match, -1, 1e9, own);
            for (int64_t i = 0; i <= count; i++) {
                int64_t length = 3 + right + i, came = 0;
                if (t.text[length - 1] != (i + right <= MOST ? found[i + right] : t.tops[i - 1])) bad = 1;
                for (int64_t at = 0; at + match < length; at++)
                    came |= !memcmp(t.text + at, t.text + length - match, (size_t)match * sizeof *t.text);
                bad |= came != (i == count) && i < MOST;
            }
        }
    }
    free(before), free(other), free(turns), free(t.kv), free(t.logits), free(t.shown), free(t.rows), free(entered), free(rows);
    return bad;
}

int check_runs(void) {
    fr_layer layer = {.attention_norm = floats(WIDTH), .mlp_norm = floats(WIDTH), .qkv = plain(3 * HEADS * DIM, WIDTH),
                      .output = plain(WIDTH, HEADS * DIM), .gate_up = plain(2 * INNER, WIDTH), .down = plain(WIDTH, INNER),
                      .rotate = 1, .kv_heads = HEADS, .head_dim = DIM, .rotary = DIM};
    float *table = floats(VOCAB * WIDTH);
    fr_decoder m = {1, WIDTH, HEADS, VOCAB, INNER, DIM, 1, 1e-5f, 0.25f, &layer, floats(WIDTH), plain(VOCAB, WIDTH),
                    {-1, WIDTH * sizeof(float), table}};
    int bad = check_model(&m);
    const fr_weights *const all[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &m.head};
    for (int i = 0; i < 5; i++) free((void *)all[i]->part[0].data);
    free((void *)layer.attention_norm), free((void *)layer.mlp_norm), free((void *)m.final_norm), free(table);
    return bad;
}
