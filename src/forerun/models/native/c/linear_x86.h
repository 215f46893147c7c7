/* Packed linear layers for x86-64, written once for AVX2 and for VNNI: include with FR_PACKED and FR_VNNI defined.
 *
 * A vector holds two rows of activations, sixteen inputs each; a shuffle brings four inputs of each row beside the
 * panel's four outputs, so one step advances four outputs of two rows. The odd last row has an unused neighbour in
 * its group of four, whose results are dropped.
 */
FR_INLINE __m256i both_rows(const int8_t *x) {
    __m128i a = _mm_loadu_si128((const __m128i *)x), b = _mm_loadu_si128((const __m128i *)(x + FR_BLOCK / 2));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

FR_INLINE __m256 both_floats(const float *p) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_set1_ps(p[0])), _mm_set1_ps(p[1]), 1);
}

FR_INLINE __m256 twice(__m128 v) { return _mm256_insertf128_ps(_mm256_castps128_ps256(v), v, 1); }
FR_INLINE __m256 halves(const uint8_t *p) { return twice(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p))); }
FR_INLINE __m256 floats(const uint8_t *p) { return twice(_mm_loadu_ps((const float *)p)); }

/* Group g of a block, in both halves: inputs 4g..4g+3 of the four rows. */
FR_INLINE __m256i weights_of(const uint8_t *p, int four, int g) {
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p + 16 * (four ? g % 4 : g))));
    if (!four) return v;
    return _mm256_and_si256(g < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

/* sum += v . x in fours of bytes; values of v are signed unless it holds nibbles. */
FR_INLINE __m256i dot(__m256i sum, __m256i v, __m256i x, int four) {
    if (!four) {
        x = _mm256_sign_epi8(x, v);
        v = _mm256_abs_epi8(v);
    }
#if FR_VNNI
    return _mm256_dpbusd_epi32(sum, v, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(v, x), _mm256_set1_epi16(1)));
#endif
}

FR_INLINE __m256i spread(__m256i x, int at) {
    switch (at) { /* the instruction wants a constant */
    case 0: return _mm256_shuffle_epi32(x, 0x00);
    case 1: return _mm256_shuffle_epi32(x, 0x55);
    case 2: return _mm256_shuffle_epi32(x, 0xAA);
    default: return _mm256_shuffle_epi32(x, 0xFF);
    }
}

FR_INLINE __m256 add_scaled(__m256i sum, __m256 d, __m256 scales, __m256 total) {
    return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), scales), d, total);
}

/* One panel, `pairs` (1 or 2) pairs of rows of one group: pairs and kind are constants where this is inlined. */
FR_INLINE void panel_pairs(const uint8_t *panel, int kind, int pairs, int64_t blocks, const fr_group *q,
                           __m256 total[2]) {
    int four = kind == FR_P4 || kind == FR_P4W;
    total[0] = total[1] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, q++, panel += fr_block_bytes(kind)) {
        __m256 d, d2 = _mm256_setzero_ps(), m = _mm256_setzero_ps();
        if (kind == FR_P4) d = halves(panel + 64), m = halves(panel + 72);
        else if (kind == FR_P8) d = halves(panel + 128);
        else if (kind == FR_P4W) d = floats(panel + 64), m = floats(panel + 80);
        else if (kind == FR_P8M) d = floats(panel + 128), m = floats(panel + 144);
        else d = floats(panel + 128), d2 = floats(panel + 144);
        __m256i low[2], high[2], first[2], last[2];
        FR_UNROLL for (int p = 0; p < pairs; p++) {
            low[p] = high[p] = _mm256_setzero_si256();
            first[p] = both_rows(q->values[0][2 * p]), last[p] = both_rows(q->values[1][2 * p]);
        }
        FR_UNROLL for (int g = 0; g < 4; g++) {
            __m256i v = weights_of(panel, four, g), w = weights_of(panel, four, g + 4);
            FR_UNROLL for (int p = 0; p < pairs; p++) {
                low[p] = dot(low[p], v, spread(first[p], g), four);
                high[p] = dot(high[p], w, spread(last[p], g), four);
            }
        }
        FR_UNROLL for (int p = 0; p < pairs; p++) {
            __m256 scales = both_floats(q->scales + 2 * p);
            if (four || kind == FR_P8M) total[p] = _mm256_fmadd_ps(m, both_floats(q->sums + 2 * p), total[p]);
            if (kind == FR_P8W) {
                total[p] = add_scaled(low[p], d, scales, total[p]);
                total[p] = add_scaled(high[p], d2, scales, total[p]);
            } else total[p] = add_scaled(_mm256_add_epi32(low[p], high[p]), d, scales, total[p]);
        }
    }
}

FR_INLINE void store(const fr_range *g, int64_t row, int64_t panel, __m128 total) {
    int64_t o = panel * FR_PANEL;
    float lanes[4], *y = g->y + row * g->stride + o;
    _mm_storeu_ps(lanes, total);
    for (int i = 0; i < FR_PANEL && o + i < g->w->outputs; i++) y[i] = g->w->bias ? lanes[i] + g->w->bias[o + i] : lanes[i];
}

FR_INLINE void group_rows(const fr_range *g, int kind, int rows, int64_t first, int64_t panel) {
    int64_t blocks = g->w->inputs / FR_BLOCK;
    const uint8_t *data = (const uint8_t *)g->w->data + panel * blocks * fr_block_bytes(kind);
    __m256 total[2];
    panel_pairs(data, kind, rows > 2 ? 2 : 1, blocks, g->q + first / FR_GROUP * blocks, total);
    for (int r = 0; r < rows; r++) {
        __m256 pair = total[r / 2];
        store(g, first + r, panel, r % 2 ? _mm256_extractf128_ps(pair, 1) : _mm256_castps256_ps128(pair));
    }
}

FR_INLINE void packed(const fr_range *g, int kind) {
    for (int64_t p = g->begin; p < g->end; p++) { /* a panel stays in the first cache for all groups of rows */
        int64_t r = 0;
        for (; r + FR_GROUP <= g->rows; r += FR_GROUP) group_rows(g, kind, FR_GROUP, r, p);
        int left = (int)(g->rows - r);
        if (left > 2) group_rows(g, kind, 3, r, p);
        else if (left > 0) group_rows(g, kind, left, r, p);
    }
}

void FR_PACKED(const fr_range *g) {
    switch (g->w->kind) {
    case FR_P4: packed(g, FR_P4); break;
    case FR_P8: packed(g, FR_P8); break;
    case FR_P4W: packed(g, FR_P4W); break;
    case FR_P8W: packed(g, FR_P8W); break;
    case FR_P8M: packed(g, FR_P8M); break;
    default: break;
    }
}
