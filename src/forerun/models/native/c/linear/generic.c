/* Packed linear layers by the definition, in plain C: for machines without better, and the measure of the others.
 *
 * Every kernel for packed weights gives exactly these bits: sums of a block are integers, so their order is free;
 * scales, activations' scales and offsets come in through the same roundings in the same order.
 */
#include "vector.h"

enum { ROWS = 8 }; /* for which a block of weights is unpacked once */

/* One block of a panel as numbers. */
typedef struct {
    int8_t values[FR_WIDEST][FR_BLOCK];
    float scales[2][FR_WIDEST], offsets[FR_WIDEST];
} numbers;

FR_INLINE float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return fr_half(h);
}

FR_INLINE float float_at(const uint8_t *p) {
    float f;
    memcpy(&f, p, 4);
    return f;
}

FR_INLINE float bf16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static const int8_t float_steps[16] = {FR_FLOAT_STEPS};

FR_INLINE int value_at(int format, int64_t w, const uint8_t *block, int64_t output, int k) {
    int64_t group = k / 4, at = output * 4 + k % 4, more = 16 * w;
    if (format == FR_P8 || format == FR_P8W || format == FR_P8M) return (int8_t)block[group * 4 * w + at];
    int v = block[group % 4 * 4 * w + at];
    v = group < 4 ? v & 15 : v >> 4;
    if (format == FR_P5 || format == FR_P5M || format == FR_P5K) v |= (block[more + group * w / 2 + at / 8] >> at % 8 & 1) << 4;
    if (format == FR_P6K) v |= (block[more + group / 4 * 4 * w + at] >> group % 4 * 2 & 3) << 4;
    if (format == FR_P4E) return float_steps[v];
    return format == FR_P5 ? v - 16 : format == FR_P6K ? v - 32 : v;
}

/* `after` is where the super block's own scales lie. */
FR_INLINE void read_scales(int format, int64_t w, const uint8_t *block, const uint8_t *after, int64_t i, numbers *out) {
    const uint8_t *end = block + fr_block_bytes(format, w);
    float *first = &out->scales[0][i], *last = &out->scales[1][i], *offset = &out->offsets[i];
    *last = *offset = 0;
    switch (format) {
    case FR_P4: case FR_P5M: *first = half_at(end - 4 * w + 2 * i), *offset = half_at(end - 2 * w + 2 * i); break;
    case FR_P8: case FR_P5: *first = half_at(end - 2 * w + 2 * i); break;
    case FR_P4E: *first = bf16_at(end - 2 * w + 2 * i); break;
    case FR_P4W: case FR_P8M: *first = float_at(end - 8 * w + 4 * i), *offset = float_at(end - 4 * w + 4 * i); break;
    case FR_P8W: *first = float_at(end - 8 * w + 4 * i), *last = float_at(end - 4 * w + 4 * i); break;
    case FR_P6K:
        *first = half_at(after + 2 * i) * (float)(int8_t)end[i - 2 * w];
        *last = half_at(after + 2 * i) * (float)(int8_t)end[i - w];
        break;
    default: /* P4K, P5K */
        *first = half_at(after + 2 * i) * (float)end[i - 2 * w];
        *offset = half_at(after + 2 * (w + i)) * (float)end[i - w];
    }
}

FR_INLINE int32_t dot_half(const int8_t *v, const int8_t *x) {
    int32_t sum = 0;
    for (int k = 0; k < FR_BLOCK / 2; k++) sum += v[k] * x[k];
    return sum;
}

FR_INLINE float add_block(int format, const numbers *n, int64_t i, const fr_group *q, int row, float total) {
    float s = q->scales[row];
    int32_t low = dot_half(n->values[i], q->values[0][row]), high = dot_half(n->values[i] + 16, q->values[1][row]);
    if (format != FR_P8 && format != FR_P5 && format != FR_P4E && format != FR_P8W && format != FR_P6K)
        total = __builtin_fmaf(n->offsets[i], q->sums[row], total);
    if (format != FR_P8W && format != FR_P6K) return __builtin_fmaf((float)(low + high) * s, n->scales[0][i], total);
    total = __builtin_fmaf((float)low * s, n->scales[0][i], total);
    return __builtin_fmaf((float)high * s, n->scales[1][i], total);
}

FR_INLINE void tile(const fr_range *g, int format, const uint8_t *panel, int64_t p, int64_t first, int rows) {
    int64_t w = fr_width(g->w->kind), blocks = g->w->inputs / FR_BLOCK;
    int64_t bytes = fr_block_bytes(format, w), more = fr_super_bytes(format, w);
    int64_t outputs = g->w->outputs - p * w < w ? g->w->outputs - p * w : w;
    float total[ROWS][FR_WIDEST] = {{0}};
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *from = panel + b / FR_SUPER * more;
        const uint8_t *after = from + (b / FR_SUPER + 1) * FR_SUPER * bytes;
        numbers n;
        for (int64_t i = 0; i < outputs; i++) {
            for (int k = 0; k < FR_BLOCK; k++) n.values[i][k] = (int8_t)value_at(format, w, from + b * bytes, i, k);
            read_scales(format, w, from + b * bytes, after, i, &n);
        }
        for (int r = 0; r < rows; r++) {
            const fr_group *q = g->q + (first + r) / FR_GROUP * blocks + b;
            for (int64_t i = 0; i < outputs; i++)
                total[r][i] = add_block(format, &n, i, q, (int)((first + r) % FR_GROUP), total[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < outputs; i++)
            g->y[(first + r) * g->stride + p * w + i] = g->w->bias ? total[r][i] + g->w->bias[p * w + i] : total[r][i];
}

FR_INLINE void packed(const fr_range *g, int format) {
    int64_t bytes = fr_panel_bytes(g->w->kind, g->w->inputs);
    for (int64_t p = g->begin; p < g->end; p++)
        for (int64_t r = 0; r < g->rows; r += ROWS)
            tile(g, format, (const uint8_t *)g->w->data + p * bytes, p, r, g->rows - r < ROWS ? (int)(g->rows - r) : ROWS);
}

void fr_packed_generic(const fr_range *g) { FR_BY_FORMAT(g, FR_ALL_CASES) }
FR_POP_TARGET
