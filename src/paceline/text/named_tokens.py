"""Tokens that the files beside a ``tokenizer.json`` name, and what they make of its vocabulary.

A token that only these files name is added to the vocabulary, behind its last id, and one that they
describe otherwise than ``tokenizer.json`` changes. Which file counts is as in transformers 5.24.0,
settled by loading such folders with it. Knows no folder and no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken

from paceline.core.errors import ModelLoadError

ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """What the files name.

    Attributes:
        roles: role -> token (``bos_token``, ``image_token``, ...), as templates name them.
        extra: special tokens without a role.
        declared: tokens that come with an id, in the order of the ids.
    """

    roles: dict[str, AddedToken]
    extra: list[AddedToken]
    declared: list[AddedToken]


def read_named_tokens(
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    added: Mapping[str, Any],
    own: Mapping[int, AddedToken],
) -> NamedTokens:
    """What the files beside a ``tokenizer.json`` name.

    The two old files count only where the configuration has no ``added_tokens_decoder``, and there
    ``special_tokens_map.json`` has the last word on a role.

    Args:
        config: ``tokenizer_config.json``.
        special_map: ``special_tokens_map.json``.
        added: ``added_tokens.json``: token -> id.
        own: id -> token that ``tokenizer.json`` itself adds to its vocabulary.

    Raises:
        ModelLoadError: there is something else where a token must be.
    """
    declared = config.get("added_tokens_decoder")
    if declared is not None:
        special_map = {}
    extra, extra_roles = _extra(config, special_map)
    roles = _roles(config, special_map) | extra_roles
    if declared is None:
        special = {roles[role].content for role in roles.keys() & set(ROLES)}
        special |= {token.content for token in extra}
        by_id = _spelled(added, special) | dict(own)
    else:
        by_id = _by_id(declared)
    return NamedTokens(roles, extra, [token for _, token in sorted(by_id.items())])


def add_named_tokens(backend: tokenizers.Tokenizer, named: NamedTokens) -> None:
    """Make a vocabulary match these tokens whole; a token with a role is special."""
    of_roles = {token.content for token in named.roles.values()}
    for token in named.declared:
        token.special |= token.content in of_roles
    known = {token.content for token in named.declared}
    known |= {token.content for token in backend.get_added_tokens_decoder().values()}
    fresh = dict[str, AddedToken]()
    for token in (*named.roles.values(), *named.extra):
        if token.content not in known:
            token.special |= token.content in of_roles
            fresh.setdefault(token.content, token)
    backend.add_tokens([*named.declared, *fresh.values()])


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
    """Further special tokens, without a role and with one."""
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
