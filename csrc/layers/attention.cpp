#include "layers/attention.h"

#include <algorithm>
#include <tuple>

namespace paceline {
namespace {

constexpr size_t PARTIAL_FLOATS = 2 << 20;
constexpr int ROTARY_ROWS = 32;  // that one piece of work turns

}  // namespace

Attention::Attention(const DecoderWeights& weights, Workspace& shared)
    : shared_(shared), latent_(shared) {
    for (const DecoderLayer& layer : weights.layers) {
        const int q_width = layer.q_width(), gate = weights.shape.attention_gate ? q_width : 0;
        q_width_ = std::max(q_width_, q_width);
        qkv_width_ = std::max(qkv_width_, q_width + 2 * layer.kv_width() + gate);
    }
}

void Attention::begin() {
    planned_ = nullptr;
    qkv_.need(shared_.rows(), qkv_width_);
    queries_.need(shared_.rows(), q_width_);
    attended_.need(shared_.rows(), q_width_);
}

void Attention::read(const DecoderLayer& layer, const Inputs& in) {
    if (layer.latent) {
        latent_.read(*layer.latent, layer.qkv, in, qkv_);
    } else {
        shared_.added.run(layer.index, layer.qkv, &AddedLayer::qkv, in, qkv_.out());
    }
}

void Attention::run(const DecoderLayer& layer, const KvLayer& kv) {
    plan(layer.attention);
    turn_heads(layer, kv);
    Inputs in = shared_.inputs(shared_.rows(), layer.q_width());
    for (const Pass& pass : passes_) {
        attend(pass, layer.attention, kv);
        finish(pass, layer, in);
    }
    if (layer.latent) {
        in = latent_.results(*layer.latent, layer.o, attended_);
    }
    const float scale = layer.recurrent ? shared_.shape.attention_out_scale : 1.0f;
    shared_.added.run(layer.index, layer.o, &AddedLayer::o, in,
                      shared_.out(shared_.branches(layer), scale, layer.recurrent.has_value()));
}

void Attention::write(const DecoderLayer& layer, const KvLayer& kv) {
    // The queries, which come first, are not needed.
    run_linear(layer.qkv, shared_.hidden, qkv_.out(), layer.q_width() / TILE);
    turn_heads(layer, kv);
}

void Attention::plan(const AttentionShape& a) {
    if (planned_ && planned_->kv_heads == a.kv_heads && planned_->head_dim == a.head_dim) {
        return;
    }
    planned_ = &a;
    int last = 0;
    for (int row = shared_.slice.first; row < shared_.slice.end; ++row) {
        last = std::max(last, shared_.batch->rows[row].last);
    }
    chunks_ = last_chunk(last) + 1;
    int most = std::max(1, std::min(QUERIES / (a.heads / a.kv_heads), shared_.rows()));
    cut_rows(most);
    while (most > 1 && idles(last + 1, a.kv_heads)) {
        most = (most + 1) / 2;
        cut_rows(most);
    }
    const size_t per_row = static_cast<size_t>(a.heads) * chunks_ * partial_stride(a);
    const int rows_per_pass = std::max<int>(most, static_cast<int>(PARTIAL_FLOATS / per_row));
    cut_passes(rows_per_pass);
    partials_.need(per_row * std::min(rows_per_pass, shared_.rows()));
}

void Attention::cut_rows(int most) {
    const std::vector<int32_t>& span_of = shared_.batch->span_of;
    const int last = shared_.slice.end;
    blocks_.clear();
    for (int row = shared_.slice.first; row < last;) {
        const int span = span_of[row];
        int end = row;
        while (end < last && span_of[end] == span) {
            ++end;
        }
        for (int left = (end - row + most - 1) / most; left > 0; --left) {
            const int count = (end - row) / left;  // as even as can be
            blocks_.push_back({row, count, span});
            row += count;
        }
    }
}

bool Attention::idles(int keys, int kv_heads) const {
    const int threads = pool().size(), columns = static_cast<int>(blocks_.size()) * kv_heads;
    const int whole = columns * (chunks_ - 1);  // pieces; the last chunk's are shorter
    const int rest = keys - (chunks_ - 1) * KEY_CHUNK;
    const auto share = [&](int pieces) { return (pieces + threads - 1) / threads; };
    const long total = long(columns) * keys;
    const long longest = chunks_ == 1 ? long(share(columns)) * rest
                                      : std::max(long(share(whole)) * KEY_CHUNK, total / threads);
    return 10 * total < 9 * longest * threads;
}

void Attention::cut_passes(int rows_per_pass) {
    passes_.clear();
    for (int block = 0; block < static_cast<int>(blocks_.size()); ++block) {
        const int end_row = blocks_[block].first + blocks_[block].count;
        if (passes_.empty() || end_row - passes_.back().first_row > rows_per_pass) {
            passes_.push_back({block, block, blocks_[block].first, end_row});
        }
        passes_.back().end_block = block + 1;
        passes_.back().end_row = end_row;
    }
}

void Attention::turn_heads(const DecoderLayer& layer, const KvLayer& kv) {
    const DecoderShape& all = shared_.shape;
    const AttentionShape& shape = layer.attention;
    const Batch& batch = *shared_.batch;
    const KvLayer own = layer.owns_kv ? kv : KvLayer{nullptr, nullptr, kv.type};
    if (layer.norms_whole) {
        norm_heads(layer);
    }
    // By heads, since the keys of neighbouring tokens share lines that two threads would fight for.
    const int parts = (shared_.rows() + ROTARY_ROWS - 1) / ROTARY_ROWS;
    pool().each(shape.kv_heads * parts, [&](int piece, int) {
        const int begin = piece % parts * ROTARY_ROWS;
        for (int row = begin; row < std::min(begin + ROTARY_ROWS, shared_.rows()); ++row) {
            const int at = shared_.slice.first + row, position = batch.rows[at].position;
            const RotaryTable& table = layer.rotary;
            const size_t offset = static_cast<size_t>(position) * table.dim;
            const bool norms_each = !layer.norms_whole;
            const RotaryArgs args{table.cos + offset, table.sin + offset, table.dim,
                                  norms_each ? layer.q_norm : nullptr,
                                  norms_each ? layer.k_norm : nullptr, all.norm_eps,
                                  all.heads_normed_last,
                                  table.q_scale ? table.q_scale[position] : 1.0f, layer.v_norm,
                                  layer.values_are_keys};
            kernels().rotary_kv(qkv_.row(row), shape, args, own, batch.write_slots[at] / TILE,
                                batch.write_slots[at] % TILE, piece / parts, queries_.row(row));
        }
    });
}

void Attention::norm_heads(const DecoderLayer& layer) {
    const int q_width = layer.q_width(), k_width = layer.kv_width();
    pool().each(shared_.rows(), [&](int row, int thread) {
        float *q = qkv_.row(row), *normed = shared_.scratch(thread);
        for (const auto& [x, weight, width] : {std::tuple{q, layer.q_norm, q_width},
                                               std::tuple{q + q_width, layer.k_norm, k_width}}) {
            kernels().rms_norm(x, weight, shared_.shape.norm_eps, width, normed);
            std::copy_n(normed, width, x);
        }
    });
}

void Attention::attend(const Pass& pass, const AttentionShape& shape, const KvLayer& kv) {
    const Batch& batch = *shared_.batch;
    const int blocks = pass.end_block - pass.first_block;
    const int row_stride = chunks_ * partial_stride(shape);
    pool().each(blocks * shape.kv_heads * chunks_, [&](int piece, int) {
        const Block& block = blocks_[pass.first_block + piece % blocks];
        const int kv_head = piece / blocks % shape.kv_heads;
        const int chunk = piece / blocks / shape.kv_heads;
        kernels().attend(shape, kv, batch.spans[block.span], &batch.rows[block.first], block.count,
                         queries_.row(block.first - shared_.slice.first), queries_.ld(), kv_head,
                         chunk, partial(pass, block.first, 0, chunk), row_stride);
    });
}

void Attention::finish(const Pass& pass, const DecoderLayer& layer, const Inputs& in) {
    const AttentionShape& shape = layer.attention;
    const int q_width = layer.q_width();
    pool().each(pass.end_row - pass.first_row, [&](int i, int thread) {
        const int at = pass.first_row + i, row = at - shared_.slice.first;
        const AttentionRow& seen = shared_.batch->rows[at];
        float* y = attended_.row(row);
        for (int h = 0; h < shape.heads; ++h) {
            kernels().merge(shape, partial(pass, at, h, 0), partial_stride(shape),
                            first_chunk(shape, seen.position), last_chunk(seen.last_seen(shape)),
                            layer.sinks ? layer.sinks + h : nullptr, y + h * shape.head_dim);
        }
        if (shared_.shape.attention_gate) {
            kernels().recurrent->gate(y, qkv_.row(row) + q_width + 2 * layer.kv_width(), q_width, y);
        }
        std::fill(y + q_width, y + round_up(q_width, TILE), 0.0f);
        if (!layer.latent) {
            layer.o.take(y, in, row, shared_.spare(thread));
        }
    });
}

}  // namespace paceline
