#include "layer_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace paceline {

#if defined(__linux__)

namespace {

constexpr int64_t PAGE = 4096, CHUNK = 4 << 20;
constexpr size_t RESIDENT = SIZE_MAX;  // the turn of a layer that stays

int64_t page_floor(int64_t n) { return n / PAGE * PAGE; }
int64_t page_ceiling(int64_t n) { return page_floor(n + PAGE - 1); }

std::string reason(const char* what, const std::string& path) {
    return std::string(what) + " " + path + ": " + std::strerror(errno);
}

bool look(int descriptor, int64_t* size, int64_t* modified) {
    struct stat found {};
    if (fstat(descriptor, &found) != 0) {
        return false;
    }
    *size = found.st_size;
    *modified = found.st_mtim.tv_sec * 1'000'000'000LL + found.st_mtim.tv_nsec;
    return true;
}

}  // namespace

LayerStream::LayerStream(const std::vector<std::string>& files,
                         std::vector<std::vector<Extent>> layers, int slots, int readers)
    : layers_(std::move(layers)) {
    try {
        for (const std::string& path : files) {
            open_file(path);
        }
        map_layers(slots);
        for (int i = 0; i < readers; ++i) {
            readers_.emplace_back([this] { read_on(); });
        }
    } catch (...) {
        give_back();
        throw;
    }
}

LayerStream::~LayerStream() { give_back(); }

void LayerStream::give_back() {
    {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
    }
    room_.notify_all();
    for (std::thread& reader : readers_) {
        reader.join();
    }
    for (const Mapping& mapping : mappings_) {
        munmap(mapping.start, mapping.bytes);
    }
    for (const File& file : files_) {
        close(file.descriptor);
    }
    if (memory_ >= 0) {
        close(memory_);
    }
}

void LayerStream::open_file(const std::string& path) {
    File file{path, open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC), true, 0, 0};
    if (file.descriptor < 0 && errno == EINVAL) {
        file.is_direct = false;
        file.descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (file.descriptor < 0) {
        throw ReadError(reason("cannot open", path));
    }
    files_.push_back(file);
    if (!look(file.descriptor, &files_.back().size, &files_.back().modified)) {
        throw ReadError(reason("cannot look at", path));
    }
}

void LayerStream::map_layers(int slots) {
    int64_t largest = 0;
    for (const std::vector<Extent>& extents : layers_) {
        int64_t size = 0;
        for (const Extent& each : extents) {
            size += page_ceiling(each.offset + each.bytes) - page_floor(each.offset);
        }
        largest = std::max(largest, size);
    }
    slots_.resize(static_cast<size_t>(slots));
    memory_ = memfd_create("paceline-layers", MFD_CLOEXEC);
    if (memory_ < 0 || ftruncate(memory_, largest * slots) != 0) {
        throw std::runtime_error(reason("no memory for", "streamed layers"));
    }
    for (const std::vector<Extent>& extents : layers_) {
        places_.emplace_back();
        turns_.push_back(extents.empty() ? RESIDENT : chunks_.size());
        if (extents.empty()) {
            continue;
        }
        const int64_t at = largest * static_cast<int64_t>(chunks_.size() % slots_.size());
        void* start = mmap(nullptr, largest, PROT_READ | PROT_WRITE, MAP_SHARED, memory_, at);
        if (start == MAP_FAILED) {
            throw std::runtime_error(reason("no memory for", "streamed layers"));
        }
        mappings_.push_back({start, static_cast<size_t>(largest)});
        chunks_.emplace_back();
        uint8_t* to = static_cast<uint8_t*>(start);
        for (const Extent& each : extents) {
            const int64_t first = page_floor(each.offset);
            const int64_t last = page_ceiling(each.offset + each.bytes);
            places_.back().push_back(to + (each.offset - first));
            for (int64_t from = first; from < last; from += CHUNK) {
                const int64_t bytes = std::min(CHUNK, last - from);
                chunks_.back().push_back({each.file, from, bytes, to + (from - first)});
            }
            to += last - first;
        }
    }
}

void LayerStream::begin(size_t layer) {
    const size_t turn = turns_[layer];
    if (turn == RESIDENT) {
        return;
    }
    std::unique_lock lock(mutex_);
    Slot& slot = slots_[turn % slots_.size()];
    const bool comes = slot.state == State::free ? next_turn_ == turn : slot.turn == turn;
    if (!comes) {
        start_at(lock, turn);
    }
    const auto is_there = [&] { return slot.state == State::ready && slot.turn == turn; };
    if (!is_there()) {
        const auto began = std::chrono::steady_clock::now();
        arrival_.wait(lock, is_there);
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
        seconds_waited_ += waited.count();
    }
    if (!slot.error.empty()) {
        const ReadError error(slot.error);
        start_at(lock, turn);  // whoever asks again may find the file mended
        throw error;
    }
}

void LayerStream::end(size_t layer) {
    const size_t turn = turns_[layer];
    if (turn == RESIDENT) {
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        slots_[turn % slots_.size()].state = State::free;
    }
    room_.notify_all();
}

void LayerStream::start_at(std::unique_lock<std::mutex>& lock, size_t turn) {
    for (Slot& slot : slots_) {
        if (next_chunk_ > 0 && slot.state == State::reading && slot.turn == next_turn_) {
            slot.left -= chunks_[next_turn_].size() - next_chunk_;  // not begun
            if (slot.left == 0) {
                slot.state = State::free;
            }
        }
    }
    next_turn_ = SIZE_MAX;  // nobody begins anything
    arrival_.wait(lock, [this] {
        return std::none_of(slots_.begin(), slots_.end(),
                            [](const Slot& slot) { return slot.state == State::reading; });
    });
    for (Slot& slot : slots_) {
        slot = {};
    }
    next_turn_ = turn;
    next_chunk_ = 0;
    room_.notify_all();
}

bool LayerStream::take(std::unique_lock<std::mutex>& lock, size_t* turn, Chunk* chunk) {
    for (;; room_.wait(lock)) {
        if (is_over_) {
            return false;
        }
        if (next_turn_ >= chunks_.size()) {
            continue;
        }
        Slot& slot = slots_[next_turn_ % slots_.size()];
        if (next_chunk_ == 0) {
            if (slot.state != State::free) {
                continue;
            }
            slot = {State::reading, next_turn_, chunks_[next_turn_].size(), ""};
        }
        *turn = next_turn_;
        *chunk = chunks_[next_turn_][next_chunk_++];
        if (next_chunk_ == chunks_[next_turn_].size()) {
            next_turn_ = (next_turn_ + 1) % chunks_.size();
            next_chunk_ = 0;
        }
        return true;
    }
}

void LayerStream::read_on() {
    std::unique_lock lock(mutex_);
    size_t turn = 0;
    Chunk chunk{};
    while (take(lock, &turn, &chunk)) {
        room_.notify_one();  // there may be more
        lock.unlock();
        std::string error = read(chunk);
        lock.lock();
        bytes_read_ += error.empty() ? chunk.bytes : 0;
        Slot& slot = slots_[turn % slots_.size()];
        if (!error.empty()) {
            slot.error = std::move(error);
        }
        if (--slot.left == 0) {
            slot.state = State::ready;
            arrival_.notify_all();
        }
    }
}

std::string LayerStream::read(const Chunk& chunk) {
    const File& file = files_[static_cast<size_t>(chunk.file)];
    int64_t size = 0, modified = 0;
    if (!look(file.descriptor, &size, &modified)) {
        return reason("cannot look at", file.path);
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
            return reason("cannot read", file.path);
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

LayerStream::LayerStream(const std::vector<std::string>&, std::vector<std::vector<Extent>>, int, int) {
    throw std::runtime_error("weights are read from disk on Linux alone");
}
LayerStream::~LayerStream() = default;
void LayerStream::begin(size_t) {}
void LayerStream::end(size_t) {}

#endif

int64_t LayerStream::bytes_read() const {
    const std::lock_guard lock(mutex_);
    return bytes_read_;
}

double LayerStream::seconds_waited() const {
    const std::lock_guard lock(mutex_);
    return seconds_waited_;
}

}  // namespace paceline
