#include "layers/latent.h"

#include <algorithm>

#include "forward/workspace.h"

namespace paceline {

void LatentHeads::read(const LatentAttention& a, const Linear& first, const Inputs& in,
                       const RowBuffer& qkv) {
    const int rows = shared_.rows(), key = a.key_dim();
    down_.need(rows, a.first_width());
    run_linear(first, in, down_.out());
    const RowBuffer& queries = a.q_rank > 0 ? queries_ : down_;
    if (a.q_rank > 0) {
        const Inputs x = shared_.inputs(rows, a.q_rank);
        pool().each(rows, [&](int row, int thread) {
            float* normed = shared_.scratch(thread);
            kernels().rms_norm(down_.row(row), a.q_norm, a.norm_eps, a.q_rank, normed);
            std::fill(normed + a.q_rank, normed + round_up(a.q_rank, TILE), 0.0f);
            a.q_b.take(normed, x, row, shared_.spare(thread));
        });
        queries_.need(rows, a.queries());
        run_linear(a.q_b, x, queries_.out());
    }
    by_head(a.k_b, {queries.row(0), queries.ld(), a.query_dim()},
            {qkv.row(0) + a.rope_dim, qkv.ld(), key});
    pool().each(rows, [&](int row, int) {
        float* to = qkv.row(row);
        for (int h = 0; h < a.heads(); ++h, to += key) {
            const float* query = queries.row(row) + size_t(h) * a.query_dim();
            std::copy_n(query + a.nope_dim, a.rope_dim, to);
        }
        const float* latent = down_.row(row) + a.first_queries();
        std::copy_n(latent + a.rank, a.rope_dim, to);
        kernels().rms_norm(latent, a.kv_norm, a.norm_eps, a.rank, to + a.rope_dim);
    });
}

Inputs LatentHeads::results(const LatentAttention& a, const Linear& last, const RowBuffer& attended) {
    results_.need(shared_.rows(), a.results());
    by_head(a.v_b, {attended.row(0) + a.rope_dim, attended.ld(), a.key_dim()},
            {results_.row(0), results_.ld(), a.value_dim});
    const Inputs x = shared_.inputs(shared_.rows(), a.results());
    pool().each(shared_.rows(), [&](int row, int thread) {
        last.take(results_.row(row), x, row, shared_.spare(thread));
    });
    return x;
}

void LatentHeads::by_head(const std::vector<Linear>& linears, const HeadRows& from,
                          const HeadRows& to) {
    const int heads = int(linears.size()), rows = shared_.rows(), k = linears.front().k();
    const int orders = shared_.most_orders;
    const Inputs all = head_inputs_.view(rows * heads, k, orders);
    const auto inputs_of = [&](int head) { return rows_of(all, head * rows, rows, orders); };
    pool().each(rows * heads, [&](int i, int thread) {
        const int head = i / rows, row = i % rows;
        const float* x = from.x + size_t(row) * from.ld + size_t(head) * from.step;
        float* padded = shared_.scratch(thread);
        std::fill(std::copy_n(x, k, padded), padded + round_up(k, TILE), 0.0f);
        linears[head].take(padded, inputs_of(head), row, shared_.spare(thread));
    });
    pool().each(heads, [&](int head, int) {
        const LinearOut out{to.x + size_t(head) * to.step, nullptr, to.ld, 1.0f};
        linears[head].run(inputs_of(head), out, 0, linears[head].tiles());
    });
}

}  // namespace paceline
