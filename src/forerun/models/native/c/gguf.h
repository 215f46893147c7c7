/* GGUF's numbers of the types that the kernels read. */
#ifndef FORERUN_GGUF_H
#define FORERUN_GGUF_H

enum { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8 };
enum { GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14, GGUF_IQ4_NL = 20 };

#endif
