// Files of weights that are read in pieces, past the page cache where their system allows it; where
// it does not, what was read is dropped from the cache. Notices files that change. Linux alone has
// what this needs. Knows no weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace paceline {

// Weights could not be read; the message names the file.
struct ReadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Bytes of a file.
struct Extent {
    int file;
    int64_t offset, bytes;
};

// What one read brings: whole pages, but for the end of a file.
struct Chunk {
    int file;
    int64_t offset, bytes;
    uint8_t* to;
};

constexpr int64_t FILE_PAGE = 4096;
inline int64_t page_floor(int64_t n) { return n / FILE_PAGE * FILE_PAGE; }
inline int64_t page_ceiling(int64_t n) { return page_floor(n + FILE_PAGE - 1); }

// What failed, with the system's reason for it.
std::string system_reason(const char* what, const std::string& of);

// Memory that the system has mapped, for as long as its owner lives.
struct Unmap {
    size_t bytes = 0;
    void operator()(uint8_t* start) const;
};
using Mapped = std::unique_ptr<uint8_t, Unmap>;
// Whole pages, or addresses alone where they are not `usable`. They are large where the system offers
// that: a virtual disk has to find each page of a read, and serves small ones at a quarter of the rate.
// Throws std::runtime_error, which says what there is no memory for.
Mapped map_memory(size_t bytes, bool usable, const char* purpose);

class DirectFiles {
  public:
    // Throws ReadError where a file cannot be opened.
    explicit DirectFiles(const std::vector<std::string>& paths);
    ~DirectFiles();
    DirectFiles(const DirectFiles&) = delete;
    DirectFiles& operator=(const DirectFiles&) = delete;

    // Empty, or what went wrong. Any thread may call it.
    std::string read(const Chunk& chunk) const;

  private:
    struct File {
        std::string path;
        int descriptor;
        bool is_direct;
        int64_t size, modified;  // bytes; nanoseconds
    };
    void add(const std::string& path);
    void give_back();

    std::vector<File> files_;
};

}  // namespace paceline
