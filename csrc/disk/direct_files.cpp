#include "disk/direct_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace paceline {

std::string system_reason(const char* what, const std::string& of) {
    return std::string(what) + " " + of + ": " + std::strerror(errno);
}

#if defined(__linux__)

namespace {

bool look(int descriptor, int64_t* size, int64_t* modified) {
    struct stat found {};
    if (fstat(descriptor, &found) != 0) {
        return false;
    }
    *size = found.st_size;
    *modified = found.st_mtim.tv_sec * 1'000'000'000LL + found.st_mtim.tv_nsec;
    return true;
}

// Some file systems take the flag, and refuse the reads.
int open_direct(const std::string& path) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    alignas(FILE_PAGE) uint8_t page[FILE_PAGE];
    if (descriptor >= 0 && pread(descriptor, page, sizeof(page), 0) < 0 && errno == EINVAL) {
        close(descriptor);
        errno = EINVAL;
        return -1;
    }
    return descriptor;
}

}  // namespace

void Unmap::operator()(uint8_t* start) const { munmap(start, bytes); }

Mapped map_memory(size_t bytes, bool usable, const char* purpose) {
    const int access = usable ? PROT_READ | PROT_WRITE : PROT_NONE;
    void* start =
        mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        throw std::runtime_error(system_reason("no memory for", purpose));
    }
    if (usable) {
        madvise(start, bytes, MADV_HUGEPAGE);
    }
    return Mapped(static_cast<uint8_t*>(start), {bytes});
}

DirectFiles::DirectFiles(const std::vector<std::string>& paths) {
    try {
        for (const std::string& path : paths) {
            add(path);
        }
    } catch (...) {
        give_back();
        throw;
    }
}

DirectFiles::~DirectFiles() { give_back(); }

void DirectFiles::give_back() {
    for (const File& file : files_) {
        close(file.descriptor);
    }
}

void DirectFiles::add(const std::string& path) {
    File file{path, open_direct(path), true, 0, 0};
    if (file.descriptor < 0 && errno == EINVAL) {
        file.is_direct = false;
        file.descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (file.descriptor < 0) {
        throw ReadError(system_reason("cannot open", path));
    }
    files_.push_back(file);
    if (!look(file.descriptor, &files_.back().size, &files_.back().modified)) {
        throw ReadError(system_reason("cannot look at", path));
    }
}

std::string DirectFiles::read(const Chunk& chunk) const {
    const File& file = files_[static_cast<size_t>(chunk.file)];
    int64_t size = 0, modified = 0;
    if (!look(file.descriptor, &size, &modified)) {
        return system_reason("cannot look at", file.path);
    }
    if (size != file.size || modified != file.modified) {
        return file.path + " was changed while it was in use; load the model again";
    }
    const int64_t wanted = std::min(chunk.bytes, size - chunk.offset);
    for (int64_t done = 0; done < wanted;) {
        // Direct reads are of whole pages, also where the file ends within one.
        const int64_t most = file.is_direct ? chunk.bytes - done : wanted - done;
        const ssize_t count = pread(file.descriptor, chunk.to + done, static_cast<size_t>(most),
                                    chunk.offset + done);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return system_reason("cannot read", file.path);
        }
        if (count == 0) {
            return file.path + " ends too early";
        }
        done += count;
    }
    if (!file.is_direct) {
        posix_fadvise(file.descriptor, chunk.offset, wanted, POSIX_FADV_DONTNEED);
    }
    return "";
}

#else

DirectFiles::DirectFiles(const std::vector<std::string>&) {
    throw std::runtime_error("weights are read from disk on Linux alone");
}
DirectFiles::~DirectFiles() = default;
std::string DirectFiles::read(const Chunk&) const { return ""; }
void Unmap::operator()(uint8_t*) const {}
Mapped map_memory(size_t, bool, const char* purpose) {
    throw std::runtime_error(std::string("no memory for ") + purpose);
}

#endif

}  // namespace paceline
