#include "forward/latent.h"

#include <algorithm>

#include "forward/forward.h"

namespace paceline {

void Decoder::latent_heads(const LatentAttention& a, const Linear& first_linear, int rows,
                           const Inputs& in) {
    const int ld_first = round_up(a.first_width(), TILE), ld_queries = round_up(a.queries(), TILE);
    down_.need(size_t(rows) * ld_first);
    const auto down_row = [&](int row) { return down_.get() + size_t(row) * ld_first; };
    run_linear(first_linear, in, {down_.get(), nullptr, ld_first, 1.0f});
    const float* queries = down_.get();
    int ld = ld_first;
    if (a.q_rank > 0) {
        const Inputs x = inputs_.view(rows, a.q_rank, most_orders_);
        pool().each(rows, [&](int row, int thread) {
            float* normed = scratch(thread);
            kernels().rms_norm(down_row(row), a.q_norm, a.norm_eps, a.q_rank, normed);
            std::fill(normed + a.q_rank, normed + round_up(a.q_rank, TILE), 0.0f);
            a.q_b.take(normed, x, row, spare(thread));
        });
        ld = ld_queries;
        queries = queries_.need(size_t(rows) * ld_queries);
        run_linear(a.q_b, x, {queries_.get(), nullptr, ld_queries, 1.0f});
    }
    const int key = a.key_dim();
    by_head(a.k_b, rows, {queries, ld, a.query_dim()}, qkv_.get() + a.rope_dim, ld_qkv_, key);
    pool().each(rows, [&](int row, int) {
        float* to = qkv_.get() + size_t(row) * ld_qkv_;
        for (int h = 0; h < a.heads(); ++h, to += key) {
            const float* query = queries + size_t(row) * ld + size_t(h) * a.query_dim();
            std::copy_n(query + a.nope_dim, a.rope_dim, to);
        }
        const float* latent = down_row(row) + a.first_queries();
        std::copy_n(latent + a.rank, a.rope_dim, to);
        kernels().rms_norm(latent, a.kv_norm, a.norm_eps, a.rank, to + a.rope_dim);
    });
}

Inputs Decoder::latent_results(const LatentAttention& a, const Linear& last, int rows) {
    const int ld = round_up(a.results(), TILE);
    results_.need(size_t(rows) * ld);
    by_head(a.v_b, rows, {attended_.get() + a.rope_dim, ld_q_, a.key_dim()}, results_.get(), ld,
            a.value_dim);
    const Inputs x = inputs_.view(rows, a.results(), most_orders_);
    pool().each(rows, [&](int row, int thread) {
        last.take(results_.get() + size_t(row) * ld, x, row, spare(thread));
    });
    return x;
}

void Decoder::by_head(const std::vector<Linear>& linears, int rows, const HeadRows& from, float* y,
                      int ld, int step) {
    const int heads = int(linears.size()), k = linears.front().k(), orders = most_orders_;
    const Inputs all = head_inputs_.view(rows * heads, k, orders);
    const auto inputs_of = [&](int head) { return rows_of(all, head * rows, rows, orders); };
    pool().each(rows * heads, [&](int i, int thread) {
        const int head = i / rows, row = i % rows;
        const float* x = from.x + size_t(row) * from.ld + size_t(head) * from.step;
        float* padded = scratch(thread);
        std::fill(std::copy_n(x, k, padded), padded + round_up(k, TILE), 0.0f);
        linears[head].take(padded, inputs_of(head), row, spare(thread));
    });
    pool().each(heads, [&](int head, int) {
        const LinearOut out{y + size_t(head) * step, nullptr, ld, 1.0f};
        linears[head].run(inputs_of(head), out, 0, linears[head].tiles());
    });
}

}  // namespace paceline
