/* GGUF blocks into panels of output rows: the same numbers in another order, so nothing is lost.
 *
 * Q4_0, Q4_1 -> P4;  Q8_0, IQ4_NL -> P8;  in panels of four Q5_0 -> P8, Q4_K -> P4W, Q5_1, Q5_K -> P8M, Q6_K -> P8W;
 * MXFP4 -> P4E; in wider ones Q5_0 -> P5, Q5_1 -> P5M, Q4_K -> P4K, Q5_K -> P5K, Q6_K -> P6K. Rows past the last output are zero.
 */
#include "forerun.h"

static int is_bytes(int format) { return format == FR_P8 || format == FR_P8W || format == FR_P8M; }
static int has_fifth_bits(int format) { return format == FR_P5 || format == FR_P5M || format == FR_P5K; }
/* Which of FR_FLOAT_STEPS a value is, from -12 on. */
static const uint8_t step_of[25] = {15, 0, 0, 0, 14, 0, 13, 0, 12, 11, 10, 9, 0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7};
/* What is added to values so that they are not negative. */
static int zero_of(int format) { return format == FR_P5 ? 16 : format == FR_P6K ? 32 : 0; }

static void write_values(int format, int64_t w, uint8_t *to, int64_t row, const fr_block *in) {
    int zero = zero_of(format);
    for (int k = 0; k < FR_BLOCK; k++) {
        int64_t group = k / 4, at = row * 4 + k % 4, more = 16 * w;
        int v = format == FR_P4E ? step_of[in->values[k] + 12] : in->values[k] + zero;
        if (is_bytes(format)) {
            to[group * 4 * w + at] = (uint8_t)v;
            continue;
        }
        to[group % 4 * 4 * w + at] |= (uint8_t)((v & 15) << (group < 4 ? 0 : 4));
        if (has_fifth_bits(format)) to[more + group * w / 2 + at / 8] |= (uint8_t)((v >> 4 & 1) << at % 8);
        if (format == FR_P6K) to[more + group / 4 * 4 * w + at] |= (uint8_t)((v >> 4) << group % 4 * 2);
    }
}

static void write_floats(uint8_t *to, int64_t w, int64_t row, float scale, float offset) {
    memcpy(to + 4 * row, &scale, 4);
    memcpy(to + 4 * (w + row), &offset, 4);
}

static void write_halves(uint8_t *to, int64_t w, int64_t row, const fr_block *in, int offsets) {
    memcpy(to + 2 * row, &in->half_scale, 2);
    if (offsets) memcpy(to + 2 * (w + row), &in->half_offset, 2);
}

/* `after` is where the super block's own scales go. */
static void write_block(int format, int64_t w, uint8_t *to, uint8_t *after, int64_t row, const fr_block *in) {
    write_values(format, w, to, row, in);
    switch (format) {
    case FR_P4: write_halves(to + 16 * w, w, row, in, 1); break;
    case FR_P4E: write_halves(to + 16 * w, w, row, in, 0); break;
    case FR_P8: write_halves(to + 32 * w, w, row, in, 0); break;
    case FR_P5: write_halves(to + 20 * w, w, row, in, 0); break;
    case FR_P5M: write_halves(to + 20 * w, w, row, in, 1); break;
    case FR_P4W: write_floats(to + 16 * w, w, row, in->scales[0], in->offset); break;
    case FR_P8M: write_floats(to + 32 * w, w, row, in->scales[0], in->offset); break;
    case FR_P8W: write_floats(to + 32 * w, w, row, in->scales[0], in->scales[1]); break;
    case FR_P4K: case FR_P5K: case FR_P6K:
        to += fr_block_bytes(format, w) - 2 * w;
        to[row] = in->factors[0];
        to[w + row] = format == FR_P6K ? in->factors[1] : in->offset_factor;
        write_halves(after, w, row, in, format != FR_P6K);
        break;
    default: break;
    }
}

static int format_of(int type, int narrow) {
    switch (type) {
    case GGUF_Q4_0: case GGUF_Q4_1: return FR_P4;
    case GGUF_Q8_0: case GGUF_IQ4_NL: return FR_P8;
    case GGUF_MXFP4: return FR_P4E;
    case GGUF_Q5_0: return narrow ? FR_P8 : FR_P5;
    case GGUF_Q5_1: return narrow ? FR_P8M : FR_P5M;
    case GGUF_Q4_K: return narrow ? FR_P4W : FR_P4K;
    case GGUF_Q5_K: return narrow ? FR_P8M : FR_P5K;
    case GGUF_Q6_K: return narrow ? FR_P8W : FR_P6K;
    default: return -1;
    }
}

/* The packed kind of a GGUF type on the chosen path, or -1. */
FR_API int fr_packed_kind(int type) {
    int width = fr_chosen_width(), format = format_of(type, width == 4);
    return format < 0 ? -1 : fr_kind(format, width);
}

FR_INLINE int64_t panels_of(int kind, int64_t outputs) { return (outputs + fr_width(kind) - 1) / fr_width(kind); }

FR_API int64_t fr_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    return panels_of(kind, outputs) * fr_panel_bytes(kind, inputs);
}

typedef struct {
    int type, kind;
    const uint8_t *raw;
    uint8_t *out;
    int64_t outputs, inputs, row_bytes;
} pack_job;

static void pack_row(const pack_job *job, uint8_t *panel, int64_t source, int64_t row) {
    int format = fr_format(job->kind);
    int64_t w = fr_width(job->kind), blocks = job->inputs / FR_BLOCK;
    int64_t bytes = fr_block_bytes(format, w), more = fr_super_bytes(format, w);
    for (int64_t b = 0; b < blocks; b++) {
        fr_block block;
        fr_read_block(job->type, job->raw + source * job->row_bytes, b, &block);
        uint8_t *first = panel + b / FR_SUPER * more;
        uint8_t *after = first + (b / FR_SUPER + 1) * FR_SUPER * bytes;
        write_block(format, w, first + b * bytes, after, row, &block);
    }
}

static void pack_panels(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const pack_job *job = arg;
    int64_t bytes = fr_panel_bytes(job->kind, job->inputs), w = fr_width(job->kind);
    for (int64_t p = begin; p < end; p++) {
        uint8_t *panel = job->out + p * bytes;
        memset(panel, 0, (size_t)bytes);
        for (int64_t row = 0; row < w && p * w + row < job->outputs; row++) pack_row(job, panel, p * w + row, row);
    }
}

/* Pack `outputs` rows of raw GGUF blocks; the caller has checked the sizes. */
FR_API void fr_pack(int type, const uint8_t *raw, int64_t row_bytes, int64_t outputs, int64_t inputs,
                    uint8_t *out) {
    pack_job job = {type, fr_packed_kind(type), raw, out, outputs, inputs, row_bytes};
    fr_parallel(pack_panels, &job, panels_of(job.kind, outputs), 4);
}
