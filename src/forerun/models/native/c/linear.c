/* Linear layers: activations to int8 blocks, and the panels of all weights of a projection over the pool. */
#include "vector.h"

#include <stdlib.h>

FR_INLINE int64_t groups_of(int64_t rows) { return (rows + FR_GROUP - 1) / FR_GROUP; }

FR_INLINE int64_t tiles_of(int64_t rows) { return (rows + FR_TILE_ROWS - 1) / FR_TILE_ROWS; }
FR_INLINE size_t groups_bytes(int64_t rows, int64_t inputs) {
    return (size_t)(groups_of(rows) * (inputs / FR_BLOCK)) * sizeof(fr_group);
}

/* Groups, then tiles where the path wants them. */
size_t fr_quants_bytes(int64_t rows, int64_t inputs) {
    size_t tiles = fr_uses_tiles(rows) ? (size_t)(tiles_of(rows) * (inputs / FR_BLOCK)) * sizeof(fr_tile) : 0;
    return groups_bytes(rows, inputs) + tiles;
}

/* The even elements of two vectors: from wide integers to narrow ones that hold the same small numbers. */
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
#if defined(__clang__)
#define EVEN(type, a, b, ...) __builtin_shufflevector((type)(a), (type)(b), __VA_ARGS__)
#else
#define EVEN(type, a, b, ...) __builtin_shuffle((type)(a), (type)(b), (type){__VA_ARGS__})
#endif

FR_INLINE i16x8 narrow16(u32x4 a, u32x4 b) { return EVEN(i16x8, a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
FR_INLINE i8x16 narrow8(i16x8 a, i16x8 b) {
    return EVEN(i8x16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

/* amax/127 to the nearest number of 16 significant bits, so that small integers times it are exact. */
FR_INLINE float scale_of(float amax) {
    float scale = amax * (1.0f / 127.0f);
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x80) & 0xffffff00u;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* The sum of sixteen integers whose bits are those of SHIFT + integer, added up in four lanes. */
FR_INLINE int32_t sum_of(u32x4 v) { return (int32_t)((v[0] + v[1]) + (v[2] + v[3]) - FR_BLOCK / 2 * (uint32_t)FR_SHIFT_BITS); }

/* What kernels want to know of a row's block beside its integers: its scale, and the sums of both halves. */
FR_INLINE void set_scales(fr_group *out, int row, float scale, int32_t low, int32_t high) {
    out->scales[row] = scale;
    out->sums[row] = scale * (float)(int32_t)((uint32_t)low + (uint32_t)high);
#if defined(__aarch64__)
    store4(out->backs[row], all4(-FR_SHIFT) * all4(scale));
#else
    out->backs[row] = -FR_SHIFT * scale;
    uint32_t first = (uint32_t)low, last = (uint32_t)high; /* anything in rows that are not numbers */
    out->starts[FR_ZERO_8][row] = (int32_t)(FR_SHIFT_BITS - 128 * (first + last));
    out->starts[FR_ZERO_5][row] = (int32_t)(FR_SHIFT_BITS - 16 * (first + last));
    out->starts[FR_ZERO_6][row] = (int32_t)(FR_SHIFT_BITS - 32 * first);
    out->starts[FR_ZERO_6_LAST][row] = (int32_t)(FR_SHIFT_BITS - 32 * last);
#endif
}

/* Nearest multiple of amax/127 per block of 32; ties to even, by adding a number whose unit is one. */
static void quantize_block(const float *x, fr_group *out, int row) {
    const f32x4 shift = all4(FR_SHIFT);
    const i32x4 magnitude = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
    f32x4 most[FR_BLOCK / 4];
    for (int i = 0; i < FR_BLOCK / 4; i++) most[i] = (f32x4)((i32x4)load4(x + 4 * i) & magnitude);
    for (int step = FR_BLOCK / 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) most[i] = max4(most[i], most[i + step]);
    float low = most[0][0] > most[0][1] ? most[0][0] : most[0][1];
    float high = most[0][2] > most[0][3] ? most[0][2] : most[0][3];
    float amax = low > high ? low : high;
    f32x4 inverse = all4(amax > 0.0f ? 127.0f / amax : 0.0f);
    /* the low byte of a sum with SHIFT is the integer, and the bits of SHIFT itself cancel in the total of all */
    u32x4 v[FR_BLOCK / 4];
    for (int i = 0; i < FR_BLOCK / 4; i++) v[i] = (u32x4)(load4(x + 4 * i) * inverse + shift);
    for (int i = 0; i < FR_BLOCK / 4; i += 4) {
        i8x16 bytes = narrow8(narrow16(v[i], v[i + 1]), narrow16(v[i + 2], v[i + 3]));
        memcpy(out->values[i / 4][row], &bytes, 16);
    }
    int32_t sums[2] = {sum_of((v[0] + v[1]) + (v[2] + v[3])), sum_of((v[4] + v[5]) + (v[6] + v[7]))};
    set_scales(out, row, scale_of(amax), sums[0], sums[1]);
}

typedef struct {
    const float *x;
    int64_t rows, inputs;
    fr_group *q;
    fr_tile *tiles; /* or NULL */
} quantize_job;

static void quantize_range(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const quantize_job *job = arg;
    int64_t blocks = job->inputs / FR_BLOCK;
    for (int64_t r = begin; r < end; r++)
        for (int64_t b = 0; b < blocks; b++)
            quantize_block(job->x + r * job->inputs + b * FR_BLOCK, job->q + r / FR_GROUP * blocks + b, r % FR_GROUP);
}

/* The groups of sixteen rows as one run of tiles; what lies past the last row is zero. */
static void tile_range(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const quantize_job *job = arg;
    int64_t blocks = job->inputs / FR_BLOCK;
    for (int64_t i = begin; i < end; i++)
        for (int64_t b = 0; b < blocks; b++) {
            fr_tile *tile = job->tiles + i * blocks + b;
            for (int64_t row = 0; row < FR_TILE_ROWS; row++) {
                int64_t r = i * FR_TILE_ROWS + row, in = r % FR_GROUP;
                const fr_group *q = job->q + r / FR_GROUP * blocks + b;
                if (r >= job->rows) {
                    memset(tile->values[row], 0, FR_BLOCK);
                    tile->scales[row] = tile->sums[row] = 0;
                    continue;
                }
                memcpy(tile->values[row], q->values[0][in], FR_BLOCK / 2);
                memcpy(tile->values[row] + FR_BLOCK / 2, q->values[1][in], FR_BLOCK / 2);
                tile->scales[row] = q->scales[in];
                tile->sums[row] = q->sums[in];
            }
        }
}

static void quantize_rows(quantize_job *job) {
    fr_parallel(quantize_range, job, job->rows, FR_GROUP); /* few rows are done before a worker would wake */
    if (job->tiles) fr_parallel(tile_range, job, tiles_of(job->rows), 1);
}

typedef struct {
    const fr_weights *weights;
    const float *x;
    const fr_group *q;
    const fr_tile *tiles;
    float *y;
    int64_t rows, stride;
} linear_job;

FR_INLINE int64_t panels_of(const fr_weight *w) { return (w->outputs + fr_width(w->kind) - 1) / fr_width(w->kind); }

/* Panels are numbered through all parts; a range may span several. */
static void run_panels(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const linear_job *job = arg;
    float *y = job->y;
    for (int64_t i = 0; i < job->weights->count && end > 0; i++) {
        const fr_weight *w = &job->weights->part[i];
        int64_t panels = panels_of(w), last = end < panels ? end : panels;
        if (begin < last) {
            fr_range range = {w, job->x, job->q, job->tiles, y, job->rows, job->stride, begin, last};
            if (w->kind <= FR_BF16) fr_plain(&range);
            else fr_packed_kernel(w->kind)(&range);
        }
        begin = begin > panels ? begin - panels : 0;
        end -= panels;
        y += w->outputs;
    }
}

void fr_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch) {
    linear_job job = {.weights = w, .x = x, .y = y, .rows = rows};
    int64_t panels = 0, inputs = w->part[0].inputs, packed = 0, least = 1; /* panels worth a turn: 16 outputs */
    for (int64_t i = 0; i < w->count; i++) {
        panels += panels_of(&w->part[i]);
        job.stride += w->part[i].outputs;
        packed |= w->part[i].kind > FR_BF16;
        if (16 / fr_width(w->part[i].kind) > least) least = 16 / fr_width(w->part[i].kind);
    }
    if (packed) {
        quantize_job rounding = {x, rows, inputs, scratch, NULL};
        if (fr_uses_tiles(rows)) rounding.tiles = (fr_tile *)((char *)scratch + groups_bytes(rows, inputs));
        quantize_rows(&rounding);
        job.q = rounding.q, job.tiles = rounding.tiles;
    }
    int64_t grain = panels / (fr_threads() * 4);
    fr_parallel(run_panels, &job, panels, grain < least ? least : grain > 32 * least ? 32 * least : grain);
}

/* One linear layer on its own, for families that run in torch. 0 = done, 1 = out of memory. */
FR_API int fr_linear_rows(const fr_weights *w, const float *x, float *y, int64_t rows) {
    void *scratch = malloc(fr_quants_bytes(rows, w->part[0].inputs));
    if (!scratch) return 1;
    fr_linear(w, x, y, rows, scratch);
    free(scratch);
    return 0;
}
FR_POP_TARGET
