/* Packed linear layers for x86-64 with 256-bit vectors, written once for AVX2 and for AVX-VNNI: include with FR_PACKED
 * and FR_VNNI defined.
 *
 * As in linear_avx512.c a vector holds four inputs of each of the panel's outputs, here eight, and four inputs of a row
 * are broadcast against it. There are sixteen registers, so a group of weights is unpacked, used for all rows of the tile
 * and forgotten. Without VNNI products are added in pairs to 16 bits; as many of those as cannot overflow are added up
 * before they become 32 bits wide.
 */
enum { W = 8, TILE = 4 };

typedef __m256 vec;
#define vec_zero _mm256_setzero_ps
#define vec_mul _mm256_mul_ps
FR_INLINE __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
FR_INLINE __m256 bf16s(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
FR_INLINE __m256 unsigned_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
FR_INLINE __m256 signed_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
#include "x86/block_scales.h"

FR_INLINE __m256i load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* 16 in the bytes whose bit of 32 is set, else 0. */
FR_INLINE __m256i fifth_bits(const uint8_t *p) {
    int32_t set;
    memcpy(&set, p, 4);
    const __m256i byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3,
                                          3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(set), byte), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(16));
}

/* Bits 5 and 6 of a group, at their place in a byte. */
FR_INLINE __m256i two_bits(const uint8_t *p, int g) {
    __m256i v = load(p + g / 4 * 4 * W);
    switch (g % 4) {
    case 0: v = _mm256_slli_epi16(v, 4); break;
    case 1: v = _mm256_slli_epi16(v, 2); break;
    case 2: break;
    default: v = _mm256_srli_epi16(v, 2);
    }
    return _mm256_and_si256(v, _mm256_set1_epi8(48));
}

/* Group g of a block as unsigned bytes, zero points added; P8 without VNNI stays signed. */
FR_INLINE __m256i group(int format, const uint8_t *block, int g) {
    if (format == FR_P8) {
        __m256i v = load(block + 4 * W * g);
        return FR_VNNI ? _mm256_xor_si256(v, _mm256_set1_epi8((char)0x80)) : v;
    }
    __m256i v = load(block + 4 * W * (g % 4));
    v = _mm256_and_si256(g < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
    if (format == FR_P4E) return _mm256_shuffle_epi8(_mm256_setr_epi8(FR_FLOAT_STEPS_UP, FR_FLOAT_STEPS_UP), v);
    if (format == FR_P5 || format == FR_P5M || format == FR_P5K) v = _mm256_or_si256(v, fifth_bits(block + 16 * W + g * W / 2));
    if (format == FR_P6K) v = _mm256_or_si256(v, two_bits(block + 16 * W, g));
    return v;
}

/* How many sums of two products fit into 16 bits: of nibbles 8 * 2 * 15 * 127, of bytes one. */
FR_INLINE int fits(int format) {
    switch (format) {
    case FR_P4: case FR_P4K: return 8;
    case FR_P6K: return 2;
    case FR_P8: return 1;
    default: return 4;
    }
}

FR_INLINE __m256i start(int format, const fr_group *q, int row, int last) {
    if (format == FR_P8 && FR_VNNI) return _mm256_set1_epi32(q->starts[FR_ZERO_8][row]);
    if (format == FR_P5 || format == FR_P4E) return _mm256_set1_epi32(q->starts[FR_ZERO_5][row]);
    if (format == FR_P6K) return _mm256_set1_epi32(q->starts[last ? FR_ZERO_6_LAST : FR_ZERO_6][row]);
    return _mm256_set1_epi32(FR_SHIFT_BITS);
}

FR_INLINE __m256i inputs_of(const fr_group *q, int row, int g) {
    int32_t four;
    memcpy(&four, &q->values[g / 4][row][g % 4 * 4], 4);
    return _mm256_set1_epi32(four);
}

/* sum[r] += groups from..to of a block times each row. */
FR_INLINE void dot(int format, const uint8_t *block, const fr_group *q, int rows, int from, int to, __m256i *sum) {
#if FR_VNNI
    FR_UNROLL for (int g = from; g < to; g++) {
        __m256i v = group(format, block, g);
        FR_UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm256_dpbusd_avx_epi32(sum[r], v, inputs_of(q, r, g));
    }
#else
    int run = fits(format);
    __m256i pairs[TILE];
    FR_UNROLL for (int g = from; g < to; g++) {
        __m256i v = group(format, block, g), size = format == FR_P8 ? _mm256_abs_epi8(v) : v;
        FR_UNROLL for (int r = 0; r < rows; r++) {
            __m256i x = inputs_of(q, r, g);
            if (format == FR_P8) x = _mm256_sign_epi8(x, v);
            __m256i two = _mm256_maddubs_epi16(size, x);
            pairs[r] = g % run ? _mm256_add_epi16(pairs[r], two) : two;
            if (g % run == run - 1)
                sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1)));
        }
    }
#endif
}

FR_INLINE __m256 add_scaled(__m256i sum, const fr_group *q, int row, __m256 d, __m256 total) {
    __m256 scaled = _mm256_fmadd_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps(q->scales[row]), _mm256_set1_ps(q->backs[row]));
    return _mm256_fmadd_ps(scaled, d, total);
}

FR_INLINE void add_block(int format, const uint8_t *block, const block_scales *s, const fr_group *q, int rows,
                         __m256 *total) {
    __m256i sum[TILE];
    int step = format == FR_P6K ? 4 : 8;
    FR_UNROLL for (int from = 0; from < 8; from += step) {
        FR_UNROLL for (int r = 0; r < rows; r++) sum[r] = start(format, q, r, from > 0);
        dot(format, block, q, rows, from, from + step, sum);
        FR_UNROLL for (int r = 0; r < rows; r++) {
            if (has_offsets(format)) total[r] = _mm256_fmadd_ps(s->m, _mm256_set1_ps(q->sums[r]), total[r]);
            total[r] = add_scaled(sum[r], q, r, from ? s->d2 : s->d, total[r]);
        }
    }
}

/* One panel, `rows` rows of one group (both constants where this is inlined). */
FR_INLINE void panel_rows(const uint8_t *panel, int format, int rows, int64_t blocks, const fr_group *q, __m256 *total) {
    int64_t run = is_super(format) ? FR_SUPER : blocks;
    FR_UNROLL for (int r = 0; r < rows; r++) total[r] = _mm256_setzero_ps();
    for (int64_t first = 0; first < blocks; first += run) {
        block_scales s = super_scales(format, panel + FR_SUPER * fr_block_bytes(format, W));
        for (int64_t b = 0; b < run; b++, q++, panel += fr_block_bytes(format, W)) {
            read_scales(format, panel, &s);
            add_block(format, panel, &s, q, rows, total);
        }
        panel += fr_super_bytes(format, W);
    }
}

FR_INLINE void store_row(const fr_range *g, int64_t row, int64_t panel, __m256 total) {
    int64_t o = panel * W;
    float lanes[W], *y = g->y + row * g->stride + o;
    _mm256_storeu_ps(lanes, total);
    for (int i = 0; i < W && o + i < g->w->outputs; i++) y[i] = g->w->bias ? lanes[i] + g->w->bias[o + i] : lanes[i];
}

FR_INLINE void tile_rows(const fr_range *g, int format, int rows, int64_t first, int64_t p) {
    int64_t blocks = g->w->inputs / FR_BLOCK;
    const uint8_t *panel = (const uint8_t *)g->w->data + p * fr_panel_bytes(fr_kind(format, W), g->w->inputs);
    __m256 total[TILE];
    panel_rows(panel, format, rows, blocks, g->q + first / FR_GROUP * blocks, total);
    FR_UNROLL for (int r = 0; r < rows; r++) store_row(g, first + r, p, total[r]);
}

FR_INLINE void packed(const fr_range *g, int format) {
    for (int64_t p = g->begin; p < g->end; p++) { /* a panel stays in the first caches for all tiles of rows */
        int64_t r = 0;
        for (; r + TILE <= g->rows; r += TILE) tile_rows(g, format, TILE, r, p);
        switch (g->rows - r) {
        case 1: tile_rows(g, format, 1, r, p); break;
        case 2: tile_rows(g, format, 2, r, p); break;
        case 3: tile_rows(g, format, 3, r, p); break;
        default: break;
        }
    }
}

void FR_PACKED(const fr_range *g) { FR_BY_FORMAT(g, FR_X86_CASES) }
