#include "forward/forward.h"

#include <algorithm>
#include <functional>

namespace paceline {
namespace {

constexpr int SLICE_ROWS = 128;        // bounds the buffers; weights are read once per slice
constexpr int STREAMED_SLICE_ROWS = 512;  // where that takes longer than anything

}  // namespace

Decoder::Decoder(DecoderWeights weights)
    : weights_(std::move(weights)),
      shared_(weights_),
      residual_streams_(weights_, shared_),
      attention_(weights_, shared_),
      recurrences_(weights_.recurrent(), shared_),
      local_convs_(shared_),
      feed_forwards_(shared_, residual_streams_, local_convs_),
      mixtures_(shared_, feed_forwards_),
      inputs_of_layers_(weights_, shared_, residual_streams_),
      head_(weights_.head, shared_) {}

void Decoder::set_cache(std::vector<KvLayer> caches, int num_blocks, Kept keep_alive) {
    caches_ = std::move(caches);
    num_blocks_ = num_blocks;
    keep_cache_ = std::move(keep_alive);
}

void Decoder::set_states(const LayerStates& first, Kept keep_alive) {
    recurrences_.set_states(first);
    keep_states_ = std::move(keep_alive);
}

void Decoder::set_stream(LayerStream* stream, Kept keep_alive) {
    stream_ = stream;
    keep_stream_ = std::move(keep_alive);
}

void Decoder::set_experts(ExpertCache* cache, Kept keep_alive) {
    mixtures_.set_cache(cache);
    keep_stream_ = std::move(keep_alive);
}

void Decoder::forward(const Batch& batch, const Streams& streams, float* logits) {
    const ThreadPool::Turn turn = pool().take_turn();
    run_slices(batch, streams);
    head_.run(int(batch.sample_rows.size()), logits);
}

void Decoder::forward_greedy(const Batch& batch, const Streams& streams, int32_t* tokens) {
    const ThreadPool::Turn turn = pool().take_turn();
    run_slices(batch, streams);
    head_.run_greedy(int(batch.sample_rows.size()), tokens);
}

void Decoder::write_kv(const Batch& batch, const float* inputs) {
    const ThreadPool::Turn turn = pool().take_turn();
    for (int first = 0; first < batch.num_rows(); first += SLICE_ROWS) {
        shared_.begin(batch, {first, std::min(first + SLICE_ROWS, batch.num_rows()), 0, 0});
        attention_.begin();
        for (const DecoderLayer& layer : weights_.layers) {
            pool().each(shared_.rows(), [&](int row, int thread) {
                const float* x = inputs + size_t(first + row) * weights_.shape.hidden;
                shared_.norm_for(layer.qkv, row, x, nullptr, thread);
            });
            attention_.write(layer, caches_[layer.index]);
        }
    }
}

void Decoder::run_slices(const Batch& batch, const Streams& streams) {
    head_.begin(int(batch.sample_rows.size()));
    mixtures_.begin(weights_.layers.size());
    const bool is_read = stream_ || mixtures_.reads_from_disk();
    for (const BatchSlice& slice : batch.slices(is_read ? STREAMED_SLICE_ROWS : SLICE_ROWS)) {
        shared_.begin(batch, slice);
        attention_.begin();
        recurrences_.begin();
        run_layers(streams);
        leave(streams);
    }
}

void Decoder::run_layers(const Streams& streams) {
    const Inputs* in = &enter(streams);
    if (weights_.altup) {
        residual_streams_.spread();
    }
    for (const DecoderLayer& layer : weights_.layers) {
        if (stream_) {
            stream_->begin(layer.index);
        }
        if (layer.altup) {
            residual_streams_.predict(layer);
        }
        mix(layer, *in);
        if (layer.mixture) {
            mixtures_.run(layer);
        } else if (layer.has_mlp()) {
            feed_forwards_.run(layer);
        }
        if (layer.gate) {
            inputs_of_layers_.run(layer);
        }
        if (stream_) {
            stream_->end(layer.index);
        }
        if (layer.index + 1 == weights_.layers.size()) {
            break;
        }
        in = &shared_.hidden;
        const DecoderLayer& next = weights_.layers[layer.index + 1];
        pool().each(shared_.rows(), [&](int row, int thread) {
            end_layer(layer, row);
            hand_out(streams, next.index, row, shared_.x.row(row));
            shared_.norm_for(next.first(), row, next.input_norm, thread);
        });
    }
    if (weights_.altup) {
        pool().each(shared_.rows(), [&](int row, int) { end_layer(weights_.layers.back(), row); });
        residual_streams_.gather();
    }
}

void Decoder::mix(const DecoderLayer& layer, const Inputs& in) {
    if (layer.recurrent) {
        recurrences_.read(*layer.recurrent, in);
    }
    if (layer.recurrent && layer.has_attention()) {  // of rows that the recurrence is not added to yet
        pool().each(shared_.rows(), [&](int row, int thread) {
            shared_.norm_for(layer.qkv, row, layer.input_norm, thread);
        });
    }
    if (layer.attention_conv) {
        local_convs_.read(*layer.attention_conv, layer.qkv, layer.input_norm);
    }
    if (layer.has_attention()) {
        attention_.read(layer, in);
    }
    if (layer.recurrent) {
        recurrences_.run(layer);
    }
    if (layer.has_attention()) {
        attention_.run(layer, caches_[layer.index]);
    }
    if (layer.attention_conv) {
        local_convs_.finish(*layer.attention_conv);
    }
}

const Inputs& Decoder::enter(const Streams& streams) {
    const auto& entry = weights_.entry;
    const DecoderLayer& first = weights_.layers.front();
    const auto begin_layer = [&](int row, int thread) {
        hand_out(streams, 0, row, shared_.x.row(row));
        shared_.norm_for(first.first(), row, first.input_norm, thread);
    };
    const bool waits = weights_.layer_inputs || (entry && entry->is_fused());
    const auto input = [&](int row) {
        return streams.inputs + size_t(shared_.slice.first + row) * weights_.shape.hidden;
    };
    pool().each(shared_.rows(), [&](int row, int thread) {
        if (entry && entry->is_residual) {
            std::copy_n(input(row), weights_.shape.hidden, shared_.x.row(row));
        } else {
            embed(row, thread);
        }
        if (entry && !entry->is_residual) {
            join(row, input(row), thread);
        }
        if (entry && entry->is_read_joined()) {
            hand_out(streams, 0, row, shared_.x.row(row));
        } else if (!waits) {
            begin_layer(row, thread);
        }
    });
    if (entry && entry->is_fused()) {
        run_linear(entry->join, shared_.joined, shared_.x.out());
    }
    if (weights_.layer_inputs) {
        inputs_of_layers_.begin();
    }
    pool().each(waits ? shared_.rows() : 0, begin_layer);
    return entry && entry->is_read_joined() ? shared_.joined : shared_.hidden;
}

void Decoder::embed(int row, int thread) const {
    const Batch& batch = *shared_.batch;
    const int at = shared_.slice.first + row, hidden = weights_.shape.hidden;
    float* x = shared_.x.row(row);
    weights_.embedding.gather(batch.tokens[at], weights_.shape.embedding_multiplier, x,
                              shared_.spare(thread));
    if (weights_.places) {
        const float* place = weights_.places + size_t(batch.rows[at].position) * hidden;
        std::transform(x, x + hidden, place, x, std::plus<float>());
    }
}

void Decoder::join(int row, const float* input, int thread) const {
    const Entry& entry = *weights_.entry;
    const int hidden = weights_.shape.hidden;
    float *x = shared_.x.row(row), *joined = shared_.scratch(thread), *second = joined + hidden;
    shared_.normed(x, entry.token_norm, joined);
    shared_.normed(input, entry.input_norm, second);
    std::fill(second + hidden, joined + round_up(2 * hidden, TILE), 0.0f);
    const Linear& to = entry.is_fused() ? entry.join : weights_.layers.front().first();
    to.take(joined, shared_.joined, row, shared_.spare(thread));
    if (!entry.is_fused()) {
        std::copy_n(entry.norm_before_residual ? second : input, hidden, x);
    }
}

void Decoder::end_layer(const DecoderLayer& layer, int row) const {
    if (layer.altup) {
        residual_streams_.end(layer, row);
        return;
    }
    if (layer.last_norm()) {
        shared_.add_branch(row, layer.last_norm());
    }
    float* x = shared_.x.row(row);
    for (int i = 0; layer.scale != 1.0f && i < weights_.shape.hidden; ++i) {
        x[i] *= layer.scale;
    }
}

void Decoder::leave(const Streams& streams) {
    const size_t count = weights_.layers.size();
    const BatchSlice& slice = shared_.slice;
    const float* norm = weights_.final_norm;
    const bool every_row = streams.has_tap(count) || streams.has_tap(count + 1);
    pool().each(every_row ? shared_.rows() : 0, [&](int row, int thread) {
        if (!weights_.altup) {
            end_layer(weights_.layers.back(), row);
        }
        hand_out(streams, count, row, shared_.x.row(row));
        shared_.normed(shared_.x.row(row), norm, shared_.scratch(thread));
        hand_out(streams, count + 1, row, shared_.scratch(thread));
    });
    pool().each(slice.samples_end - slice.samples, [&](int i, int) {
        const int sample = slice.samples + i;
        const int row = shared_.batch->sample_rows[sample] - slice.first;
        if (!every_row && !weights_.altup) {
            end_layer(weights_.layers.back(), row);  // a row is sampled at most once
        }
        shared_.normed(shared_.x.row(row), norm, head_.row(sample));
    });
}

void Decoder::hand_out(const Streams& streams, size_t tap, int row, const float* x) const {
    const size_t count = streams.taps.size(), width = size_t(weights_.shape.hidden);
    const size_t first = size_t(shared_.slice.first + row) * count;
    for (size_t i = 0; i < count; ++i) {
        if (static_cast<size_t>(streams.taps[i]) == tap) {
            std::copy_n(x, width, streams.features + (first + i) * width);
        }
    }
}

}  // namespace paceline
