// paceline._native.Decoder. Arguments are checked once, when the decoder is built.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "bind/arrays.h"
#include "bind/decoder.h"
#include "forward/forward.h"
#include "bind/kv_arrays.h"
#include "bind/linear_objects.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using NewLogits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Features = Array<float, 3>;
using States = Array<float, 4>;
using Tokens = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

// What has been read of Python's objects, which the decoder keeps alive.
struct HaveRead {
    nb::list objects;
    int widest = 0, most_orders = 0;  // of any linear
};

// Reads fields of Python's objects by their names: numbers, vectors and linears.
class Reader {
  public:
    Reader(nb::object of, HaveRead& read) : of_(std::move(of)), read_(read) {}

    nb::object get(const char* name) const { return keep(of_.attr(name)); }
    bool has(const char* name) const { return !get(name).is_none(); }
    explicit operator bool() const { return !of_.is_none(); }
    Reader part(const char* name) const { return {get(name), read_}; }
    // What a method says of a layer.
    Reader of_layer(const char* method, int layer) const {
        return {keep(of_.attr(method)(layer)), read_};
    }
    template <typename T> T number_of(const char* method, int layer) const {
        return nb::cast<T>(of_.attr(method)(layer));
    }
    template <typename Read> void each(const char* name, const Read& read) const {
        for (nb::handle item : get(name)) {
            read(Reader(nb::borrow(item), read_));
        }
    }
    template <typename T> T number(const char* name) const { return nb::cast<T>(get(name)); }
    int positive(const char* name) const {
        const int value = number<int>(name);
        require(value > 0, std::string(name) + " must be positive");
        return value;
    }
    // `size` floats; null where the field is None. A vector is repeated `times` times.
    const float* vector(const char* name, int size, int times = 1) const {
        nb::object value = get(name);
        if (value.is_none()) {
            return nullptr;
        }
        if (times > 1) {
            value = keep(nb::module_::import_("numpy").attr("tile")(value, times));
        }
        const auto found = array<Floats>(value, name);
        require(found.size() == static_cast<size_t>(size), std::string(name) + " has another size");
        return found.data();
    }
    Linear linear(const char* name, int n, int k) const { return checked(get(name), name, n, k); }
    std::vector<Linear> linears(const char* name, int count, int n, int k) const {
        std::vector<Linear> found;
        for (nb::handle item : get(name)) {
            found.push_back(checked(item, name, n, k));
        }
        require(static_cast<int>(found.size()) == count, std::string(name) + ": another number of them");
        return found;
    }
    // What is added to the embedding at each position; null where the field is None.
    const float* places(int max_len, int hidden) const {
        if (!has("places")) {
            return nullptr;
        }
        const Rows table = array<Rows>(get("places"), "places");
        require(static_cast<int>(table.shape(0)) >= max_len &&
                    static_cast<int>(table.shape(1)) == hidden,
                "places has another shape");
        return table.data();
    }
    // A RotaryTable of Python's; of None one without dimensions.
    RotaryTable rotary(int max_len, int head_dim) const {
        if (of_.is_none()) {
            return {};
        }
        const Rows cos = array<Rows>(get("cos"), "cos"), sin = array<Rows>(get("sin"), "sin");
        const int dim = static_cast<int>(cos.shape(1));
        require(static_cast<int>(cos.shape(0)) >= max_len && sin.shape(0) == cos.shape(0) &&
                    sin.shape(1) == cos.shape(1) && dim <= head_dim && dim % 2 == 0,
                "the rotary tables have another shape");
        return {cos.data(), sin.data(), dim, vector("q_scale", max_len)};
    }
    // Rows of `dim` floats: how many there are, and where.
    std::pair<int, const float*> rows(const char* name, int dim) const {
        if (!has(name)) {
            return {0, nullptr};
        }
        const auto found = array<Floats>(get(name), name);
        require(found.size() % static_cast<size_t>(dim) == 0, std::string(name) + " has another size");
        return {static_cast<int>(found.size()) / dim, found.data()};
    }
  private:
    using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

    nb::object keep(nb::object value) const {
        read_.objects.append(value);
        return value;
    }
    // Not converted: what a conversion makes lives no longer than this call.
    template <typename A> static A array(nb::handle value, const char* name) {
        A found;
        require(nb::try_cast(value, found, false), std::string(name) + " must be contiguous float32");
        return found;
    }
    Linear checked(nb::handle value, const char* name, int n, int k) const {
        const Linear& linear = linear_of(value);
        require(linear.n() == n && linear.k() == k, std::string(name) + " has another shape");
        read_.widest = std::max(read_.widest, k);
        read_.most_orders = std::max(read_.most_orders, linear.num_orders);
        return linear;
    }

    nb::object of_;
    HaveRead& read_;
};

// A decoder's configuration and its parts, by the names of paceline/models/config.py.
struct Config {
    Reader own, attention, norms, mlp, multipliers, entry;

    explicit Config(const Reader& decoder)
        : own(decoder.part("config")),
          attention(own.part("attention")),
          norms(own.part("norms")),
          mlp(own.part("mlp")),
          multipliers(own.part("multipliers")),
          entry(own.part("entry")) {}
};

DecoderShape shape_of(const Config& c, int max_len) {
    DecoderShape s{};
    s.hidden = c.own.positive("hidden_size");
    s.vocab = c.own.positive("vocab_size");
    s.num_logits = c.own.positive("num_logits");
    s.max_len = max_len;
    s.norm_eps = c.norms.number<float>("eps");
    s.layer_norm = c.norms.number<bool>("layer_norm");
    s.embedding_multiplier = c.multipliers.number<float>("embedding");
    s.residual_multiplier = c.multipliers.number<float>("residual");
    s.attention_out_scale = c.multipliers.number<float>("attention_out");
    s.gate_multiplier = c.multipliers.number<float>("gate");
    s.mlp_out_scale = c.multipliers.number<float>("mlp_out");
    s.logits_divisor = c.multipliers.number<float>("logits_divisor");
    s.logits_softcap = c.multipliers.number<float>("logits_softcap");
    const auto activation = c.mlp.number<std::string>("activation");
    require(find_activation(activation.c_str(), &s.activation), "activation: one that kernels.h names");
    s.gated = c.mlp.number<bool>("gated");
    s.parallel = c.mlp.number<bool>("parallel");
    s.attention_gate = c.attention.number<bool>("gate");
    s.heads_normed_last = c.attention.number<bool>("qk_norm_last");
    return s;
}

AttentionShape attention_of(const Config& c, int layer) {
    const Reader heads = c.own.of_layer("heads_of", layer);
    AttentionShape a{};
    a.heads = c.own.positive("num_heads");
    a.kv_heads = heads.positive("kv_heads");
    a.head_dim = heads.positive("dim");
    require(a.heads % a.kv_heads == 0, "num_heads must be a multiple of kv_heads");
    require(a.head_dim <= MAX_HEAD_DIM, "head_dim: heads of this size are not supported");
    a.v_stride = round_up(a.head_dim, TILE);
    a.scale = c.own.number<float>("attention_scale");
    a.softcap = c.attention.number<float>("softcap");
    const bool slides = c.attention.number_of<bool>("is_sliding", layer);
    a.window = slides ? c.attention.number<int>("sliding_window") : 0;
    a.chunks = c.attention.number<bool>("window_chunks");
    a.ahead = c.own.number_of<bool>("sees_ahead", layer);
    return a;
}

std::optional<Entry> entry_of(const Reader& weights, const Config& c, const DecoderShape& s) {
    if (!weights) {
        return std::nullopt;
    }
    Entry entry{};
    entry.token_norm = weights.vector("token_norm", s.hidden);
    entry.input_norm = weights.vector("input_norm", s.hidden);
    if (weights.has("join")) {
        entry.join = weights.linear("join", s.hidden, 2 * s.hidden);
    }
    entry.norm_before_residual = c.entry.number<bool>("norm_before_residual");
    entry.is_residual = c.entry.number<std::string>("kind") == "residual";
    return entry;
}

FeedForward feed_forward_of(const Reader& r, const DecoderShape& s, int width) {
    return {r.linear("gate_up", (s.gated ? 2 : 1) * width, s.hidden),
            r.linear("down", s.hidden, width)};
}

MixtureNorms mixture_norms_of(const Reader& r, const DecoderShape& s) {
    const Reader n = r.part("norms");
    if (!n) {
        return {};
    }
    return {n.vector("router", s.hidden), n.vector("experts", s.hidden),
            n.vector("routed", s.hidden), n.vector("shared", s.hidden)};
}

// `r` says of what kind and size it is, `w` has its weights.
Mixture mixture_of(const Reader& r, const Reader& w, const DecoderShape& s) {
    Mixture mixture{};
    const int width = r.positive("width"), number = r.positive("number");
    mixture.per_token = r.positive("per_token");
    mixture.renormalise = r.number<bool>("renormalise");
    mixture.shared_gate = r.number<bool>("shared_gate");
    mixture.scale = r.number<float>("scale");
    mixture.sigmoid = r.number<bool>("sigmoid");
    mixture.choice_bias = w.vector("choice_bias", number);
    mixture.groups = r.positive("groups");
    mixture.groups_per_token = r.positive("groups_per_token");
    mixture.group_best = r.positive("group_best");
    mixture.least_sum = r.number<float>("least_sum");
    mixture.scales = w.vector("scales", number);
    mixture.norms = mixture_norms_of(w, s);
    require(!mixture.norms.router || !s.layer_norm, "norms: a mixture's own are RMS norms");
    mixture.jitter = r.number<float>("jitter");
    mixture.weighs_inputs = r.number<bool>("weighs_inputs");
    require(number % mixture.groups == 0 && mixture.groups_per_token <= mixture.groups &&
              mixture.group_best <= number / mixture.groups,
          "groups: of one size, and no more chosen than there are");
    require(mixture.per_token <= number / mixture.groups * mixture.groups_per_token,
          "per_token: as many experts as can be chosen, or fewer");
    w.each("experts", [&](const Reader& expert) {
        mixture.experts.push_back(feed_forward_of(expert, s, width));
    });
    require(static_cast<int>(mixture.experts.size()) == number, "experts: another number of them");
    if (const Reader shared = w.part("shared")) {
        mixture.shared = feed_forward_of(shared, s, r.positive("shared_width"));
    }
    require(!mixture.shared_gate || mixture.shared, "shared_gate: there is no shared expert");
    mixture.router = w.linear("router", number + (mixture.shared_gate ? 1 : 0), s.hidden);
    return mixture;
}

LatentAttention latent_of(const Reader& r, const Reader& w, const AttentionShape& a) {
    LatentAttention latent{};
    latent.rank = r.positive("rank");
    latent.q_rank = r.number<int>("q_rank");
    latent.nope_dim = r.positive("nope_dim");
    latent.rope_dim = r.positive("rope_dim");
    latent.value_dim = r.positive("value_dim");
    latent.norm_eps = r.number<float>("NORM_EPS");
    latent.kv_norm = w.vector("kv_norm", latent.rank);
    latent.k_b = w.linears("k_b", a.heads, latent.rank, latent.nope_dim);
    latent.v_b = w.linears("v_b", a.heads, latent.value_dim, latent.rank);
    require(latent.q_rank >= 0 && latent.kv_norm, "latent: a norm is missing, or q_rank negative");
    if (latent.q_rank > 0) {
        latent.q_norm = w.vector("q_norm", latent.q_rank);
        latent.q_b = w.linear("q_b", latent.queries(), latent.q_rank);
        require(latent.q_norm, "latent: the norm of the queries is missing");
    }
    require(a.kv_heads == 1 && a.head_dim == latent.rope_dim + latent.rank,
          "latent: there is one key, of rotated dimensions and a latent");
    return latent;
}

RecurrentKind kind_of(const std::string& name) {
    require(name == "delta" || name == "mamba2" || name == "short_conv",
          "kind: delta, mamba2 or short_conv");
    return name == "delta"    ? RecurrentKind::delta
           : name == "mamba2" ? RecurrentKind::mamba2
                              : RecurrentKind::short_conv;
}

RecurrentLayer recurrent_of(const Reader& r, const Reader& w, const DecoderShape& s) {
    RecurrentLayer layer{};
    layer.kind = kind_of(r.number<std::string>("kind"));
    const bool short_conv = layer.kind == RecurrentKind::short_conv;
    RecurrentShape& shape = layer.shape;
    shape.heads = r.positive("heads");
    shape.groups = r.positive("groups");
    shape.key_dim = short_conv ? 0 : r.positive("key_dim");
    shape.value_dim = r.positive("value_dim");
    shape.corrects = layer.kind == RecurrentKind::delta;
    require(shape.heads % shape.groups == 0, "groups: heads are not a multiple of them");
    Convolution& conv = layer.conv;
    conv.channels = shape.inner() + 2 * shape.keys();
    conv.kernel = r.positive("kernel");
    require(conv.kernel <= MAX_KERNEL, "kernel: more rows than are supported");
    conv.weight = w.vector("conv", conv.channels * conv.kernel);
    conv.bias = w.vector("conv_bias", conv.channels);
    conv.silu = !short_conv;
    layer.numbers = {w.vector("decay", shape.heads), w.vector("step_bias", shape.heads),
                     r.number<float>("beta_scale"), r.number<float>("least_step"), INFINITY};
    layer.skip = w.vector("skip", shape.heads);
    layer.in_scale = w.vector("in_scale", layer.parts().width);
    layer.out_scale = r.number<float>("out_scale");
    require(conv.weight && (short_conv || (layer.numbers.decay && layer.numbers.step_bias)),
          "recurrent: a weight is missing");
    require(find_norm(r.number<std::string>("norm").c_str(), &layer.gating),
          "norm: one that recurrent.h names");
    // The delta rule norms each head by itself.
    const int each_head = layer.kind == RecurrentKind::delta ? shape.heads : 1;
    layer.norm_groups = r.positive("norm_groups") * each_head;
    require(shape.inner() % layer.norm_groups == 0, "norm_groups: parts of different sizes");
    layer.norm = w.vector("norm", shape.inner(), each_head);
    require(layer.norm || layer.gating == GatedNorm::none, "recurrent: its norm is missing");
    layer.norm_eps = r.number<float>("norm_eps");
    layer.first = w.linear("first", layer.parts().width, s.hidden);
    layer.last = w.linear("last", s.hidden, shape.inner());
    return layer;
}

// How a layer takes its input of `width` numbers.
LayerGate gate_of(const Reader& r, const DecoderShape& s, int width) {
    return {r.linear("gate", width, s.hidden), r.linear("projection", s.hidden, width),
            r.vector("norm", s.hidden)};
}

AltUpLayer altup_layer_of(const Reader& r, const DecoderShape& s, const AltUp& altup) {
    const int streams = altup.streams, rank = linear_of(r.get("left")).n();
    AltUpLayer layer{};
    layer.router_norm = r.vector("router_norm", s.hidden);
    layer.router = r.vector("router", streams * s.hidden);
    layer.predict = r.vector("predict", streams * streams * streams);
    layer.correct = r.vector("correct", streams * streams);
    layer.scale = r.vector("scale", s.hidden);
    layer.left = r.linear("left", rank, s.hidden);
    layer.right = r.linear("right", s.hidden, rank);
    layer.norm = r.vector("norm", s.hidden);
    require(layer.router_norm && layer.router && layer.predict && layer.correct && layer.norm,
          "altup: a vector is missing");
    require(rank <= s.hidden, "altup: the low rank is above the width");
    return layer;
}

LocalConv local_conv_of(const Reader& r, const Reader& w, const DecoderShape& s) {
    LocalConv conv{};
    conv.kernel = r.positive("kernel");
    conv.group = r.positive("group");
    require(s.hidden % conv.group == 0, "local_conv: groups of different sizes");
    conv.base = w.vector("base", 2 * conv.kernel * s.hidden);
    require(conv.base, "local_conv: its base is missing");
    conv.deltas = w.linear("deltas", 2 * conv.kernel * (s.hidden / conv.group), s.hidden);
    return conv;
}

// The convolutions around a layer's parts, of which there are both or neither.
void read_local_convs(const Reader& r, const Reader& w, const DecoderShape& s, DecoderLayer* layer) {
    if (!r) {
        return;
    }
    layer->attention_conv = local_conv_of(r, w.part("attention_conv"), s);
    layer->mlp_conv = local_conv_of(r, w.part("mlp_conv"), s);
    require(layer->has_attention() && layer->mlp.down.num_parts > 0 && !layer->recurrent &&
                !layer->latent && !layer->post_attention_norm && !layer->post_mlp_norm && !s.parallel,
            "local_conv: layers are dense, have attention, and no norms after their branches");
}

std::optional<AltUp> altup_of(const Reader& r, const Reader& w, const DecoderShape& s) {
    if (!r || !w) {
        return std::nullopt;
    }
    AltUp altup{r.positive("streams"), r.number<int>("active"), {}, {}};
    require(altup.active >= 0 && altup.active < altup.streams, "altup: no such stream is active");
    altup.spread = w.linears("spread", altup.streams - 1, s.hidden, s.hidden);
    altup.gather = w.linears("gather", altup.streams - 1, s.hidden, s.hidden);
    return altup;
}

// The norms of heads, which are equal for all query and for all key heads or are not.
void read_head_norms(const Config& c, const Reader& r, DecoderLayer* layer) {
    const AttentionShape& a = layer->attention;
    const auto [rows, norms] = r.rows("qk_norm", a.head_dim);
    if (!norms) {
        return;
    }
    layer->norms_whole = c.attention.number<bool>("qk_norm_whole");
    require(rows == a.heads + a.kv_heads || (rows == a.heads && !layer->norms_whole),
            "qk_norm has another number of heads");
    layer->q_norm = norms;
    layer->k_norm = norms + ptrdiff_t(layer->norms_whole ? a.heads : rows - 1) * a.head_dim;
}

// Layer `index`, whose weights `r` has. `read` is the width of what its queries, keys and values
// read, `own_input` that of its own input.
DecoderLayer layer_of(const Config& c, const Reader& r, int index, const DecoderShape& s, int read,
                      int own_input) {
    DecoderLayer layer{};
    layer.index = size_t(index);
    const AttentionShape& a = layer.attention = attention_of(c, index);
    const int q_width = layer.q_width(), kv_width = layer.kv_width();
    layer.owns_kv = c.own.number_of<bool>("owns_kv", index);
    layer.values_are_keys = !c.own.of_layer("heads_of", index).number<bool>("has_values");
    layer.v_norm = r.vector("v_norm", a.head_dim);
    layer.scale = r.number<float>("scale");
    layer.sparse_deviations = c.mlp.number_of<float>("sparse_deviations", index);
    layer.input_norm = r.vector("input_norm", s.norm_size());
    layer.mlp_norm = r.vector("mlp_norm", s.norm_size());
    layer.learnt = r.vector("learnt", 3);
    require(layer.learnt || s.activation != Activation::xielu, "xielu: what it learnt is missing");
    read_head_norms(c, r, &layer);
    layer.post_attention_norm = r.vector("post_attention_norm", s.norm_size());
    layer.post_mlp_norm = r.vector("post_mlp_norm", s.norm_size());
    layer.sinks = r.vector("sinks", a.heads);
    if (const Reader recurrent = r.part("recurrent")) {
        require(read == s.hidden, "a layer that reads joined rows has attention");
        require(!r.has("latent"), "a recurrence has no latent attention beside it");
        layer.recurrent = recurrent_of(c.own.of_layer("recurrent_of", index), recurrent, s);
    }
    if (!c.own.number_of<bool>("has_attention", index)) {
        require(!r.has("qkv") && !r.has("o"), "a layer without attention has none");
    } else if (!r.has("latent")) {
        const int kv_parts = !layer.owns_kv ? 0 : layer.values_are_keys ? 1 : 2;
        require(!s.attention_gate || kv_parts == 2, "attention_gate: of layers with keys and values");
        layer.qkv = r.linear("qkv", (s.attention_gate ? 2 : 1) * q_width + kv_parts * kv_width, read);
        layer.o = r.linear("o", s.hidden, q_width);
    } else {
        layer.latent = latent_of(c.attention.part("latent"), r.part("latent"), a);
        layer.qkv = r.linear("qkv", layer.latent->first_width(), read);
        layer.o = r.linear("o", s.hidden, layer.latent->results());
    }
    const Reader mixture = r.part("mixture");
    if (!mixture && !r.has("down")) {
        require(!layer.post_attention_norm && !layer.post_mlp_norm && !s.parallel,
              "a layer without a feed-forward has no norms after its branches");
    } else if (!mixture) {
        layer.mlp = feed_forward_of(r, s, c.own.number_of<int>("mlp_width", index));
    } else {
        require(!s.parallel && s.gate_multiplier == 1.0f && s.mlp_out_scale == 1.0f,
              "mixtures come after the attention, without the factors of dense layers");
        layer.mixture = mixture_of(c.mlp.of_layer("experts_of", index), mixture, s);
    }
    require(own_input > 0 || !r.has("gate"), "gate: there are no inputs of layers");
    if (own_input > 0) {
        layer.gate = gate_of(r.part("gate"), s, own_input);
        require(layer.gate->norm, "gate: its norm is missing");
    }
    return layer;
}

std::optional<LayerInputs> layer_inputs_of(const Reader& r, const Reader& w, const DecoderShape& s) {
    if (!r || !w) {
        return std::nullopt;
    }
    LayerInputs inputs{};
    inputs.width = r.positive("width");
    const int total = r.positive("layers") * inputs.width;
    inputs.multiplier = r.number<float>("multiplier");
    inputs.embedding = w.linear("embedding", r.positive("vocab_size"), total);
    inputs.projection = w.linear("projection", total, s.hidden);
    inputs.norm = w.vector("norm", inputs.width);
    require(inputs.norm, "layer_inputs: the norm is missing");
    return inputs;
}

// `of` is a paceline.models.decoder.Decoder.
void make_decoder(Decoder* self, nb::object of) {
    HaveRead read;
    const Reader r(of, read);
    const Config c(r);
    DecoderWeights w{};
    const DecoderShape shape = w.shape = shape_of(c, r.positive("max_len"));
    w.entry = entry_of(r.part("entry"), c, shape);
    w.layer_inputs = layer_inputs_of(c.own.part("layer_inputs"), r.part("layer_inputs"), shape);
    w.altup = altup_of(c.own.part("altup"), r.part("altup"), shape);
    require(!w.altup || (w.layer_inputs && !shape.layer_norm), "altup: there are no inputs of layers");
    require(!w.layer_inputs || !w.entry,
            "layer_inputs: rows of a decoder that has an entry have none");
    size_t num_recurrent = 0;
    r.each("layers", [&](const Reader& weights) {
        const size_t index = w.layers.size();
        const bool reads_joined = index == 0 && w.entry && w.entry->is_read_joined();
        const int inputs = (reads_joined ? 2 : 1) * shape.hidden;
        const int own_input = w.layer_inputs ? w.layer_inputs->width : 0;
        w.layers.push_back(layer_of(c, weights, int(index), shape, inputs, own_input));
        DecoderLayer& layer = w.layers.back();
        read_local_convs(c.own.part("local_conv"), weights, shape, &layer);
        layer.rotary =
            r.of_layer("rotary", int(index)).rotary(shape.max_len, layer.attention.head_dim);
        if (layer.recurrent) {
            layer.recurrent->index = num_recurrent++;
        }
        if (w.altup) {
            layer.altup = altup_layer_of(weights.part("altup"), shape, *w.altup);
            require(layer.post_attention_norm && layer.post_mlp_norm && layer.has_mlp() &&
                        !layer.mixture,
                    "altup: layers are dense, with norms after both branches");
        }
    });
    require(!w.layers.empty(), "a decoder needs a layer");
    require(!w.layer_inputs || w.layer_inputs->layers() >= static_cast<int>(w.layers.size()),
          "layer_inputs: of fewer layers than there are");
    for (const DecoderLayer& layer : w.layers) {
        require(layer.latent.has_value() == w.is_latent(),
              "all layers have latent attention, or none has");
    }
    w.embedding = r.linear("embedding", shape.vocab, shape.hidden);
    w.head = r.linear("head", shape.num_logits, shape.hidden);
    w.final_norm = r.vector("norm", shape.norm_size());
    w.places = r.places(shape.max_len, shape.hidden);
    w.widest = read.widest;
    w.most_orders = read.most_orders;
    w.keep_alive = kept(read.objects);
    new (self) Decoder(std::move(w));
}

// One layer's keys and values, of any number of blocks.
KvLayer cache_of(const DecoderLayer& layer, const KvArray& k, const KvArray& v) {
    const AttentionShape& a = layer.attention;
    const KvType type = kv_type(k.dtype(), v.dtype());
    const size_t heads = static_cast<size_t>(a.kv_heads);
    const bool latent = layer.latent.has_value();
    require(k.ndim() == 4 && v.ndim() == 4 && k.shape(0) == v.shape(0) && k.shape(1) == heads &&
              v.shape(1) == heads &&
              static_cast<int>(k.shape(2)) == head_elements(type, a.head_dim) &&
              k.shape(3) == TILE && v.shape(2) == TILE &&
              static_cast<int>(v.shape(3)) == (latent ? 0 : head_elements(type, a.v_stride)),
          "the cache has another shape than the decoder needs");
    return {k.data(), latent ? nullptr : v.data(), type};
}

// The arrays [blocks, kv_heads, ...] that each layer reads; None where it has no attention. Where no
// layer has, `num_blocks` says how many blocks there are.
void set_cache(Decoder& decoder, nb::list keys, nb::list values, int num_blocks) {
    std::vector<KvLayer> caches;
    const std::vector<DecoderLayer>& layers = decoder.weights().layers;
    require(keys.size() == layers.size() && values.size() == layers.size(),
          "the cache has another number of layers than the decoder");
    size_t blocks = 0;
    KvType type{};
    for (size_t i = 0; i < layers.size(); ++i) {
        if (!layers[i].has_attention()) {
            caches.push_back({});
            continue;
        }
        const auto k = nb::cast<KvArray>(keys[i], false), v = nb::cast<KvArray>(values[i], false);
        caches.push_back(cache_of(layers[i], k, v));
        require(blocks == 0 || (k.shape(0) == blocks && caches[i].type == type),
              "the layers' caches differ in their blocks or their type");
        blocks = k.shape(0);
        type = caches[i].type;
    }
    num_blocks = blocks ? static_cast<int>(blocks) : num_blocks;
    decoder.set_cache(std::move(caches), num_blocks, kept(nb::make_tuple(keys, values)));
}

void set_layers(Decoder& decoder, const nb::object& object) {
    LayerStream& stream = nb::cast<LayerStream&>(object);
    require(stream.places().size() >= decoder.weights().layers.size(),
          "the stream has fewer layers than the decoder");
    decoder.set_stream(&stream, kept(object));
}

void set_experts(Decoder& decoder, const nb::object& object) {
    ExpertCache* cache = nb::cast<ExpertCache*>(object);
    for (size_t index = 0; index < decoder.weights().layers.size(); ++index) {
        const auto& mixture = decoder.weights().layers[index].mixture;
        const size_t number = cache->number(index);
        require(number == 0 || (mixture && mixture->experts.size() == number),
              "the cache has another number of experts than a layer");
    }
    decoder.set_experts(cache, kept(object));
}

// conv [layers, slots, kernel - 1, channels], state [layers, slots, heads, state of a head], logs
// [layers, lanes, nodes, numbers of a row] and due [layers, lanes].
void set_states(Decoder& decoder, States conv, States state, States log_conv, States log_key,
                States log_added, States log_decay, Array<uint8_t, 2> due) {
    const RecurrentLayer* layer = decoder.weights().recurrent();
    require(layer, "the decoder has no recurrent layer");
    const RecurrentShape& s = layer->shape;
    const size_t layers = decoder.weights().num_recurrent(), slots = conv.shape(1);
    const size_t lanes = due.shape(1), nodes = log_conv.shape(2), heads = static_cast<size_t>(s.heads);
    const auto is = [](const States& x, size_t a, size_t b, size_t c, size_t d) {
        return x.shape(0) == a && x.shape(1) == b && x.shape(2) == c && x.shape(3) == d;
    };
    const auto wide = [](int x) { return static_cast<size_t>(x); };
    require(is(conv, layers, slots, wide(layer->conv.kernel) - 1, wide(layer->conv.channels)) &&
              is(state, layers, slots, heads, s.state_floats() / heads) &&
              is(log_conv, layers, lanes, nodes, wide(layer->conv.channels)) &&
              is(log_key, layers, lanes, nodes, wide(s.keys())) &&
              is(log_added, layers, lanes, nodes, wide(s.inner())) &&
              is(log_decay, layers, lanes, nodes, heads) && due.shape(0) == layers,
          "the states have another shape than the decoder needs");
    const LayerStates first{conv.data(), state.data(), log_conv.data(), log_key.data(),
                            log_added.data(), log_decay.data(), due.data(),
                            static_cast<int>(slots), static_cast<int>(lanes),
                            static_cast<int>(nodes)};
    decoder.set_states(first, kept(nb::make_tuple(conv, state, log_conv, log_key, log_added,
                                                  log_decay, due)));
}

Streams streams_of(const Decoder& decoder, const Batch& batch, std::optional<Rows> inputs,
                   std::vector<int> taps, Features features) {
    const size_t rows = static_cast<size_t>(batch.num_rows());
    const size_t width = static_cast<size_t>(decoder.weights().shape.hidden);
    require(inputs.has_value() == decoder.weights().entry.has_value(), "inputs are for decoders that have an entry");
    require(!inputs || (inputs->shape(0) == rows && inputs->shape(1) == width),
          "the inputs have another shape than rows, hidden_size");
    for (const int tap : taps) {
        require(tap >= 0 && tap <= static_cast<int>(decoder.weights().layers.size()) + 1,
              "a tap must be 0 up to one more than the number of layers");
    }
    require(taps.empty() || (features.shape(0) == rows && features.shape(1) == taps.size() &&
                           features.shape(2) == width),
          "the features have another shape than rows, taps, hidden_size");
    return {inputs ? inputs->data() : nullptr, std::move(taps), features.data()};
}

NewLogits forward(Decoder& decoder, const Batch& batch, std::optional<Rows> inputs,
               std::vector<int> taps, Features features) {
    const Streams streams = streams_of(decoder, batch, inputs, std::move(taps), features);
    const size_t samples = batch.sample_rows.size();
    const size_t columns = static_cast<size_t>(decoder.weights().shape.num_logits);
    float* memory = new float[samples * columns + TILE];
    nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    {
        nb::gil_scoped_release release;
        decoder.forward(batch, streams, memory);
    }
    return NewLogits(memory, {samples, columns}, owner);
}

void write_kv(Decoder& decoder, const Batch& batch, Rows inputs) {
    require(!decoder.weights().entry, "rows of a decoder that has an entry are more than their inputs");
    require(!decoder.weights().is_latent(), "latents are not written without their queries");
    require(!decoder.weights().recurrent(), "recurrent layers have no keys and values");
    require(inputs.shape(0) == static_cast<size_t>(batch.num_rows()) &&
              inputs.shape(1) == static_cast<size_t>(decoder.weights().shape.hidden),
          "the inputs have another shape than rows, hidden_size");
    nb::gil_scoped_release release;
    decoder.write_kv(batch, inputs.data());
}

Tokens forward_greedy(Decoder& decoder, const Batch& batch, std::optional<Rows> inputs,
                      std::vector<int> taps, Features features) {
    const Streams streams = streams_of(decoder, batch, inputs, std::move(taps), features);
    const size_t samples = batch.sample_rows.size();
    int32_t* memory = new int32_t[samples + 1];
    nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    {
        nb::gil_scoped_release release;
        decoder.forward_greedy(batch, streams, memory);
    }
    return Tokens(memory, {samples}, owner);
}

}  // namespace

void bind_forward(nb::module_& module) {
    nb::class_<Decoder>(module, "Decoder")
        .def("__init__", &make_decoder, nb::arg("decoder"))
        .def("set_stream", [](Decoder& decoder, nb::object stream) {
            if (nb::isinstance<ExpertCache>(stream)) {
                set_experts(decoder, stream);
            } else {
                set_layers(decoder, stream);
            }
        })
        .def("set_cache", &set_cache, nb::arg("keys"), nb::arg("values"),
             nb::arg("num_blocks") = 0)
        .def("set_states", &set_states, nb::arg("conv").noconvert(), nb::arg("state").noconvert(),
             nb::arg("log_conv").noconvert(), nb::arg("log_key").noconvert(),
             nb::arg("log_added").noconvert(), nb::arg("log_decay").noconvert(),
             nb::arg("due").noconvert())
        .def("pack", &pack, nb::rv_policy::take_ownership)
        .def("adapt", &adapt)
        .def("forward", &forward, nb::arg("batch"), nb::arg("inputs").none(), nb::arg("taps"),
             nb::arg("features").noconvert())
        .def_prop_ro("experts_read", [](const Decoder& decoder) { return decoder.experts().read; })
        .def_prop_ro("experts_fetched",
                     [](const Decoder& decoder) { return decoder.experts().fetched; })
        .def_prop_ro("chosen_experts", [](const Decoder& decoder) { return decoder.experts().chosen; })
        .def("write_kv", &write_kv, nb::arg("batch"), nb::arg("inputs"))
        .def("forward_greedy", &forward_greedy, nb::arg("batch"), nb::arg("inputs").none(),
             nb::arg("taps"), nb::arg("features").noconvert());
}

}  // namespace paceline
