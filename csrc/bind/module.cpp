// The Python module paceline._native. What it offers is described in paceline/backends/native/cpu.py;
// what it does for the planner in paceline/planner/planner.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/kernels.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
void bind_adapter(nb::module_&);
void bind_attention(nb::module_&);
void bind_batch(nb::module_&);
void bind_drafts(nb::module_&);
void bind_forward(nb::module_&);
void bind_grow(nb::module_&);
void bind_linear(nb::module_&);
void bind_ngram(nb::module_&);
void bind_recurrent(nb::module_&);
void bind_rows(nb::module_&);
void bind_sampler(nb::module_&);
void bind_stream(nb::module_&);
void bind_suffix(nb::module_&);
}  // namespace paceline

NB_MODULE(_native, module) {
    using namespace paceline;
    nb::set_leak_warnings(false);  // the engine's thread may outlive the interpreter's clean-up
    module.def("isa", [] { return std::string(kernels().isa); });
    module.def("set_isa", [](const std::string& isa) {
        if (!set_level(isa.c_str())) {
            throw nb::value_error("this CPU or this build has no such instruction-set level");
        }
    });
    module.def("isas", [](bool supported) {
        std::vector<std::string> names;
        int count = 0;
        const Kernels* const* levels = all_levels(&count);
        for (int i = 0; i < count; ++i) {
            if (!supported || levels[i]->supported()) {
                names.emplace_back(levels[i]->isa);
            }
        }
        return names;
    }, nb::arg("supported") = true);
    module.def("set_threads", [](int threads) {
        if (threads < 1 || threads > 1024) {
            throw nb::value_error("the number of threads is not in 1..1024");
        }
        const nb::gil_scoped_release unlocked;  // it waits for a forward in progress
        set_threads(threads);
    });
    module.def("num_threads", [] { return pool().size(); });
    bind_linear(module);
    bind_rows(module);
    bind_attention(module);
    bind_drafts(module);
    bind_ngram(module);
    bind_recurrent(module);
    bind_sampler(module);
    bind_suffix(module);
    bind_stream(module);
    bind_batch(module);
    bind_forward(module);
    bind_grow(module);
    bind_adapter(module);
}
