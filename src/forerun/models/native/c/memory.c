/* Large pages for what every pass reads from end to end. */
#include "forerun.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

/* Before the memory is first written: where the system has them, whole pages of 2 MB in it become one page each. */
FR_API void fr_use_huge_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = 2 << 20, begin = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a wish: without it all is as it was */
#else
    (void)memory, (void)bytes;
#endif
}
