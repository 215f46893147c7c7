/* Rows of activations to int8 blocks of 32, in groups of four rows and, for AMX, in tiles of sixteen. */
#include "vector.h"
#include "linear/quantize.h"

FR_INLINE int64_t groups_of(int64_t rows) { return (rows + FR_GROUP - 1) / FR_GROUP; }

FR_INLINE size_t groups_bytes(int64_t rows, int64_t inputs) {
    return (size_t)(groups_of(rows) * (inputs / FR_BLOCK)) * sizeof(fr_group);
}

/* Groups, then tiles where the path wants them. */
size_t fr_quants_bytes(int64_t rows, int64_t inputs) {
    size_t tiles = fr_uses_tiles(rows) ? (size_t)(fr_tiles_of(rows) * (inputs / FR_BLOCK)) * sizeof(fr_tile) + FR_LINE : 0;
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

/* The sum of sixteen integers whose bits are those of SHIFT + integer, added up in four lanes. */
FR_INLINE int32_t sum_of(u32x4 v) { return (int32_t)((v[0] + v[1]) + (v[2] + v[3]) - FR_BLOCK / 2 * (uint32_t)FR_SHIFT_BITS); }

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

void fr_quantize(const fr_quants *to, const float *x, int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t r = begin; r < end; r++)
        for (int64_t b = first; b < last; b++)
            quantize_block(x + (r * to->blocks + b) * FR_BLOCK, to->groups + r / FR_GROUP * to->blocks + b, r % FR_GROUP);
}

typedef struct {
    fr_quants to;
    const float *x;
    fr_quantize_range quantize;
    int64_t step; /* rows of a tile or of a group */
} quantize_job;

/* Tiles or groups begin .. end, numbered as they lie. Rows of one share cache lines, so one thread has all of them. */
static void quantize_some(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const quantize_job *job = arg;
    int64_t blocks = job->to.blocks;
    for (int64_t at = begin, next; at < end; at = next) {
        int64_t row = at / blocks * job->step, last = row + job->step, first = at % blocks;
        next = at - first + blocks < end ? at - first + blocks : end;
        job->quantize(&job->to, job->x, row, last < job->to.rows ? last : job->to.rows, first, first + next - at);
    }
}

fr_quants fr_quants_in(void *scratch, int64_t rows, int64_t inputs) {
    fr_quants to = {scratch, NULL, rows, inputs / FR_BLOCK};
    uintptr_t behind = (uintptr_t)scratch + groups_bytes(rows, inputs);
    if (fr_uses_tiles(rows)) to.tiles = (fr_tile *)((behind + FR_LINE - 1) / FR_LINE * FR_LINE);
    return to;
}

fr_quants fr_quantize_rows(const float *x, int64_t rows, int64_t inputs, void *scratch, int groups) {
    quantize_job job = {fr_quants_in(scratch, rows, inputs), x, fr_chosen_quantize(), FR_GROUP};
    if (job.to.tiles) job.step = FR_TILE_ROWS;
    if (job.to.tiles && !groups) job.to.groups = NULL;
    int64_t count = (rows + job.step - 1) / job.step * job.to.blocks;
    /* four rows without tiles are done before a worker would wake */
    fr_parallel(quantize_some, &job, count, job.to.tiles ? count / (fr_threads() * 2) + 1 : job.to.blocks);
    return job.to;
}
FR_POP_TARGET
