#include "forward/forward.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace paceline {
namespace {

constexpr int SLICE_ROWS = 128;        // bounds the buffers; weights are read once per slice
constexpr int STREAMED_SLICE_ROWS = 512;  // where that takes longer than anything
constexpr int VECTORS_PER_BLOCK = 32;  // query vectors that share the loads of a key tile
constexpr size_t PARTIAL_FLOATS = 2 << 20;
constexpr int ROTARY_ROWS = 32;    // that one piece of work turns
constexpr int HEAD_TILES = 32;  // tiles of logits that the greedy head holds at a time

template <typename Visit> void for_each_mlp(const DecoderLayer& layer, const Visit& visit) {
    if (!layer.mixture) {
        visit(layer.mlp);
        return;
    }
    std::for_each(layer.mixture->experts.begin(), layer.mixture->experts.end(), visit);
    if (layer.mixture->shared) {
        visit(*layer.mixture->shared);
    }
}

int most_orders(const std::optional<Entry>& entry, const std::vector<DecoderLayer>& layers,
                const std::optional<LayerInputs>& inputs, const std::optional<AltUp>& altup,
                const Linear& head) {
    int most = std::max({head.num_orders, entry ? entry->join.num_orders : 0,
                         inputs ? inputs->projection.num_orders : 0});
    for (const auto& linears : altup ? std::vector{altup->spread, altup->gather}
                                     : std::vector<std::vector<Linear>>{}) {
        for (const Linear& each : linears) {
            most = std::max(most, each.num_orders);
        }
    }
    for (const DecoderLayer& layer : layers) {
        most = std::max({most, layer.first().num_orders, layer.o.num_orders});
        if (layer.recurrent) {
            most = std::max(most, layer.recurrent->last.num_orders);
        }
        if (layer.latent) {
            most = std::max(most, layer.latent->q_b.num_orders);
        }
        if (layer.gate) {
            most = std::max({most, layer.gate->gate.num_orders, layer.gate->projection.num_orders});
        }
        if (layer.altup) {
            most = std::max({most, layer.altup->left.num_orders, layer.altup->right.num_orders});
        }
        for_each_mlp(layer, [&](const FeedForward& mlp) {
            most = std::max({most, mlp.gate_up.num_orders, mlp.down.num_orders});
        });
    }
    return most;
}

int widest_mlp(const std::vector<DecoderLayer>& layers) {
    int widest = 0;
    for (const DecoderLayer& layer : layers) {
        for_each_mlp(layer, [&](const FeedForward& mlp) { widest = std::max(widest, mlp.width()); });
    }
    return widest;
}

// Of the layer in which `width_of` it is largest.
template <typename WidthOf>
int widest(const std::vector<DecoderLayer>& layers, const WidthOf& width_of) {
    int most = 0;
    for (const DecoderLayer& layer : layers) {
        most = std::max(most, width_of(layer));
    }
    return most;
}

}  // namespace

Decoder::Decoder(DecoderShape shape, std::optional<Entry> entry, std::vector<DecoderLayer> layers,
                 std::optional<LayerInputs> layer_inputs, std::optional<AltUp> altup,
                 Linear embedding, Linear head, const float* final_norm, const float* places,
                 Kept keep_alive)
    : shape_(shape),
      entry_(entry),
      layers_(std::move(layers)),
      layer_inputs_(layer_inputs),
      altup_(std::move(altup)),
      embedding_(embedding),
      head_(head),
      final_norm_(final_norm),
      places_(places),
      keep_alive_(std::move(keep_alive)),
      q_width_(widest(layers_, [](const DecoderLayer& each) { return each.q_width(); })),
      qkv_width_(widest(layers_, [](const DecoderLayer& each) {
          return each.q_width() + 2 * each.kv_width();
      })),
      widest_mlp_(widest_mlp(layers_)),
      ld_hidden_(round_up(shape.hidden, TILE)),
      ld_qkv_(round_up(qkv_width_ + (shape.attention_gate ? q_width_ : 0), TILE)),
      ld_q_(round_up(q_width_, TILE)),
      ld_gate_up_(round_up(2 * widest_mlp_, TILE)),
      ld_mlp_(round_up(widest_mlp_, TILE)),
      most_orders_(most_orders(entry_, layers_, layer_inputs_, altup_, head_)) {
    for (const DecoderLayer& layer : layers_) {
        num_recurrent_ += layer.recurrent ? 1 : 0;
        recurrent_ = !recurrent_ && layer.recurrent ? &*layer.recurrent : recurrent_;
    }
}

void Decoder::set_cache(std::vector<KvLayer> caches, int num_blocks, Kept keep_alive) {
    caches_ = std::move(caches);
    num_blocks_ = num_blocks;
    keep_cache_ = std::move(keep_alive);
}

void Decoder::forward(const Batch& batch, const Streams& streams, float* logits) {
    run(batch, streams, logits, nullptr);
}

void Decoder::forward_greedy(const Batch& batch, const Streams& streams, int32_t* tokens) {
    run(batch, streams, nullptr, tokens);
}

void Decoder::run(const Batch& batch, const Streams& streams, float* logits, int32_t* tokens) {
    const ThreadPool::Turn turn = pool().take_turn();
    const int threads = pool().size();
    const int samples = static_cast<int>(batch.sample_rows.size());
    const int q_rank = is_latent() ? round_up(layers_.front().latent->q_rank, TILE) : 0;
    const int told = layer_inputs_ ? round_up(layer_inputs_->total(), TILE) : 0;
    const int inner = recurrent_ ? round_up(recurrent_->shape.inner(), TILE) : 0;
    scratch_stride_ =
        2 * std::max({(entry_ ? 2 : 1) * ld_hidden_, ld_q_, ld_mlp_, q_rank, told, inner});
    scratch_.need(static_cast<size_t>(threads) * scratch_stride_);
    sampled_.need(static_cast<size_t>(samples) * ld_hidden_);
    is_read_.assign(layers_.size(), {});
    chosen_.assign(layers_.size(), {});
    experts_read_ = experts_fetched_ = 0;
    for (const Slice& slice : slices(batch)) {
        prepare(batch, slice);
        layers(batch, slice, streams);
    }
    if (samples > 0 && logits) {
        head(samples, logits);
    } else if (samples > 0) {
        head_greedy(samples, tokens);
    }
}

std::vector<Decoder::Slice> Decoder::slices(const Batch& batch) const {
    std::vector<Slice> parts;
    const int samples = static_cast<int>(batch.sample_rows.size());
    int sample = 0;
    for (int first = 0; first < batch.num_rows(); first = parts.back().end) {
        Slice part{first, slice_end(batch, first), sample, sample};
        while (part.samples_end < samples && batch.sample_rows[part.samples_end] < part.end) {
            ++part.samples_end;
        }
        sample = part.samples_end;
        parts.push_back(part);
    }
    return parts;
}

int Decoder::slice_end(const Batch& batch, int first) const {
    const int most = stream_ || cache_ ? STREAMED_SLICE_ROWS : SLICE_ROWS;
    int end = std::min(first + most, batch.num_rows());
    const auto cuts = [&](int row) {  // whether a block or a tree goes on there
        if (row == batch.num_rows()) {
            return false;
        }
        const int span = batch.span_of[row], node = row - batch.first_rows[span];
        const bool in_tree = !batch.states.empty() && node > batch.states[span].certain;
        return in_tree || batch.rows[row - 1].last > batch.rows[row - 1].position;
    };
    while (end > first && cuts(end)) {
        --end;
    }
    if (end > first) {
        return end;
    }
    do {  // one that is larger than a slice
        ++end;
    } while (cuts(end));
    return end;
}

void Decoder::prepare(const Batch& batch, const Slice& slice) {
    const int rows = slice.end - slice.first;
    const size_t count = static_cast<size_t>(rows);
    x_.need(count * ld_hidden_);
    branch_.need(count * ld_hidden_);
    qkv_.need(count * ld_qkv_);
    q_.need(count * ld_q_);
    attended_.need(count * ld_q_);
    gate_up_.need(count * ld_gate_up_);
    const int most = std::max(rows, static_cast<int>(batch.sample_rows.size()));
    const int joined = entry_ ? 2 * shape_.hidden : 0;
    const auto& latent = layers_.front().latent;
    const int between = latent ? std::max(latent->q_rank, latent->results()) : 0;
    const int told = layer_inputs_ ? layer_inputs_->width : 0;
    const int inner = recurrent_ ? recurrent_->shape.inner() : 0;
    const int widest =
        std::max({joined, shape_.hidden, q_width_, widest_mlp_, between, told, inner});
    inputs_.view(most, widest, most_orders_);  // room for all, so that no view moves another
    in_joined_ = inputs_.view(rows, joined, most_orders_);
    in_hidden_ = inputs_.view(rows, shape_.hidden, most_orders_);
    planned_ = nullptr;
    added_.plan(batch, slice.first, slice.end);
    if (recurrent_) {
        plan_recurrences(batch, slice);
    }
}

void Decoder::plan_attention(const Batch& batch, const Slice& slice, const AttentionShape& a) {
    if (planned_ && planned_->kv_heads == a.kv_heads && planned_->head_dim == a.head_dim) {
        return;
    }
    planned_ = &a;
    int last = 0;
    for (int row = slice.first; row < slice.end; ++row) {
        last = std::max(last, batch.rows[row].last);
    }
    chunks_ = last_chunk(last) + 1;
    int most = std::min(VECTORS_PER_BLOCK / (a.heads / a.kv_heads), slice.end - slice.first);
    most = std::max(1, most);
    cut_rows(batch, slice, most);
    const auto idles = [&] {  // threads for more than a tenth of the time
        const int threads = pool().size();
        const int pieces = static_cast<int>(blocks_.size()) * a.kv_heads * chunks_;
        return 10 * pieces < 9 * round_up(pieces, threads);
    };
    while (most > 1 && idles()) {
        most = (most + 1) / 2;
        cut_rows(batch, slice, most);
    }
    const size_t per_row = static_cast<size_t>(a.heads) * chunks_ * partial_stride(a);
    const int rows_per_pass = std::max<int>(most, static_cast<int>(PARTIAL_FLOATS / per_row));
    passes_.clear();
    for (int block = 0; block < static_cast<int>(blocks_.size()); ++block) {
        const int end_row = blocks_[block].first + blocks_[block].count;
        if (passes_.empty() || end_row - passes_.back().first_row > rows_per_pass) {
            passes_.push_back({block, block, blocks_[block].first, end_row});
        }
        passes_.back().end_block = block + 1;
        passes_.back().end_row = end_row;
    }
    partials_.need(per_row * std::min(rows_per_pass, slice.end - slice.first));
}

void Decoder::cut_rows(const Batch& batch, const Slice& slice, int most) {
    blocks_.clear();
    for (int row = slice.first; row < slice.end;) {
        int end = row + 1;
        while (end < slice.end && end - row < most && batch.span_of[end] == batch.span_of[row]) {
            ++end;
        }
        blocks_.push_back({row, end - row, batch.span_of[row]});
        row = end;
    }
}

void Decoder::norm(const float* x, const float* weight, float* y) const {
    const int n = shape_.hidden;
    if (shape_.layer_norm) {
        kernels().layer_norm(x, weight, weight + n, shape_.norm_eps, n, y);
    } else {
        kernels().rms_norm(x, weight, shape_.norm_eps, n, y);
    }
}

void Decoder::normed(const float* x, const float* weight, float* y) const {
    if (weight) {
        norm(x, weight, y);
    } else {
        std::fill(std::copy_n(x, shape_.hidden, y), y + ld_hidden_, 0.0f);
    }
}

void Decoder::norm_for(const Linear& to, int row, const float* weight, int thread) {
    normed(x_row(row), weight, scratch(thread));
    to.take(scratch(thread), in_hidden_, row, spare(thread));
}

void Decoder::add_branch(int row, const float* weight) {
    float* x = x_row(row);
    float* branch = branch_.get() + static_cast<size_t>(row) * ld_hidden_;
    if (weight) {
        norm(branch, weight, branch);
    }
    for (int i = 0; i < shape_.hidden; ++i) {
        x[i] += shape_.residual_multiplier * branch[i];
    }
}

void Decoder::end_layer(const DecoderLayer& layer, int row) {
    if (layer.altup) {
        end_streams(layer, row);
        return;
    }
    if (layer.last_norm()) {
        add_branch(row, layer.last_norm());
    }
    float* x = x_row(row);
    for (int i = 0; layer.scale != 1.0f && i < shape_.hidden; ++i) {
        x[i] *= layer.scale;
    }
}

void Decoder::hand_out(const Streams& streams, size_t tap, int at, const float* x) const {
    const size_t count = streams.taps.size(), width = static_cast<size_t>(shape_.hidden);
    for (size_t i = 0; i < count; ++i) {
        if (static_cast<size_t>(streams.taps[i]) == tap) {
            std::copy_n(x, width, streams.features + (at * count + i) * width);
        }
    }
}

void Decoder::join(int row, const float* input, int thread) {
    float *x = x_row(row), *joined = scratch(thread), *second = joined + shape_.hidden;
    normed(x, entry_->token_norm, joined);
    normed(input, entry_->input_norm, second);
    std::fill(second + shape_.hidden, joined + 2 * ld_hidden_, 0.0f);
    const Linear& to = entry_->is_fused() ? entry_->join : layers_.front().first();
    to.take(joined, in_joined_, row, spare(thread));
    if (!entry_->is_fused()) {
        std::copy_n(entry_->norm_before_residual ? second : input, shape_.hidden, x);
    }
}

const Inputs& Decoder::enter(const Batch& batch, const Slice& slice, const Streams& streams) {
    const int rows = slice.end - slice.first;
    const DecoderLayer& first = layers_.front();
    const auto begin_layer = [&](int row, int thread) {
        hand_out(streams, 0, slice.first + row, x_row(row));
        norm_for(first.first(), row, first.input_norm, thread);
    };
    pool().each(rows, [&](int row, int thread) {
        const int at = slice.first + row;
        if (entry_ && entry_->is_residual) {
            std::copy_n(streams.inputs + static_cast<size_t>(at) * shape_.hidden, shape_.hidden,
                        x_row(row));
            begin_layer(row, thread);
            return;
        }
        embedding_.gather(batch.tokens[at], shape_.embedding_multiplier, x_row(row), spare(thread));
        if (places_) {
            const float* place = places_ + size_t(batch.rows[at].position) * shape_.hidden;
            for (int i = 0; i < shape_.hidden; ++i) {
                x_row(row)[i] += place[i];
            }
        }
        if (!entry_) {
            if (!layer_inputs_) {
                begin_layer(row, thread);
            }
            return;
        }
        join(row, streams.inputs + static_cast<size_t>(at) * shape_.hidden, thread);
        if (!entry_->is_fused()) {
            hand_out(streams, 0, at, x_row(row));
        }
    });
    if (entry_ && entry_->is_fused()) {
        run_linear(entry_->join, in_joined_, {x_.get(), nullptr, ld_hidden_, 1.0f});
        pool().each(rows, begin_layer);
    }
    if (layer_inputs_) {
        layer_inputs(batch, slice);
        pool().each(rows, begin_layer);
    }
    return entry_ && entry_->is_read_joined() ? in_joined_ : in_hidden_;
}

void Decoder::set_stream(LayerStream* stream, Kept keep_alive) {
    stream_ = stream;
    keep_stream_ = std::move(keep_alive);
}

void Decoder::set_cache_of_experts(ExpertCache* cache, Kept keep_alive) {
    cache_ = cache;
    keep_stream_ = std::move(keep_alive);
}

void Decoder::layers(const Batch& batch, const Slice& slice, const Streams& streams) {
    const int rows = slice.end - slice.first;
    const Inputs* in = &enter(batch, slice, streams);
    if (altup_) {
        spread_streams(rows);
    }
    for (size_t index = 0; index < layers_.size(); ++index) {
        if (stream_) {
            stream_->begin(index);
        }
        if (altup_) {
            predict_streams(layers_[index], rows);
        }
        mix(batch, slice, index, *in);
        if (layers_[index].has_mlp()) {
            feed_forward(layers_[index], rows);
        }
        if (layers_[index].gate) {
            take_layer_input(layers_[index], index, rows);
        }
        if (stream_) {
            stream_->end(index);
        }
        if (index + 1 == layers_.size()) {
            break;
        }
        in = &in_hidden_;
        const DecoderLayer& next = layers_[index + 1];
        pool().each(rows, [&](int row, int thread) {
            end_layer(layers_[index], row);
            hand_out(streams, index + 1, slice.first + row, x_row(row));
            norm_for(next.first(), row, next.input_norm, thread);
        });
    }
    if (altup_) {
        pool().each(rows, [&](int row, int) { end_layer(layers_.back(), row); });
        gather_streams(rows);
    }
    leave(batch, slice, streams);
}

void Decoder::leave(const Batch& batch, const Slice& slice, const Streams& streams) {
    const size_t count = layers_.size();
    const bool every_row = streams.has_tap(count) || streams.has_tap(count + 1);
    pool().each(every_row ? slice.end - slice.first : 0, [&](int row, int thread) {
        if (!altup_) {
            end_layer(layers_.back(), row);
        }
        hand_out(streams, count, slice.first + row, x_row(row));
        normed(x_row(row), final_norm_, scratch(thread));
        hand_out(streams, count + 1, slice.first + row, scratch(thread));
    });
    pool().each(slice.samples_end - slice.samples, [&](int i, int) {
        const int sample = slice.samples + i;
        const int row = batch.sample_rows[sample] - slice.first;
        if (!every_row && !altup_) {
            end_layer(layers_.back(), row);  // a row is sampled at most once
        }
        normed(x_row(row), final_norm_, sampled_.get() + static_cast<size_t>(sample) * ld_hidden_);
    });
}

void Decoder::mix(const Batch& batch, const Slice& slice, size_t index, const Inputs& in) {
    const DecoderLayer& layer = layers_[index];
    const int rows = slice.end - slice.first;
    const bool attends = layer.has_attention();
    if (layer.recurrent) {
        read_recurrent(*layer.recurrent, rows, in);
    }
    if (layer.recurrent && attends) {  // of rows that the recurrence has not been added to
        pool().each(rows, [&](int row, int thread) {
            norm_for(layer.qkv, row, layer.input_norm, thread);
        });
    }
    if (attends && !layer.latent) {
        added_.run(index_of(layer), layer.qkv, &AddedLayer::qkv, in,
                       {qkv_.get(), nullptr, ld_qkv_, 1.0f});
    }
    if (layer.recurrent) {
        recurrence(layer, rows);
    }
    if (attends) {
        attention(batch, slice, layer, caches_[index], in);
    }
}

void Decoder::attention(const Batch& batch, const Slice& slice,
                        const DecoderLayer& layer, const KvLayer& kv, const Inputs& in) {
    const AttentionShape& shape = layer.attention;
    const int heads = shape.heads, q_width = layer.q_width();
    plan_attention(batch, slice, shape);
    if (layer.latent) {
        latent_heads(*layer.latent, layer.qkv, slice.end - slice.first, in);
    }
    turn_heads(batch, slice.first, slice.end, layer, kv);
    const Inputs in_attended = inputs_.view(slice.end - slice.first, q_width, most_orders_);
    const int stride = partial_stride(shape), row_stride = chunks_ * stride;
    for (const Pass& pass : passes_) {
        const int blocks = pass.end_block - pass.first_block;
        const auto partial_of = [&](int row, int chunk) {
            return partials_.get() + static_cast<size_t>(row - pass.first_row) * heads * row_stride +
                   static_cast<size_t>(chunk) * stride;
        };
        pool().each(blocks * shape.kv_heads * chunks_, [&](int piece, int) {
            const RowBlock& block = blocks_[pass.first_block + piece % blocks];
            const int kv_head = piece / blocks % shape.kv_heads;
            const int chunk = piece / blocks / shape.kv_heads;
            const size_t row = static_cast<size_t>(block.first - slice.first);
            kernels().attend(shape, kv, batch.spans[block.span], &batch.rows[block.first],
                             block.count, q_.get() + row * ld_q_, ld_q_, kv_head, chunk,
                             partial_of(block.first, chunk), row_stride);
        });
        pool().each(pass.end_row - pass.first_row, [&](int i, int thread) {
            const int at = pass.first_row + i, row = at - slice.first;
            const AttentionRow& seen = batch.rows[at];
            float* y = attended_.get() + static_cast<size_t>(row) * ld_q_;
            for (int h = 0; h < heads; ++h) {
                kernels().merge(shape, partial_of(at, 0) + static_cast<size_t>(h) * row_stride,
                                stride, first_chunk(shape, seen.position),
                                last_chunk(seen.last_seen(shape)),
                                layer.sinks ? layer.sinks + h : nullptr, y + h * shape.head_dim);
            }
            if (shape_.attention_gate) {
                const float* gate = qkv_.get() + static_cast<size_t>(row) * ld_qkv_ +
                                    q_width + 2 * layer.kv_width();
                kernels().recurrent->gate(y, gate, q_width, y);
            }
            std::fill(y + q_width, y + round_up(q_width, TILE), 0.0f);
            if (!layer.latent) {
                layer.o.take(y, in_attended, row, spare(thread));
            }
        });
    }
    const Inputs heads_in = layer.latent
                                ? latent_results(*layer.latent, layer.o, slice.end - slice.first)
                                : in_attended;
    mix_in(layer, layer.o, heads_in, layer.recurrent ? shape_.attention_out_scale : 1.0f,
           layer.recurrent.has_value());
}

void Decoder::mix_in(const DecoderLayer& layer, const Linear& last, const Inputs& in, float scale,
                     bool is_second) {
    const bool branch = branches(layer);
    float* to = branch ? branch_.get() : x_.get();
    const LinearOut out{to, branch && !is_second ? nullptr : to, ld_hidden_,
                        scale * (branch ? 1.0f : shape_.residual_multiplier)};
    if (&last == &layer.o) {
        added_.run(index_of(layer), last, &AddedLayer::o, in, out);
    } else {
        run_linear(last, in, out);
    }
}

void Decoder::turn_heads(const Batch& batch, int first, int end, const DecoderLayer& layer,
                         const KvLayer& kv) {
    const AttentionShape& shape = layer.attention;
    const KvLayer own = layer.owns_kv ? kv : KvLayer{nullptr, nullptr, kv.type};
    if (layer.norms_whole) {
        norm_heads(layer, end - first);
    }
    // By heads, since the keys of neighbouring tokens share lines that two threads would fight for.
    const int parts = (end - first + ROTARY_ROWS - 1) / ROTARY_ROWS;
    pool().each(shape.kv_heads * parts, [&](int piece, int) {
        const int begin = first + piece % parts * ROTARY_ROWS;
        for (int at = begin; at < std::min(begin + ROTARY_ROWS, end); ++at) {
            const size_t row = static_cast<size_t>(at - first);
            const RotaryTable& table = layer.rotary;
            const size_t offset = static_cast<size_t>(batch.rows[at].position) * table.dim;
            const bool each = !layer.norms_whole;
            const RotaryArgs args{table.cos + offset, table.sin + offset, table.dim,
                                  each ? layer.q_norm : nullptr, each ? layer.k_norm : nullptr,
                                  shape_.norm_eps, shape_.heads_normed_last,
                                  table.q_scale ? table.q_scale[batch.rows[at].position] : 1.0f,
                                  layer.v_norm, layer.values_are_keys};
            kernels().rotary_kv(qkv_.get() + row * ld_qkv_, shape, args, own,
                                batch.write_slots[at] / TILE, batch.write_slots[at] % TILE,
                                piece / parts, q_.get() + row * ld_q_);
        }
    });
}

void Decoder::norm_heads(const DecoderLayer& layer, int rows) {
    const int q_width = layer.q_width(), k_width = layer.kv_width();
    pool().each(rows, [&](int row, int thread) {
        float* q = qkv_.get() + static_cast<size_t>(row) * ld_qkv_;
        for (const auto& [x, weight, width] : {std::tuple{q, layer.q_norm, q_width},
                                               std::tuple{q + q_width, layer.k_norm, k_width}}) {
            kernels().rms_norm(x, weight, shape_.norm_eps, width, scratch(thread));
            std::copy_n(scratch(thread), width, x);
        }
    });
}

void Decoder::write_kv(const Batch& batch, const float* inputs) {
    const ThreadPool::Turn turn = pool().take_turn();
    const int count = batch.num_rows(), most = std::min(count, SLICE_ROWS), hidden = shape_.hidden;
    scratch_stride_ = 2 * std::max(ld_hidden_, ld_q_);
    scratch_.need(static_cast<size_t>(pool().size()) * scratch_stride_);
    qkv_.need(static_cast<size_t>(most) * ld_qkv_);
    q_.need(static_cast<size_t>(most) * ld_q_);
    for (int first = 0; first < count; first += SLICE_ROWS) {
        const int end = std::min(first + SLICE_ROWS, count);
        in_hidden_ = inputs_.view(end - first, hidden, most_orders_);
        for (size_t index = 0; index < layers_.size(); ++index) {
            const DecoderLayer& layer = layers_[index];
            pool().each(end - first, [&](int row, int thread) {
                const float* x = inputs + static_cast<size_t>(first + row) * hidden;
                normed(x, nullptr, scratch(thread));
                layer.qkv.take(scratch(thread), in_hidden_, row, spare(thread));
            });
            // The queries, which come first, are not needed.
            run_linear(layer.qkv, in_hidden_, {qkv_.get(), nullptr, ld_qkv_, 1.0f},
                   layer.q_width() / TILE);
            turn_heads(batch, first, end, layer, caches_[index]);
        }
    }
}

void Decoder::feed_forward(const DecoderLayer& layer, int rows) {
    if (layer.mixture) {
        mixture(layer, rows);
        return;
    }
    pool().each(rows, [&](int row, int thread) {
        if (shape_.parallel) {
            norm_for(layer.mlp.gate_up, row, layer.mlp_norm, thread);
        }
        if (branches(layer)) {
            add_branch(row, layer.post_attention_norm);
        }
        if (layer.altup) {
            add_laurel(row);
        }
        if (!shape_.parallel) {
            norm_for(layer.mlp.gate_up, row, layer.mlp_norm, thread);
        }
    });
    const bool branch = layer.post_mlp_norm != nullptr;
    feed(layer, layer.mlp, rows,
         {branch ? branch_.get() : x_.get(), branch ? nullptr : x_.get(), ld_hidden_,
          shape_.mlp_out_scale * (branch ? 1.0f : shape_.residual_multiplier)});
}

void Decoder::feed(const DecoderLayer& layer, const FeedForward& mlp, int rows,
                   const LinearOut& out) {
    const bool is_dense = &mlp == &layer.mlp;
    const auto run = [&](const Linear& weights, AddedLinear AddedLayer::*which, const Inputs& x,
                         const LinearOut& to) {
        if (is_dense) {
            added_.run(index_of(layer), weights, which, x, to);
        } else {
            run_linear(weights, x, to);
        }
    };
    const float sparse_deviations = is_dense ? layer.sparse_deviations : -INFINITY;
    run(mlp.gate_up, &AddedLayer::gate_up, in_hidden_, {gate_up_.get(), nullptr, ld_gate_up_, 1.0f});
    const Inputs inner = inputs_.view(rows, mlp.width(), most_orders_);
    pool().each(rows, [&](int row, int thread) {
        float* up = gate_up_.get() + static_cast<size_t>(row) * ld_gate_up_;
        if (sparse_deviations > -INFINITY) {
            cut_gates(up, mlp.width(), sparse_deviations);
        }
        for (int i = 0; shape_.gate_multiplier != 1.0f && i < mlp.width(); ++i) {
            up[i] *= shape_.gate_multiplier;
        }
        if (shape_.gated) {
            kernels().gated(up, mlp.width(), shape_.activation, scratch(thread));
        } else {
            kernels().activate(up, mlp.width(), shape_.activation, is_dense ? layer.learnt : nullptr,
                               scratch(thread));
        }
        mlp.down.take(scratch(thread), inner, row, spare(thread));
    });
    run(mlp.down, &AddedLayer::down, inner, out);
}

void Decoder::head(int samples, float* logits) {
    const Inputs x = inputs_.view(samples, shape_.hidden, most_orders_);
    pool().each(samples, [&](int row, int thread) {
        head_.take(sampled_.get() + static_cast<size_t>(row) * ld_hidden_, x, row, spare(thread));
    });
    run_linear(head_, x, {logits, nullptr, shape_.num_logits, 1.0f / shape_.logits_divisor});
    if (shape_.logits_softcap != 0.0f) {
        pool().each(samples, [&](int row, int) {
            kernels().softcap(logits + static_cast<size_t>(row) * shape_.num_logits,
                              shape_.num_logits, shape_.logits_softcap);
        });
    }
}

void Decoder::head_greedy(int samples, int32_t* tokens) {
    const Inputs x = inputs_.view(samples, shape_.hidden, most_orders_);
    pool().each(samples, [&](int row, int thread) {
        head_.take(sampled_.get() + static_cast<size_t>(row) * ld_hidden_, x, row, spare(thread));
    });
    constexpr int width = HEAD_TILES * TILE;
    const int threads = pool().size(), tiles = head_.tiles();
    head_chunk_.need(static_cast<size_t>(threads) * samples * width);
    best_values_.assign(static_cast<size_t>(threads) * samples, -INFINITY);
    best_tokens_.assign(static_cast<size_t>(threads) * samples, 0);
    pool().each((tiles + HEAD_TILES - 1) / HEAD_TILES, [&](int piece, int thread) {
        const size_t own = static_cast<size_t>(thread) * samples;
        float* chunk = head_chunk_.get() + own * width;
        const int begin = piece * HEAD_TILES, first = begin * TILE;
        const int count = std::min(width, shape_.num_logits - first);
        head_.run(x, {chunk - first, nullptr, width, 1.0f / shape_.logits_divisor}, begin,
                  std::min(begin + HEAD_TILES, tiles));
        for (int row = 0; row < samples; ++row) {
            float* z = chunk + static_cast<size_t>(row) * width;
            if (shape_.logits_softcap != 0.0f) {
                kernels().softcap(z, count, shape_.logits_softcap);
            }
            // A thread's pieces ascend, so the first of equal values has the lowest id.
            float& value = best_values_[own + row];
            for (int i = 0; i < count; ++i) {
                if (z[i] > value) {
                    value = z[i];
                    best_tokens_[own + row] = first + i;
                } else if (!(z[i] <= value)) {
                    value = INFINITY;  // a NaN: nothing is larger, and it is not finite
                }
            }
        }
    });
    for (int row = 0; row < samples; ++row) {
        float value = -INFINITY;
        int32_t token = 0;
        for (int thread = 0; thread < threads; ++thread) {
            const size_t at = static_cast<size_t>(thread) * samples + row;
            if (best_values_[at] > value || (best_values_[at] == value && best_tokens_[at] < token)) {
                value = best_values_[at];
                token = best_tokens_[at];
            }
        }
        tokens[row] = std::isfinite(value) ? token : -1;
    }
}

}  // namespace paceline
