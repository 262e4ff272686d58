// paceline._native.grow: draft trees of several requests, from the tokens that a draft still has to
// read to the last level that pays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "bind/arrays.h"
#include "drafts/grow.h"
#include "bind/sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

// (rules, tokens, most nodes, most depth, blur, start, block table), and what must be as it is.
Growth growth_of(nb::tuple fields, int vocab) {
    require(fields.size() == 7, "a growth has seven fields");
    Growth growth{};
    auto& rules = nb::cast<SamplingRules&>(fields[0]);
    const nb::list tokens = nb::cast<nb::list>(fields[1]);
    require(tokens.size() > 0, "a request without tokens has no draft");
    growth.rules = &rules;
    growth.length = tokens.size();
    growth.max_nodes = nb::cast<int>(fields[2]);
    growth.max_depth = nb::cast<int>(fields[3]);
    growth.blur = nb::cast<double>(fields[4]);
    growth.start = nb::cast<int>(fields[5]);
    growth.blocks = to_integers(fields[6], "a block table is a sequence");
    growth.last_token = nb::cast<int32_t>(tokens[tokens.size() - 1]);
    Job root{};
    root.length = growth.length;
    prepare(rules, tokens.size(), token_at(tokens), root, vocab);
    return growth;
}

nb::tuple result_of(const Growth& growth) {
    return nb::make_tuple(to_list(growth.tokens), to_list(growth.parents), to_list(growth.probs),
                          to_list(growth.path_probs), to_list(growth.kv_tokens),
                          to_list(growth.kv_parents), growth.num_levels);
}

// `pays` takes (growth, estimates down to its best node) of each and says for which another level
// pays; None: for all. `reserve` takes a growth and a number of drafted nodes; its block table is
// the list of the growth's fields, which it makes longer.
nb::tuple grow_trees(Decoder& decoder, const Batch& batch, std::optional<Rows> inputs, int tap,
                     int ranked, int branching, double min_path_prob, double sureness,
                     std::optional<Array<const int64_t, 1>> column_ids, int vocab_size, nb::list fields,
                     nb::object pays, nb::object reserve) {
    const int columns = decoder.weights().shape.num_logits;
    require(inputs.has_value() == decoder.weights().entry.has_value(), "inputs are for decoders that have an entry");
    require(!inputs || (inputs->shape(0) == static_cast<size_t>(batch.num_rows()) &&
                      inputs->shape(1) == static_cast<size_t>(decoder.weights().shape.hidden)),
          "the inputs have another shape than rows, hidden_size");
    require(!decoder.weights().recurrent(), "no tree grows on recurrent layers in one call");
    require(tap >= 0 && tap <= static_cast<int>(decoder.weights().layers.size()) + 1,
          "a tap must be 0 up to one more than the number of layers");
    require(1 <= branching && branching <= ranked && ranked <= columns && columns <= vocab_size,
          "branching, ranked, columns and vocabulary do not ascend");
    require(fields.size() > 0 && batch.sample_rows.size() == fields.size(),
          "as many sampled rows as growths are needed, and one at least");
    Ranking ranking{ranked, branching, min_path_prob, sureness, {}, vocab_size};
    if (column_ids) {
        ranking.columns = columns_of(column_ids->data(), column_ids->shape(0), columns, vocab_size);
    }
    std::vector<Growth> growths;
    for (nb::handle each : fields) {
        growths.push_back(growth_of(nb::cast<nb::tuple>(each), vocab_size));
    }
    Asked asked;
    if (!pays.is_none()) {
        asked.pays = [&](const std::vector<Promise>& promises) {
            const nb::gil_scoped_acquire locked;
            const nb::object asked_for = make_list(promises.size(), [&](size_t i) {
                const nb::object estimates = to_list(promises[i].estimates);
                return nb::make_tuple(promises[i].growth, estimates).release().ptr();
            });
            const nb::object answer = pays(asked_for);
            const Items answers(answer, "answers are a sequence");
            require(answers.size() == promises.size(), "as many answers as promises are needed");
            std::vector<char> found(answers.size());
            for (size_t i = 0; i < found.size(); ++i) {
                found[i] = PyObject_IsTrue(answers[i]) == 1;
            }
            return found;
        };
    }
    asked.reserve = [&](size_t growth, int drafted) {
        Growth& grown = growths[growth];
        if (grown.start + drafted < static_cast<int>(grown.blocks.size()) * TILE) {
            return true;  // there was more room than was asked for
        }
        const nb::gil_scoped_acquire locked;
        if (!nb::cast<bool>(reserve(growth, drafted))) {
            return false;
        }
        grown.blocks =
            to_integers(nb::cast<nb::tuple>(fields[growth])[6], "a block table is a sequence");
        return true;
    };
    Forwards forwards{};
    {
        const nb::gil_scoped_release released;
        forwards = grow(decoder, batch, inputs ? inputs->data() : nullptr, tap, ranking, asked,
                        &growths);
    }
    nb::list found;
    for (const Growth& growth : growths) {
        found.append(result_of(growth));
    }
    return nb::make_tuple(forwards.count, forwards.rows, found);
}

}  // namespace

void bind_grow(nb::module_& module) {
    using nb::arg;
    module.def("grow", &grow_trees, arg("decoder"), arg("batch"), arg("inputs").none(), arg("tap"),
               arg("ranked"), arg("branching"), arg("min_path_prob"), arg("sureness"),
               arg("column_ids").none(), arg("vocab_size"), arg("growths"), arg("pays").none(),
               arg("reserve"));
}

}  // namespace paceline
