"""Files of options: read, checked against a command's options, written; and what overrules them.

A file is like a set of environment variables: one can serve several commands, and each takes what
it has an option for. Knows no option's meaning; imports nothing slow.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer

from paceline.core.checks import did_you_mean
from paceline.core.errors import ConfigError
from paceline.core.files import write_text
from paceline.core.installation import pip_install

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# Options that the command line can only take as text, and what a file may hold instead.
_ALSO: dict[str, tuple[type, ...]] = {
    "speculative_config": (dict, list),
    "objective": (dict,),
    "json_schema": (dict,),
    "default_chat_template_kwargs": (dict,),
    "kv_cache_memory": (int,),
    "weight_memory": (int,),
    "packed_space": (int,),
}
_NEVER_EMPTY = ("api_key",)
"""Options that close something: a file that names one has to give it a value."""
_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP", "DEFAULT")
"""Where values come from, the strongest first; DEFAULT_MAP is the file."""
_REPLACES = {
    "prompt": ("prompts",),
    "prompts": ("prompt",),
    "speculative_config": ("method", "draft", "num_speculative_tokens", "no_speculation"),
    "method": ("speculative_config", "no_speculation"),
    "draft": ("speculative_config", "no_speculation"),
    "num_speculative_tokens": ("no_speculation",),
    "no_speculation": ("speculative_config", "method", "draft", "num_speculative_tokens"),
}
"""What of the weaker sources an option makes void, because it says the same differently."""


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The values in a JSON file, or a YAML file if PyYAML is installed, by names with underscores.

    Raises:
        ConfigError: it cannot be read or parsed, is no object, or has a key twice.
    """
    format_name, parse = _PARSERS.get(Path(path).suffix.lower(), ("JSON", json.loads))
    try:
        document = parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ImportError as error:
        raise ConfigError(
            f"{path} needs PyYAML: {pip_install('pyyaml')}, or write the options as JSON"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid {format_name}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} must hold one object whose keys are the long names of options")
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path} has {name} twice, with a dash and with an underscore")
        values[name] = value
    return values


def _parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_PARSERS = dict.fromkeys((".yaml", ".yml"), ("YAML", _parse_yaml))


def write_config_file(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write plain values, by option names with underscores, as JSON; or raise ``ConfigError``."""
    write_text(path, json.dumps(dict(values), indent=2) + "\n", ConfigError)


def take_config_file(context: typer.Context, path: str | None) -> str | None:
    """Let the options of the running command default to what a file says.

    Raises:
        ConfigError: the file is unusable, or has an unknown key or a value of the wrong type.
    """
    if path is not None and not context.resilient_parsing:
        allowed, everywhere = _file_keys(context.command), set(_all_keys(context))
        assert context.command.callback is not None
        annotations = inspect.signature(context.command.callback).parameters
        defaults = {}
        for key, value in read_config_file(path).items():
            if key not in everywhere:
                raise ConfigError(_unknown(path, key, allowed))
            if key in _NEVER_EMPTY and value in (None, []):
                raise ConfigError(f"{path}: {key} is empty; give a value, or leave the key out")
            if key in allowed and value is not None:
                name = allowed[key]
                defaults[name] = _checked(path, key, value, annotations[name].annotation)
        context.default_map = defaults
    return path


def _file_keys(command: Any) -> dict[str, str]:
    """The parameters of a command by the keys of a file, if it takes one."""
    keys = {}
    for parameter in command.params:
        long = next((name for name in parameter.opts if name.startswith("--")), parameter.name)
        keys[long.removeprefix("--").replace("-", "_")] = parameter.name
    keys.pop("help", None)
    return keys if keys.pop("config", None) else {}


def _all_keys(context: typer.Context) -> Iterator[str]:
    commands = [context.find_root().command]
    for command in commands:
        yield from _file_keys(command)
        commands.extend(getattr(command, "commands", {}).values())


def _unknown(path: str, key: str, allowed: Mapping[str, str]) -> str:
    hint = did_you_mean(key, allowed)
    return f"{path}: unknown option {key!r}{hint}; allowed: {', '.join(sorted(allowed))}"


def _checked(path: str, key: str, value: Any, annotation: Any) -> Any:
    """A value of a file as its option takes it."""
    declared, info = annotation.__origin__, annotation.__metadata__[0]
    if list[str] in (declared, *get_args(declared)):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{path}: {key} is {value!r}; it must be text or a list of texts")
        return texts
    value_type = next(each for each in _TYPES if each in (declared, *get_args(declared)))
    if isinstance(value, _ALSO.get(key, ())) and not isinstance(value, bool):
        return json.dumps(value, default=str)
    fits = (int, float) if value_type is float else value_type
    if not isinstance(value, fits) or (isinstance(value, bool) and value_type is not bool):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be {_TYPES[value_type]}")
    if info.min is not None and value < info.min:
        raise ConfigError(f"{path}: {key} is {value!r}; it must be at least {info.min}")
    return value


def without_overruled(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """A command's values less those that a stronger source says differently.

    ``--method`` on the command line replaces the ``speculative_config`` of a file; both on the
    command line remain, for the command to refuse.
    """
    sources = {name: context.get_parameter_source(name) for name in values}
    ranks = {name: _SOURCES.index(each.name) for name, each in sources.items() if each}
    void = {
        other
        for name, others in _REPLACES.items()
        for other in others
        if values.get(name) not in (None, False) and ranks[name] < ranks.get(other, 0)
    }
    return {name: value for name, value in values.items() if name not in void}
