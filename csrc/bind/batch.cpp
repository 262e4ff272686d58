// paceline._native.Batch: spans of requests, read out of Python's objects.
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bind/arrays.h"
#include "bind/decoder.h"
#include "bind/sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

struct SpanNames {
    PyObject *token_ids = name("token_ids"), *parents = name("parents"),
             *sample_rows = name("sample_rows"), *start = name("start"),
             *num_cached = name("num_cached"), *read = name("read"), *write = name("write"),
             *lane = name("lane"), *path = name("path"), *certain = name("certain");
};

const SpanNames& span_names() {
    static const SpanNames names;
    return names;
}

std::vector<int32_t> integers_of(nb::handle owner, PyObject* name) {
    return to_integers(attribute(owner.ptr(), name), "a span's fields are sequences");
}

int integer_of(nb::handle owner, PyObject* name) {
    return nb::cast<int>(attribute(owner.ptr(), name));
}

NodeSpan span_of(nb::handle span, nb::handle table) {
    const SpanNames& names = span_names();
    return {integers_of(span, names.token_ids),
            integers_of(span, names.parents),
            integers_of(span, names.sample_rows),
            integer_of(span, names.start),
            integer_of(span, names.num_cached),
            to_integers(table, "a block table is a sequence")};
}

StateSpan state_of(nb::handle state) {
    const SpanNames& names = span_names();
    return {integer_of(state, names.read), integer_of(state, names.write),
            integer_of(state, names.lane), integers_of(state, names.path),
            integer_of(state, names.certain)};
}

}  // namespace

Batch* pack(const Decoder& decoder, const nb::sequence& spans, const nb::sequence& block_tables,
            const nb::sequence& states) {
    require(decoder.num_blocks() > 0, "the decoder has no cache yet");
    const size_t count = nb::len(spans);
    require(count == nb::len(block_tables), "as many block tables as spans are needed");
    std::vector<NodeSpan> nodes;
    nodes.reserve(count);
    for (size_t i = 0; i < count; ++i) {
        nodes.push_back(span_of(spans[i], block_tables[i]));
    }
    const DecoderShape& s = decoder.weights().shape;
    auto batch = std::make_unique<Batch>(std::move(nodes), s.vocab, s.max_len,
                                         decoder.num_blocks(), decoder.weights().reads_blocks());
    for (nb::handle state : states) {
        batch->states.push_back(state_of(state));
    }
    decoder.check_states(*batch);
    return batch.release();
}

void bind_batch(nb::module_& module) {
    nb::class_<Batch>(module, "Batch")
        .def_prop_ro("num_rows", &Batch::num_rows)
        .def_prop_ro("sample_offsets",
                     [](const Batch& batch) { return to_list(batch.sample_offsets); });
}

}  // namespace paceline
