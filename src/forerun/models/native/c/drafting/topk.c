/* The likeliest entries of rows of logits, and the logarithm of the sum of their exponentials.
 *
 * A row is cut into chunks of one size, whose sums are added in order: what a row gives depends neither on the threads
 * nor on its neighbours. Ties go to the smaller index. A row may be scaled (temperature) and have noise
 * taken off: that which verifiers couple by, hashed from a key and the token's id as in noise.py.
 */
#include "vector.h"

#include <math.h>
#include <stdlib.h>

enum { CHUNK = 2048 };

typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int64_t i64x2 __attribute__((vector_size(16)));

typedef struct {
    float value;
    int32_t index;
} entry;

/* What one chunk of one row came to; its entries lie in an array beside it. */
typedef struct {
    float most, sum; /* sum of exp(x - most) */
    int64_t held;    /* entries in its list */
} part;

FR_INLINE u32x4 hash4(u32x4 h) {
    h ^= h >> 16;
    h *= 0x21F0AAADu;
    h ^= h >> 15;
    h *= 0x735A2D97u;
    return h ^ (h >> 15);
}

/* log of positive, normal numbers: 2 artanh((m - 1) / (m + 1)) for m near one, and the exponent. */
FR_INLINE f32x4 log4(f32x4 x) {
    const i32x4 middle = {0x3f3504f3, 0x3f3504f3, 0x3f3504f3, 0x3f3504f3}; /* sqrt(1/2) */
    i32x4 exponent = ((i32x4)x - middle) >> 23;
    f32x4 m = (f32x4)((i32x4)x - (exponent << 23));
    f32x4 e = __builtin_convertvector(exponent, f32x4);
    f32x4 s = (m - all4(1.0f)) / (m + all4(1.0f)), s2 = s * s;
    f32x4 p = fma4(s2, fma4(s2, fma4(s2, fma4(s2, all4(1.0f / 9), all4(1.0f / 7)), all4(0.2f)), all4(1.0f / 3)), all4(1.0f));
    return fma4(e, all4(0.69314718f), (s + s) * p);
}

/* log of a standard exponential for each of four ids. */
FR_INLINE f32x4 log_noise4(u32x4 ids, uint32_t low, uint32_t high) {
    u32x4 h = hash4(hash4(ids ^ low) ^ high) & 0x7fffffffu;
    f32x4 u = (__builtin_convertvector((i32x4)h, f32x4) + all4(0.5f)) * all4(0x1p-31f);
    f32x4 rest = all4(1.0f) - u;
    rest = choose4(rest > all4(0x1p-31f), rest, all4(0x1p-31f)); /* u was rounded to one */
    f32x4 series = u * fma4(u, fma4(u, all4(1.0f / 3), all4(0.5f)), all4(1.0f));
    return log4(choose4(u < all4(0.01f), series, -log4(rest)));
}

typedef struct {
    const int32_t *ids;
    uint32_t low, high;
    float *out;
} noise_job;

static void fill_noise(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const noise_job *job = arg;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
        u32x4 ids[4];
        f32x4 noise[4];
        memcpy(ids, job->ids + i, 64);
        FR_UNROLL for (int j = 0; j < 4; j++) noise[j] = log_noise4(ids[j], job->low, job->high);
        FR_UNROLL for (int j = 0; j < 4; j++) store4(job->out + i + 4 * j, noise[j]);
    }
    for (; i < end; i++) job->out[i] = log_noise4((u32x4){(uint32_t)job->ids[i], 0, 0, 0}, job->low, job->high)[0];
}

/* The logarithm of the noise of one position, for each of these token ids. */
FR_API void fr_log_noise(const int32_t *ids, int64_t count, uint32_t low, uint32_t high, float *out) {
    noise_job job = {ids, low, high, out};
    fr_parallel(fill_noise, &job, count, CHUNK);
}

static const float *seasoned(const fr_top *t, int64_t row, int64_t first, int64_t count, float *own) {
    const float *x = t->x + row * t->count + first, *noise = NULL;
    if (t->noise && t->noise_row[row] >= 0) noise = t->noise + t->noise_row[row] * t->count + first;
    float scale = t->scale ? t->scale[row] : 1.0f;
    if (!noise && scale == 1.0f) return x;
    for (int64_t i = 0; i < count; i++) own[i] = x[i] * scale - (noise ? noise[i] : 0.0f);
    return own;
}

/* Keep the best k, best first; an equal value that comes later stays behind. */
FR_INLINE int64_t insert(entry *held, int64_t count, int64_t k, float value, int32_t index) {
    if (count == k && !(value > held[k - 1].value)) return count;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && value > held[at - 1].value; at--) held[at] = held[at - 1];
    held[at] = (entry){value, index};
    return count;
}

FR_INLINE int any(i32x4 where) { return (((i64x2)where)[0] | ((i64x2)where)[1]) != 0; }

/* The largest of a chunk. */
static float most_of(const float *x, int64_t count) {
    float most = -INFINITY;
    int64_t i = 0;
    if (count >= 16) {
        f32x4 m[4] = {load4(x), load4(x + 4), load4(x + 8), load4(x + 12)};
        for (i = 16; i + 16 <= count; i += 16)
            FR_UNROLL for (int j = 0; j < 4; j++) m[j] = max4(m[j], load4(x + i + 4 * j));
        f32x4 all = max4(max4(m[0], m[1]), max4(m[2], m[3]));
        for (int j = 0; j < 4; j++) most = all[j] > most ? all[j] : most;
    }
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Go on with the best of a row through one more chunk of it. */
static int64_t best_of(const float *x, int64_t count, int64_t first, int64_t k, entry *held, int64_t n) {
    int64_t i = 0;
    for (; i < count && n < k; i++) n = insert(held, n, k, x[i], (int32_t)(first + i));
    for (; i + 16 <= count; i += 16) {
        f32x4 floor = all4(held[k - 1].value);
        if (!any((load4(x + i) > floor) | (load4(x + i + 4) > floor) | (load4(x + i + 8) > floor) |
                 (load4(x + i + 12) > floor)))
            continue;
        for (int64_t j = i; j < i + 16; j++) insert(held, n, k, x[j], (int32_t)(first + j));
    }
    for (; i < count; i++) insert(held, n, k, x[i], (int32_t)(first + i));
    return n;
}

static float sum_of(const float *x, int64_t count, float most) {
    f32x4 sum[4] = {all4(0), all4(0), all4(0), all4(0)}, m = all4(most);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        FR_UNROLL for (int j = 0; j < 4; j++) sum[j] += exp4(load4(x + i + 4 * j) - m);
    float total = across((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < count; i++) total += exp4(all4(x[i] - most))[0];
    return total;
}

typedef struct {
    const fr_top *top;
    part *parts;
    entry *entries;
    int64_t chunks;
} top_job;

/* Chunks of one row in a row share a list of the best, kept with the first: later ones seldom add to it. */
static void reduce_chunks(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const top_job *job = arg;
    const fr_top *t = job->top;
    float own[CHUNK];
    for (int64_t i = begin, start = begin; i < end; i++) {
        int64_t row = i / job->chunks, first = i % job->chunks * CHUNK;
        int64_t count = t->count - first < CHUNK ? t->count - first : CHUNK;
        const float *x = seasoned(t, row, first, count, own);
        part *p = job->parts + i;
        if (first == 0) start = i;
        p->held = 0;
        job->parts[start].held = best_of(x, count, first, t->k, job->entries + start * t->k, job->parts[start].held);
        if (!t->totals) continue;
        p->most = most_of(x, count);
        p->sum = p->most > -INFINITY ? sum_of(x, count, p->most) : 0.0f;
    }
}

static void merge_row(const top_job *job, int64_t row, entry *best) {
    const fr_top *t = job->top;
    const part *parts = job->parts + row * job->chunks;
    int64_t n = 0;
    for (int64_t c = 0; c < job->chunks; c++)
        for (int64_t i = 0; i < parts[c].held; i++) {
            const entry *e = job->entries + (row * job->chunks + c) * t->k + i;
            n = insert(best, n, t->k, e->value, e->index);
        }
    for (int64_t i = 0; i < t->k; i++) {
        t->values[row * t->k + i] = best[i].value;
        t->indices[row * t->k + i] = best[i].index;
    }
    if (!t->totals) return;
    double sum = 0;
    for (int64_t c = 0; c < job->chunks; c++)
        if (parts[c].sum > 0) sum += parts[c].sum * exp((double)parts[c].most - best[0].value);
    float total = t->totals[row] = best[0].value + (float)log(sum);
    for (int64_t i = 0; i < t->k; i++) {
        float *value = t->values + row * t->k + i;
        *value = *value < total ? *value - total : 0.0f;
    }
}

/* 0 = done, 1 = out of memory. The caller has checked that 1 <= k <= count. */
FR_API int fr_top_rows(const fr_top *t) {
    int64_t chunks = (t->count + CHUNK - 1) / CHUNK, items = t->rows * chunks;
    if (items == 0) return 0;
    char *block = malloc((size_t)items * (sizeof(part) + (size_t)t->k * sizeof(entry)) + (size_t)t->k * sizeof(entry));
    if (!block) return 1;
    part *parts = (part *)block;
    entry *entries = (entry *)(parts + items);
    top_job job = {t, parts, entries, chunks};
    int64_t grain = items / (fr_threads() * 2);
    fr_parallel(reduce_chunks, &job, items, grain < 2 ? 2 : grain);
    for (int64_t r = 0; r < t->rows; r++) merge_row(&job, r, entries + items * t->k);
    free(block);
    return 0;
}

typedef struct {
    const float *x;
    int64_t count;
    int32_t *out;
} argmax_job;

/* The sum of a chunk: none where it holds NaN or both infinities. */
static float total_of(const float *x, int64_t count) {
    f32x4 sum[4] = {all4(0), all4(0), all4(0), all4(0)};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        FR_UNROLL for (int j = 0; j < 4; j++) sum[j] += load4(x + i + 4 * j);
    float total = across((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < count; i++) total += x[i];
    return total;
}

void fr_note_best(const float *x, int64_t count, int64_t first, fr_best *best) {
    float most = most_of(x, count);
    best->total += total_of(x, count);
    if (!(most > best->most || (most == best->most && first < best->at))) return;
    const f32x4 wanted = all4(most);
    int64_t i = 0;
    while (i + 8 <= count && !any((load4(x + i) == wanted) | (load4(x + i + 4) == wanted))) i += 8;
    while (i < count && x[i] != most) i++; /* in a chunk with NaN it may be nowhere */
    best->most = most, best->at = (int32_t)(first + i);
}

int32_t fr_best_of(const fr_best *bests, int64_t count, int64_t stride) {
    fr_best all = FR_NO_BEST;
    for (const fr_best *one = bests; one < bests + count * stride; one += stride) {
        all.total += one->total;
        if (one->most > all.most || (one->most == all.most && one->at < all.at)) all.most = one->most, all.at = one->at;
    }
    return all.total == all.total ? all.at : -1;
}

/* Chunk by chunk: a row is longer than the first cache, and each of its chunks is walked twice. */
static void find_most(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const argmax_job *job = arg;
    for (int64_t r = begin; r < end; r++) {
        fr_best best = FR_NO_BEST;
        for (int64_t first = 0; first < job->count; first += CHUNK) {
            int64_t here = job->count - first < CHUNK ? job->count - first : CHUNK;
            fr_note_best(job->x + r * job->count + first, here, first, &best);
        }
        job->out[r] = fr_best_of(&best, 1, 1);
    }
}

/* Where each row is largest, the first on a tie; -1 where it holds NaN or both infinities. */
FR_API void fr_argmax_rows(const float *x, int64_t rows, int64_t count, int32_t *out) {
    argmax_job job = {x, count, out};
    fr_parallel(find_most, &job, rows, 1);
}
FR_POP_TARGET
