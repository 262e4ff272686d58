"""The commands: their names, their help, and where their options and their work are.

``paceline --help`` needs no more than that: a command's options are imported when it is looked at,
its work when it runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.habits import Own, advice_on_command, read

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


class Entry(NamedTuple):
    """A command of the command line.

    Attributes:
        options: the dataclass of its options, as ``module:name`` in :mod:`paceline.cli`.
        work: the function that takes them and returns the exit code, likewise. It raises a
            :class:`~paceline.core.errors.PacelineError` where an option, a model or a file cannot
            be used.
        help: a line for the list of commands, and what its own help says besides.
        aliases: other names, which lists leave out.
        section: of the list of commands; only of those that belong to no group.
    """

    name: str
    options: str
    work: str
    help: str
    aliases: tuple[str, ...] = ()
    section: str = USE


class LazyGroup(TyperGroup):
    """A group with the commands that the table lists under its name, before its own groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        entries = COMMANDS[self.name or ""]
        self.commands = {**{each.name: LazyCommand(each) for each in entries}, **self.commands}
        self._aliases = {alias: each.name for each in entries for alias in each.aliases}

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
            raise _advised(error, _command_advice(arguments, context)) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of the root in sections, those of a group as one list."""
        if self.name != ROOT:
            super().format_commands(ctx, formatter)
            return
        sections = {entry.name: entry.section for entry in COMMANDS[ROOT]} | GROUP_SECTIONS
        width = max(map(len, self.commands))
        for section in SECTIONS:
            rows = [
                (name.ljust(width), command.get_short_help_str(formatter.width - 6 - width))
                for name, command in self.commands.items()
                if sections.get(name, USE) == section
            ]
            with formatter.section(section):
                formatter.write_dl(rows)


class LazyCommand(TyperCommand):
    """A command that is made of its options when something first asks for its parameters."""

    def __init__(self, entry: Entry) -> None:
        text = inspect.cleandoc(entry.help)
        super().__init__(entry.name, help=text, epilog=ENVIRONMENT_NOTE, rich_markup_mode=None)
        self._entry = entry
        del self.params, self.callback  # So that asking for them comes to __getattr__.

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(f"a command has no attribute {name!r}")
        from paceline.cli.options.options import takes

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command()(takes(load(self._entry.options), self._work))
        made = typer.main.get_command(single)
        self.params, self.callback = made.params, made.callback
        return getattr(self, name)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        reading = read(arguments, own_words(self, _words(context)))
        try:
            words = arguments if reading.unmet else reading.words
            left: list[str] = super().parse_args(context, list(words))
        except _USAGE_ERROR as error:
            unknown = reading.unknown or _joined_option(error, arguments)
            advice = reading.advice if reading.is_foreign else ""
            if getattr(getattr(error, "param", None), "name", "") in _MODELS:
                from paceline.cli.options.model_choice import advice_on_models

                advice = advice_on_models(context.command_path)
            raise _advised(error, advice, unknown) from error
        if reading.notes:
            print(f"note: {'; '.join(dict.fromkeys(reading.notes))}", file=sys.stderr)
        return left

    def _work(self, options: Any) -> None:
        raise typer.Exit(load(self._entry.work)(options))


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


def _advised(error: Any, advice: str, unknown: str = "") -> Any:
    """The same error, which says what to type in place of Typer's own guess.

    Args:
        unknown: the option that there is not, whatever the error says.
    """
    if not advice and not unknown:
        return error
    error.possibilities = None
    said = f"No such option: {unknown}" if unknown else error.format_message().rstrip(".")
    return _USAGE_ERROR(f"{said}. {advice}" if advice else said, ctx=error.ctx)


_MODELS = ("model", "name", "target")
"""Arguments that are a model's name."""


def load(reference: str) -> Any:
    """What ``module:name`` of :mod:`paceline.cli` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"paceline.cli.{module}"), name)


_ROOT = (
    Entry(
        "run",
        "options.options:RunOptions",
        "use.run:run_command",
        """Chat with a model, or answer prompts.

        Without a prompt, it starts a chat on a terminal; elsewhere it reads the prompt from
        standard input.

        Speculative decoding is on. It changes the speed, never the tokens; --method chooses how
        drafts are made.
        """,
    ),
    Entry(
        "serve",
        "serve.serve:ServeOptions",
        "serve.serve_replicas:serve_or_replicate",
        """Serve models to OpenAI, Anthropic and Ollama clients.

        Completions, chats, tools and structured output, all with speculative decoding, which
        changes the speed and never the tokens. A web page at the same address lets you chat and
        shows the server at work. Ctrl-C lets running requests finish; a second Ctrl-C stops at
        once.
        """,
        section=SERVE,
    ),
    Entry(
        "stage",
        "serve.stage:StageOptions",
        "serve.stage:stage_command",
        """Run some of a model's layers for an engine on another host.

        The engine names this address with --pipeline-stage and decides which layers of which model
        it needs. The model must be available here under the same name. A stage serves one engine at
        a time. There is no password, so listen only where you trust everybody.
        """,
        section=SERVE,
    ),
    Entry(
        "run-batch",
        "use.run_batch:RunBatchOptions",
        "use.run_batch:run_batch_command",
        """Answer a file of requests, as the server would.

        The file is in OpenAI's batch format: each line has custom_id, method, url and body. Answers
        are written as they finish, in any order. If interrupted, run the same command again to
        continue. The exit code is 1 if a request failed.
        """,
        section=SERVE,
    ),
    Entry(
        "trace",
        "speed_up.trace:TraceOptions",
        "speed_up.trace:trace_command",
        """Record a model's answers with their log-probabilities.

        Training and simulation read these traces. If interrupted, run the same command again: it
        continues after the last complete file.
        """,
        section=SPEED_UP,
    ),
    Entry(
        "simulate",
        "speed_up.simulate:SimulateOptions",
        "speed_up.simulate:simulate_command",
        """Predict from traces how much speculation would gain.

        Drafts do not change what a model answers, so recorded answers show what any draft would
        have been worth. They are replayed through the real proposers and the real planner, and a
        cost table says how long each step takes. Fixed configurations and the best choices in
        hindsight are shown for comparison.
        """,
        section=SPEED_UP,
    ),
    Entry(
        "tune",
        "speed_up.tune_setup:TuneOptions",
        "speed_up.tune:tune_command",
        """Find the fastest way to speculate with a model.

        The model's answers to your usual prompts are replayed with every proposer in many settings,
        with the cost of a step as measured on this machine. The ranking includes what you run by
        default, says how certain it is, and whether anything beats plain decoding at all. Each
        draft model is also compared with the target.
        """,
        section=SPEED_UP,
    ),
    Entry(
        "convert",
        "use.convert:ConvertOptions",
        "use.convert:convert_command",
        """Pack a model for the native kernels.

        The packed folder loads at once, because its weights are memory-mapped as they are instead
        of being quantised again.
        """,
        section=SPEED_UP,
    ),
    Entry(
        "profile",
        "speed_up.profile:ProfileOptions",
        "speed_up.profile:profile_command",
        """Measure how long a step takes at each width.

        Steps of the target and of its draft model are measured in shuffled rounds, the way the
        engine runs them. The result is kept for this machine, model, precision and number of
        threads, and the last two lines say which drafts pay.
        """,
        section=SPEED_UP,
    ),
    Entry(
        "verify",
        "options.options:VerifyOptions",
        "check.verify:verify_command",
        """Check that speculation changes no token.

        Every prompt is decoded plainly and speculatively with the same seed, and the speculative
        output is scored again token by token. The exit code is 1 if the check fails. With
        --quality, it measures instead how much accuracy the arithmetic costs compared with float32.
        """,
        section=CHECK,
    ),
    Entry(
        "demo",
        "use.demo:DemoOptions",
        "use.demo:demo_command",
        """Watch drafted tokens light up, and the same text come faster.

        Several kinds of prompts are decoded plainly and speculatively, and compared. The model is
        SmolLM2 if it is on this machine or can be downloaded within a minute, and the embedded
        model otherwise.
        """,
    ),
    Entry(
        "pull",
        "use.pull:PullOptions",
        "use.pull:pull_command",
        """Download a model by its name; no model hub is needed.

        Prints where the model is. From then on, its name works in every command.
        """,
    ),
    Entry(
        "models",
        "use.pull:ModelsOptions",
        "use.pull:models_command",
        """List the models that you can use by name.

        These are the models that can be downloaded, with licence and size, and those that Ollama
        and LM Studio have downloaded.
        """,
        aliases=("list", "ls"),
    ),
    Entry(
        "rm",
        "use.remove:RemoveOptions",
        "use.remove:remove_command",
        """Delete downloaded models, and packed copies of any model.

        Models of other programs and your own files stay; it says how to delete those.
        """,
    ),
    Entry(
        "completion",
        "completion:CompletionOptions",
        "completion:completion_command",
        """Print a script for completion in a shell.

        Bash: paceline completion bash > ~/.local/share/bash-completion/completions/paceline. Zsh
        and fish: source the output.
        """,
    ),
    Entry(
        "doctor",
        "check.doctor:DoctorOptions",
        "check.doctor:doctor_command",
        """Inspect this machine, and say what would make it faster.

        Shows the instruction set, cores, memory and its bandwidth, optional packages, and how the
        model would run.
        """,
        section=CHECK,
    ),
    Entry("version", "about:VersionOptions", "about:version_command", "Print the version."),
    Entry(
        "help",
        "about:HelpOptions",
        "about:help_command",
        "Print the commands, or the options of one.",
    ),
    Entry(
        "explain",
        "speed_up.explain:ExplainOptions",
        "speed_up.explain:explain_command",
        """Show step by step what was drafted and accepted, and why.

        The prompt is answered speculatively and then plainly. The verdict comes first. Each step
        then shows its candidates, which of them were cut and why, which were accepted, and its
        predicted and measured cost.
        """,
        section=SPEED_UP,
    ),
)
_TRAIN = (
    Entry(
        "lm",
        "train.train:LMOptions",
        "train.train:train_lm_command",
        """Train a small language model on text.

        Training starts from scratch or from an existing model. If interrupted, run the same command
        again to continue from the last saved state.
        """,
    ),
    Entry(
        "draft",
        "train.train:DraftOptions",
        "train.train:train_draft_command",
        """Train a draft model for a target model.

        The draft learns to imitate the target. It starts from scratch or is cut out of a larger
        model. If interrupted, run the same command again to continue from the last saved state.
        """,
    ),
    Entry(
        "head",
        "train.train:HeadOptions",
        "train.train:train_head_command",
        """Train a head that drafts from its target's hidden states.

        The head learns from the target's own answers and starts as a copy of the target's last
        layer. If interrupted, run the same command again to continue from the last saved state.
        """,
    ),
    Entry(
        "ngram",
        "train.train_ngram:TrainNgramOptions",
        "train.train_ngram:train_ngram_command",
        """Train an n-gram model that drafts for a target model.

        It learns best from the target's own answers. The figures are for held-out text, next to
        those of prompt lookup on the same text.
        """,
    ),
)
_BENCH = (
    Entry(
        "serve",
        "check.bench_options:BenchServeOptions",
        "check.bench_serve:bench_serve_command",
        """Benchmark any server that speaks the OpenAI protocol.

        Requests arrive as configured, and answers are streamed. Reports throughput, the time to the
        first token, the time between tokens, and what speculation did if the server's metrics tell.
        With --compare-with, two servers take turns on the same requests.
        """,
    ),
    Entry(
        "throughput",
        "check.bench_options:BenchThroughputOptions",
        "check.bench_throughput:bench_throughput_command",
        """Measure the engine's tokens per second, without a server.

        All prompts are submitted at once. With --compare, plain and speculative decoding take
        turns.
        """,
    ),
)
COMMANDS = {ROOT: _ROOT, "train": _TRAIN, "bench": _BENCH}
"""By the group that they belong to."""
