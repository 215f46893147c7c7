/* GGUF blocks into panels of four output rows: the same numbers in another order, so nothing is lost.
 *
 * Q4_0, Q4_1 -> P4;  Q8_0, Q5_0 -> P8;  Q4_K, Q5_K stay exact in wider forms;  Q6_K -> P8W.
 * Rows past the last output are zero.
 */
#include "forerun.h"

#include <string.h>

enum { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q8_0 = 8, GGUF_Q4_K = 12, GGUF_Q6_K = 14 };

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

/* -8 * d as a half: exact, because only the exponent moves (subnormal d keeps its bits too, shifted). */
static uint16_t minus_eight(uint16_t d) {
    uint16_t sign = (uint16_t)((d ^ 0x8000) & 0x8000), exponent = (d >> 10) & 31, fraction = d & 0x3ff;
    if (exponent == 0) {
        uint32_t shifted = (uint32_t)fraction << 3;
        exponent = 0;
        while (shifted >= 0x800) shifted >>= 1, exponent++; /* only zero bits fall off: fraction < 2^10 */
        return (uint16_t)(sign | (shifted >= 0x400 ? ((exponent + 1) << 10) | (shifted & 0x3ff) : shifted));
    }
    return (uint16_t)(sign | ((exponent + 3 > 30 ? 30 : exponent + 3) << 10) | fraction);
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

static void read_q4_k(const uint8_t *p, int j, block32 *out) {
    int scale, min;
    scale_min_k4(j, p + 4, &scale, &min);
    const uint8_t *q = p + 16 + (j / 2) * 32;
    for (int k = 0; k < 32; k++) out->values[k] = (int8_t)(j % 2 ? q[k] >> 4 : q[k] & 15);
    out->scales[0] = out->scales[1] = half(p) * (float)scale;
    out->offset = -half(p + 2) * (float)min;
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
    case GGUF_Q5_0: {
        uint32_t high;
        row += b * 22;
        memcpy(&out->half_scale, row, 2);
        memcpy(&high, row + 2, 4);
        nibbles(row + 6, out->values);
        for (int k = 0; k < 32; k++) out->values[k] = (int8_t)((out->values[k] | (int)(((high >> k) & 1) << 4)) - 16);
        break;
    }
    case GGUF_Q8_0:
        row += b * 34;
        memcpy(&out->half_scale, row, 2);
        memcpy(out->values, row + 2, 32);
        break;
    case GGUF_Q4_K: read_q4_k(row + b / 8 * 144, (int)(b % 8), out); break;
    case GGUF_Q6_K: read_q6_k(row + b / 8 * 210, (int)(b % 8), out); break;
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
        memcpy(panel + 144 + 4 * row, &in->scales[1], 4);
    }
}

/* The packed kind of a GGUF type, or -1. */
FR_API int fr_packed_kind(int type) {
    switch (type) {
    case GGUF_Q4_0: case GGUF_Q4_1: return FR_P4;
    case GGUF_Q5_0: case GGUF_Q8_0: return FR_P8;
    case GGUF_Q4_K: return FR_P4W;
    case GGUF_Q6_K: return FR_P8W;
    default: return -1;
    }
}

FR_API int64_t fr_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    static const int64_t bytes[] = {0, 0, FR_P4_BYTES, FR_P8_BYTES, FR_P4W_BYTES, FR_P8W_BYTES};
    return (outputs + FR_PANEL - 1) / FR_PANEL * (inputs / FR_BLOCK) * bytes[kind];
}

typedef struct {
    int type, kind;
    const uint8_t *raw;
    uint8_t *out;
    int64_t outputs, inputs, row_bytes;
    const int32_t *order; /* [outputs] source row of each output, or NULL */
} pack_job;

static void pack_panels(void *arg, int64_t begin, int64_t end) {
    pack_job *job = arg;
    int64_t blocks = job->inputs / FR_BLOCK, bytes = fr_packed_bytes(job->kind, FR_PANEL, FR_BLOCK);
    for (int64_t p = begin; p < end; p++) {
        uint8_t *panel = job->out + p * blocks * bytes;
        memset(panel, 0, (size_t)(blocks * bytes));
        for (int row = 0; row < FR_PANEL && p * FR_PANEL + row < job->outputs; row++) {
            int64_t source = p * FR_PANEL + row;
            if (job->order) source = job->order[source];
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
                    const int32_t *order, uint8_t *out) {
    pack_job job = {type, fr_packed_kind(type), raw, out, outputs, inputs, row_bytes, order};
    fr_parallel(pack_panels, &job, (outputs + FR_PANEL - 1) / FR_PANEL, 16);
}

/* Float rows into P8: a scale of amax/127 per block of 32, as Q8_0 has it. */
FR_API void fr_pack_floats(const float *rows, int64_t outputs, int64_t inputs, uint8_t *out) {
    int64_t blocks = inputs / FR_BLOCK;
    memset(out, 0, (size_t)fr_packed_bytes(FR_P8, outputs, inputs));
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t b = 0; b < blocks; b++) {
            const float *x = rows + o * inputs + b * FR_BLOCK;
            block32 block = {0};
            float amax = 0;
            for (int k = 0; k < 32; k++) amax = __builtin_fabsf(x[k]) > amax ? __builtin_fabsf(x[k]) : amax;
            _Float16 scale = (_Float16)(amax / 127.0f);
            float inverse = scale > 0 ? 1.0f / (float)scale : 0;
            for (int k = 0; k < 32; k++) {
                float v = __builtin_rintf(x[k] * inverse);
                block.values[k] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v);
            }
            memcpy(&block.half_scale, &scale, 2);
            write_block(FR_P8, out + (o / FR_PANEL * blocks + b) * FR_P8_BYTES, (int)(o % FR_PANEL), &block);
        }
}
