#include "memory.h"

#include "quire_cpu.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {

void prefer_huge_pages(void* data, int64_t bytes) {
#ifdef __linux__
    constexpr uintptr_t kPage = 1 << 12;
    constexpr int64_t kHugePage = 1 << 21;
    if (bytes < kHugePage) return;
    const uintptr_t start = reinterpret_cast<uintptr_t>(data) & ~(kPage - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes);
    madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
    static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace quire

void quire_cpu_prefer_huge_pages(void* data, int64_t bytes) { quire::prefer_huge_pages(data, bytes); }
