/* Recurrent layers: short convolutions, gated DeltaNet, Mamba-2.
 *
 * Every row is computed by the same few steps in the same order, whether it is one of a prompt's, a tree's node or alone:
 * a state does not depend on how its tokens were cut into passes. What a row needs of itself (convolution, norms, gates)
 * is computed for all rows at once. The recurrence is walked head by head and by blocks of COLUMNS columns, which do not
 * depend on each other: a block stays in the first cache for all rows of a sequence.
 */
#include "vector.h"

#include <math.h>

#if defined(__x86_64__)
typedef float vec __attribute__((vector_size(32)));
FR_INLINE vec fma_v(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
FR_INLINE vec all_v(float f) { return (vec)_mm256_set1_ps(f); }
#else
typedef f32x4 vec;
FR_INLINE vec fma_v(vec a, vec b, vec c) { return fma4(a, b, c); }
FR_INLINE vec all_v(float f) { return all4(f); }
#endif
enum { LANES = sizeof(vec) / sizeof(float), COLUMNS = 32, VECTORS = COLUMNS / LANES, CHANNELS = 64 };

FR_INLINE vec load_v(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
FR_INLINE void store_v(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* Of what is convolved: where queries, keys and values begin, and strengths and what is left of before, behind them. */
typedef struct {
    int64_t queries, keys, values, strengths, left, size;
} places;

static places places_of(const fr_mixer *m) {
    int64_t keys = m->key_heads * m->key_dim, values = m->value_heads * m->value_dim, end = m->channels;
    if (m->kind == FR_MAMBA2) return (places){values + keys, values, 0, end, end + m->value_heads, end + 2 * m->value_heads};
    return (places){0, keys, 2 * keys, end, end + m->value_heads, end + 2 * m->value_heads};
}

static int64_t blocks_of(const fr_mixer *m) { return (m->value_dim + COLUMNS - 1) / COLUMNS; }
static int64_t last_inputs(const fr_mixer *m) { return (m->kernel - 1) * m->channels; }

FR_API int64_t fr_state_numbers(const fr_mixer *m) {
    return last_inputs(m) + m->value_heads * blocks_of(m) * m->key_dim * COLUMNS;
}

typedef struct {
    const fr_mixer *m;
    const fr_walk *walks;
    const int32_t *owner; /* [rows] which walk a row belongs to */
    float *inputs, *mixed, *found, *room;
    float eps;
    int64_t count, room_size;
    places at;
} mix_job;

static int64_t parent_of(const fr_walk *w, int64_t node) { return w->parents ? w->parents[node] : node - 1; }

/* The inputs that a node's convolution reads, its own last. */
static void find_inputs(const mix_job *job, const fr_walk *w, int64_t node, const float **from) {
    const fr_mixer *m = job->m;
    const float *before = w->start + m->state + last_inputs(m);
    for (int64_t j = m->kernel - 1; j >= 0; j--) {
        if (node < 0) {
            from[j] = before -= m->channels;
            continue;
        }
        from[j] = job->inputs + (w->first + node) * m->wide + m->convolved_at;
        node = parent_of(w, node);
    }
}

FR_INLINE f32x4 silu4(f32x4 x) { return x / (all4(1.0f) + exp4(-x)); }

static void silu_row(float *x, int64_t count) {
    int64_t whole = count / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4) store4(x + i, silu4(load4(x + i)));
    for (int64_t i = whole; i < count; i++) x[i] = silu4(all4(x[i]))[0];
}

static void convolve_row(const mix_job *job, int64_t row, float *restrict y) {
    const fr_mixer *m = job->m;
    const fr_walk *w = job->walks + job->owner[row];
    const float *from[FR_MOST_TAPS];
    find_inputs(job, w, row - w->first, from);
    for (int64_t c = 0; c < m->channels; c += CHANNELS) {
        int64_t n = m->channels - c < CHANNELS ? m->channels - c : CHANNELS;
        for (int64_t i = 0; i < n; i++) y[c + i] = from[0][c + i] * m->taps[c + i];
        for (int64_t j = 1; j < m->kernel; j++) {
            const float *restrict x = from[j] + c, *restrict taps = m->taps + j * m->channels + c;
            for (int64_t i = 0; i < n; i++) y[c + i] = __builtin_fmaf(x[i], taps[i], y[c + i]);
        }
        for (int64_t i = 0; m->bias && i < n; i++) y[c + i] += m->bias[c + i];
    }
}

/* Each head to length one (eps as in the delta rule's own code), times scale. */
static void unit_heads(float *x, int64_t heads, int64_t dim, float scale) {
    for (int64_t h = 0; h < heads; h++, x += dim) {
        f32x4 sum = all4(0);
        int64_t i = 0;
        for (; i + 4 <= dim; i += 4) sum = fma4(load4(x + i), load4(x + i), sum);
        float total = across(sum);
        for (; i < dim; i++) total = __builtin_fmaf(x[i], x[i], total);
        float by = scale / sqrtf(total + 1e-6f);
        for (i = 0; i < dim; i++) x[i] *= by;
    }
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* How strongly each head's value is written, and what is left of what was written before. */
static void find_steps(const mix_job *job, const float *steps, float *row) {
    const fr_mixer *m = job->m;
    for (int64_t h = 0; h < m->value_heads; h++) {
        float strength, step;
        if (m->kind == FR_MAMBA2) {
            step = softplus(steps[h] + m->step_bias[h]);
            strength = step = step < m->least_step ? m->least_step : step;
        } else {
            strength = 1.0f / (1.0f + expf(-steps[h]));
            step = softplus(steps[m->value_heads + h] + m->step_bias[h]);
        }
        row[job->at.strengths + h] = strength;
        row[job->at.left + h] = expf(step * m->rates[h]);
    }
}

/* A short convolution stands between two gates: the first is multiplied in before any row is convolved. */
static void open_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const mix_job *job = arg;
    for (int64_t r = begin; r < end; r++) {
        float *restrict x = job->inputs + r * job->m->wide, *restrict inner = x + 2 * job->m->channels;
        for (int64_t i = 0; i < job->m->channels; i++) x[i] *= inner[i];
    }
}

static void prepare_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const mix_job *job = arg;
    const fr_mixer *m = job->m;
    for (int64_t r = begin; r < end; r++) {
        const float *input = job->inputs + r * m->wide;
        if (m->kind == FR_SHORT_CONV) {
            float *restrict y = job->found + r * m->channels;
            const float *restrict gate = input + m->gates_at;
            convolve_row(job, r, y);
            for (int64_t i = 0; i < m->channels; i++) y[i] *= gate[i];
            continue;
        }
        float *row = job->mixed + r * job->at.size;
        convolve_row(job, r, row);
        silu_row(row, m->channels);
        if (m->kind == FR_DELTA_NET) {
            unit_heads(row + job->at.queries, m->key_heads, m->key_dim, 1.0f / sqrtf((float)m->key_dim));
            unit_heads(row + job->at.keys, m->key_heads, m->key_dim, 1.0f);
        }
        find_steps(job, input + m->steps_at, row);
    }
}

/* One row's step of one block of a head: a memory [keys, COLUMNS] from the one before, and what the query finds in it. */
typedef struct {
    const float *query, *key;
    float value[COLUMNS], found[COLUMNS], strength, left, skip;
    int64_t keys;
} step;

FR_INLINE void run_step(step *s, const float *before, float *after, int delta) {
    vec sum[VECTORS], add[VECTORS], found[VECTORS], left = all_v(s->left), strength = all_v(s->strength);
    FR_UNROLL for (int j = 0; j < VECTORS; j++) add[j] = load_v(s->value + j * LANES), found[j] = sum[j] = all_v(0.0f);
    if (delta) { /* what the key gives already */
        for (int64_t i = 0; i < s->keys; i++) {
            vec key = all_v(s->key[i]);
            FR_UNROLL for (int j = 0; j < VECTORS; j++) sum[j] = fma_v(key, load_v(before + i * COLUMNS + j * LANES), sum[j]);
        }
        FR_UNROLL for (int j = 0; j < VECTORS; j++) add[j] = add[j] - left * sum[j];
    }
    FR_UNROLL for (int j = 0; j < VECTORS; j++) add[j] = add[j] * strength;
    for (int64_t i = 0; i < s->keys; i++) {
        vec key = all_v(s->key[i]), query = all_v(s->query[i]);
        FR_UNROLL for (int j = 0; j < VECTORS; j++) {
            vec now = fma_v(key, add[j], left * load_v(before + i * COLUMNS + j * LANES));
            store_v(after + i * COLUMNS + j * LANES, now);
            found[j] = fma_v(query, now, found[j]);
        }
    }
    vec skip = all_v(s->skip);
    FR_UNROLL for (int j = 0; j < VECTORS; j++)
        store_v(s->found + j * LANES, delta ? found[j] : fma_v(skip, load_v(s->value + j * LANES), found[j]));
}

/* All rows of one sequence through one block of one head. Where a state is wanted it is computed in its place. */
static void walk_block(const mix_job *job, const fr_walk *w, int64_t head, int64_t block, float *room) {
    const fr_mixer *m = job->m;
    const int64_t size = m->key_dim * COLUMNS, column = block * COLUMNS;
    const int64_t group = m->in_turns ? head % m->key_heads : head / (m->value_heads / m->key_heads);
    const int64_t here = m->state + last_inputs(m) + (head * blocks_of(m) + block) * size;
    const int64_t n = m->value_dim - column < COLUMNS ? m->value_dim - column : COLUMNS;
    const float *nodes[w->parents ? w->nodes : 1], *before = w->start + here;
    step s = {.keys = m->key_dim, .skip = m->skip ? m->skip[head] : 0.0f};
    for (int64_t node = 0, kept = 0; node < w->nodes; node++) {
        const float *row = job->mixed + (w->first + node) * job->at.size;
        int is_kept = kept < w->kept && w->kept_nodes[kept] == node;
        float *after = is_kept ? w->states[kept++] + here : w->parents ? room + node * size : room;
        if (w->parents) before = w->parents[node] < 0 ? w->start + here : nodes[w->parents[node]];
        s.query = row + job->at.queries + group * m->key_dim, s.key = row + job->at.keys + group * m->key_dim;
        s.strength = row[job->at.strengths + head], s.left = row[job->at.left + head];
        memcpy(s.value, row + job->at.values + head * m->value_dim + column, (size_t)n * sizeof(float));
        if (m->kind == FR_DELTA_NET) run_step(&s, before, after, 1);
        else run_step(&s, before, after, 0);
        if (job->found)
            memcpy(job->found + ((w->first + node) * m->value_heads + head) * m->value_dim + column, s.found,
                   (size_t)n * sizeof(float));
        before = after;
        if (w->parents) nodes[node] = after;
    }
}

static void walk_blocks(void *arg, int64_t begin, int64_t end, int worker) {
    const mix_job *job = arg;
    int64_t blocks = blocks_of(job->m), each = job->m->value_heads * blocks;
    for (int64_t i = begin; i < end; i++)
        walk_block(job, job->walks + i / each, i % each / blocks, i % blocks, job->room + worker * job->room_size);
}

static void finish_rows(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const mix_job *job = arg;
    const fr_mixer *m = job->m;
    int64_t values = m->value_heads * m->value_dim;
    fr_gate_row *open = fr_chosen_gate();
    for (int64_t r = begin; r < end; r++) {
        float *y = job->found + r * values;
        const float *gates = job->inputs + r * m->wide + m->gates_at;
        if (m->kind == FR_DELTA_NET) {
            fr_rms_norm(y, m->norm, job->eps, y, m->value_heads, m->value_dim);
            open(gates, y, y, values, FR_SILU);
            continue;
        }
        open(gates, y, y, values, FR_SILU);
        for (int64_t i = 0; i < values; i += m->norm_size) fr_rms_norm(y + i, m->norm + i, job->eps, y + i, 1, m->norm_size);
    }
}

/* The inputs that convolutions behind a kept state read. */
static void keep_inputs(const mix_job *job) {
    const fr_mixer *m = job->m;
    const float *from[FR_MOST_TAPS];
    for (const fr_walk *w = job->walks; w < job->walks + job->count; w++)
        for (int64_t k = 0; k < w->kept; k++) {
            find_inputs(job, w, w->kept_nodes[k], from);
            for (int64_t j = 1; j < m->kernel; j++)
                memcpy(w->states[k] + m->state + (j - 1) * m->channels, from[j], (size_t)m->channels * sizeof(float));
        }
}

/* Lay out scratch; how many bytes it takes. */
static size_t lay_out(const fr_mixer *m, const fr_walk *walks, int64_t count, int64_t rows, void *memory, mix_job *job) {
    int64_t most = 1;
    for (const fr_walk *w = walks; w < walks + count; w++)
        if (w->parents && w->nodes > most) most = w->nodes;
    job->at = places_of(m);
    job->room_size = m->kind == FR_SHORT_CONV ? 0 : most * m->key_dim * COLUMNS;
    size_t owners = ((size_t)rows * sizeof(int32_t) + 63) / 64 * 64, room = (size_t)(fr_threads() * job->room_size) * sizeof(float);
    size_t mixed = m->kind == FR_SHORT_CONV ? 0 : ((size_t)(rows * job->at.size) * sizeof(float) + 63) / 64 * 64;
    job->owner = memory;
    job->mixed = (float *)((uintptr_t)memory + owners);
    job->room = (float *)((uintptr_t)memory + owners + mixed);
    return owners + mixed + (room + 63) / 64 * 64;
}

size_t fr_mixer_bytes(const fr_mixer *m, const fr_walk *walks, int64_t count, int64_t rows) {
    mix_job job;
    return lay_out(m, walks, count, rows, NULL, &job);
}

void fr_mix(const fr_mixer *m, float eps, float *inputs, const fr_walk *walks, int64_t count, int64_t rows, float *found,
            void *scratch) {
    mix_job job = {.m = m, .walks = walks, .inputs = inputs, .found = found, .eps = eps, .count = count};
    lay_out(m, walks, count, rows, scratch, &job);
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < walks[i].nodes; r++) ((int32_t *)scratch)[walks[i].first + r] = (int32_t)i;
    int64_t some = fr_rows_at_once(m->channels), each = m->value_heads * blocks_of(m);
    if (m->kind == FR_SHORT_CONV) {
        if (found) fr_parallel(open_rows, &job, rows, some), fr_parallel(prepare_rows, &job, rows, some);
    } else {
        fr_parallel(prepare_rows, &job, rows, some);
        fr_parallel(walk_blocks, &job, count * each, rows > 16 * count ? 1 : 8);
        if (found) fr_parallel(finish_rows, &job, rows, some);
    }
    keep_inputs(&job);
}
FR_POP_TARGET
