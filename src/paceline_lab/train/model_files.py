"""Models in the Hugging Face layout, in and out. Knows no training loop.

A model that is trained is float32 tensors under their checkpoint names plus the ``config.json`` it
will be written with; the decoder's shape is always derived from that one description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.core.errors import ModelLoadError, TrainingError
from paceline.core.files import read_as, read_json, whole_file, write_text
from paceline.loading.checkpoint import HEAD, name_embedding, with_stored_head
from paceline.loading.fetching import model_path
from paceline.loading.quantised.integers import is_packable, packed, packed_config
from paceline.loading.safetensors_files import INDEX_FILE, SafetensorsFolder, shards_by_tensor
from paceline.loading.safetensors_files import SINGLE_FILE as WEIGHTS
from paceline.models.config import ModelConfig
from paceline.models.families.config_json import config_from_hf, layout_from_hf
from paceline.models.families.family import PLAIN
from paceline.models.tensor_reader import check_floats, is_harmless
from paceline.models.weights import HEAD_TOKENS
from paceline.tensors.arrays import floats
from paceline.tensors.torch_arrays import to_numpy, to_torch
from paceline.text.tokenizer_files import read_tokenizer_folder, tokenizer_files
from paceline_lab.train.checkpoint import FILE_NAME as STATE
from paceline_lab.train.configs import PACKED_BITS, ModelShape

Tensor = torch.Tensor
FIXED = (HEAD_TOKENS,)
EMBEDDING = "model.embed_tokens.weight"
HYBRID = "qwen3_5_text"
ROUTER = ".mlp.gate.weight"
ONE_EXPERT = re.compile(r"\.mlp\.experts\.0\.gate_proj\.weight$")
GENERATION, CARD = "generation_config.json", "README.md"


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model in memory, tensors under their checkpoint names.

    Attributes:
        raw: the ``config.json``.
        params: float32; training changes them in place.
        fixed: what belongs to the model and is not trained.
    """

    raw: Mapping[str, Any]
    params: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return config_from_hf(self.raw)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.fixed}

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.params.values())

    def to(self, device: str) -> TrainableModel:
        """The same tensors where they are to be trained."""
        params, fixed = ({n: t.to(device) for n, t in x.items()} for x in (self.params, self.fixed))
        return TrainableModel(self.raw, params, fixed)


def new_model(shape: ModelShape, vocab_size: int, eos_token_id: int, seed: int) -> TrainableModel:
    """Random weights: normal with deviation 0.02, branch outputs scaled by depth, norms one."""
    raw = shape.hf_config(vocab_size, eos_token_id)
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, size in _parameter_shapes(shape, vocab_size).items():
        if len(size) == 1:
            params[name] = torch.ones(size)
            continue
        deviation = 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= (2 * shape.num_layers) ** 0.5
        params[name] = torch.empty(size).normal_(0.0, deviation, generator=generator)
    return TrainableModel(raw, params)


def _parameter_shapes(shape: ModelShape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    d, width, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, d)}
    for index in range(shape.num_layers):
        p = f"model.layers.{index}."
        sizes |= {
            p + "input_layernorm.weight": (d,),
            p + "self_attn.q_proj.weight": (q, d),
            p + "self_attn.k_proj.weight": (kv, d),
            p + "self_attn.v_proj.weight": (kv, d),
            p + "self_attn.q_norm.weight": (dim,),
            p + "self_attn.k_norm.weight": (dim,),
            p + "self_attn.o_proj.weight": (d, q),
            p + "post_attention_layernorm.weight": (d,),
        }
        parts = [p + "mlp."]
        if shape.num_experts:
            sizes[p + "mlp.gate.weight"] = (shape.num_experts, d)
            parts = [f"{p}mlp.experts.{expert}." for expert in range(shape.num_experts)]
        for part in parts:
            sizes |= {
                part + "gate_proj.weight": (width, d),
                part + "up_proj.weight": (width, d),
                part + "down_proj.weight": (d, width),
            }
    sizes["model.norm.weight"] = (d,)
    if not shape.tie_embeddings:
        sizes["lm_head.weight"] = (vocab_size, d)
    return sizes


def load_model(folder: str | Path, hybrid: bool = False) -> TrainableModel:
    """The weights of a model's folder, or of a name, as float32, to train on or to teach.

    Args:
        hybrid: whether it may be one of Qwen3.5's form, dense.

    Raises:
        ModelLoadError: its configuration or its weights cannot be read.
        TrainingError: it is of a family that cannot be trained, or a mixture whose experts are not
            matrices of their own.
    """
    folder = model_path(folder)
    raw = read_json(folder / "config.json")
    config = config_from_hf(raw)
    fits = config.is_like_llama or (hybrid and raw.get("model_type") == HYBRID)
    if not fits or layout_from_hf(raw) != PLAIN:
        raise TrainingError(
            f"{folder} is of the family {config.architecture}, which cannot be trained here; "
            "families whose layers and checkpoints are like Llama's can"
        )
    tensors = SafetensorsFolder(folder)
    own = raw.get("model_type") == "qwen3_moe" and any(map(ONE_EXPERT.search, tensors))
    if config.mlp.experts and not own:
        raise TrainingError(
            f"{folder} is a mixture that is not of Qwen3's form with each expert's matrices by "
            "themselves, which cannot be trained here; paceline train lm --num-experts makes such"
        )
    if config.tie_embeddings:
        name_embedding(tensors, PLAIN)
        raw = with_stored_head(raw, tensors)
    # Copies, because a file that is mapped here may be replaced or trained in place.
    fixed = {name: to_torch(tensors[name].copy()) for name in tensors if name in FIXED}
    trained = [name for name in tensors if name not in FIXED and not is_harmless(name)]
    for name in trained:
        check_floats(name, tensors[name], tensors.type_of(name))
    params = {name: to_torch(floats(tensors[name]).copy()) for name in trained}
    if config_from_hf(raw).tie_embeddings:
        params.pop(HEAD, None)
    return TrainableModel(raw, params, fixed)


def load_tokenizer(folder: str | Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder or a name; ModelLoadError where it has none."""
    return read_tokenizer_folder(model_path(folder)).backend


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest id of a ``tokenizers.Tokenizer``, which may leave ids out."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_output(folder: str | Path, overwrite: bool) -> Path:
    """The output folder, created; ``TrainingError`` unless that may be done."""
    path = Path(folder)
    if _holds_model(path) and not overwrite:
        raise TrainingError(f"{path} already holds a model; choose another output or overwrite it")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _holds_model(folder: Path) -> bool:
    """Whether a model is there besides what a training that was interrupted has left."""
    is_begun = (folder / STATE).is_file()
    names = (INDEX_FILE,) if is_begun else (INDEX_FILE, "config.json")
    if any((folder / name).exists() for name in names):
        return True
    return any(path.name != STATE for path in folder.glob("*.safetensors"))


def save_model(
    folder: Path,
    model: TrainableModel,
    tokenizer_from: Path | None,
    weights_dtype: str,
    card: str,
    begun_from: str | None = None,
) -> None:
    """Write config, weights, generation config and model card; the weights last.

    Args:
        tokenizer_from: the folder of a tokenizer that is written too.
        begun_from: the folder of the model that was continued, whose generation config is kept.

    Raises:
        TrainingError: a file cannot be written.
    """
    raw = {**model.raw, "dtype": weights_dtype}
    raw.pop("torch_dtype", None)
    if weights_dtype in PACKED_BITS:
        config = packed_config(PACKED_BITS[weights_dtype])
        raw |= {"dtype": "bfloat16", "quantization_config": config}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation: dict[str, Any] = {name: raw[name] for name in ids if name in raw}
    with suppress(ModelLoadError):  # there is none, or a damaged one
        generation |= read_json(Path(begun_from) / GENERATION) if begun_from else {}
    _write(folder / "config.json", json.dumps(raw, indent=2, sort_keys=True) + "\n")
    if generation:
        _write(folder / GENERATION, json.dumps(generation, indent=2, sort_keys=True) + "\n")
    _write(folder / CARD, card)
    if tokenizer_from is not None:
        _copy_tokenizer(tokenizer_from, folder)
    model = model.to("cpu")
    tensors = {**_stored(model.params, weights_dtype), **model.fixed}
    with whole_file(folder / WEIGHTS, TrainingError) as partial:
        save_file(tensors, partial, {"format": "pt"})
    _remove_shards(folder)


def _remove_shards(folder: Path) -> None:
    """Of the model that was overwritten: with its index they would be read in place of this one."""
    index, shards = folder / INDEX_FILE, set[str]()
    with suppress(ModelLoadError):  # of a damaged one
        shards = set(shards_by_tensor(index).values()) - {WEIGHTS}
    for name in (INDEX_FILE, *shards):
        (folder / name).unlink(missing_ok=True)


def _stored(params: Mapping[str, Tensor], weights_dtype: str) -> dict[str, Tensor]:
    """What is written of parameters: in 8 or 4 bits the linears' weights alone."""
    bits = PACKED_BITS.get(weights_dtype)
    kind = torch.float32 if weights_dtype == "float32" else torch.bfloat16
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        weight = to_numpy(param)
        exact = name == EMBEDDING or name.endswith(ROUTER)
        if bits is not None and not exact and is_packable(weight):
            tensors |= {n: to_torch(array) for n, array in packed(name, weight, bits).items()}
        else:
            tensors[name] = param.detach().to(kind).contiguous()
    return tensors


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for path in tokenizer_files(source):
        copied = folder / path.relative_to(source)
        if path.resolve() != copied.resolve():
            _copy(path, copied)


def _copy(source: Path, path: Path) -> None:
    with read_as(TrainingError, source):
        data = source.read_bytes()
    with whole_file(path, TrainingError, make_folder=True) as partial:
        partial.write_bytes(data)


def _write(path: Path, text: str) -> None:
    write_text(path, text, TrainingError)
