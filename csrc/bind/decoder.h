// Those methods of the Python class Decoder that do not lie in bind/forward.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include "forward/forward.h"

namespace paceline {

// bind/batch.cpp: spans and their block tables as rows. `states`: a StateSpan of
// paceline/models/backend.py for each span, or none where no layer is recurrent.
Batch* pack(const Decoder& decoder, const nanobind::sequence& spans,
            const nanobind::sequence& block_tables, const nanobind::sequence& states);

// bind/adapter.cpp: an adapter or None for each span of the batch, which keeps them alive.
void adapt(const Decoder& decoder, Batch& batch, const nanobind::sequence& of_spans);

}  // namespace paceline
