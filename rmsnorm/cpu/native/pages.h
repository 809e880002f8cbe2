// Huge pages for large results. A page of 2 MB instead of 512 small ones saves most of the time that the system takes to
// provide new memory.
//
// Only the whole pages of a result are advised, and only where the system leaves the choice to programs ("madvise"). A
// result whose memory was in use before gets no advice: its pages are there. RMSNORM_HUGE_PAGES=0 switches it off.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace rmsnorm {

constexpr std::int64_t least_huge = std::int64_t{4} << 20;  // bytes, as for NumPy's arrays

#if defined(__linux__)
inline bool may_have_huge_pages() {
    static const bool may = [] {
        const char* value = std::getenv("RMSNORM_HUGE_PAGES");
        if (value && !std::strcmp(value, "0")) return false;
        char text[64] = {};
        if (std::FILE* file = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
            text[std::fread(text, 1, sizeof text - 1, file)] = 0;
            std::fclose(file);
        }
        return std::strstr(text, "[madvise]") != nullptr;
    }();
    return may;
}

inline void advise_huge_pages(const void* result, std::int64_t bytes) {
    if (!result || bytes < least_huge || !may_have_huge_pages()) return;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(result);
    const auto first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
    unsigned char in_use = 1;
    if (mincore(reinterpret_cast<void*>(first), page, &in_use) != 0 || (in_use & 1)) return;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}
#else
inline void advise_huge_pages(const void*, std::int64_t) {}
#endif

}  // namespace rmsnorm
