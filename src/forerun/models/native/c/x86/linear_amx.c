/* Packed linear layers for x86-64 with AMX: sixteen rows by sixteen outputs by 32 inputs in one instruction.
 *
 * Scales change every 32 inputs (P6K: 16), so a product tile is stored after each and scaled in vectors; that, two to
 * four vector instructions a row, is most of what a row costs. Weights of a panel are unpacked once for up to MOST rows,
 * CHUNK blocks at a time, so that they stay in the first cache. Tile instructions run LAG steps ahead of the scaling:
 * their results take fifty cycles. Few rows go to the VNNI kernel; a row has the same bits in both.
 */
#include "forerun.h"

#if FR_NEW_X86 && defined(__linux__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")
#include <immintrin.h>
#endif
#include "x86/unpack_avx512.h"

#include <sys/syscall.h>
#include <unistd.h>

/* CHUNK: with more blocks than this, rows and weights push each other out of the first cache */
enum { ROWS = FR_TILE_ROWS, MOST = 64, CHUNK = 6, LAG = 2, RING = 4, AHEAD = 4096 };

/* Blocks of one panel: signed bytes as the instruction reads them, and scales as floats. */
typedef struct {
    int8_t values[CHUNK][FR_BLOCK * W];
    float d[2 * CHUNK][W], m[CHUNK][W]; /* one d for each step of 32 inputs, in P6K of 16 */
} __attribute__((aligned(64))) unpacked;

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_config;

/* Tiles 0 and 1 take products, 2 and 3 rows of activations, 4 and 5 weights. */
static void configure(int rows, int inputs) {
    tile_config c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 2; i++) {
        c.row_bytes[i] = 64, c.rows[i] = (uint8_t)rows;
        c.row_bytes[2 + i] = (uint16_t)inputs, c.rows[2 + i] = (uint8_t)rows;
        c.row_bytes[4 + i] = 64, c.rows[4 + i] = (uint8_t)(inputs / 4);
    }
    _tile_loadconfig(&c);
}

FR_INLINE void unpack_chunk(int format, const uint8_t *panel, int64_t first, int64_t count, unpacked *out) {
    const int64_t bytes = fr_block_bytes(format, W), more = fr_super_bytes(format, W);
    const __m512i zero = _mm512_set1_epi8(format == FR_P6K ? 32 : 16);
    block_scales s = super_scales(FR_P8, panel);
    for (int64_t i = 0; i < count; i++) {
        int64_t b = first + i;
        const uint8_t *super = panel + b / FR_SUPER * (is_super(format) ? FR_SUPER * bytes + more : 0);
        const uint8_t *block = is_super(format) ? super + b % FR_SUPER * bytes : panel + b * bytes;
        if (is_super(format) && (i == 0 || b % FR_SUPER == 0)) s = super_scales(format, super + FR_SUPER * bytes);
        read_scales(format, block, &s);
        FR_UNROLL for (int g = 0; g < 8; g++) {
            __m512i v = group(format, block, 0, g);
            if (format == FR_P5 || format == FR_P4E || format == FR_P6K) v = _mm512_sub_epi8(v, zero);
            _mm512_store_si512(out->values[i] + 64 * g, v);
        }
        if (format == FR_P6K) _mm512_store_ps(out->d[2 * i], s.d), _mm512_store_ps(out->d[2 * i + 1], s.d2);
        else _mm512_store_ps(out->d[i], s.d);
        if (has_offsets(format)) _mm512_store_ps(out->m[i], s.m);
    }
    __asm__ volatile("" ::: "memory"); /* tile loads do not say that they read memory */
}

/* Products of step i into its place in the ring. */
#define STEP(c, x, w) \
    do { \
        int64_t block = split ? i / 2 : i, half = split ? i % 2 : 0; \
        _tile_loadd(x, t[block].values[0] + 16 * half, FR_BLOCK); \
        _tile_loadd(w, u->values[block] + 256 * half, 64); \
        _tile_zero(c); \
        _tile_dpbssd(c, x, w); \
        _tile_stored(c, ring[i % RING], 64); \
    } while (0)
FR_INLINE void multiply(int split, int64_t i, const fr_tile *t, const unpacked *u, int32_t (*ring)[ROWS * W]) {
    if (i % 2 == 0) STEP(0, 2, 4);
    else STEP(1, 3, 5);
}

FR_INLINE void scale(int format, int rows, int64_t i, const fr_tile *t, const unpacked *u, const int32_t *products,
                     __m512 *total) {
    int split = format == FR_P6K;
    const fr_tile *at = t + (split ? i / 2 : i);
    __m512 d = _mm512_load_ps(u->d[i]), m = has_offsets(format) ? _mm512_load_ps(u->m[i]) : d;
    FR_UNROLL for (int r = 0; r < rows; r++) {
        __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(products + r * W));
        if (has_offsets(format)) total[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(at->sums[r]), total[r]);
        total[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(at->scales[r])), d, total[r]);
    }
}

/* A chunk of one panel times one tile of rows: `sums` [rows, W] go on. Weights that come later, at `next`, are asked for
 * meanwhile. */
FR_INLINE void chunk_rows(int format, int rows, int64_t count, const fr_tile *t, const unpacked *u, const uint8_t *next,
                          float *sums) {
    const int split = format == FR_P6K;
    const int64_t steps = split ? 2 * count : count, step_bytes = fr_block_bytes(format, W) >> split;
    __attribute__((aligned(64))) int32_t ring[RING][ROWS * W];
    __m512 total[ROWS];
    FR_UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_load_ps(sums + r * W);
    for (int64_t i = 0; i < LAG && i < steps; i++) multiply(split, i, t, u, ring);
    int64_t i = 0;
    for (; i + LAG + 2 <= steps; i += 2) {
        ask_for(next + i * step_bytes, 2 * step_bytes);
        multiply(split, i + LAG, t, u, ring);
        scale(format, rows, i, t, u, ring[i % RING], total);
        multiply(split, i + LAG + 1, t, u, ring);
        scale(format, rows, i + 1, t, u, ring[(i + 1) % RING], total);
    }
    for (; i < steps; i++) {
        ask_for(next + i * step_bytes, step_bytes);
        if (i + LAG < steps) multiply(split, i + LAG, t, u, ring);
        scale(format, rows, i, t, u, ring[i % RING], total);
    }
    FR_UNROLL for (int r = 0; r < rows; r++) _mm512_store_ps(sums + r * W, total[r]);
}

/* One panel and the rows from `first` on, MOST at most; of the last tile only `last` rows are scaled. */
FR_INLINE void panel_rows(const fr_range *g, int format, int64_t p, int64_t first, int64_t rows, int last) {
    int64_t blocks = g->w->inputs / FR_BLOCK, tiles = (rows + ROWS - 1) / ROWS;
    const uint8_t *panel = (const uint8_t *)g->w->data + p * fr_panel_bytes(fr_kind(format, W), g->w->inputs);
    __attribute__((aligned(64))) float sums[MOST * W];
    unpacked u;
    memset(sums, 0, (size_t)(tiles * ROWS * W) * sizeof(float));
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        int64_t count = blocks - b < CHUNK ? blocks - b : CHUNK;
        const uint8_t *next = panel + fr_panel_bytes(fr_kind(format, W), b * FR_BLOCK) + AHEAD;
        unpack_chunk(format, panel, b, count, &u);
        for (int64_t i = 0; i < tiles; i++) {
            const fr_tile *t = g->tiles + (first / ROWS + i) * blocks + b;
            if (last == ROWS || i + 1 < tiles) chunk_rows(format, ROWS, count, t, &u, next, sums + i * ROWS * W);
            else chunk_rows(format, last, count, t, &u, next, sums + i * ROWS * W);
        }
    }
    for (int64_t r = 0; r < rows; r++) store_row(g, first + r, p, _mm512_load_ps(sums + r * W));
}

FR_INLINE void packed(const fr_range *g, int format) {
    configure(ROWS, format == FR_P6K ? FR_BLOCK / 2 : FR_BLOCK);
    for (int64_t r = 0; r < g->rows; r += MOST)
        for (int64_t p = g->begin; p < g->end; p++) {
            int64_t rows = g->rows - r < MOST ? g->rows - r : MOST, over = rows % ROWS;
            if (over && over <= ROWS / 2) panel_rows(g, format, p, r, rows, ROWS / 2);
            else panel_rows(g, format, p, r, rows, ROWS);
        }
    _tile_release();
}

void fr_packed_amx(const fr_range *g) {
    if (!g->tiles || !fr_reads_tiles(g->w->kind, g->rows)) {
        fr_packed_avx512(g);
        return;
    }
    FR_BY_FORMAT(g, FR_X86_CASES)
}

/* Does one tile give the right product? Asked after the system has allowed tiles. */
static int one_tile_is_right(void) {
    __attribute__((aligned(64))) int8_t x[ROWS * FR_BLOCK], w[FR_BLOCK * W];
    __attribute__((aligned(64))) int32_t y[ROWS * W];
    for (int i = 0; i < ROWS * FR_BLOCK; i++) x[i] = (int8_t)(i % 7 - 3), w[i] = (int8_t)(i % 5 - 2);
    __asm__ volatile("" ::: "memory");
    configure(ROWS, FR_BLOCK);
    _tile_loadd(2, x, FR_BLOCK);
    _tile_loadd(4, w, 64);
    _tile_zero(0);
    _tile_dpbssd(0, 2, 4);
    _tile_stored(0, y, 64);
    _tile_release();
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < W; o++) {
            int32_t sum = 0;
            for (int k = 0; k < FR_BLOCK; k++) sum += x[r * FR_BLOCK + k] * w[k / 4 * 64 + o * 4 + k % 4];
            if (sum != y[r * W + o]) return 0;
        }
    return 1;
}

/* Linux gives the tiles' state (number 18) to processes that ask for it. */
int fr_amx_works(void) {
    enum { ARCH_REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQUEST, TILE_DATA) == 0 && one_tile_is_right();
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_amx_only;
