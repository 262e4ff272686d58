// What the linears of all kinds and levels share: how rows and tiles are cut, what is fetched from
// memory meanwhile, and what is done with a finished sum.
namespace paceline {
namespace {

// Loops over rows live in registers only if what they call is part of them.
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda

constexpr int LINE = 64;             // bytes that are fetched at a time
constexpr int STREAM_AHEAD = 4096;  // bytes from what is read to what is fetched

// What is fetched into the caches during a pass over a tile: `step` bytes on with each fetch, and
// `leap` more from fetch `turn` on, where a tile ends that others follow.
struct Ahead {
    const int8_t* at;
    ptrdiff_t step, turn, leap;

    ALWAYS_INLINE const int8_t* place(ptrdiff_t index) const {
        return at + index * step + (index < turn ? 0 : leap);
    }
    ALWAYS_INLINE void fetch(ptrdiff_t index, ptrdiff_t offset = 0) const {
        __builtin_prefetch(place(index) + offset);
    }
    Ahead from(ptrdiff_t index) const { return {at + index * step, step, turn - index, leap}; }
};

inline int32_t load_quad(const int8_t* a) {
    int32_t quad;
    std::memcpy(&quad, a, sizeof quad);
    return quad;
}

// Bias, alpha and residual, in this order, of one row's 16 outputs from `column` on; the outputs
// past the last real one go through a copy.
inline void finish(f32x16 y, const float* bias, const LinearOut& out, int row, int column, int n) {
    if (bias) {
        y = y + load(bias + column);
    }
    if (out.alpha != 1.0f) {
        y = y * splat(out.alpha);
    }
    const ptrdiff_t at = ptrdiff_t(row) * out.ld + column;
    if (n - column >= TILE) {
        if (out.residual) {
            y = y + load(out.residual + at);
        }
        store(out.y + at, y);
        return;
    }
    const size_t bytes = size_t(n - column) * sizeof(float);
    float lane[TILE] = {};
    if (out.residual) {
        std::memcpy(lane, out.residual + at, bytes);
        y = y + load(lane);
    }
    store(lane, y);
    std::memcpy(out.y + at, lane, bytes);
}

// Fetches what `finish` will touch of so many rows, so that it does not wait for memory.
ALWAYS_INLINE void fetch_outputs(const LinearOut& out, int row, int rows, int column) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        __builtin_prefetch(out.y + ptrdiff_t(row + r) * out.ld + column, 1);
    }
}

// Calls f(std::integral_constant<int, n>()) for n = LEAST..MOST.
template <int MOST, int LEAST = 1, typename F> inline void with_number(int n, const F& f) {
    if constexpr (MOST > LEAST) {
        if (n < MOST) {
            return with_number<MOST - 1, LEAST>(n, f);
        }
    }
    f(std::integral_constant<int, MOST>());
}

// Calls f(std::integral_constant<int, i>()), an INLINED lambda, for i = 0..N - 1. Unlike in an
// unrolled loop, indices are constants before gcc decides which arrays live in registers.
template <typename F, int... I>
ALWAYS_INLINE void unrolled(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> ALWAYS_INLINE void unrolled(const F& f) {
    unrolled(f, std::make_integer_sequence<int, N>());
}

// The tiles that rows are multiplied with, several side by side or one.
struct Reading {
    const void* now;
    const void* next;  // the tiles after these, or null
    ptrdiff_t bytes;   // of a tile
    ptrdiff_t lead;    // of them, before what is read at the pace of the fetches
    int tiles;
    int fetches;       // that a block makes in each tile
    bool is_first;     // nobody has fetched these
};

// How a call for tiles begin..end - 1 comes to read `tiles` of them from `tile` on.
template <typename Call>
inline Reading reading_of(const Call& call, int tile, int tiles, int begin, int end, int fetches,
                          ptrdiff_t lead = 0) {
    const int next = tile + tiles;
    const void* after = next < end ? call.tile(next) : nullptr;
    return {call.tile(tile), after, call.tile_bytes(), lead, tiles, fetches, tile == begin};
}

// What the i-th of so many blocks of rows fetches. One block alone lets the weights stream by. Of
// several each fetches its share of the tiles after these, so that the memory is busy while they
// compute; the first ones' first block streams.
inline Ahead ahead_of(const Reading& reading, int blocks, int i) {
    const int streaming = blocks == 1 || reading.is_first ? 1 : 0, shares = blocks - streaming;
    const ptrdiff_t step = (reading.bytes + reading.fetches - 1) / reading.fetches;
    if (i < streaming) {
        const ptrdiff_t ahead = STREAM_AHEAD + reading.lead;
        const ptrdiff_t turn = (reading.bytes - ahead) / step;
        return {static_cast<const int8_t*>(reading.now) + ahead, step, turn,
                (reading.tiles - 1) * reading.bytes};
    }
    if (!reading.next) {
        return {static_cast<const int8_t*>(reading.now), 0, 0, 0};
    }
    return {static_cast<const int8_t*>(reading.next) + reading.bytes / shares * (i - streaming),
            (step + shares - 1) / shares, 0, 0};
}

// Calls block(first row, their number as a constant, what to fetch) for blocks of at most MOST rows,
// none of which has fewer than LEAST.
template <int MOST, int LEAST = 1, typename Block>
inline void each_block(int begin, int end, const Reading& reading, const Block& block) {
    const int blocks = (end - begin + MOST - 1) / MOST;
    int row = begin;
    for (int i = 0; i < blocks; ++i) {
        const int rows = (end - row) / (blocks - i);  // as even as can be
        const Ahead ahead = ahead_of(reading, blocks, i);
        with_number<MOST, LEAST>(rows, [&](auto count) { block(row, count, ahead); });
        row += rows;
    }
}

// Calls tiles(first, their number as a constant) for tiles begin..end - 1: MOST, a power of two, side
// by side while there are so many, then half as many, or one at a time.
template <int MOST, typename Tiles>
inline void each_tile(int begin, int end, bool several, const Tiles& tiles) {
    int tile = begin;
    for (; (several || MOST == 1) && tile + MOST <= end; tile += MOST) {
        tiles(tile, std::integral_constant<int, MOST>());
    }
    if constexpr (MOST > 1) {
        each_tile<MOST / 2>(tile, end, several, tiles);
    }
}

}  // namespace
}  // namespace paceline
