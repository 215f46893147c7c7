/* Several plain passes in one call, on exact-sized buffers: the same bits as pass by pass, and where a run stops.
 *
 * Called by check.c on every path; 0 where all agree. The context crosses from one page to another that lies before it.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, HEADS = 2, DIM = 16, INNER = 48, VOCAB = 29, PAGES = 3, SLOTS = PAGES * FR_PAGE, CONTEXT = 62, MOST = 6 };
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

/* The pass over a token at a position, in columns that the caller has. */
static fr_pass pass_at(int64_t *token, int32_t *columns, const int32_t *pages, int32_t at, float *kv, const float *turns) {
    columns[0] = 0, columns[1] = columns[3] = at, columns[2] = 1;
    columns[4] = pages[at / FR_PAGE] * FR_PAGE + at % FR_PAGE;
    return (fr_pass){.nodes = 1, .scored = 1, .tokens = token, .cosines = turns, .sines = turns, .position = columns + 3,
                     .write = columns + 4, .reach = {columns, columns + 1, columns + 2, columns + 4, 1, at + 1, pages},
                     .keys = kv, .values = kv + CACHE / 2, .layer_stride = CACHE, .head_stride = SLOTS * DIM};
}

/* A run of up to MOST passes behind `text`, which ends with the token to begin with. Returns how many were run. */
static int64_t run_it(const fr_decoder *m, const float *before, const float *turns, int32_t *text, int64_t length,
                      int64_t match, int64_t stop, double seconds, float *logits, int32_t *tops, float *kv) {
    int32_t *pages = malloc(2 * sizeof *pages), columns[5];
    int64_t token = text[length - 1], *stops = malloc(sizeof *stops);
    pages[0] = 2, pages[1] = 0, *stops = stop;
    memcpy(kv, before, CACHE * sizeof(float));
    fr_pass first = pass_at(&token, columns, pages, CONTEXT, kv, turns);
    fr_run run = {.most = MOST, .seconds = seconds, .stops = stops, .stop_count = stop >= 0, .match = match, .text = text,
                  .length = length, .logits = logits, .tops = tops};
    if (fr_decode_run(m, &first, &run)) exit(4);
    free(pages), free(stops);
    return run.count;
}

static int check_model(const fr_decoder *m) {
    float *before = floats(CACHE), *kv = floats(CACHE), *other = floats(CACHE), *turns = floats(SLOTS * DIM / 2);
    float *logits = malloc(MOST * VOCAB * sizeof(float)), *wanted = malloc(VOCAB * sizeof(float));
    int32_t pages[2] = {2, 0}, columns[5], tops[MOST], again[MOST], top, *text = malloc((2 + MOST) * sizeof *text);
    text[0] = 3, text[1] = 8;
    int bad = run_it(m, before, turns, text, 2, 0, -1, 1e9, logits, tops, kv) != MOST;
    memcpy(other, before, CACHE * sizeof(float));
    for (int i = 0; i < MOST; i++) {
        int64_t token = i ? tops[i - 1] : text[1];
        fr_pass pass = pass_at(&token, columns, pages, CONTEXT + i, other, turns);
        pass.logits = wanted, pass.tops = &top;
        if (fr_decode(m, &pass)) exit(4);
        bad |= top != tops[i] || memcmp(wanted, logits + i * VOCAB, VOCAB * sizeof(float));
    }
    bad |= memcmp(kv, other, CACHE * sizeof(float));
    bad |= run_it(m, before, turns, text, 2, 0, tops[2], 1e9, logits, again, kv) > 3; /* it may have come before that */
    bad |= run_it(m, before, turns, text, 2, 0, -1, 0.0, logits, again, kv) != 1;
    for (int match = 1; match <= 2; match++) { /* stops behind the first end of the text that came before, and not earlier */
        int64_t count = run_it(m, before, turns, text, 2, match, -1, 1e9, logits, again, kv);
        for (int64_t i = 1; i <= count; i++) {
            int64_t length = 2 + i, found = 0;
            text[length - 1] = tops[i - 1];
            for (int64_t at = 0; at + match < length; at++)
                found |= !memcmp(text + at, text + length - match, (size_t)match * sizeof *text);
            bad |= found != (i == count && count < MOST) && i < MOST;
        }
    }
    free(before), free(kv), free(other), free(turns), free(logits), free(wanted), free(text);
    return bad;
}

int check_runs(void) {
    fr_layer layer = {.attention_norm = floats(WIDTH), .mlp_norm = floats(WIDTH), .qkv = plain(3 * HEADS * DIM, WIDTH),
                      .output = plain(WIDTH, HEADS * DIM), .gate_up = plain(2 * INNER, WIDTH), .down = plain(WIDTH, INNER),
                      .rotate = 1};
    float *table = floats(VOCAB * WIDTH);
    fr_decoder m = {1, WIDTH, HEADS, HEADS, DIM, DIM, INNER, VOCAB, 1e-5f, 0.25f, &layer, floats(WIDTH), plain(VOCAB, WIDTH),
                    {-1, WIDTH * sizeof(float), table}};
    int bad = check_model(&m);
    const fr_weights *const all[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &m.head};
    for (int i = 0; i < 5; i++) free((void *)all[i]->part[0].data);
    free((void *)layer.attention_norm), free((void *)layer.mlp_norm), free((void *)m.final_norm), free(table);
    return bad;
}
