"""The tokenizer files of a model folder. Knows their names and keys, and neither text nor ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from paceline.core.errors import ModelLoadError
from paceline.core.json_file import read_json, read_text
from paceline.text.named_tokens import add_named_tokens, read_named_tokens

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 4 << 20
_PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model")
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_ADDITIONAL = "additional_chat_templates/*.jinja"
_SAVED_ROLES = "special_token_roles"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What the files say; the arguments of :class:`~paceline.text.tokenizer.Tokenizer`."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    piece_scores: Mapping[str, float] | None = None


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer, of whatever kind."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _PATTERNS)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that :func:`read_tokenizer_folder` reads in a folder, as far as they are there."""
    named = (folder / name for name in _FILES)
    return [path for path in (*named, *sorted(folder.glob(_ADDITIONAL))) if path.is_file()]


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Read ``tokenizer.json`` and what lies beside it, as transformers 5.24.0 does.

    Whether a text begins with a BOS token or ends with an EOS token says ``tokenizer.json`` alone.
    The configuration's ``add_bos_token`` and ``add_eos_token`` do not count, nor do
    ``add_prefix_space``, ``legacy`` and ``clean_up_tokenization_spaces``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there (transformers' "
            "save_pretrained writes it)"
        )
    backend = backend_from_json(read_text(path, _MAX_TOKENIZER_BYTES), str(path))
    config = _optional_json(folder / "tokenizer_config.json")
    if config.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
    roles = config.get(_SAVED_ROLES)
    if not isinstance(roles, dict):
        roles = _add_named_tokens(backend, folder, config)
    return TokenizerParts(backend, roles, _templates(folder, config), _piece_scores(config))


def write_tokenizer_folder(folder: Path, parts: TokenizerParts) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, to be read back as they were."""
    config: dict[str, Any] = {_SAVED_ROLES: dict(parts.special_tokens)}
    if parts.backend.encode_special_tokens:
        config["split_special_tokens"] = True
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


def _add_named_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]
) -> dict[str, str]:
    """Add what the files of a folder name; role -> token."""
    named = read_named_tokens(
        config,
        _optional_json(folder / "special_tokens_map.json"),
        _optional_json(folder / "added_tokens.json"),
        backend.get_added_tokens_decoder(),
    )
    add_named_tokens(backend, named)
    return {role: token.content for role, token in named.roles.items()}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template, from the first place that has any.

    Files of templates replace the configuration's entry, and a ``default`` among the additional
    ones replaces ``chat_template.jinja``, as for transformers' tokenizers. Its processors alone
    read ``chat_template.json``; here it serves where there is nothing else.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob(_ADDITIONAL))}
    found = {
        name: read_text(path, _MAX_TEMPLATE_BYTES) for name, path in files.items() if path.is_file()
    }
    if found:
        return found
    path = folder / "chat_template.json"
    for source in (config, _optional_json(path)):
        if source.get("chat_template") is not None:
            return _templates_of(source["chat_template"])
    return {}


def _templates_of(entry: Any) -> dict[str, str]:
    """Name -> template, of one template, a list of named ones, or an object of them."""
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, dict):
        entry = [{"name": name, "template": text} for name, text in entry.items()]
    if isinstance(entry, list):
        return named_templates(entry)
    raise ModelLoadError("chat_template of a tokenizer must be text, a list or an object")


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
