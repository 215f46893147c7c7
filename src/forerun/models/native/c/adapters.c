/* LoRA adapters: low-rank changes of linear layers, added row by row, each row by the adapter of its own sequence.
 *
 * y += up (scale * down x), for all projections that read the same rows at once: first what `down` gives, shared out by
 * projections and fours of ranks, then what `up` adds, shared out by panels of outputs. Rows of one adapter that lie side
 * by side use its numbers together. Every number is summed in one order, whatever rows are beside it and however many
 * threads there are.
 */
#include "vector.h"

#if defined(__x86_64__)
typedef struct {
    __m256 a, b;
} v16;
FR_INLINE v16 zero16(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FR_INLINE v16 all16(float f) { return (v16){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
FR_INLINE v16 load16(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FR_INLINE void store16(float *p, v16 v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
FR_INLINE v16 halves16(const uint16_t *p) {
    const __m128i *both = (const __m128i *)p;
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128(both)), _mm256_cvtph_ps(_mm_loadu_si128(both + 1))};
}
FR_INLINE v16 fma16(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
FR_INLINE float across16(v16 v) {
    __m256 half = _mm256_add_ps(v.a, v.b);
    return across((f32x4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#else
typedef struct {
    f32x4 v[4];
} v16;
FR_INLINE v16 all16(float f) { return (v16){{all4(f), all4(f), all4(f), all4(f)}}; }
FR_INLINE v16 zero16(void) { return all16(0.0f); }
FR_INLINE v16 load16(const float *p) { return (v16){{load4(p), load4(p + 4), load4(p + 8), load4(p + 12)}}; }
FR_INLINE void store16(float *p, v16 v) {
    FR_UNROLL for (int i = 0; i < 4; i++) store4(p + 4 * i, v.v[i]);
}
FR_INLINE v16 halves16(const uint16_t *p) {
    return (v16){{load4_halves(p), load4_halves(p + 4), load4_halves(p + 8), load4_halves(p + 12)}};
}
FR_INLINE v16 fma16(v16 x, v16 y, v16 z) {
    FR_UNROLL for (int i = 0; i < 4; i++) z.v[i] = fma4(x.v[i], y.v[i], z.v[i]);
    return z;
}
FR_INLINE float across16(v16 v) { return across((v.v[0] + v.v[2]) + (v.v[1] + v.v[3])); }
#endif

#define DOWN_ROWS fr_adapt_down
#define UP_ROWS fr_adapt_up
#include "adapters.h"

typedef struct {
    const fr_adapter_layer *const *of; /* [rows] */
    const fr_adapt_path *path;
    const fr_adapted *parts;
    int64_t layer, count, inputs, stride; /* stride = numbers between the middles of two rows */
    int64_t units[FR_MOST_PARTS];         /* of each part */
    const float *x;
    float *middle; /* [rows, stride]: those of the parts behind each other */
} adapt_job;

FR_INLINE const fr_change *change_of(const adapt_job *job, const fr_adapted *part, int64_t row) {
    return job->of[row] ? job->of[row][job->layer].changes + part->which : NULL;
}

/* Rows from `first` on that have the same adapter, a few at most. */
FR_INLINE int64_t alike(const adapt_job *job, int64_t first, int64_t rows) {
    int64_t end = first + 1;
    while (end < rows && end < first + FR_ALIKE && job->of[end] == job->of[first]) end++;
    return end - first;
}

static void down_unit(const adapt_job *job, int64_t part, int64_t block) {
    const fr_adapted *to = job->parts + part;
    for (int64_t r = 0, together; r < to->rows; r += together) {
        together = alike(job, r, to->rows);
        const fr_change *change = change_of(job, to, r);
        if (change && block * FR_RANKS < change->rank)
            job->path->down(change, block, job->x + r * job->inputs, job->inputs, together,
                            job->middle + r * job->stride + part * FR_MOST_RANK, job->stride);
    }
}

static void up_unit(const adapt_job *job, int64_t part, int64_t panel) {
    const fr_adapted *to = job->parts + part;
    int64_t first = panel * FR_OUTPUTS, left = to->outputs - first;
    for (int64_t r = 0, together; r < to->rows; r += together) {
        float ends[FR_ALIKE][FR_OUTPUTS], *y[FR_ALIKE];
        together = alike(job, r, to->rows);
        const fr_change *change = change_of(job, to, r);
        if (!change || !change->rank) continue;
        for (int64_t i = 0; i < together; i++) y[i] = to->y + (r + i) * to->stride + first;
        for (int64_t i = 0; left < FR_OUTPUTS && i < together; i++) { /* behind the last output lies something else */
            memset(ends[i], 0, sizeof ends[i]);
            y[i] = memcpy(ends[i], y[i], (size_t)left * sizeof(float));
        }
        job->path->up(change, panel, job->middle + r * job->stride + part * FR_MOST_RANK, job->stride, y, together);
        for (int64_t i = 0; left < FR_OUTPUTS && i < together; i++)
            memcpy(to->y + (r + i) * to->stride + first, ends[i], (size_t)left * sizeof(float));
    }
}

typedef void unit_of(const adapt_job *job, int64_t part, int64_t unit);
/* Units are numbered through all parts. */
FR_INLINE void run_units(const adapt_job *job, int64_t begin, int64_t end, unit_of *run) {
    for (int64_t part = 0; part < job->count; begin -= job->units[part], end -= job->units[part], part++)
        for (int64_t i = begin > 0 ? begin : 0; i < end && i < job->units[part]; i++) run(job, part, i);
}
static void run_down(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    run_units(arg, begin, end, down_unit);
}
static void run_up(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    run_units(arg, begin, end, up_unit);
}

/* `each` = products of a unit for one row; other threads are asked where they have enough to do. */
static void share_out(adapt_job *job, fr_job run, int64_t each, int64_t rows) {
    int64_t all = 0, least = 4 * FR_AT_ONCE / (each * rows) + 1;
    for (int64_t i = 0; i < job->count; i++) all += job->units[i];
    int64_t grain = all / (fr_threads() * 4);
    fr_parallel(run, job, all, grain < least ? least : grain);
}

void fr_adapt(const fr_adapter_layer *const *of, int64_t layer, const fr_adapted *parts, int64_t count, const float *x,
              int64_t inputs, float *middle) {
    if (!of) return;
    int64_t rows = 0, rank = 0, changed = 0;
    adapt_job job = {.of = of, .path = fr_chosen_adapt(), .parts = parts, .layer = layer, .count = count, .inputs = inputs,
                     .stride = count * FR_MOST_RANK, .x = x, .middle = middle};
    for (int64_t part = 0; part < count; part++) {
        if (parts[part].rows > rows) rows = parts[part].rows;
        for (int64_t r = 0; r < parts[part].rows; r++) {
            const fr_change *change = change_of(&job, parts + part, r);
            if (change && change->rank > rank) rank = change->rank;
            changed += part == 0 && change;
        }
    }
    if (!rank) return;
    for (int64_t part = 0; part < count; part++) job.units[part] = rank / FR_RANKS;
    share_out(&job, run_down, FR_RANKS * inputs, changed ? changed : 1);
    for (int64_t part = 0; part < count; part++) job.units[part] = (parts[part].outputs + FR_OUTPUTS - 1) / FR_OUTPUTS;
    share_out(&job, run_up, rank * FR_OUTPUTS, changed ? changed : 1);
}
FR_POP_TARGET
