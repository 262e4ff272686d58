"""The commands: their names, their help, and where their options and their work are.

``paceline --help`` needs no more than that: a command's options are imported when it is looked at,
its work when it runs.

An entry point of the group ``paceline.commands`` that refers to a :class:`Command` adds one. The
laboratory, :mod:`paceline_lab`, adds its own in this way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.habits import Own, advice_on_command, read
from paceline.core.checks import did_you_mean, sentences
from paceline.core.errors import ConfigError
from paceline.core.installation import plugins_of

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Click's, which newer releases of Typer bring along under a name of their own."""
ENVIRONMENT_NOTE = (
    "Every option can also be set by an environment variable, such as PACELINE_MODEL for MODEL."
)
USE, SERVE, SPEED_UP, TRAIN, CHECK = "Use", "Serve", "Speed up", "Train", "Check"
SECTIONS = (USE, SERVE, SPEED_UP, TRAIN, CHECK)
"""Of the list of commands, in order."""
GROUP_SECTIONS = {"train": TRAIN, "bench": CHECK}
ROOT = "paceline"
ENTRY_POINTS = "paceline.commands"
LABORATORY = {
    ROOT: {"trace": SPEED_UP, "simulate": SPEED_UP, "tune": SPEED_UP, "verify": CHECK},
    "train": dict.fromkeys(("lm", "draft", "head", "ngram"), TRAIN),
    "bench": dict.fromkeys(("serve", "throughput"), CHECK),
}
"""By group, the commands that :mod:`paceline_lab` adds, in the order of lists, and their sections.

They are listed where it is missing too, and say so.
"""
NO_LABORATORY = "missing: it belongs to the laboratory, paceline_lab, which is not installed"


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        options: the dataclass of its options, as ``module:name``.
        work: the function that takes them and returns the exit code, likewise. It raises a
            :class:`~paceline.core.errors.PacelineError` where an option, a model or a file cannot
            be used.
        help: a line for the list of commands, and what its own help says besides.
        aliases: other names, which lists leave out.
        section: of the list of commands; only of those that belong to no group.
        group: the words before the name: ``train`` or ``bench``, or the root.
    """

    name: str
    options: str
    work: str
    help: str
    aliases: tuple[str, ...] = ()
    section: str = USE
    group: str = ROOT


class LazyGroup(TyperGroup):
    """A group with the commands that the table lists under its name, before its own groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = commands_of(self.name or "")
        self.commands = {**{each.name: LazyCommand(each) for each in listed}, **self.commands}
        self._sections = {each.name: each.section for each in listed} | GROUP_SECTIONS
        self._aliases = {alias: each.name for each in listed for alias in each.aliases}

    def get_command(self, context: Any, name: str) -> Any:
        return super().get_command(context, self._aliases.get(name, name))

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        typed = list(arguments)
        try:
            return super().parse_args(context, arguments)
        except _USAGE_ERROR as error:
            raise _advised(error, _command_advice(typed, context) if typed else "") from error

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        try:
            return super().resolve_command(context, arguments)
        except _USAGE_ERROR as error:
            advice = _command_advice(arguments, context)
            if not advice and not did_you_mean(arguments[0], self.commands):
                advice = f"There are {', '.join(self.commands)}"
            raise _advised(error, advice) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of the root in sections, those of a group as one list."""
        if self.name != ROOT:
            super().format_commands(ctx, formatter)
            return
        width = max(map(len, self.commands))
        for section in SECTIONS:
            rows = [
                (name.ljust(width), command.get_short_help_str(formatter.width - 6 - width))
                for name, command in self.commands.items()
                if self._sections.get(name, USE) == section
            ]
            with formatter.section(section):
                formatter.write_dl(rows)


class LazyCommand(TyperCommand):
    """A command that is made of its options when something first asks for its parameters."""

    def __init__(self, command: Command) -> None:
        text = inspect.cleandoc(command.help)
        super().__init__(command.name, help=text, epilog=ENVIRONMENT_NOTE, rich_markup_mode=None)
        self._command = command
        del self.params, self.callback  # So that asking for them comes to __getattr__.

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(f"a command has no attribute {name!r}")
        if self._command.options == UNUSABLE:
            self.params, self.callback = [], self._refuse
            return getattr(self, name)
        from paceline.cli.options import takes

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command()(takes(load(self._command.options), self._work))
        made = typer.main.get_command(single)
        self.params, self.callback = made.params, made.callback
        return getattr(self, name)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        if self._command.options == UNUSABLE and not context.resilient_parsing:
            arguments = [each for each in arguments if each in context.help_option_names]
        reading = read(arguments, own_words(self, _words(context)))
        try:
            words = arguments if reading.unmet else reading.words
            left: list[str] = super().parse_args(context, list(words))
        except _USAGE_ERROR as error:
            unknown = reading.unknown or _joined_option(error, arguments)
            advice = reading.advice if reading.notes or reading.unmet else ""
            _reword(error)
            if getattr(getattr(error, "param", None), "name", "") in _MODELS:
                from paceline.cli.model_argument import advice_on_models

                advice = advice_on_models(context.command_path)
            raise _advised(error, advice, unknown) from error
        if reading.notes:
            print(f"note: {'; '.join(dict.fromkeys(reading.notes))}", file=sys.stderr)
        return left

    def _refuse(self) -> None:
        raise ConfigError(f"{self.name} cannot be run {self._command.help}")

    def _work(self, options: Any) -> None:
        raise typer.Exit(load(self._command.work)(options))


def _words(context: Any) -> list[str]:
    """Those that lead to a command, without the program's name."""
    return str(context.command_path).split()[1:]


def own_words(command: Any, words: Sequence[str]) -> Own:
    """What a command takes, for a look at what was typed by habit."""
    options = {
        name: not parameter.is_flag
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if parameter.param_type_name == "option"
    }
    names = {each.name for each in command.params if each.param_type_name == "argument"}
    return Own(words, options, not names.isdisjoint(_MODELS))


def _command_advice(words: Sequence[str], context: Any) -> str:
    """What to type instead of a command that there is not."""

    def find(path: Sequence[str]) -> Own | None:
        command = context.find_root().command
        for word in path:
            command = command.get_command(context, word) if hasattr(command, "commands") else None
        return None if command is None or hasattr(command, "commands") else own_words(command, path)

    return advice_on_command(words, _words(context), find)


def _joined_option(error: Any, arguments: Sequence[str]) -> str:
    """``-kvu``, which was read as ``-k`` with a value; empty where the error is another."""
    short = [name for name in getattr(getattr(error, "param", None), "opts", ()) if name[1] != "-"]
    joined = (word for word in arguments if word[:2] in short and word[2:3].isalpha())
    return next(joined, "")


_WRONG_VALUES = {
    "int_parsing": "{input!r} is not a whole number",
    "float_parsing": "{input!r} is not a number",
    "greater_than_equal": "{input} is less than {ge}",
}
"""What is wrong with an option's value, by Pydantic's types of errors."""


def _reword(error: Any) -> None:
    """Say plainly what is wrong with a value; releases of Typer that ask Pydantic quote it."""
    for problem in getattr(error.__cause__, "errors", list)()[:1]:
        if problem["type"] in _WRONG_VALUES:
            values = {"input": problem["input"], **problem.get("ctx", {})}
            error.message = _WRONG_VALUES[problem["type"]].format_map(values)


def _advised(error: Any, advice: str, unknown: str = "") -> Any:
    """The same error with advice in place of Typer's own guess, and the option that is unknown."""
    if not advice and not unknown:
        return error
    error.possibilities = None
    problem = f"No such option: {unknown}" if unknown else error.format_message()
    return _USAGE_ERROR(sentences(problem, advice) if advice else problem, ctx=error.ctx)


_MODELS = ("model", "name", "target")
"""Arguments that are a model's name."""


def load(reference: str) -> Any:
    """What ``module:name`` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def commands_of(group: str) -> list[Command]:
    """The product's commands of a group, then the laboratory's, then those of other packages."""
    commands = {command.name: command for command in COMMANDS if command.group == group}
    added = {command.name: command for command in _added() if command.group == group}
    for name in LABORATORY.get(group, {}):
        commands[name] = added.get(name) or _unusable(name, group, NO_LABORATORY)
    return [*commands.values(), *(each for name, each in added.items() if name not in commands)]


def option_variables() -> set[str]:
    """The environment variables that the options of all commands read."""
    from paceline.cli.options import variables_of

    commands = [command for group in (ROOT, *GROUP_SECTIONS) for command in commands_of(group)]
    usable = (command.options for command in commands if command.options != UNUSABLE)
    return {variable for options in usable for variable in variables_of(load(options))}


def _added() -> Iterator[Command]:
    """What entry points refer to; one that cannot be loaded is a command that says why."""
    for point in plugins_of(ENTRY_POINTS):
        try:
            command = point.load()
            if not isinstance(command, Command):
                raise TypeError(f"{point.value} is no {Command.__module__}:{Command.__name__}")
            yield command
        except Exception as error:  # of another package; all others have to go on
            group, _, name = point.name.rpartition(".")
            reason = f"cannot be loaded: {type(error).__name__}: {error}"
            yield _unusable(name, group or ROOT, reason)


def _unusable(name: str, group: str, reason: str) -> Command:
    section = LABORATORY.get(group, {}).get(name, USE)
    return Command(name, UNUSABLE, UNUSABLE, f"({reason})", section=section, group=group)


UNUSABLE = ""
"""In place of a command's references, where its help says why it cannot be run."""


COMMANDS = (
    Command(
        "run",
        "paceline.cli.options:RunOptions",
        "paceline.cli.run:run_command",
        """Chat with a model, or answer prompts.

        Without a prompt, it starts a chat if it runs in a terminal; otherwise it reads the prompt
        from standard input.

        Speculative decoding is on. It changes the speed, never the tokens; --method chooses how
        drafts are made.
        """,
    ),
    Command(
        "serve",
        "paceline.cli.serve:ServeOptions",
        "paceline.cli.serve:serve_or_replicate",
        """Serve models to OpenAI, Anthropic and Ollama clients.

        Completions, chats, tools and structured output, all with speculative decoding, which
        changes the speed and never the tokens. A web page at the same address lets you chat and
        shows the server at work. Ctrl-C lets running requests finish; a second Ctrl-C stops at
        once.
        """,
        section=SERVE,
    ),
    Command(
        "stage",
        "paceline.cli.serve:StageOptions",
        "paceline.cli.serve:stage_command",
        """Run some of a model's layers for an engine on another host.

        The engine names this address with --pipeline-stage and decides which layers of which model
        to run here. The model must be available here under the same name. A stage serves one engine
        at a time. There is no authentication, so listen only on a network that you trust.
        """,
        section=SERVE,
    ),
    Command(
        "run-batch",
        "paceline.cli.run_batch:RunBatchOptions",
        "paceline.cli.run_batch:run_batch_command",
        """Answer a file of requests, as the server would.

        The file is in OpenAI's batch format: each line has custom_id, method, url and body. Answers
        are written as they finish, in any order. If interrupted, run the same command again to
        continue. The exit code is 1 if a request failed.
        """,
        section=SERVE,
    ),
    Command(
        "convert",
        "paceline.cli.models:ConvertOptions",
        "paceline.cli.models:convert_command",
        """Pack a model for the native kernels.

        The packed folder loads at once, because its weights are memory-mapped as they are instead
        of being quantised again.
        """,
        section=SPEED_UP,
    ),
    Command(
        "profile",
        "paceline.cli.profile:ProfileOptions",
        "paceline.cli.profile:profile_command",
        """Measure how long a step takes at each width.

        Steps of the target and of its draft model are measured in shuffled rounds, the way the
        engine runs them. The result is kept for this machine, model, precision and number of
        threads, and the last two lines say which drafts pay off.
        """,
        section=SPEED_UP,
    ),
    Command(
        "demo",
        "paceline.cli.demo:DemoOptions",
        "paceline.cli.demo:demo_command",
        """See drafted tokens light up and the same text arrive faster.

        Several kinds of prompts are decoded plainly and speculatively, and compared. The model is
        SmolLM2 if it is on this machine or can be downloaded within a minute, and the embedded
        model otherwise.
        """,
    ),
    Command(
        "pull",
        "paceline.cli.models:PullOptions",
        "paceline.cli.models:pull_command",
        """Download a model by its name; no model hub is needed.

        Prints the path of the model. From then on, its name works in every command.
        """,
    ),
    Command(
        "models",
        "paceline.cli.models:ModelsOptions",
        "paceline.cli.models:models_command",
        """List the models that you can use by name.

        These are the models that can be downloaded, with licence and size, and those that Ollama
        and LM Studio have downloaded.
        """,
        aliases=("list", "ls"),
    ),
    Command(
        "rm",
        "paceline.cli.models:RemoveOptions",
        "paceline.cli.models:remove_command",
        """Delete downloaded models, and packed copies of any model.

        Models of other programs and your own files are kept; the command says how to delete them.
        """,
    ),
    Command(
        "completion",
        "paceline.cli.reference:CompletionOptions",
        "paceline.cli.reference:completion_command",
        """Print a script for completion in a shell.

        Bash: paceline completion bash > ~/.local/share/bash-completion/completions/paceline. Zsh
        and fish: source the output.
        """,
    ),
    Command(
        "doctor",
        "paceline.cli.doctor:DoctorOptions",
        "paceline.cli.doctor:doctor_command",
        """Inspect this machine, and say what would make it faster.

        Shows the instruction set, cores, memory and its bandwidth, optional packages, and how the
        model would run.
        """,
        section=CHECK,
    ),
    Command(
        "version",
        "paceline.cli.reference:VersionOptions",
        "paceline.cli.reference:version_command",
        "Print the version.",
    ),
    Command(
        "help",
        "paceline.cli.reference:HelpOptions",
        "paceline.cli.reference:help_command",
        "Print the commands, or the options of one.",
    ),
    Command(
        "explain",
        "paceline.cli.options:ExplainOptions",
        "paceline.cli.explain:explain_command",
        """Show step by step what was drafted and accepted, and why.

        The prompt is answered speculatively and then plainly. The verdict comes first. Each step
        then shows its candidates, which of them were cut and why, which were accepted, and its
        predicted and measured cost.
        """,
        section=SPEED_UP,
    ),
)
"""Those of the product; those of other packages come by entry points."""
