// Attention of a few rows over one chunk of keys, and the merging of chunks.
//
// The query vectors of a call are its rows times the query heads that share the KV head. They are
// taken at most QUERIES at a time, in blocks of at most QUERY_BLOCK, through three stages: scores
// (a small matrix product per K tile), the softmax of each vector, values (a small matrix product
// per V tile). A row sees a contiguous range of logical positions. Up to its `straight` position
// the slot of a key has the key's own number; what follows is reached through the row's path.
//
// A vector's bits depend on nothing but its logical keys: every score is one chain of fma over the
// head's dimensions (of int8 keys one for each group, times its scale, added up in order), every
// value one chain over ascending positions, and the exponentials are summed by logical lane. Hence
// blocks, tiles and runs may be cut in any way. Keys that a row does not see are masked out by
// selection, or never read; a scratch lane may hold anything.

namespace paceline {
namespace {

constexpr int SCORE_STRIDE = KEY_CHUNK + LANES;  // no power of two: rows spread over cache sets

// Query vectors that share loaded keys, and tiles (or 16 dimensions) that share a loaded query:
// as many sums as hide the latency of fma and still fit the registers.
#if defined(__AVX512F__)
constexpr int QUERY_BLOCK = 12;
constexpr int width_of(int queries, bool) { return queries == 1 ? 8 : queries <= 3 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int QUERY_BLOCK = 6;
constexpr int width_of(int queries, bool scaled) {
    return queries == 1 ? 4 : queries == 2 || (queries == 3 && !scaled) ? 2 : 1;
}
#elif defined(__aarch64__)
constexpr int QUERY_BLOCK = 6;
constexpr int width_of(int queries, bool) { return queries == 1 ? 4 : queries <= 3 ? 2 : 1; }
#else
constexpr int QUERY_BLOCK = 3;
constexpr int width_of(int queries, bool) { return queries == 1 ? 2 : 1; }
#endif
// From query to query where they are copied to, so that one pointer serves for all of a block.
constexpr int QUERY_STRIDE = MAX_HEAD_DIM + LANES;
constexpr int TURN_TILES = 2;  // on which blocks of queries take turns
constexpr int TREE_TILES = 4;  // K tiles whose scores are held while paths pick from them

// Blocks are scattered, so that no hardware foresees the next one: it is fetched while this one is
// computed with, so many tiles ahead. A single query reads several tiles at once, which keeps the
// memory busy enough.
constexpr int AHEAD_TILES = 4;
constexpr bool fetches_ahead(int queries) { return queries > 1; }

#define APART __attribute__((noinline))  // within its caller gcc keeps sums in memory

// Adds `a` times the number at `b`. Assembly, since gcc spends an instruction and a register on a
// broadcast that the operand gives for nothing.
ALWAYS_INLINE void add_product(f32x16& total, f32x16 a, const float* b) {
#if defined(__AVX512F__) && !defined(PACELINE_EMULATED)
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(total.v) : "v"(a.v), "m"(*b));
#else
    total = fma(splat(*b), a, total);
#endif
}

inline int at_least(int a, int b) { return a < b ? b : a; }
inline int at_most(int a, int b) { return b < a ? b : a; }

inline f32x16 load_kv(const float* p) { return load(p); }
inline f32x16 load_kv(const Bfloat16* p) { return load_bf16(&p->bits); }
inline f32x16 load_kv(const Float16* p) { return load_f16(&p->bits); }
inline f32x16 load_kv(const Int8* p) { return to_float(load_i8(p)); }  // the codes
#if defined(__AVX2__) && !defined(__AVX512F__)
ALWAYS_INLINE __m256 load_kv_half(const float* p) { return _mm256_loadu_ps(p); }
ALWAYS_INLINE __m256 load_kv_half(const Bfloat16* p) { return load_bf16_half(&p->bits); }
ALWAYS_INLINE __m256 load_kv_half(const Float16* p) { return load_f16_half(&p->bits); }
#endif

// Elements whose scales are apart from them.
template <typename E> constexpr bool SCALED = std::is_same<E, Int8>::value;
// The scales of 16 keys, whose first byte's lanes lie at `p`.
inline f32x16 load_scales(const Int8* p) {
    const i32x16 low = load_i8(p) & splat_i32(255), high = load_i8(p + TILE);
    return as_float(shift_left<16>(low) + shift_left<24>(high));
}
// The scale at `p` for all lanes.
inline f32x16 splat_scale(const Int8* p) {
    uint16_t scale;
    std::memcpy(&scale, p, sizeof scale);
    return splat(from_bf16(scale));
}

// One KV head of a request's cache.
template <typename E> struct HeadCache {
    const E* k;  // of block 0
    const E* v;  // null: a key is its value too
    const int32_t* blocks;
    size_t k_block, v_block;  // elements from block to block
    int head_dim, v_stride;
    int start;   // of the span
    int origin;  // first position of the chunk
    int tile_begin, tile_end;  // tiles of which the queries see straight keys

    const E* k_tile(int tile) const { return k + static_cast<size_t>(blocks[tile]) * k_block; }
    const E* key_scales(int tile) const { return k_tile(tile) + head_dim * TILE; }
    const E* v_row(int slot) const {
        return v + static_cast<size_t>(blocks[slot / TILE]) * v_block +
               static_cast<size_t>(slot % TILE) * head_elements<E>(v_stride);
    }
    // What is read `width` K tiles after `tile`: a K tile, or a V tile once those are through.
    const E* next_tile(int tile, int width) const {
        const int next = tile + width;
        if (next < tile_end) {
            return k_tile(next);
        }
        const int v_tile = tile_begin + next - tile_end;
        return v && v_tile < tile_end ? v_row(v_tile * TILE) : k_tile(tile);
    }
};

// Keys that are values, as rows of them.
struct Turned {
    const float* rows;
    int begin, end;  // slots
};

struct Query {
    const float* q;
    float* out;           // the partial result
    const int32_t* path;  // of positions from the span's start on; unused below `straight`
    int begin, end;       // positions of the chunk that it sees
    int straight;         // begin..end; below it a key's slot is its position
};

// V rows one after the other in memory.
template <typename E> struct Run {
    const E* row;
    int count;
    ptrdiff_t ahead;  // from each row to one that will be read soon; 0 if unknown
};

// Queries first..first + count - 1 of those at hand.
struct QueryBlock {
    int first, count;
    int tile_begin, tile_end;  // straight keys of any of them
    int same_begin, same_end;  // straight keys of all of them
};

// Adds to the totals [R, C] the products of C vectors with R numbers, `stride` apart.
template <int R, int C>
ALWAYS_INLINE void add_vectors(const f32x16 (&vectors)[C], const float* by, int stride,
                               f32x16 (&total)[R * C]) {
    unrolled<R * C>([&](auto i) INLINED {
        add_product(total[i()], vectors[i() % C], by + i() / C * stride);
    });
}

// The same with vectors in memory, which have no scales.
template <int R, int C, typename E>
ALWAYS_INLINE void add_stored(const E* const (&at)[C], const float* by, int stride,
                              f32x16 (&total)[R * C]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (R == 3 && C == 2) {  // twelve registers of sums, three of numbers, one of half a vector
        __m256 numbers[R];
        unrolled<R>([&](auto r) INLINED { numbers[r()] = _mm256_set1_ps(by[r() * stride]); });
        unrolled<C>([&](auto c) INLINED {
            const __m256 low = load_kv_half(at[c()]);
            unrolled<R>([&](auto r) INLINED {
                __m256& sum = total[r() * C + c()].lo;
                sum = _mm256_fmadd_ps(numbers[r()], low, sum);
            });
            const __m256 high = load_kv_half(at[c()] + LANES / 2);
            unrolled<R>([&](auto r) INLINED {
                __m256& sum = total[r() * C + c()].hi;
                sum = _mm256_fmadd_ps(numbers[r()], high, sum);
            });
        });
        return;
    }
#endif
    f32x16 vectors[C];
    unrolled<C>([&](auto c) INLINED { vectors[c()] = load_kv(at[c()]); });
    add_vectors<R, C>(vectors, by, stride, total);
}

// Adds the products of R queries, QUERY_STRIDE apart, and C tiles over the dimensions begin..end - 1
// to the totals [R, C], while other tiles are fetched.
template <int R, int C, bool FETCHES, typename E>
ALWAYS_INLINE void add_products(const float* q, const E* const (&k)[C], const E* const (&next)[C],
                                size_t begin, size_t end, f32x16 (&total)[R * C]) {
    constexpr size_t LINE = 64 / sizeof(E) / TILE;  // dimensions
    for (size_t d = begin; d < end; ++d) {
        const E* keys[C];
        unrolled<C>([&](auto i) INLINED {
            keys[i()] = k[i()] + d * TILE;
            if (FETCHES && (LINE <= 2 || d % LINE == 0)) {
                __builtin_prefetch(next[i()] + d * TILE);
            }
        });
        add_stored<R, C>(keys, q + d, QUERY_STRIDE, total);
    }
}

template <int N> ALWAYS_INLINE void clear(f32x16 (&total)[N]) {
    unrolled<N>([&](auto i) INLINED { total[i()] = zero(); });
}

// Scores of R queries with tiles tile_begin..tile_end - 1, to `scores` + query * stride + position
// - origin. A short last group repeats its last tile.
template <int R, typename E>
APART void score_tiles(const HeadCache<E>& cache, const float* q, int tile_begin, int tile_end,
                       float scale, float* scores, int stride, int origin) {
    constexpr int C = width_of(R, SCALED<E>);
    constexpr bool FETCHES = fetches_ahead(R);
    const size_t dims = static_cast<size_t>(cache.head_dim);
    for (int tile = tile_begin; tile < tile_end; tile += C) {
        const E *k[C], *next[C];
        for (int c = 0; c < C; ++c) {
            const int own = at_most(tile + c, tile_end - 1);
            k[c] = cache.k_tile(own);
            next[c] = cache.next_tile(own, at_least(C, AHEAD_TILES));
        }
        f32x16 total[R * C];
        clear(total);
        if constexpr (SCALED<E>) {
            const Int8* scales_at[C];
            for (int c = 0; c < C; ++c) {
                scales_at[c] = cache.key_scales(at_most(tile + c, tile_end - 1));
            }
            for (size_t d = 0; d < dims; d += KV_GROUP) {
                f32x16 part[R * C];
                clear(part);
                const size_t stop = d + KV_GROUP < dims ? d + KV_GROUP : dims;
                add_products<R, C, FETCHES>(q, k, next, d, stop, part);
                f32x16 scales[C];
                unrolled<C>([&](auto i) INLINED {
                    scales[i()] = load_scales(scales_at[i()]);
                    scales_at[i()] += 2 * TILE;
                });
                unrolled<R * C>([&](auto i) INLINED {
                    total[i()] = fma(part[i()], scales[i() % C], total[i()]);
                });
            }
        } else {
            add_products<R, C, FETCHES>(q, k, next, 0, dims, total);
        }
        unrolled<R * C>([&](auto i) INLINED {
            const int at = at_most(tile + i() % C, tile_end - 1) * TILE - origin;
            store(scores + i() / C * stride + at, total[i()] * splat(scale));
        });
    }
}

// Scores of keys that R queries reach through their paths: of the slots' tiles, a few at a time,
// then picked into logical order.
template <int R, typename E>
void score_paths(const HeadCache<E>& cache, const Query* queries, const float* q, float scale,
                 float* scores) {
    constexpr int STRIDE = TREE_TILES * TILE;
    alignas(64) float picked[R * STRIDE];
    int next[R];
    int last_slot = -1;
    for (int r = 0; r < R; ++r) {
        next[r] = queries[r].straight;
        if (next[r] < queries[r].end) {
            last_slot = at_least(last_slot,
                                 cache.start + queries[r].path[queries[r].end - 1 - cache.start]);
        }
    }
    while (true) {
        int slot = last_slot + 1;
        for (int r = 0; r < R; ++r) {
            if (next[r] < queries[r].end) {
                slot = at_most(slot, cache.start + queries[r].path[next[r] - cache.start]);
            }
        }
        if (slot > last_slot) {
            return;
        }
        const int tile = slot / TILE;
        const int tile_end = at_most(tile + TREE_TILES, last_slot / TILE + 1);
        score_tiles<R>(cache, q, tile, tile_end, scale, picked, STRIDE, tile * TILE);
        for (int r = 0; r < R; ++r) {
            for (; next[r] < queries[r].end; ++next[r]) {
                slot = cache.start + queries[r].path[next[r] - cache.start];
                if (slot >= tile_end * TILE) {
                    break;
                }
                scores[r * SCORE_STRIDE + next[r] - cache.origin] =
                    picked[r * STRIDE + slot - tile * TILE];
            }
        }
    }
}

// Softmax without its division, in place: begin..end of `scores` are seen. What is not seen of their
// tiles gets the least weight that there is, which no sum notices beside the 1 of the highest score.
inline void exponentials(float* scores, int begin, int end, float softcap, float* max_sum) {
    const int first = begin / LANES, last = (end - 1) / LANES;
    float* tiles = scores + first * LANES;
    const int count = last - first + 1;
    const f32x16 lowest = splat(-__builtin_inff());
    if (softcap > 0.0f) {
        for (int tile = 0; tile < count; ++tile) {
            const f32x16 score = load(tiles + tile * LANES);
            store(tiles + tile * LANES, splat(softcap) * tanh(score / splat(softcap)));
        }
    }
    const auto hide = [&](int tile, uint32_t seen) {
        float* at = scores + tile * LANES;
        store(at, select(mask_from_bits(seen & 0xffffu), load(at), lowest));
    };
    hide(first, 0xffffu << begin % LANES);
    hide(last, 0xffffu >> (LANES - 1 - (end - 1) % LANES));
    f32x16 highest = lowest;
    for (int tile = 0; tile < count; ++tile) {
        highest = max(highest, load(tiles + tile * LANES));
    }
    const float maximum = max_lane(highest);
    f32x16 total = zero();
    for (int tile = 0; tile < count; ++tile) {
        const f32x16 weight = softmax_weight(load(tiles + tile * LANES) - splat(maximum));
        store(tiles + tile * LANES, weight);
        total = total + weight;
    }
    max_sum[0] = maximum;
    max_sum[1] = sum(total);
}

// Adds the V rows of `runs`, weighted, to the values of R queries; `weights` + query * SCORE_STRIDE
// are the weights from the first row on. A short last group repeats its last 16 dimensions.
template <int R, typename E>
APART void add_values(const Query* queries, const float* weights, const Run<E>* runs,
                      int num_runs, int v_stride) {
    constexpr int C = width_of(R, SCALED<E>);
    const int row_size = head_elements<E>(v_stride);
    for (int d = 0; d < v_stride; d += C * LANES) {
        size_t at[C], scale_at[C];
        for (int c = 0; c < C; ++c) {
            at[c] = static_cast<size_t>(at_most(d + c * LANES, v_stride - LANES));
            scale_at[c] = v_stride + at[c] / KV_GROUP * 2;
        }
        f32x16 total[R * C];
        unrolled<R * C>([&](auto i) INLINED {
            total[i()] = load(queries[i() / C].out + TILE + at[i() % C]);
        });
        size_t key = 0;
        for (int run = 0; run < num_runs; ++run) {
            const E* row = runs[run].row;
            const ptrdiff_t ahead = runs[run].ahead;
            for (const size_t stop = key + runs[run].count; key < stop; ++key, row += row_size) {
                const E* stored[C];
                unrolled<C>([&](auto i) INLINED {
                    stored[i()] = row + at[i()];
                    if (fetches_ahead(R) && (sizeof(E) > 1 || i() % 2 == 0)) {
                        __builtin_prefetch(stored[i()] + ahead);
                    }
                });
                if constexpr (SCALED<E>) {
                    f32x16 scale, values[C];  // a scale is of this and the next 16 dimensions
                    unrolled<C>([&](auto i) INLINED {
                        scale = i() % 2 == 0 ? splat_scale(row + scale_at[i()]) : scale;
                        values[i()] = load_kv(stored[i()]) * scale;
                    });
                    add_vectors<R, C>(values, weights + key, SCORE_STRIDE, total);
                } else {
                    add_stored<R, C>(stored, weights + key, SCORE_STRIDE, total);
                }
            }
        }
        unrolled<R * C>([&](auto i) INLINED {
            store(queries[i() / C].out + TILE + at[i() % C], total[i()]);
        });
    }
}

// The numbers of 16 keys' dimension `d`.
template <typename E> f32x16 key_numbers(const HeadCache<E>& cache, int tile, int d) {
    const f32x16 elements = load_kv(cache.k_tile(tile) + d * TILE);
    if constexpr (SCALED<E>) {
        return elements * load_scales(cache.key_scales(tile) + d / KV_GROUP * 2 * TILE);
    }
    return elements;
}

// The key of a slot as a row of values, [v_stride].
template <typename E> void copy_key(const HeadCache<E>& cache, int slot, float* to) {
    alignas(64) float lanes[LANES];
    std::memset(to + cache.head_dim, 0, sizeof(float) * (cache.v_stride - cache.head_dim));
    for (int d = 0; d < cache.head_dim; ++d) {
        store(lanes, key_numbers(cache, slot / TILE, d));
        to[d] = lanes[slot % TILE];
    }
}

// The V rows of positions begin..end - 1 as one query sees them, added to `count` queries of which
// that holds. Those whose tiles are unpacked come first.
template <typename E>
void add_range(const HeadCache<E>& cache, const Turned& turned, const Query* queries, int count,
               const float* scores, int begin, int end) {
    const Query& query = queries[0];
    const int floats_end = at_most(at_most(end, query.straight), turned.end);
    if (begin < floats_end) {
        const Run<float> run = {turned.rows + (begin - turned.begin) * cache.v_stride,
                                floats_end - begin, 0};
        with_number<QUERY_BLOCK>(count, [&](auto n) {
            add_values<decltype(n)::value>(queries, scores + begin - cache.origin, &run, 1,
                                           cache.v_stride);
        });
        begin = floats_end;
    }
    if (begin >= end) {
        return;
    }
    if (!cache.v) {  // the others are reached through paths
        alignas(64) float value[MAX_HEAD_DIM];
        for (int key = begin; key < end; ++key) {
            copy_key(cache, cache.start + query.path[key - cache.start], value);
            const Run<float> run = {value, 1, 0};
            with_number<QUERY_BLOCK>(count, [&](auto n) {
                add_values<decltype(n)::value>(queries, scores + key - cache.origin, &run, 1,
                                               cache.v_stride);
            });
        }
        return;
    }
    Run<E> runs[KEY_CHUNK];
    int num_runs = 0;
    for (int key = begin; key < end;) {
        if (key < query.straight) {
            const int stop = at_most(at_most(end, query.straight), (key / TILE + 1) * TILE);
            const E* row = cache.v_row(key);
            const int ahead = key + AHEAD_TILES * TILE;
            const bool known = ahead < cache.tile_end * TILE;
            runs[num_runs++] = {row, stop - key, known ? cache.v_row(ahead) - row : 0};
            key = stop;
        } else {
            const int slot = cache.start + query.path[key - cache.start];
            runs[num_runs++] = {cache.v_row(slot), 1, 0};
            ++key;
        }
    }
    with_number<QUERY_BLOCK>(count, [&](auto n) {
        add_values<decltype(n)::value>(queries, scores + begin - cache.origin, runs, num_runs,
                                       cache.v_stride);
    });
}

// Positions begin..end - 1 of a block's queries: those that all of them see in the same slots are
// shared, what comes before and after (a window's edge, the last rows, a tree) is each row's own.
template <typename E>
void add_block(const HeadCache<E>& cache, const Turned& turned, const QueryBlock& block,
               const Query* queries, const float* scores, int begin, int end) {
    const auto each_row = [&](int from, int to) {
        for (int i = 0; from < to && i < block.count;) {
            const Query& query = queries[i];
            int next = i + 1;
            while (next < block.count && queries[next].path == query.path &&
                   queries[next].begin == query.begin && queries[next].end == query.end) {
                ++next;
            }
            add_range(cache, turned, queries + i, next - i, scores + i * SCORE_STRIDE,
                      at_least(from, query.begin), at_most(to, query.end));
            i = next;
        }
    };
    each_row(begin, at_most(end, block.same_begin));
    add_range(cache, turned, queries, block.count, scores, at_least(begin, block.same_begin),
              at_most(end, block.same_end));
    each_row(at_least(begin, block.same_end), end);
}

// Makes rows of values of tiles begin..end - 1 of the keys.
template <typename E> void turn_keys(const HeadCache<E>& cache, int begin, int end, float* to) {
    alignas(64) float lanes[LANES];
    for (int tile = begin; tile < end; ++tile, to += TILE * cache.v_stride) {
        for (int d = 0; d < cache.v_stride; ++d) {
            store(lanes, d < cache.head_dim ? key_numbers(cache, tile, d) : zero());
            for (int lane = 0; lane < TILE; ++lane) {
                to[lane * cache.v_stride + d] = lanes[lane];
            }
        }
    }
}

// Cuts queries into blocks of nearly equal size.
inline int make_blocks(const Query* queries, int count, QueryBlock* blocks) {
    const int num_blocks = (count + QUERY_BLOCK - 1) / QUERY_BLOCK;
    int first = 0;
    for (int b = 0; b < num_blocks; ++b) {
        const int left = num_blocks - b;
        QueryBlock block = {first, (count - first + left - 1) / left, 1 << 30, 0, 0, 1 << 30};
        for (const Query* query = queries + first; query < queries + first + block.count; ++query) {
            if (query->begin < query->straight) {
                block.tile_begin = at_most(block.tile_begin, query->begin / TILE);
                block.tile_end = at_least(block.tile_end, (query->straight - 1) / TILE + 1);
            }
            block.same_begin = at_least(block.same_begin, query->begin);
            block.same_end = at_most(block.same_end, query->straight);
        }
        block.same_end = at_least(block.same_begin, block.same_end);
        first += block.count;
        blocks[b] = block;
    }
    return num_blocks;
}

// All stages of at most QUERIES query vectors. Where several blocks share the keys, they take
// turns on a few tiles at a time, lest every block fetch them anew.
template <typename E>
void attend_queries(HeadCache<E> cache, const AttentionShape& shape, const Query* queries,
                    int count) {
    alignas(64) float scores[QUERIES * SCORE_STRIDE];
    alignas(64) float q[QUERIES * QUERY_STRIDE];
    QueryBlock blocks[QUERIES];
    const int num_blocks = make_blocks(queries, count, blocks);
    const int chunk_tile = cache.origin / TILE, chunk_tiles = KEY_CHUNK / TILE;
    const int step = num_blocks > 1 || !cache.v ? TURN_TILES : chunk_tiles;
    cache.tile_begin = chunk_tile + chunk_tiles;
    cache.tile_end = 0;
    for (const QueryBlock* block = blocks; block < blocks + num_blocks; ++block) {
        cache.tile_begin = at_most(cache.tile_begin, block->tile_begin);
        cache.tile_end = at_least(cache.tile_end, block->tile_end);
    }
    for (int i = 0; i < count; ++i) {
        std::memcpy(q + i * QUERY_STRIDE, queries[i].q, sizeof(float) * cache.head_dim);
    }

    for (int tile = chunk_tile; tile < chunk_tile + chunk_tiles; tile += step) {
        for (const QueryBlock* block = blocks; block < blocks + num_blocks; ++block) {
            const int begin = at_least(tile, block->tile_begin);
            const int end = at_most(tile + step, block->tile_end);
            if (begin < end) {
                with_number<QUERY_BLOCK>(block->count, [&](auto n) {
                    score_tiles<decltype(n)::value>(
                        cache, q + block->first * QUERY_STRIDE, begin, end, shape.scale,
                        scores + block->first * SCORE_STRIDE, SCORE_STRIDE, cache.origin);
                });
            }
        }
    }
    for (const QueryBlock* block = blocks; block < blocks + num_blocks; ++block) {
        with_number<QUERY_BLOCK>(block->count, [&](auto n) {
            score_paths<decltype(n)::value>(cache, queries + block->first,
                                            q + block->first * QUERY_STRIDE, shape.scale,
                                            scores + block->first * SCORE_STRIDE);
        });
    }
    int key_begin = cache.origin + KEY_CHUNK, key_end = 0;
    for (int i = 0; i < count; ++i) {
        const Query& query = queries[i];
        exponentials(scores + i * SCORE_STRIDE, query.begin - cache.origin,
                     query.end - cache.origin, shape.softcap, query.out);
        std::memset(query.out + TILE, 0, sizeof(float) * cache.v_stride);
        key_begin = at_most(key_begin, query.begin);
        key_end = at_least(key_end, query.end);
    }
    alignas(64) float rows[TURN_TILES * TILE * MAX_HEAD_DIM];
    for (int key = key_begin / TILE * TILE; key < key_end; key += step * TILE) {
        Turned turned = {rows, 0, 0};
        if (!cache.v) {
            const int begin = at_least(key / TILE, cache.tile_begin);
            const int end = at_most(key / TILE + step, cache.tile_end);
            turn_keys(cache, begin, end, rows);
            turned.begin = begin * TILE;
            turned.end = begin < end ? end * TILE : 0;  // none: what is at its end ends at 0
        }
        for (const QueryBlock* block = blocks; block < blocks + num_blocks; ++block) {
            add_block(cache, turned, *block, queries + block->first,
                      scores + block->first * SCORE_STRIDE, key,
                      at_most(key + step * TILE, key_end));
        }
    }
}

// The first position from `start` on, at most `end`, that a row's path does not put into the slot of
// its own number. Nodes ascend along a path, so that it never returns to its number.
inline int straight_end(const AttentionRow& row, int start, int end) {
    int low = start, high = end;
    if (!row.path) {
        return high;
    }
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (row.path[middle - start] == middle - start) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <typename E>
void attend_as(const AttentionShape& shape, const E* k, const E* v, const AttentionSpan& span,
               const AttentionRow* rows, int count, const float* q, int q_stride, int kv_head,
               int chunk, float* partial, int row_stride) {
    const size_t k_head = static_cast<size_t>(head_elements<E>(shape.head_dim)) * TILE;
    const size_t v_head = static_cast<size_t>(head_elements<E>(shape.v_stride)) * TILE;
    const size_t kv_heads = static_cast<size_t>(shape.kv_heads);
    const HeadCache<E> cache = {k + k_head * kv_head,
                                v ? v + v_head * kv_head : nullptr,
                                span.blocks,
                                k_head * kv_heads,
                                v_head * kv_heads,
                                shape.head_dim,
                                shape.v_stride,
                                span.start,
                                chunk * KEY_CHUNK,
                                0,
                                0};
    const int group = shape.heads / shape.kv_heads;
    Query queries[QUERIES];
    int num_queries = 0;
    for (int r = 0; r < count; ++r) {
        const int begin = at_least(cache.origin, shape.first_seen(rows[r].position));
        const int seen = rows[r].last_seen(shape) + 1;
        const int end = at_most(cache.origin + KEY_CHUNK, seen);
        if (begin >= end) {
            continue;
        }
        const int straight = at_most(at_least(straight_end(rows[r], span.start, seen), begin), end);
        for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
            queries[num_queries++] = {
                q + static_cast<size_t>(r) * q_stride + static_cast<size_t>(h) * shape.head_dim,
                partial + (static_cast<size_t>(r) * shape.heads + h) * row_stride,
                rows[r].path,
                begin,
                end,
                straight};
            if (num_queries == QUERIES) {
                attend_queries(cache, shape, queries, num_queries);
                num_queries = 0;
            }
        }
    }
    if (num_queries > 0) {
        attend_queries(cache, shape, queries, num_queries);
    }
}

void attend(const AttentionShape& shape, const KvLayer& layer, const AttentionSpan& span,
            const AttentionRow* rows, int count, const float* q, int q_stride, int kv_head,
            int chunk, float* partial, int row_stride) {
    with_elements(layer.type, [&](auto element) {
        using E = decltype(element);
        attend_as(shape, static_cast<const E*>(layer.k), static_cast<const E*>(layer.v), span, rows,
                  count, q, q_stride, kv_head, chunk, partial, row_stride);
    });
}

// Sixteen values of a head from the `at`-th on.
inline void store_values(const AttentionShape& shape, f32x16 values, int at, float* y) {
    if (at + LANES <= shape.head_dim) {
        store(y + at, values);
        return;
    }
    alignas(64) float lane[LANES];
    store(lane, values);
    std::memcpy(y + at, lane, sizeof(float) * static_cast<size_t>(shape.head_dim - at));
}

void merge(const AttentionShape& shape, const float* partials, int stride, int first, int last,
           const float* sink, float* y) {
    const auto partial = [&](int chunk) { return partials + static_cast<size_t>(chunk) * stride; };
    if (first == last && !sink) {  // its weight is e^0: the same bits
        const f32x16 total = splat(partial(first)[1]);
        for (int d = 0; d < shape.head_dim; d += LANES) {
            store_values(shape, load(partial(first) + TILE + d) / total, d, y);
        }
        return;
    }
    float highest = sink ? *sink : -__builtin_inff();
    for (int chunk = first; chunk <= last; ++chunk) {
        highest = partial(chunk)[0] > highest ? partial(chunk)[0] : highest;
    }
    for (int d = 0; d < shape.head_dim; d += 4 * LANES) {
        // Past the end the last 16 dimensions are repeated.
        int at[4];
        f32x16 values[4], total = sink ? exp(splat(*sink - highest)) : zero();
        for (int c = 0; c < 4; ++c) {
            at[c] = at_most(d + c * LANES, shape.v_stride - LANES);
            values[c] = zero();
        }
        for (int chunk = first; chunk <= last; ++chunk) {
            const f32x16 weight = exp(splat(partial(chunk)[0] - highest));
            total = fma(weight, splat(partial(chunk)[1]), total);
            for (int c = 0; c < 4; ++c) {
                values[c] = fma(weight, load(partial(chunk) + TILE + at[c]), values[c]);
            }
        }
        for (int c = 0; c < 4; ++c) {
            store_values(shape, values[c] / total, at[c], y);
        }
    }
}

}  // namespace
}  // namespace paceline
