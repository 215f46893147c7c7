/* The experts' kernels by themselves, on exact-sized buffers: packed and plain weights, with and without a shared expert,
 * with biases and limited gates, with groups and corrected scores.
 *
 * Called by check.c on every path; 0 where a row has the same bits alone and beside others, and where no more experts
 * are read than were picked.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { WIDTH = 64, INNER = 32, SHARED = 96, EXPERTS = 8, PICKED = 3, ROWS = 45 };
enum { Q8_0 = 8, MXFP4 = 39 }; /* types of weights; 0 = floats */

static uint32_t state = 9;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

static float *floats(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) p[i] = (float)(next() >> 8) / (1 << 23) - 1.0f;
    return p;
}

static fr_weight new_weight(int type, int outputs, int inputs) {
    if (!type) return (fr_weight){FR_F32, outputs, inputs, floats((int64_t)outputs * inputs), NULL};
    int64_t block = type == Q8_0 ? 34 : 17, row = inputs / FR_BLOCK * block, bytes = outputs * row;
    uint8_t *raw = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) {
        raw[i] = (uint8_t)(next() >> 24);
        if (type == Q8_0 && i % block == 1) raw[i] = 0x18; /* small scales */
        if (type == MXFP4 && i % block == 0) raw[i] = (uint8_t)(120 + raw[i] % 4);
    }
    fr_weight w = {fr_packed_kind(type), outputs, inputs, NULL, NULL};
    void *data = malloc((size_t)fr_packed_bytes(w.kind, outputs, inputs));
    fr_pack(type, raw, row, outputs, inputs, data);
    w.data = data;
    free(raw);
    return w;
}

static fr_weights one(fr_weight w) { return (fr_weights){1, {w}}; }

static void drop(fr_weights *w) {
    for (int64_t i = 0; i < w->count; i++) free((void *)w->part[i].data);
}

static int64_t run(const fr_experts *e, const float *x, float *out, int64_t rows) {
    void *scratch = malloc(fr_experts_bytes(e, rows, WIDTH));
    int64_t active_experts = fr_run_experts(e, x, out, rows, WIDTH, scratch);
    free(scratch);
    return active_experts;
}

static int check_kind(int type, int shared, float limit, int groups) {
    fr_weights into[EXPERTS], out[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        into[i] = (fr_weights){2, {new_weight(type, INNER, WIDTH), new_weight(type, INNER, WIDTH)}};
        out[i] = one(new_weight(type, WIDTH, INNER));
    }
    fr_experts e = {.count = EXPERTS, .per_token = PICKED, .inner = INNER, .renormalise = !shared, .gate_up = into, .down = out,
                    .groups = 1, .kept_groups = 1, .scale = 1.0f};
    float biases[WIDTH + 2 * INNER + EXPERTS];
    for (int i = 0; i < WIDTH + 2 * INNER + EXPERTS; i++) biases[i] = (float)(i % 7) / 4 - 1;
    if (limit) e.limit = limit, e.alpha = 1.702f;
    for (int i = 0; i < EXPERTS && limit; i++) {
        out[i].part[0].bias = biases;
        for (int j = 0; j < 2; j++) into[i].part[j].bias = biases + WIDTH + j * INNER;
    }
    e.router = one(new_weight(0, EXPERTS, WIDTH));
    if (limit) e.router.part[0].bias = biases + WIDTH + 2 * INNER;
    float *correction = floats(EXPERTS);
    if (groups > 1) e.groups = groups, e.kept_groups = 2, e.sigmoid = 1, e.correction = correction, e.scale = 1.5f;
    if (shared) {
        e.shared_inner = SHARED;
        e.shared_gate_up = one(new_weight(type, 2 * SHARED, WIDTH));
        e.shared_down = one(new_weight(type, WIDTH, SHARED));
        if (groups == 1) e.shared_gate = one(new_weight(0, 1, WIDTH));
    }
    float *x = floats(ROWS * WIDTH), *together = floats(ROWS * WIDTH), *alone = floats(WIDTH);
    int bad = run(&e, x, together, ROWS) > EXPERTS;
    for (int r = 0; r < ROWS; r++) {
        bad |= run(&e, x + r * WIDTH, alone, 1) != PICKED;
        bad |= memcmp(alone, together + r * WIDTH, WIDTH * sizeof(float)) != 0;
    }
    for (int i = 0; i < EXPERTS; i++) drop(into + i), drop(out + i);
    drop(&e.router), drop(&e.shared_gate_up), drop(&e.shared_down), drop(&e.shared_gate);
    free(x), free(together), free(alone), free(correction);
    return bad;
}

int check_experts(void) {
    int bad = check_kind(0, 0, 0.5f, 1) | check_kind(MXFP4, 0, 0.5f, 1) | check_kind(0, 1, 0, 4) | check_kind(Q8_0, 0, 0, 4);
    return bad | check_kind(0, 0, 0, 1) | check_kind(Q8_0, 0, 0, 1) | check_kind(0, 1, 0, 1) | check_kind(Q8_0, 1, 0, 1);
}
