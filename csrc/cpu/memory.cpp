// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include "quire_cpu.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {
namespace {

#ifdef __x86_64__

// Family 25 of AMD's. Measured was Zen 4 (docs/performance.md, "Scales of groups"), and Zen 3 goes with it.
bool is_zen_3_or_4() {
    unsigned most, vendor[3], version = 0, ignored[3];
    if (!__get_cpuid(0, &most, &vendor[0], &vendor[1], &vendor[2])) return false;
    if (vendor[0] != signature_AMD_ebx || vendor[1] != signature_AMD_ecx || vendor[2] != signature_AMD_edx) return false;
    __get_cpuid(1, &version, &ignored[0], &ignored[1], &ignored[2]);
    return (version >> 8 & 0xf) + (version >> 20 & 0xff) == 25;
}

#else

bool is_zen_3_or_4() { return false; }

#endif

}  // namespace

bool streams_are_fetched_ahead() {
    static const bool fetched = !is_zen_3_or_4();
    return fetched;
}

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
