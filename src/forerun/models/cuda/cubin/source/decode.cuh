// Weights of 8 and 4 bits to pairs of bf16, in the order in which tensor cores want their first operand in registers.
//
// A thread's four registers of a step of 16 along K hold outputs g and g + 8 (g = lane / 4) at columns 2t, 2t + 1
// (registers 0 and 1) and 2t + 8, 2t + 9 (registers 2 and 3), t = lane % 4; packing.py lays weights out accordingly.
#pragma once
#include <stdint.h>

template <int TABLE>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t found;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(found) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return found;
}

constexpr int AND_OR = (0xF0 & 0xCC) | 0xAA;  // (a & b) | c

__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t found;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}

constexpr uint32_t ONES = 0x3F803F80, MINUS_ONES = 0xBF80BF80;

// the bytes 0 and 2 as signed numbers: 128 + the low seven bits, less 128 or 256 by the sign
__device__ __forceinline__ uint32_t int8_pair(uint32_t word) {
    const uint32_t low = lop3<AND_OR>(word, 0x007F007F, 0x43004300), sign = lop3<AND_OR>(word, 0x00800080, 0x43004300);
    return fma_pair(sign, MINUS_ONES, low);
}

// the bytes 1 and 3 as e4m3: the exponent's bias differs by 120, also of what is subnormal
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word) {
    const uint32_t sign = word & 0x80008000;
    return fma_pair(lop3<AND_OR>(word >> 4, 0x07F007F0, sign), 0x7B807B80, 0x80008000);
}

// four bits of each half, less a zero point; `zero`: -(128 + zero point), twice
template <int SHIFT>
__device__ __forceinline__ uint32_t int4_pair(uint32_t word, uint32_t zero) {
    return fma_pair(lop3<AND_OR>(word >> SHIFT, 0x000F000F, 0x43004300), ONES, zero);
}

// The same as 16 more than they are, for groups whose sum of columns is known: four bits of each half at bits 3 to 6 of the
// word turned right by SHIFT.
template <int SHIFT>
__device__ __forceinline__ uint32_t offset_int4_pair(uint32_t word) {
    return lop3<AND_OR>(__funnelshift_r(word, word, SHIFT), 0x00780078, 0x41804180);
}

// the bytes 0 and 2, which hold numbers up to 63 times two, as 64 more than they are
__device__ __forceinline__ uint32_t offset_byte_pair(uint32_t word) { return lop3<AND_OR>(word, 0x007E007E, 0x42804280); }
