#include "disk/expert_cache.h"

#include <algorithm>
#include <cmath>

namespace paceline {

namespace {

constexpr int64_t READ_BYTES = 1 << 20;
constexpr int64_t NEAR = 1 << 16;  // extents this close to each other are read as one
constexpr float MEMORY = 1.0f - 1.0f / 64;  // weight of the rows before each row
constexpr float LEAST_SHARE = 1e-6f;
// Of a layer at once: enough for many reads, and so few that a prompt, which needs all experts of all
// layers, does not take the place of those that will be needed again.
constexpr ptrdiff_t MOST_HELD = 24;

// Bytes of a file that hold some of an expert's extents.
struct Run {
    int file;
    int64_t begin, end;
    int64_t at;  // of the page that it begins in, behind the expert's address

    int64_t first() const { return page_floor(begin); }
    int64_t last() const { return page_ceiling(end); }
    // That it takes, wherever in a page it begins.
    int64_t room() const { return page_ceiling(end - begin) + FILE_PAGE; }
    bool has(const Extent& extent) const {
        return extent.file == file && begin <= extent.offset && extent.offset < end;
    }
};

std::vector<Run> runs_of(std::vector<Extent> extents) {
    std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
        return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
    std::vector<Run> runs;
    for (const Extent& each : extents) {
        const int64_t end = each.offset + each.bytes;
        if (!runs.empty() && runs.back().file == each.file && each.offset <= runs.back().end + NEAR) {
            runs.back().end = std::max(runs.back().end, end);
        } else {
            runs.push_back({each.file, each.offset, end, 0});
        }
    }
    for (size_t i = 1; i < runs.size(); ++i) {
        runs[i].at = runs[i - 1].at + runs[i - 1].room();
    }
    return runs;
}

int64_t room_of(const std::vector<Run>& runs) {
    return runs.empty() ? 0 : runs.back().at + runs.back().room();
}

}  // namespace

ExpertCache::ExpertCache(const std::vector<std::string>& files,
                         std::vector<std::vector<std::vector<Extent>>> experts, int64_t bytes,
                         int readers)
    : rows_(experts.size(), 0), readers_(files) {
    for (const std::vector<std::vector<Extent>>& each : experts) {
        lay_out(each);
    }
    make_slots(bytes);
    readers_.start(readers, [this] { return take(); });
}

uint8_t* ExpertCache::map(int64_t bytes, bool usable) {
    mappings_.push_back(map_memory(static_cast<size_t>(bytes), usable, "experts"));
    return mappings_.back().get();
}

int ExpertCache::kind_of(int64_t bytes) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
        if (kinds_[kind].bytes == bytes) {
            return static_cast<int>(kind);
        }
    }
    kinds_.push_back({bytes, 0, {}});
    return static_cast<int>(kinds_.size()) - 1;
}

void ExpertCache::lay_out(const std::vector<std::vector<Extent>>& experts) {
    int64_t largest = 0;
    for (const std::vector<Extent>& extents : experts) {
        largest = std::max(largest, room_of(runs_of(extents)));
    }
    kind_.push_back(experts.empty() ? -1 : kind_of(largest));
    experts_.emplace_back();
    if (experts.empty()) {
        return;
    }
    kinds_[kind_.back()].number += static_cast<int64_t>(experts.size());
    uint8_t* address = map(largest * static_cast<int64_t>(experts.size()), false);
    for (const std::vector<Extent>& extents : experts) {
        const std::vector<Run> runs = runs_of(extents);
        Expert expert;
        expert.address = address;
        for (const Extent& each : extents) {
            const auto run = std::find_if(runs.begin(), runs.end(),
                                          [&](const Run& one) { return one.has(each); });
            uint8_t* at = address + run->at + (each.offset - run->first());
            expert.places.push_back({at, static_cast<size_t>(each.bytes)});
        }
        for (const Run& run : runs) {
            for (int64_t from = run.first(); from < run.last(); from += READ_BYTES) {
                const int64_t bytes = std::min(READ_BYTES, run.last() - from);
                expert.pieces.push_back({run.file, from, bytes, run.at + (from - run.first())});
            }
        }
        experts_.back().push_back(std::move(expert));
        address += largest;
    }
}

void ExpertCache::make_slots(int64_t bytes) {
    double whole = 0.0;
    for (const Kind& kind : kinds_) {
        whole += static_cast<double>(kind.bytes) * static_cast<double>(kind.number);
    }
    for (Kind& kind : kinds_) {
        const double share = static_cast<double>(bytes) * static_cast<double>(kind.number) / whole;
        const int64_t count = std::min(kind.number, static_cast<int64_t>(share));
        if (count < 1) {
            throw std::runtime_error("no memory for one expert");
        }
        uint8_t* memory = map(count * kind.bytes, true);
        kind.slots.resize(static_cast<size_t>(count));
        for (Slot& slot : kind.slots) {
            slot.memory = memory;
            memory += kind.bytes;
        }
    }
}

std::optional<Readers::Task> ExpertCache::take() {
    if (tasks_.empty()) {
        return {};
    }
    const Readers::Task task = tasks_.front();
    tasks_.pop_front();
    return task;
}

void ExpertCache::note(size_t layer, const std::vector<Wish>& wishes, int rows) {
    layer_ = layer;
    rows_[layer] += rows;
    const float news = 1.0f - std::pow(MEMORY, static_cast<float>(rows));
    for (const Wish& wish : wishes) {
        Expert& expert = experts_[layer][static_cast<size_t>(wish.expert)];
        expert.share = share_of(layer, expert) +
                       news * static_cast<float>(wish.rows) / static_cast<float>(rows);
        expert.seen = rows_[layer];
    }
}

float ExpertCache::share_of(size_t layer, const Expert& expert) const {
    return expert.share * std::pow(MEMORY, static_cast<float>(rows_[layer] - expert.seen));
}

float ExpertCache::rounds_until_used(const Slot& slot) const {
    const size_t layer = static_cast<size_t>(slot.layer), layers = experts_.size();
    const size_t until = (layer + layers - layer_ - 1) % layers + 1;
    const Expert& expert = experts_[layer][static_cast<size_t>(slot.expert)];
    const float share = std::min(1.0f, std::max(LEAST_SHARE, share_of(layer, expert)));
    return static_cast<float>(until) / static_cast<float>(layers) + 1.0f / share - 1.0f;
}

std::vector<ExpertCache::Slot*> ExpertCache::victims(size_t layer, size_t count) {
    std::vector<std::pair<float, Slot*>> found;
    for (Slot& slot : kinds_[static_cast<size_t>(kind_[layer])].slots) {
        if (slot.state == State::free) {
            found.emplace_back(INFINITY, &slot);
        } else if (slot.state == State::ready && slot.users == 0) {
            found.emplace_back(rounds_until_used(slot), &slot);
        }
    }
    count = std::min(count, found.size());
    std::partial_sort(found.begin(), found.begin() + static_cast<ptrdiff_t>(count), found.end(),
                      [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Slot*> slots;
    for (size_t i = 0; i < count; ++i) {
        slots.push_back(found[i].second);
    }
    return slots;
}

void ExpertCache::start(size_t layer, int id, Slot& slot) {
    empty(slot);
    Expert& expert = experts_[layer][static_cast<size_t>(id)];
    std::vector<Slot>& slots = kinds_[static_cast<size_t>(kind_[layer])].slots;
    expert.slot = static_cast<int>(&slot - slots.data());
    slot.layer = static_cast<int>(layer);
    slot.expert = id;
    slot.state = State::reading;
    slot.left = expert.pieces.size();
    for (const Piece& piece : expert.pieces) {
        tasks_.push_back({&slot, {piece.file, piece.offset, piece.bytes, slot.memory + piece.at}});
    }
    readers_.wake();
}

void ExpertCache::empty(Slot& slot) {
    if (slot.state != State::free) {
        experts_[static_cast<size_t>(slot.layer)][static_cast<size_t>(slot.expert)].slot = -1;
    }
    slot.state = State::free;
    slot.error.clear();
}

ExpertCache::Slot* ExpertCache::slot_of(size_t layer, int id) {
    const int slot = experts_[layer][static_cast<size_t>(id)].slot;
    return slot < 0 ? nullptr : &kinds_[static_cast<size_t>(kind_[layer])].slots[size_t(slot)];
}

ExpertCache::Use::Use(ExpertCache& cache, size_t layer, const std::vector<Wish>& wishes, int rows)
    : cache_(cache), layer_(layer), wishes_(wishes), states_(wishes.size(), State::wanted) {
    const Readers::Lock lock = cache_.readers_.lock();
    cache_.note(layer, wishes, rows);
    for (size_t i = 0; i < wishes_.size(); ++i) {
        Slot* slot = cache_.slot_of(layer, wishes_[i].expert);
        if (slot && slot->state == ExpertCache::State::ready && !slot->error.empty()) {
            cache_.empty(*slot);  // of a read that failed for who asked before
            slot = nullptr;
        }
        if (slot) {
            ++slot->users;
            states_[i] = State::held;
        } else {
            ++read_;
        }
    }
    start_more();
}

ExpertCache::Use::~Use() {
    const Readers::Lock lock = cache_.readers_.lock();
    for (size_t i = 0; i < wishes_.size(); ++i) {
        if (states_[i] == State::held || states_[i] == State::handed_out) {
            --slot(i)->users;
        }
    }
}

ExpertCache::Slot* ExpertCache::Use::slot(size_t wish) const {
    return cache_.slot_of(layer_, wishes_[wish].expert);
}

void ExpertCache::Use::start_more() {
    const auto count = [&](State state) { return std::count(states_.begin(), states_.end(), state); };
    const ptrdiff_t room = MOST_HELD - count(State::held) - count(State::handed_out);
    const ptrdiff_t number = std::min(count(State::wanted), std::max<ptrdiff_t>(0, room));
    if (number == 0) {
        return;
    }
    const std::vector<Slot*> slots = cache_.victims(layer_, static_cast<size_t>(number));
    auto next = slots.begin();
    for (size_t i = 0; i < wishes_.size() && next != slots.end(); ++i) {
        if (states_[i] == State::wanted) {
            cache_.start(layer_, wishes_[i].expert, **next);
            ++(*next++)->users;
            states_[i] = State::held;
        }
    }
}

std::vector<int> ExpertCache::Use::take_ready() {
    std::vector<int> found;
    for (size_t i = 0; i < wishes_.size(); ++i) {
        if (states_[i] != State::held || slot(i)->state != ExpertCache::State::ready) {
            continue;
        }
        if (!slot(i)->error.empty()) {
            throw ReadError(slot(i)->error);
        }
        found.push_back(static_cast<int>(i));
    }
    for (const int wish : found) {
        states_[static_cast<size_t>(wish)] = State::handed_out;
    }
    return found;
}

std::vector<int> ExpertCache::Use::next() {
    Readers::Lock lock = cache_.readers_.lock();
    for (size_t i = 0; i < wishes_.size(); ++i) {
        if (states_[i] == State::handed_out) {
            --slot(i)->users;
            states_[i] = State::done;
        }
    }
    const auto is_done = [](State state) { return state == State::done; };
    if (std::all_of(states_.begin(), states_.end(), is_done)) {
        return {};
    }
    std::vector<int> found;
    cache_.readers_.wait(lock, [&] {
        start_more();  // also where those of others stood in the way
        found = take_ready();
        return !found.empty();
    });
    return found;
}

ptrdiff_t ExpertCache::Use::shift(int wish) const {
    const size_t i = static_cast<size_t>(wish);
    const Expert& expert = cache_.experts_[layer_][static_cast<size_t>(wishes_[i].expert)];
    return slot(i)->memory - expert.address;
}

}  // namespace paceline
