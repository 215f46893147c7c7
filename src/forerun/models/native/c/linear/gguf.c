/* GGUF blocks as a file holds them: integers and scales of 32 weights at a time, and rows that tokens look up. */
#include "forerun.h"

#include <string.h>

static uint16_t half_bits(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

static float half(const uint8_t *p) { return fr_half(half_bits(p)); }

static void set_halves(fr_block *out, uint16_t scale, uint16_t offset) {
    out->half_scale = scale;
    out->half_offset = offset;
    out->scales[0] = out->scales[1] = fr_half(scale);
    out->offset = fr_half(offset);
}

static void nibbles(const uint8_t *p, int8_t *values) {
    for (int k = 0; k < 16; k++) {
        values[k] = p[k] & 15;
        values[k + 16] = p[k] >> 4;
    }
}

/* What the sixteen values of IQ4_NL stand for. */
static const int8_t uneven_steps[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static const int8_t float_steps[16] = {FR_FLOAT_STEPS};

/* 2^(e - 128), which numbers of 16 bits with eight of exponent hold from the least to the largest. */
static uint16_t half_power(int e) { return (uint16_t)(e < 2 ? 0x20 << e : (e - 1) << 7); }

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
static void read_k(const uint8_t *p, int j, const uint8_t *fifth, const uint8_t *q, fr_block *out) {
    int scale, min;
    scale_min_k4(j, p + 4, &scale, &min);
    q += j / 2 * 32;
    for (int k = 0; k < 32; k++) {
        int v = j % 2 ? q[k] >> 4 : q[k] & 15;
        if (fifth) v |= ((fifth[k] >> j) & 1) << 4;
        out->values[k] = (int8_t)v;
    }
    out->half_scale = half_bits(p);
    out->half_offset = half_bits(p + 2) ^ 0x8000;
    out->factors[0] = (uint8_t)scale;
    out->offset_factor = (uint8_t)min;
    out->scales[0] = out->scales[1] = half(p) * (float)scale;
    out->offset = -(half(p + 2) * (float)min);
}

static void read_q6_k(const uint8_t *p, int j, fr_block *out) {
    const uint8_t *low = p + (j / 4) * 64, *high = p + 128 + (j / 4) * 32;
    const int8_t *scales = (const int8_t *)p + 192;
    int quarter = j % 4;
    for (int k = 0; k < 32; k++) {
        int l = quarter % 2 ? low[k + 32] : low[k];
        l = quarter < 2 ? l & 15 : l >> 4;
        out->values[k] = (int8_t)((l | (((high[k] >> (2 * quarter)) & 3) << 4)) - 32);
    }
    out->half_scale = half_bits(p + 208);
    for (int i = 0; i < 2; i++) {
        int8_t factor = scales[(j / 4) * 8 + quarter * 2 + i];
        out->factors[i] = (uint8_t)factor;
        out->scales[i] = half(p + 208) * (float)factor;
    }
}

/* Block `b` (of 32) of a row of raw bytes. */
void fr_read_block(int type, const uint8_t *row, int64_t b, fr_block *out) {
    memset(out, 0, sizeof *out);
    switch (type) {
    case GGUF_Q4_0:
        row += b * 18;
        set_halves(out, half_bits(row), minus_eight(half_bits(row)));
        nibbles(row + 2, out->values);
        break;
    case GGUF_Q4_1:
        row += b * 20;
        set_halves(out, half_bits(row), half_bits(row + 2));
        nibbles(row + 4, out->values);
        break;
    case GGUF_Q5_0:
        row += b * 22;
        set_halves(out, half_bits(row), 0);
        nibbles(row + 6, out->values);
        fifth_bits(row + 2, 16, out->values);
        break;
    case GGUF_Q5_1:
        row += b * 24;
        set_halves(out, half_bits(row), half_bits(row + 2));
        nibbles(row + 8, out->values);
        fifth_bits(row + 4, 0, out->values);
        break;
    case GGUF_Q8_0:
        row += b * 34;
        set_halves(out, half_bits(row), 0);
        memcpy(out->values, row + 2, 32);
        break;
    case GGUF_IQ4_NL:
        row += b * 18;
        set_halves(out, half_bits(row), 0);
        nibbles(row + 2, out->values);
        for (int k = 0; k < 32; k++) out->values[k] = uneven_steps[out->values[k]];
        break;
    case GGUF_MXFP4: {
        row += b * 17;
        uint32_t bits = (uint32_t)half_power(row[0]) << 16;
        out->half_scale = half_power(row[0]);
        memcpy(&out->scales[0], &bits, 4);
        out->scales[1] = out->scales[0];
        nibbles(row + 1, out->values);
        for (int k = 0; k < 32; k++) out->values[k] = float_steps[out->values[k]];
        break;
    }
    case GGUF_Q4_K: row += b / 8 * 144; read_k(row, (int)(b % 8), NULL, row + 16, out); break;
    case GGUF_Q5_K: row += b / 8 * 176; read_k(row, (int)(b % 8), row + 16, row + 48, out); break;
    case GGUF_Q6_K: read_q6_k(row + b / 8 * 210, (int)(b % 8), out); break;
    default: break;
    }
}

/* Some rows of raw GGUF blocks as floats: what an embedding looks up. The caller has checked rows and sizes. */
FR_API void fr_unpack_rows(int type, const uint8_t *raw, int64_t row_bytes, int64_t inputs, const int64_t *rows,
                           int64_t count, float *out) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t b = 0; b < inputs / FR_BLOCK; b++) {
            fr_block block;
            fr_read_block(type, raw + rows[r] * row_bytes, b, &block);
            for (int k = 0; k < FR_BLOCK; k++) *out++ = (float)block.values[k] * block.scales[k / 16] + block.offset;
        }
}

void fr_embed(const fr_table *table, int64_t width, const int64_t *tokens, int64_t count, float *out) {
    if (table->type >= 0) {
        fr_unpack_rows((int)table->type, table->rows, table->row_bytes, width, tokens, count, out);
        return;
    }
    for (int64_t r = 0; r < count; r++, out += width) {
        const uint16_t *halves = (const uint16_t *)table->rows + tokens[r] * width;
        if (table->type == -1) memcpy(out, (const float *)table->rows + tokens[r] * width, (size_t)width * sizeof(float));
        for (int64_t i = 0; table->type == -2 && i < width; i++) {
            uint32_t bits = (uint32_t)halves[i] << 16;
            memcpy(out + i, &bits, sizeof bits);
        }
    }
}
