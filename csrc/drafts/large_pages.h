// Memory for large arrays that are read at random: in large pages where the system offers them, since
// finding a small page takes longer than reading from it. Knows nothing of what is kept there.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paceline {

template <typename T>
struct LargePages {
    using value_type = T;
    static constexpr size_t page = size_t{2} << 20;

    LargePages() = default;
    template <typename U>
    LargePages(const LargePages<U>&) {}

    T* allocate(size_t count) {
        const size_t bytes = count * sizeof(T);
        if (bytes < 2 * page) {
            return static_cast<T*>(::operator new(bytes));
        }
        const size_t whole = (bytes + page - 1) / page * page;
        void* place = ::operator new(whole, std::align_val_t(page));
#if defined(MADV_HUGEPAGE)
        madvise(place, whole, MADV_HUGEPAGE);
#endif
        return static_cast<T*>(place);
    }

    void deallocate(T* place, size_t count) {
        if (count * sizeof(T) < 2 * page) {
            ::operator delete(place);
        } else {
            ::operator delete(place, std::align_val_t(page));
        }
    }

    template <typename U>
    bool operator==(const LargePages<U>&) const {
        return true;
    }
    template <typename U>
    bool operator!=(const LargePages<U>&) const {
        return false;
    }
};

template <typename T>
using LargeVector = std::vector<T, LargePages<T>>;

}  // namespace paceline
