"""The tokenizer files of a model folder. Knows their names and keys, and neither text nor ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import ModelLoadError
from paceline.models.fim import GGUF_ROLES
from paceline.models.json_file import read_json, read_text

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 4 << 20
_PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", *GGUF_ROLES)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What the files say; the arguments of :class:`~paceline.models.tokenizer.Tokenizer`."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    piece_scores: Mapping[str, float] | None = None


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer, of whatever kind."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _PATTERNS)


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and the template files of a folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there (transformers' "
            "save_pretrained writes it)"
        )
    backend = backend_from_json(read_text(path, _MAX_TOKENIZER_BYTES), str(path))
    config = _optional_json(folder / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    return TokenizerParts(
        backend,
        _special_tokens(_optional_json(folder / "special_tokens_map.json"), config),
        _templates(folder, config),
        add_bos if isinstance(add_bos, bool) else None,
        _piece_scores(config),
    )


def write_tokenizer_folder(folder: Path, parts: TokenizerParts) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, to be read back as they were."""
    config: dict[str, Any] = dict(parts.special_tokens)
    if parts.add_bos_token is not None:
        config["add_bos_token"] = parts.add_bos_token
    if parts.piece_scores is not None:
        config["piece_scores"] = dict(parts.piece_scores)
    if parts.chat_templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in parts.chat_templates.items()
        ]
    (folder / "tokenizer.json").write_text(parts.backend.to_str(), encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def backend_from_json(text: str, where: str) -> tokenizers.Tokenizer:
    """Build the encoder, whatever it raises when the text is not one becoming our error."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises plain Exception, and its panics derive from BaseException alone.
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ModelLoadError(f"{where} is not a valid tokenizer: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _piece_scores(config: dict[str, Any]) -> dict[str, float] | None:
    """Scores that :func:`write_tokenizer_folder` has put among the other keys."""
    scores = config.get("piece_scores")
    if scores is None:
        return None
    if not isinstance(scores, dict) or not all(isinstance(s, int | float) for s in scores.values()):
        raise ModelLoadError("piece_scores in tokenizer_config.json must give each piece a number")
    return scores


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Role -> token; later sources win. A token is a string or an object with its content."""
    found = {}
    for source in sources:
        for role in _ROLES:
            value = source.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[role] = value
    return found


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template; files of their own have priority over the configuration's entry."""
    files = {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path, _MAX_TEMPLATE_BYTES) for name, path in files.items()}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return named_templates(entry)
    if entry is not None:
        raise ModelLoadError("chat_template in tokenizer_config.json must be a string or a list")
    return {}


def named_templates(entries: list[Any]) -> dict[str, str]:
    """Templates of a list of objects with a ``name`` and a ``template``."""
    found: dict[str, str] = {}
    for entry in entries:
        name, template = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelLoadError("each entry of chat_template needs a name and a template")
        found[name] = template
    return found
