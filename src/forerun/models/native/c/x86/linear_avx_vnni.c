/* Packed linear layers for x86-64 with AVX-VNNI (laptops and desktops since 2021): one instruction where AVX2 needs two. */
#include "forerun.h"

#if FR_NEW_X86
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#include <immintrin.h>
#endif

#define FR_PACKED fr_packed_avx_vnni
#define FR_VNNI 1
#include "x86/linear_x86.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int fr_avx_vnni_only;
