/* Which paths this machine can run, asked once. Compiled for the least of machines. */
#include "forerun.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#endif

typedef struct {
    const char *name;
    fr_kernel packed;
    int width; /* of the panels that it reads */
    int tiles; /* from how many rows on it wants them in tiles; 0 = never */
    fr_quantize_range quantize;
    const fr_attention_path *attention;
    fr_gate_row *gate;
    const fr_adapt_path *adapt;
    int (*here)(void);
} variant;

static const fr_attention_path four_queries = {fr_attend, 4, 16, 0};
static const fr_adapt_path adapt_least = {fr_adapt_down, fr_adapt_up};

#if defined(__x86_64__)
#include <cpuid.h>

static const fr_attention_path twelve_queries = {fr_attend_avx512, 12, 24, 1};
static const fr_adapt_path adapt_avx512 = {fr_adapt_down_avx512, fr_adapt_up_avx512};

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#if FR_NEW_X86
static int has_avx_vnni(void) { /* not all compilers know its name here */
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#if defined(__linux__)
static int has_amx(void) {
    static int known; /* 1 = no, 2 = yes; every thread would find the same */
    unsigned a, b, c, d;
    if (!known) {
        int there = has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3; /* tiles, int8 */
        known = there && fr_amx_works() ? 2 : 1;
    }
    return known == 2;
}
#endif
#endif
/* what lies between the linear layers needs AVX2 as well, so there is no lesser machine to serve */
static const variant variants[] = {
#if FR_NEW_X86 && defined(__linux__)
    {"amx-int8", fr_packed_amx, 16, 13, fr_quantize_avx512, &twelve_queries, fr_gate_row_avx512, &adapt_avx512, has_amx},
#endif
    {"avx512-vnni", fr_packed_avx512, 16, 0, fr_quantize_avx512, &twelve_queries, fr_gate_row_avx512, &adapt_avx512,
     has_avx512},
#if FR_NEW_X86
    {"avx-vnni", fr_packed_avx_vnni, 8, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, has_avx_vnni},
#endif
    {"avx2", fr_packed_avx2, 8, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, has_avx2},
    {"generic", fr_packed_generic, 4, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, has_avx2},
};
#elif defined(__aarch64__)
static int has_dotprod(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1; /* every Apple processor with this architecture */
#endif
}
#if FR_HAS_I8MM
static int has_i8mm(void) {
#if defined(__linux__)
    return has_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
    return 0; /* Apple has it from the M2 on, and no auxiliary vector to say so */
#endif
}
#endif
static int always(void) { return 1; }
/* matrix instructions come second until they were timed on a machine that has them: the dot product is tuned */
static const variant variants[] = {
    {"neon-dotprod", fr_packed_dotprod, 4, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, has_dotprod},
#if FR_HAS_I8MM
    {"neon-i8mm", fr_packed_i8mm, 4, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, has_i8mm},
#endif
    {"generic", fr_packed_generic, 4, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, always},
};
#else
static int always(void) { return 1; }
static const variant variants[] = {
    {"generic", fr_packed_generic, 4, 0, fr_quantize, &four_queries, fr_gate_row_least, &adapt_least, always},
};
#endif

enum { VARIANTS = sizeof variants / sizeof *variants };

static const variant *chosen;

static const variant *choice(void) {
    for (int i = 0; !chosen && i < VARIANTS; i++) /* every thread would choose the same */
        if (variants[i].here()) chosen = &variants[i];
    return chosen;
}

static const variant *find(const char *isa) {
    for (int i = 0; i < VARIANTS; i++)
        if (!strcmp(variants[i].name, isa) && variants[i].here()) return &variants[i];
    return NULL;
}

int fr_chosen_width(void) { return choice() ? choice()->width : 4; }

const fr_attention_path *fr_chosen_attention(void) { return choice()->attention; }

fr_quantize_range fr_chosen_quantize(void) { return choice()->quantize; }

fr_gate_row *fr_chosen_gate(void) { return choice()->gate; }

const fr_adapt_path *fr_chosen_adapt(void) { return choice()->adapt; }

int fr_uses_tiles(int64_t rows) { return choice() && choice()->tiles && rows >= choice()->tiles; }

/* Weights that were packed for another path are read by the plain one, which reads all. */
fr_kernel fr_packed_kernel(int kind) { return choice()->width == fr_width(kind) ? choice()->packed : fr_packed_generic; }

FR_API const char *fr_isa(void) { return choice() ? choice()->name : ""; }

FR_API const char *fr_variant(int i) { return 0 <= i && i < VARIANTS ? variants[i].name : NULL; }

FR_API int fr_prefers_half(void) { return choice() && choice()->attention->half; }

FR_API int fr_has(const char *isa) { return find(isa) != NULL; }

FR_API int fr_choose(const char *isa) {
    const variant *found = find(isa);
    if (found) chosen = found;
    return found == NULL;
}
