/* Packed linear layers for x86-64 with AVX-512 VNNI: one instruction where AVX2 needs three. */
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
#include <immintrin.h>
#endif
#include "forerun.h"

#define FR_PACKED fr_packed_vnni
#define FR_VNNI 1
#include "linear_x86.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_vnni_only;
