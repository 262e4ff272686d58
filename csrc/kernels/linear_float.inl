// The linear of float weights of one level, in float32. An output is the sum, in order, of runs of
// FLOAT_RUN inputs times their scale, and each run is one chain of fused multiply-adds. Chains do
// not depend on each other, so that as many as keep the vector units busy are computed side by side,
// of several runs where the rows are few: that changes no bit.
namespace paceline {
namespace {

// Rows and tiles whose sums fit the registers, with the weights of one input.
#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 12, FLOAT_TILES = 2, FLOAT_CHAINS = 8;
#elif defined(__AVX2__)
constexpr int FLOAT_ROWS = 6, FLOAT_TILES = 1, FLOAT_CHAINS = 4;
#elif defined(__ARM_NEON) && !defined(PACELINE_PLAIN)
constexpr int FLOAT_ROWS = 6, FLOAT_TILES = 1, FLOAT_CHAINS = 4;
#else
constexpr int FLOAT_ROWS = 3, FLOAT_TILES = 1, FLOAT_CHAINS = 2;
#endif

// --- the weights of one input and 16 outputs: `load` times `factor` is exact ---------------------

template <FloatType TYPE> struct FloatCode;
template <> struct FloatCode<FloatType::f32> {
    static constexpr float factor = 1.0f;
    static ALWAYS_INLINE f32x16 load(const uint8_t* p) {
        return paceline::load(reinterpret_cast<const float*>(p));
    }
};
template <> struct FloatCode<FloatType::f16> {
    static constexpr float factor = 1.0f;
    static ALWAYS_INLINE f32x16 load(const uint8_t* p) {
        return load_f16(reinterpret_cast<const uint16_t*>(p));
    }
};
template <> struct FloatCode<FloatType::bf16> {
    static constexpr float factor = 1.0f;
    static ALWAYS_INLINE f32x16 load(const uint8_t* p) {
        return load_bf16(reinterpret_cast<const uint16_t*>(p));
    }
};

// The bits of an e4m3 shifted left by 7 are a float16 of 2^-8 times its value, but for two things.
// The sign, at bit 15, leaves a copy in bit 14, which must become 0. And NaN, exponent and mantissa
// all ones, must get an exponent of all ones, by a 1 there. Adding one to the mantissa carries into
// bit 14 for NaN alone; the exclusive or of what was there before and after is what is wanted.
template <> struct FloatCode<FloatType::f8e4m3> {
    static constexpr float factor = 256.0f;
#if defined(__AVX2__) || defined(__AVX512F__)
    static ALWAYS_INLINE f32x16 load(const uint8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        const __m256i more = _mm256_add_epi16(words, _mm256_set1_epi16(0x80));
        const __m256i change = _mm256_and_si256(more, _mm256_set1_epi16(0x4000));
        const __m256i halves = _mm256_xor_si256(words, change);
#if defined(__AVX512F__)
        return {_mm512_cvtph_ps(halves)};
#else
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
    }
#else
    static ALWAYS_INLINE f32x16 load(const uint8_t* p) {
        int32_t halves[TILE];
        for (int i = 0; i < TILE; ++i) {
            const int word = static_cast<int8_t>(p[i]) * 128;
            halves[i] = (word ^ ((word + 0x80) & 0x4000)) & 0xffff;
        }
        return from_halves(load_i32(halves));
    }
#endif
};

// --- products -----------------------------------------------------------------------------------

// A block of rows, and of tiles that follow each other.
template <FloatType TYPE, int ROWS, int TILES> struct FloatBlock {
    static constexpr int INPUT = TILE * bytes_of(TYPE);  // bytes of an input of a tile
    static constexpr int STEP = LINE / INPUT;            // inputs of a line
    const FloatRows& x;
    const FloatWeights& w;
    int tile, row;
    Ahead ahead;  // of the first tile; the others' lie tile_bytes on
    f32x16 y[ROWS][TILES];

    // What the sum of a run is multiplied with.
    ALWAYS_INLINE f32x16 factor(int t, int input) const {
        const f32x16 own = splat(FloatCode<TYPE>::factor);
        return TYPE == FloatType::f8e4m3 ? load_floats(w.scales(tile + t, input)) * own : own;
    }

    // Adds RUNS runs of `inputs` inputs each, computed side by side.
    template <int RUNS> ALWAYS_INLINE void add(int first, int inputs) {
        const ptrdiff_t tile_bytes = w.tile_bytes(), stride = x.stride;
        const uint8_t* from = w.tile(tile) + ptrdiff_t(first) * INPUT;
        const float* rows = x.x + row * stride + first;
        const Ahead on = ahead.from(first / STEP);
        f32x16 total[RUNS][ROWS][TILES];
#pragma GCC unroll 16
        for (int run = 0; run < RUNS; ++run) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
                for (int t = 0; t < TILES; ++t) {
                    total[run][r][t] = zero();
                }
            }
        }
        for (int at = 0; at < inputs; at += STEP) {
#pragma GCC unroll 16
            for (int run = 0; run < RUNS; ++run) {
#pragma GCC unroll 16
                for (int t = 0; t < TILES; ++t) {
                    on.fetch((run * FLOAT_RUN + at) / STEP, t * tile_bytes);
                }
#pragma GCC unroll 16
                for (int i = 0; i < STEP; ++i) {
                    const int input = run * FLOAT_RUN + at + i;
                    f32x16 weights[TILES];
#pragma GCC unroll 16
                    for (int t = 0; t < TILES; ++t) {
                        weights[t] =
                            FloatCode<TYPE>::load(from + t * tile_bytes + ptrdiff_t(input) * INPUT);
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        const f32x16 each = splat(rows[r * stride + input]);
#pragma GCC unroll 16
                        for (int t = 0; t < TILES; ++t) {
                            total[run][r][t] = fma(weights[t], each, total[run][r][t]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 16
        for (int run = 0; run < RUNS; ++run) {
#pragma GCC unroll 16
            for (int t = 0; t < TILES; ++t) {
                const f32x16 times = factor(t, first + run * FLOAT_RUN);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    y[r][t] = fma(total[run][r][t], times, y[r][t]);
                }
            }
        }
    }

    void run(const LinearOut& out) {
        constexpr int SUMS = ROWS * TILES;
        constexpr int RUNS = SUMS >= FLOAT_CHAINS ? 1 : 2 * SUMS >= FLOAT_CHAINS ? 2 : 4;
        for (int t = 0; t < TILES; ++t) {
            fetch_outputs(out, row, ROWS, (tile + t) * TILE);
            for (int r = 0; r < ROWS; ++r) {
                y[r][t] = zero();
            }
        }
        const int inputs = round_up(w.k, TILE);
        int input = 0;
        for (; input + RUNS * FLOAT_RUN <= inputs; input += RUNS * FLOAT_RUN) {
            add<RUNS>(input, FLOAT_RUN);
        }
        for (; input < inputs; input += FLOAT_RUN) {
            add<1>(input, inputs - input < FLOAT_RUN ? inputs - input : FLOAT_RUN);
        }
        for (int t = 0; t < TILES; ++t) {
            for (int r = 0; r < ROWS; ++r) {
                finish(y[r][t], w.bias, out, row + r, (tile + t) * TILE, w.n);
            }
        }
    }
};

template <FloatType TYPE>
void linear_float_as(const FloatRows& x, const FloatWeights& w, const LinearOut& out,
                     int tile_begin, int tile_end) {
    const int lines = static_cast<int>(w.tile_bytes() / LINE);
    each_tile<FLOAT_TILES>(tile_begin, tile_end, x.rows > FLOAT_ROWS, [&](int tile, auto tiles) {
        const Reading reading = reading_of(w, tile, tiles(), tile_begin, tile_end, lines);
        // Several tiles are read for more rows than FLOAT_ROWS, which are cut evenly.
        constexpr int LEAST = tiles() > 1 ? (FLOAT_ROWS + 1) / 2 : 1;
        each_block<FLOAT_ROWS, LEAST>(0, x.rows, reading, [&](int row, auto rows, Ahead ahead) {
            FloatBlock<TYPE, rows(), tiles()>{x, w, tile, row, ahead, {}}.run(out);
        });
    });
}

template <FloatType TYPE>
void gather_float_as(const FloatWeights& w, int row, float multiplier, float* y) {
    constexpr int BYTES = bytes_of(TYPE);
    const int tile = row / TILE, output = row % TILE;
    const uint8_t* from = w.tile(tile) + output * BYTES;
    for (int at = 0; at < w.k; at += TILE) {
        uint8_t inputs[TILE * BYTES];
        for (int i = 0; i < TILE; ++i) {
            std::memcpy(inputs + i * BYTES, from + ptrdiff_t(at + i) * TILE * BYTES, BYTES);
        }
        float scale = 1.0f;
        if (TYPE == FloatType::f8e4m3) {
            std::memcpy(&scale, w.scales(tile, at) + size_t(output) * sizeof scale, sizeof scale);
        }
        const f32x16 times = splat(FloatCode<TYPE>::factor * scale);
        store(y + at, FloatCode<TYPE>::load(inputs) * times * splat(multiplier));
    }
}

// Calls f(std::integral_constant<FloatType, type>()).
template <typename F> inline void with_type(FloatType type, const F& f) {
    switch (type) {
    case FloatType::f32: return f(std::integral_constant<FloatType, FloatType::f32>());
    case FloatType::f16: return f(std::integral_constant<FloatType, FloatType::f16>());
    case FloatType::bf16: return f(std::integral_constant<FloatType, FloatType::bf16>());
    case FloatType::f8e4m3: return f(std::integral_constant<FloatType, FloatType::f8e4m3>());
    }
}

void linear_float(const FloatRows& x, const FloatWeights& w, const LinearOut& out, int tile_begin,
                  int tile_end) {
    with_type(w.type, [&](auto type) {
        linear_float_as<type()>(x, w, out, tile_begin, tile_end);
    });
}

void gather_float(const FloatWeights& w, int row, float multiplier, float* y) {
    with_type(w.type, [&](auto type) { gather_float_as<type()>(w, row, multiplier, y); });
}

}  // namespace
}  // namespace paceline
