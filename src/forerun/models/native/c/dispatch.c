/* Which kernels this machine can run, asked once. Compiled for the least of machines. */
#include "forerun.h"

#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

typedef struct {
    const char *name;
    fr_kernel packed;
    int (*here)(void);
} variant;

#if defined(__x86_64__)
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
static int has_vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
/* what lies between the linear layers needs AVX2 as well, so there is no lesser machine to serve */
static const variant variants[] = {
    {"avx512-vnni", fr_packed_vnni, has_vnni}, {"avx2", fr_packed_avx2, has_avx2}, {"generic", fr_packed_generic, has_avx2}};
#elif defined(__aarch64__)
static int has_dotprod(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1; /* every Apple processor with this architecture */
#endif
}
static int always(void) { return 1; }
static const variant variants[] = {{"neon-dotprod", fr_packed_dotprod, has_dotprod}, {"generic", fr_packed_generic, always}};
#else
static int always(void) { return 1; }
static const variant variants[] = {{"generic", fr_packed_generic, always}};
#endif

enum { VARIANTS = sizeof variants / sizeof *variants };

static const variant *chosen;

static const variant *choice(void) {
    for (int i = 0; !chosen && i < VARIANTS; i++) /* every thread would choose the same */
        if (variants[i].here()) chosen = &variants[i];
    return chosen;
}

fr_kernel fr_packed_kernel(void) { return choice()->packed; }

FR_API const char *fr_isa(void) { return choice() ? choice()->name : ""; }

FR_API int fr_choose(const char *isa) {
    for (int i = 0; i < VARIANTS; i++)
        if (!strcmp(variants[i].name, isa) && variants[i].here()) {
            chosen = &variants[i];
            return 0;
        }
    return 1;
}
