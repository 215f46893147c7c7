/* GGUF blocks into panels of four output rows: the same numbers in another order, so nothing is lost.
 *
 * Q4_0, Q4_1 -> P4;  Q8_0, Q5_0 -> P8;  Q4_K -> P4W;  Q5_1, Q5_K -> P8M;  Q6_K -> P8W.
 * Rows past the last output are zero.
 */
#include "forerun.h"

#include <string.h>

enum { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8 };
enum { GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14 };

/* 32 weights of one row: value[k] * scale[k / 16] + offset, scales as the file holds them or as products. */
typedef struct {
    int8_t values[32];
    float scales[2], offset;
    uint16_t half_scale, half_offset;
} block32;

static float half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff, bits;
    if (mag >= 0x7c00) bits = sign | 0x7f800000u | ((mag & 0x3ff) << 13);
    else if (mag >= 0x400) bits = sign | ((mag << 13) + 0x38000000u);
    else {
        float f = (float)mag * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static void nibbles(const uint8_t *p, int8_t *values) {
    for (int k = 0; k < 16; k++) {
        values[k] = p[k] & 15;
        values[k + 16] = p[k] >> 4;
    }
}

static void fifth_bits(const uint8_t *p, int zero, int8_t *values) {
    for (int k = 0; k < 32; k++) values[k] = (int8_t)((values[k] | ((p[k / 8] >> (k % 8)) & 1) << 4) - zero);
}

/* -8 * d as a half: exact, because only the exponent moves (subnormal d keeps its bits too, shifted). */
static uint16_t minus_eight(uint16_t d) {
    uint16_t sign = (uint16_t)((d ^ 0x8000) & 0x8000), exponent = (d >> 10) & 31, fraction = d & 0x3ff;
    if (exponent == 0) {
        uint32_t shifted = (uint32_t)fraction << 3;
        exponent = 0;
        while (shifted >= 0x800) shifted >>= 1, exponent++; /* only zero bits fall off: fraction < 2^10 */
        return (uint16_t)(sign | (shifted >= 0x400 ? ((exponent + 1) << 10) | (shifted & 0x3ff) : shifted));
    }
    if (exponent + 3 > 30) return (uint16_t)(sign | 0x7c00); /* no weight is near: infinity, and not a wrong number */
    return (uint16_t)(sign | ((exponent + 3) << 10) | fraction);
}

static void scale_min_k4(int j, const uint8_t *s, int *scale, int *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
        *min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
    }
}

/* Q4_K, and Q5_K with its fifth bits. */
static void read_k(const uint8_t *p, int j, const uint8_t *fifth, const uint8_t *q, block32 *out) {
    int scale, min;
    scale_min_k4(j, p + 4, &scale, &min);
    q += j / 2 * 32;
    for (int k = 0; k < 32; k++) {
        int v = j % 2 ? q[k] >> 4 : q[k] & 15;
        if (fifth) v |= ((fifth[k] >> j) & 1) << 4;
        out->values[k] = (int8_t)v;
    }
    out->scales[0] = out->scales[1] = half(p) * (float)scale;
    out->offset = -(half(p + 2) * (float)min);
}

static void read_q6_k(const uint8_t *p, int j, block32 *out) {
    const uint8_t *low = p + (j / 4) * 64, *high = p + 128 + (j / 4) * 32;
    const int8_t *scales = (const int8_t *)p + 192;
    int quarter = j % 4;
    for (int k = 0; k < 32; k++) {
        int l = quarter % 2 ? low[k + 32] : low[k];
        l = quarter < 2 ? l & 15 : l >> 4;
        out->values[k] = (int8_t)((l | (((high[k] >> (2 * quarter)) & 3) << 4)) - 32);
    }
    for (int i = 0; i < 2; i++) out->scales[i] = half(p + 208) * (float)scales[(j / 4) * 8 + quarter * 2 + i];
}

/* Block `b` (of 32) of a row of raw bytes. */
static void read_block(int type, const uint8_t *row, int64_t b, block32 *out) {
    memset(out, 0, sizeof *out);
    switch (type) {
    case GGUF_Q4_0:
        row += b * 18;
        memcpy(&out->half_scale, row, 2);
        out->half_offset = minus_eight(out->half_scale);
        nibbles(row + 2, out->values);
        break;
    case GGUF_Q4_1:
        row += b * 20;
        memcpy(&out->half_scale, row, 2);
        memcpy(&out->half_offset, row + 2, 2);
        nibbles(row + 4, out->values);
        break;
    case GGUF_Q5_0:
        row += b * 22;
        memcpy(&out->half_scale, row, 2);
        nibbles(row + 6, out->values);
        fifth_bits(row + 2, 16, out->values);
        break;
    case GGUF_Q5_1:
        row += b * 24;
        out->scales[0] = half(row);
        out->offset = half(row + 2);
        nibbles(row + 8, out->values);
        fifth_bits(row + 4, 0, out->values);
        break;
    case GGUF_Q8_0:
        row += b * 34;
        memcpy(&out->half_scale, row, 2);
        memcpy(out->values, row + 2, 32);
        break;
    case GGUF_Q4_K: row += b / 8 * 144; read_k(row, (int)(b % 8), NULL, row + 16, out); break;
    case GGUF_Q5_K: row += b / 8 * 176; read_k(row, (int)(b % 8), row + 16, row + 48, out); break;
    case GGUF_Q6_K: read_q6_k(row + b / 8 * 210, (int)(b % 8), out); break;
    default: break;
    }
}

static void write_block(int kind, uint8_t *panel, int row, const block32 *in) {
    int four = kind == FR_P4 || kind == FR_P4W;
    for (int k = 0; k < 32; k++) {
        int group = k / 4, at = row * 4 + k % 4;
        uint8_t v = (uint8_t)in->values[k];
        if (!four) panel[group * 16 + at] = v;
        else if (group < 4) panel[group * 16 + at] |= v;
        else panel[(group - 4) * 16 + at] |= (uint8_t)(v << 4);
    }
    if (kind == FR_P4) {
        memcpy(panel + 64 + 2 * row, &in->half_scale, 2);
        memcpy(panel + 72 + 2 * row, &in->half_offset, 2);
    } else if (kind == FR_P8) memcpy(panel + 128 + 2 * row, &in->half_scale, 2);
    else if (kind == FR_P4W) {
        memcpy(panel + 64 + 4 * row, &in->scales[0], 4);
        memcpy(panel + 80 + 4 * row, &in->offset, 4);
    } else {
        memcpy(panel + 128 + 4 * row, &in->scales[0], 4);
        memcpy(panel + 144 + 4 * row, kind == FR_P8M ? &in->offset : &in->scales[1], 4);
    }
}

/* The packed kind of a GGUF type, or -1. */
FR_API int fr_packed_kind(int type) {
    switch (type) {
    case GGUF_Q4_0: case GGUF_Q4_1: return FR_P4;
    case GGUF_Q5_0: case GGUF_Q8_0: return FR_P8;
    case GGUF_Q4_K: return FR_P4W;
    case GGUF_Q5_1: case GGUF_Q5_K: return FR_P8M;
    case GGUF_Q6_K: return FR_P8W;
    default: return -1;
    }
}

FR_API int64_t fr_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    return (outputs + FR_PANEL - 1) / FR_PANEL * (inputs / FR_BLOCK) * fr_block_bytes(kind);
}

typedef struct {
    int type, kind;
    const uint8_t *raw;
    uint8_t *out;
    int64_t outputs, inputs, row_bytes;
} pack_job;

static void pack_panels(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const pack_job *job = arg;
    int64_t blocks = job->inputs / FR_BLOCK, bytes = fr_block_bytes(job->kind);
    for (int64_t p = begin; p < end; p++) {
        uint8_t *panel = job->out + p * blocks * bytes;
        memset(panel, 0, (size_t)(blocks * bytes));
        for (int row = 0; row < FR_PANEL && p * FR_PANEL + row < job->outputs; row++) {
            int64_t source = p * FR_PANEL + row;
            for (int64_t b = 0; b < blocks; b++) {
                block32 block;
                read_block(job->type, job->raw + source * job->row_bytes, b, &block);
                write_block(job->kind, panel + b * bytes, row, &block);
            }
        }
    }
}

/* Pack `outputs` rows of raw GGUF blocks; the caller has checked the sizes. */
FR_API void fr_pack(int type, const uint8_t *raw, int64_t row_bytes, int64_t outputs, int64_t inputs,
                    uint8_t *out) {
    pack_job job = {type, fr_packed_kind(type), raw, out, outputs, inputs, row_bytes};
    fr_parallel(pack_panels, &job, (outputs + FR_PANEL - 1) / FR_PANEL, 16);
}

/* Some rows of raw GGUF blocks as floats: what an embedding looks up. The caller has checked rows and sizes. */
FR_API void fr_unpack_rows(int type, const uint8_t *raw, int64_t row_bytes, int64_t inputs, const int64_t *rows,
                           int64_t count, float *out) {
    int halves = fr_packed_kind(type) == FR_P4 || fr_packed_kind(type) == FR_P8;
    for (int64_t r = 0; r < count; r++)
        for (int64_t b = 0; b < inputs / FR_BLOCK; b++) {
            block32 block;
            read_block(type, raw + rows[r] * row_bytes, b, &block);
            if (halves) {
                block.scales[0] = block.scales[1] = half((const uint8_t *)&block.half_scale);
                block.offset = half((const uint8_t *)&block.half_offset);
            } else if (fr_packed_kind(type) != FR_P8W) block.scales[1] = block.scales[0];
            for (int k = 0; k < FR_BLOCK; k++) *out++ = (float)block.values[k] * block.scales[k / 16] + block.offset;
        }
}

void fr_embed(const fr_table *table, int64_t width, const int64_t *tokens, int64_t count, float *out) {
    if (table->type >= 0) {
        fr_unpack_rows((int)table->type, table->rows, table->row_bytes, width, tokens, count, out);
        return;
    }
    for (int64_t r = 0; r < count; r++)
        memcpy(out + r * width, (const float *)table->rows + tokens[r] * width, (size_t)width * sizeof(float));
}
