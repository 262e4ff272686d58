"""The tokenizer files of a model folder. Knows their names and keys, and neither text nor ids.

A token that only the files beside ``tokenizer.json`` name is added to the vocabulary, behind its
last id, and one that they describe otherwise than ``tokenizer.json`` changes. Which file counts is
as in transformers 5.24.0, settled by loading such folders with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from paceline.core.errors import ModelLoadError
from paceline.core.files import read_json, read_text

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
    """Let a vocabulary match the tokens whole that a folder's files name; role -> token."""
    own = backend.get_added_tokens_decoder()
    roles, extra, declared = _named_tokens(folder, config, own)
    of_roles = {token.content for token in roles.values()}
    for token in declared:
        token.special |= token.content in of_roles
    known = {token.content for token in (*declared, *own.values())}
    fresh = dict[str, AddedToken]()
    for token in (*roles.values(), *extra):
        if token.content not in known:
            token.special |= token.content in of_roles
            fresh.setdefault(token.content, token)
    backend.add_tokens([*declared, *fresh.values()])
    return {role: token.content for role, token in roles.items()}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template, from the first place that has any.

    Files of templates replace the configuration's entry, and a ``default`` among the additional
    ones replaces ``chat_template.jinja``, as for transformers' tokenizers. Its processors alone
    read ``chat_template.json``; here it serves where there is nothing else.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob(_ADDITIONAL))}
    templates = {
        name: read_text(path, _MAX_TEMPLATE_BYTES) for name, path in files.items() if path.is_file()
    }
    if templates:
        return templates
    path = folder / "chat_template.json"
    for source in (config, _optional_json(path)):
        if source.get("chat_template") is not None:
            return _templates_of(source["chat_template"])
    return {}


def _templates_of(entry: Any) -> dict[str, str]:
    """Name -> template, of one template, a list of named ones, or an object of them."""
    if isinstance(entry, str):
        return {"default": entry}
    if not isinstance(entry, list | dict):
        raise ModelLoadError("chat_template of a tokenizer must be text, a list or an object")
    pairs = [*(entry.items() if isinstance(entry, dict) else map(_named_template, entry))]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ModelLoadError("each entry of chat_template needs a name and a template")
    return dict(pairs)


def _named_template(entry: Any) -> tuple[Any, Any]:
    return (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)


ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _named_tokens(
    folder: Path, config: Mapping[str, Any], own: Mapping[int, AddedToken]
) -> tuple[dict[str, AddedToken], list[AddedToken], list[AddedToken]]:
    """Tokens with roles, special tokens without, and those that come with an id, in its order.

    The two old files count only where the configuration has no ``added_tokens_decoder``, and there
    ``special_tokens_map.json`` has the last word on a role.

    Args:
        own: id -> token that ``tokenizer.json`` itself adds to its vocabulary.
    """
    declared = config.get("added_tokens_decoder")
    is_old = declared is None
    special_map = _optional_json(folder / "special_tokens_map.json") if is_old else {}
    extra, extra_roles = _extra(config, special_map)
    roles = _roles(config, special_map) | extra_roles
    if is_old:
        special = {roles[role].content for role in roles.keys() & set(ROLES)}
        special |= {token.content for token in extra}
        by_id = _spelled(_optional_json(folder / "added_tokens.json"), special) | dict(own)
    else:
        by_id = _by_id(declared)
    return roles, extra, [token for _, token in sorted(by_id.items())]


def _roles(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, AddedToken]:
    """The usual roles in their order, which is that of new ids, and behind them a model's own."""
    values = {role: special_map.get(role, config.get(role)) for role in ROLES}
    for source in (special_map, config):
        values |= {
            key: value
            for key, value in source.items()
            if key.endswith("_token") and key not in ROLES and _may_be_token(value)
        }
    return {role: _token(role, value) for role, value in values.items() if value is not None}


def _may_be_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "__type" in value)


def _extra(
    config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> tuple[list[AddedToken], dict[str, AddedToken]]:
    roles = dict(_mapping("model_specific_special_tokens", config))
    tokens: list[Any] = []
    for source in (config, special_map):
        key = "extra_special_tokens"
        if not source.get(key) and not tokens:
            key = "additional_special_tokens"
        value = source.get(key) or []
        if isinstance(value, dict):
            roles |= value
        elif isinstance(value, list):
            tokens += value
        else:
            raise ModelLoadError(f"{key} of the tokenizer must be a list or an object of tokens")
    named = {role: _token(role, value) for role, value in roles.items()}
    return [_token("extra_special_tokens", value) for value in tokens], named


def _by_id(declared: Any) -> dict[int, AddedToken]:
    key = "added_tokens_decoder"
    entries = _mapping(key, {key: declared})
    try:
        return {int(index): _token(key, value) for index, value in entries.items()}
    except ValueError as error:
        raise ModelLoadError(
            f"{key} of the tokenizer has a key that is not an id: {error}"
        ) from error


def _spelled(added: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    if not all(isinstance(index, int) for index in added.values()):
        raise ModelLoadError("added_tokens.json must give each token its id, a whole number")
    return {
        index: AddedToken(token, special=token in special, normalized=token not in special)
        for token, index in added.items()
    }


def _mapping(key: str, source: Mapping[str, Any]) -> Mapping[str, Any]:
    value = source.get(key) or {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{key} of the tokenizer must be an object of tokens")
    return value


def _token(key: str, value: Any) -> AddedToken:
    """A token from its spelling, which is special then, or from an object that describes it."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = value if isinstance(value, dict) else {}
    content = flags.get("content")
    chosen = {name: flags[name] for name in _FLAGS if name in flags}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in chosen.values()):
        raise ModelLoadError(
            f"{key} of the tokenizer must be text, or an object with the token's content and flags "
            f"({', '.join(_FLAGS)}), not {str(value)[:60]}"
        )
    return AddedToken(content, **chosen)
