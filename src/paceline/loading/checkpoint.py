"""One way to open a model: a folder, a GGUF file, a name, or a hub id.

Owns what a source *is*, which of its tensors is the head, and what its own MTP layer is as a
checkpoint; the formats are read elsewhere. Builds no decoder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from paceline.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.core.files import (
    HEAD_BYTES,
    check_fetched,
    checked_path,
    read_as,
    read_json,
    read_text,
)
from paceline.loading.catalogue import similar_name
from paceline.loading.fetching import hub_place, is_hub_id, named_model
from paceline.loading.gguf.file import MAGIC, load_gguf
from paceline.loading.quantised.methods import QuantisedTensors, schemes_of, split_quantisation
from paceline.loading.safetensors_files import SafetensorsFolder, base_names
from paceline.models.config import EntryConfig, ModelConfig
from paceline.models.decoder_reader import JOIN
from paceline.models.families import FAMILIES
from paceline.models.families.config_json import (
    config_from_hf,
    layout_from_hf,
    with_tied_embeddings,
)
from paceline.models.families.family import PLAIN, Layout
from paceline.models.families.fields import Fields
from paceline.models.families.layouts import (
    ALTUP_STACK,
    ExpertTensors,
    GroupedHeads,
    LaidOutTensors,
    LatentTensors,
    RecurrentTensors,
)
from paceline.models.heads import EXPERTS, LATENT_ATTENTION, LINEAR_ATTENTION, head_kind, mtp_part
from paceline.models.pooling import folder_pooling
from paceline.models.tensor_reader import PackedFormat, folder_format
from paceline.tensors.arrays import Array, floats
from paceline.tensors.stored import Place, PlacedTensors, StoredTensors, renamed
from paceline.text.chat_templates import MAX_TEMPLATE_CHARS
from paceline.text.tokenizer import Tokenizer
from paceline.text.tokenizer_files import has_tokenizer_files

if TYPE_CHECKING:
    from paceline.models.decoder import Decoder


log = logging.getLogger(__name__)
View = Callable[[StoredTensors], StoredTensors]
"""Makes tensors appear in another form; each is read when it is looked up."""
LOAD_FORMATS = ("mmap", "memory")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it was found.

    Attributes:
        config: its shape and flags.
        tensors: lazy mapping from Hugging Face names to tensors; a lookup of what is not there
            raises :class:`ModelLoadError`.
        tokenizer: None where there is none, or it was not asked for.
        name: for banners and listings: the folder's, the file's, the catalogue's, or the hub id.
        pooling: how it was trained to make one vector of a text; empty where no file says it.
        generation: the model's own generation defaults, by their Hugging Face names.
        card: sampling that its makers' card recommends, where the model has a name.
        hf_config: the configuration as a ``config.json`` would say it of unquantised weights, dtype
            included.
        is_quantised: whether most of the weights are stored in quantised formats.
        main_format: of a GGUF file, the one that holds most of the weights, such as ``Q4_1``.
        packed: how ``paceline convert`` packed the weights; None where it did not.
        files: that say what the weights are; none where they were given in memory.
        decoders: those that engines made of it and still use, by how they compute.
    """

    config: ModelConfig
    tensors: Mapping[str, Array]
    tokenizer: Tokenizer | None
    name: str
    generation: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, float] = field(default_factory=dict)
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    is_quantised: bool = False
    main_format: str = ""
    packed: PackedFormat | None = None
    pooling: str = ""
    files: tuple[Path, ...] = ()
    decoders: WeakValueDictionary[object, Decoder] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )

    @property
    def num_bytes(self) -> int:
        """Of the weights as they are stored."""
        if isinstance(self.tensors, StoredTensors):
            return self.tensors.num_bytes()
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def arithmetic(self, dtype: str) -> str:
        """A resolved ``dtype`` for people: in place of ``file`` the format that the file has."""
        return (self.main_format if dtype == "file" else "") or dtype

    def first_layers(self, count: int) -> Checkpoint:
        """The model's first layers as a model of their own."""
        tensors = self._tensors_of(0, count)
        return replace(self, config=self.config.first_layers(count), tensors=tensors)

    def stage(self, start: int, stop: int) -> Checkpoint:
        """Some of the model's layers, as :meth:`ModelConfig.stage` has them, and both ends."""
        tensors = self._tensors_of(start, stop)
        return replace(self, config=self.config.stage(start, stop), tensors=tensors)

    def _tensors_of(self, start: int, stop: int) -> Mapping[str, Array]:
        """Those of some layers, counted from 0 on, and what belongs to no layer."""
        kept, names = range(start, stop), dict[str, str]()
        for name in self.tensors:
            layer = _LAYER.match(name)
            beyond = layer is not None and int(layer[1]) >= self.config.num_layers
            if layer is None or (beyond and not start):  # an MTP layer stays with the first ones
                names[name] = name
            elif int(layer[1]) in kept:
                names[f"model.layers.{int(layer[1]) - start}.{layer[2]}"] = name
        tensors = self.tensors
        if not isinstance(tensors, StoredTensors):
            return {name: tensors[there] for name, there in names.items()}
        return renamed(tensors, names) if start else tensors.only(names)


def load_checkpoint(
    source: str | Path, *, load_format: str = "mmap", with_tokenizer: bool = True
) -> Checkpoint:
    """Open a model.

    Args:
        source: a folder with ``config.json`` and safetensors, a GGUF file or shard, a name that
            ``paceline models`` lists, or ``org/name`` or ``org/name:QUANTISATION`` of a model on
            the hub. What exists on disk has priority; what is not there is fetched.
        load_format: ``mmap`` maps tensors when they are looked up; ``memory`` reads all at once.
        with_tokenizer: whether to read the tokenizer, if there is one.

    Raises:
        ConfigError: ``load_format`` is unknown, or the source needs an extra not installed.
        ModelLoadError: nothing is there, or what is there is incomplete or corrupt.
        UnsupportedModelError: the model's architecture is not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    in_memory = load_format == "memory"
    entry = named_model(source) if isinstance(source, str) else None
    path, name = (Path(source), "") if entry is None else (entry.place, entry.name)
    path, is_there = checked_path(path, ModelLoadError)
    if not is_there and isinstance(source, str) and is_hub_id(source):
        path, name = hub_place(source), source
    with read_as(ModelLoadError, path):
        if path.is_dir():
            found = _from_folder(path, name or path.resolve().name, in_memory, with_tokenizer)
        elif path.is_file():
            found = load_file(path, name or path.name, in_memory, with_tokenizer)
            _check_is_model(found.hf_config, found.name, path)
        else:
            raise _unknown(source)
    if entry is None:
        return found
    if found.tokenizer is not None:
        found.tokenizer.chat_opening = entry.chat_opening
        if entry.tool_template:
            source = read_text(Path(entry.tool_template), MAX_TEMPLATE_CHARS)
            found.tokenizer.set_tool_template(source)
    return replace(found, card=entry.sampling)


def _unknown(source: str | Path) -> ModelLoadError:
    return ModelLoadError(
        f"there is no model {source}{similar_name(str(source))}. A model is a folder with "
        "config.json and safetensors, a GGUF file, a name that `paceline models` lists, or a hub "
        "id such as org/name (for a GGUF file on the hub org/name:Q4_K_M)"
    )


def _from_folder(folder: Path, name: str, in_memory: bool, with_tokenizer: bool) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a model's folder")
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    _check_is_model(raw, name, folder)
    files = SafetensorsFolder(folder, in_memory=in_memory)
    raw = _whole(raw, files, name)
    config, layout = config_from_hf(raw), layout_from_hf(raw)
    if config.tie_embeddings:
        name_embedding(files, layout)
    packed = folder_format(files.metadata, folder)
    tensors: StoredTensors = files
    for view in _folder_views(config, layout, quantisation, packed):
        tensors = view(tensors)
    raw = with_stored_head(raw, tensors) if config.tie_embeddings else raw
    if not _says_dtype(raw) and EMBEDDING in tensors:
        raw = {**raw, "dtype": str(tensors[EMBEDDING].dtype)}
    config = config_from_hf(raw)
    if config.tie_embeddings:  # what may be stored as the head is the same matrix
        tensors = tensors.only(name for name in tensors if name != HEAD)
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ends = Fields(generation).token_ids("eos_token_id", config.vocab_size)
    config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
    tokenizer = _tokenizer(folder) if with_tokenizer else None
    return Checkpoint(
        config,
        tensors,
        tokenizer,
        name,
        generation,
        hf_config=raw,
        is_quantised=quantisation is not None,
        packed=packed,
        pooling=folder_pooling(folder),
        files=(*files.paths, folder / "config.json"),
    )


def _folder_views(
    config: ModelConfig,
    layout: Layout,
    quantisation: Mapping[str, Any] | None,
    packed: PackedFormat | None,
) -> Iterator[View]:
    """What makes a folder's tensors those that a decoder reads, one after another.

    A packed folder's linears are already in the common form.
    """
    if config.mlp.experts:
        number = config.mlp.experts.number
        yield lambda tensors: ExpertTensors(tensors, number, layout)
    if quantisation is not None:
        yield lambda tensors: QuantisedTensors(tensors, schemes_of(quantisation))
    if layout != PLAIN and packed is None:
        yield lambda tensors: LaidOutTensors(tensors, layout, config)
    if config.attention.latent:
        yield lambda tensors: LatentTensors(tensors, config)
    if config.recurrent and packed is None:
        yield lambda tensors: RecurrentTensors(tensors, config)


def _gguf_views(config: ModelConfig, layout: Layout) -> Iterator[View]:
    """The same of a GGUF file's tensors."""
    experts, altup = config.mlp.experts, config.altup
    if layout != PLAIN:
        yield lambda tensors: LaidOutTensors(tensors, layout, config)
    if experts:
        yield lambda tensors: ExpertTensors(tensors, experts.number)
    if altup:
        yield lambda tensors: ExpertTensors(tensors, altup.streams - 1, stack=ALTUP_STACK)
    if config.attention.latent:
        yield lambda tensors: LatentTensors(tensors, config)
    if FAMILIES[config.architecture].gguf.tiled_heads:
        yield lambda tensors: GroupedHeads(tensors, config)
    if config.recurrent or config.attention.gate:  # of an MTP layer alone
        yield lambda tensors: RecurrentTensors(tensors, config)


def _whole(raw: dict[str, Any], files: SafetensorsFolder, name: str) -> dict[str, Any]:
    """The configuration of a model whose tensors are named as a whole model's from here on.

    The embedding stands in for a head that was not saved, as in GGUF files.
    """
    names = base_names(files)
    for stored, plain in names.items():
        files.rename(stored, plain)
    if not names or HEAD in files or config_from_hf(raw).tie_embeddings:
        return raw
    log.warning("%s was saved without its head: it gives embeddings, but no sensible text", name)
    return with_tied_embeddings(raw)


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's; without any file of one the model still runs on token ids."""
    if has_tokenizer_files(folder):
        return Tokenizer.from_folder(folder)
    log.warning(
        "%s has no tokenizer.json: it takes and gives token ids only, not text; transformers' "
        "save_pretrained of the model's fast tokenizer writes it",
        folder,
    )
    return None


def _says_dtype(raw: Mapping[str, Any]) -> bool:
    parts = (raw, raw.get("text_config") or {})
    return any(part.get(key) for part in parts for key in ("dtype", "torch_dtype"))


def _check_is_model(raw: Mapping[str, Any], name: str, path: Path) -> None:
    head = head_kind(raw)
    if head is not None:
        raise UnsupportedModelError(
            f"{name} is a head, which drafts for the model that it was trained for: run that model "
            f"with --method {head} --draft {path}"
        )


def load_file(path: Path, name: str, in_memory: bool, with_tokenizer: bool) -> Checkpoint:
    """Open a GGUF file of a model, or of a head, which has no tokenizer of its own.

    Raises: as :func:`load_checkpoint`.
    """
    with read_as(ModelLoadError, path), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    check_fetched(path, head)
    if not head.startswith(MAGIC):
        raise ModelLoadError(
            f"{path} is not a GGUF file; for safetensors, give the folder that holds them and "
            "config.json"
        )
    found = load_gguf(path, in_memory=in_memory, with_tokenizer=with_tokenizer)
    config = found.config
    tensors: StoredTensors = found.tensors
    for view in _gguf_views(config, found.layout):
        tensors = view(tensors)
    # Not the name in the metadata, which is often that of a training run.
    return Checkpoint(
        config,
        tensors,
        found.tokenizer,
        name,
        found.sampling,
        hf_config=found.hf_config,
        is_quantised=found.tensors.is_quantised,
        main_format=found.tensors.main_format,
        pooling=found.pooling,
        files=found.tensors.paths,
    )


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 1024  # at once


def name_embedding(files: SafetensorsFolder, layout: Layout) -> None:
    """Call a tied matrix that is stored as the head alone by the embedding's name."""
    stored = {layout.plain(name): name for name in files}
    if EMBEDDING not in stored and HEAD in stored:
        files.rename(stored[HEAD], EMBEDDING)


def with_stored_head(raw: dict[str, Any], tensors: StoredTensors) -> dict[str, Any]:
    """A configuration that ties the head, or the same without that where the head differs."""
    if EMBEDDING not in tensors or HEAD not in tensors or _is_embedding(tensors):
        return raw
    log.warning(
        "the configuration says tie_word_embeddings, but lm_head.weight is not "
        "model.embed_tokens.weight: both are used, as transformers does"
    )
    return with_tied_embeddings(raw, tied=False)


def _is_embedding(tensors: StoredTensors) -> bool:
    embedding, head = tensors[EMBEDDING], tensors[HEAD]
    starts = range(0, len(embedding), _COMPARED_ROWS)
    is_equal = embedding.shape == head.shape and all(
        np.array_equal(floats(embedding[at:stop]), floats(head[at:stop]))
        for at, stop in zip(starts, (*starts[1:], None), strict=True)
    )
    for name in (EMBEDDING, HEAD):
        tensors.release(name)
    return is_equal


def mtp_head(model: Checkpoint) -> Checkpoint | None:
    """A decoder with the entry ``mtp``; None without such a layer. Not all kinds can be run."""
    part = mtp_part(model.tensors)
    if part is None:
        return None
    expert = part.tensor_of(EXPERTS)
    unlike = part.tensor_of(LINEAR_ATTENTION)
    unlike = unlike or (None if model.config.mlp.experts else expert)
    unlike = unlike or (None if model.config.attention.latent else part.tensor_of(LATENT_ATTENTION))
    if unlike is not None:
        raise UnsupportedModelError(
            f"the MTP layer of {model.name} is a mixture of experts or has an attention (it has "
            f"{unlike}) that the model itself has not, or of a kind that does not run here"
        )
    assert isinstance(model.tensors, StoredTensors)
    shape = _shape(model.config, is_mixture=expert is not None)
    tensors = _renamed(model.tensors, part.names, shape)
    if part.hidden_first:
        tensors = _swapped(tensors, f"{JOIN}.weight")
    quantised = model.is_quantised
    return Checkpoint(shape, tensors, None, model.name, is_quantised=quantised, packed=model.packed)


def _renamed(tensors: StoredTensors, names: Mapping[str, str], shape: ModelConfig) -> StoredTensors:
    """The tensors under the names that a decoder reads.

    Of a quantised checkpoint the parts of weights are renamed, and put together afterwards: those
    of MTP layers were not, since the target does without them.
    """
    if not isinstance(tensors, QuantisedTensors | LatentTensors | RecurrentTensors):
        return renamed(tensors, names)
    part = mtp_part(tensors.stored)
    assert part is not None
    if not isinstance(tensors, QuantisedTensors):
        return type(tensors)(_renamed(tensors.stored, part.names, shape), shape)
    return QuantisedTensors(renamed(tensors.stored, part.names), tensors.schemes)


def _swapped(tensors: StoredTensors, name: str) -> StoredTensors:
    """The tensors, in one of which the inputs' two halves change places."""
    places = {each: Place(each) for each in tensors}
    if name in tensors and len(shape := tensors.shape_of(name)) == 2:
        columns = np.roll(np.arange(shape[1]), shape[1] // 2)
        places[name] = Place(name, columns=columns)
    return PlacedTensors(tensors, places)


def _shape(model: ModelConfig, is_mixture: bool) -> ModelConfig:
    """One layer of the model, which sees the whole text where some of the model's do."""
    experts = model.mlp.experts if is_mixture else None
    sees_all = {"attention.sliding_window": 0, "positions.local_rope": None}
    traits = {
        "num_layers": 1,
        "tie_embeddings": False,
        "recurrent": None,
        "entry": EntryConfig("mtp"),
        "mlp.experts": experts and replace(experts, sparse_layers=()),
        "attention.sliding_layers": (),
        **(sees_all if model.attention.sliding_layers else {}),
    }
    return model.with_traits(traits)


SAMPLED_MATRICES = 48
"""Whose first numbers are part of a model's fingerprint."""
SAMPLED_NUMBERS = 64
_REORDERED = ("q_proj.weight", "k_proj.weight")
"""Whose rows a GGUF file keeps in another order, so that one is not had without all."""


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """Hex hash of every tensor's name, type and shape, and of some matrices' first numbers.

    Reads a page or so of at most :data:`SAMPLED_MATRICES`: a fraction of a second for a model of
    any size.
    """
    digest, tensors, matrices = xxhash.xxh3_128(), checkpoint.tensors, []
    for name in sorted(tensors):
        kind, shape = _type_and_shape(tensors, name)
        digest.update(f"{name} {kind} {shape};".encode())
        if len(shape) > 1 and not name.endswith(_REORDERED):
            matrices.append(name)
    # By their names' hashes: of every layer and part some, whatever the order of names.
    matrices.sort(key=lambda name: xxhash.xxh3_64_hexdigest(name.encode()))
    for name in matrices[:SAMPLED_MATRICES]:
        first = tensors.rows(name, 0, 1) if isinstance(tensors, StoredTensors) else tensors[name]
        numbers = np.ascontiguousarray(first.reshape(-1)[:SAMPLED_NUMBERS])
        digest.update(numbers.view(np.uint8).data)
    return digest.hexdigest()


def _type_and_shape(tensors: Mapping[str, Array], name: str) -> tuple[str, tuple[int, ...]]:
    if isinstance(tensors, StoredTensors):
        return tensors.type_of(name), tensors.shape_of(name)
    return str(tensors[name].dtype), tuple(tensors[name].shape)
