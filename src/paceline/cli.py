"""The command line: names, help and exit codes. The work is in :mod:`paceline.commands`.

Knows no model; every import that takes time happens inside a command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline import __version__
from paceline.commands.bench_options import BenchServeOptions, BenchThroughputOptions
from paceline.commands.convert_options import ConvertOptions
from paceline.commands.demo_options import DemoOptions
from paceline.commands.doctor_options import DoctorOptions
from paceline.commands.environment import warn_of_unknown_variables
from paceline.commands.explain_options import ExplainOptions
from paceline.commands.options import RunOptions, takes
from paceline.commands.profile_options import ProfileOptions
from paceline.commands.run_batch_options import RunBatchOptions
from paceline.commands.serve_options import ServeOptions
from paceline.commands.simulate_options import SimulateOptions
from paceline.commands.trace_options import TraceOptions
from paceline.commands.train_ngram_options import TrainNgramOptions
from paceline.commands.train_options import DRAFT, LM, Values, takes_training
from paceline.commands.tune_options import TuneOptions
from paceline.commands.verify_options import VerifyOptions
from paceline.errors import PacelineError

EXIT_ERROR = 2
HELP_WIDTH = 100
ENVIRONMENT_NOTE = "Every option also reads PACELINE_<NAME>: --max-tokens is PACELINE_MAX_TOKENS."

_SETTINGS = {"max_content_width": HELP_WIDTH, "help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="paceline",
    help="Large language models, faster, without changing a token of what they say.",
    epilog=ENVIRONMENT_NOTE,
    context_settings=_SETTINGS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
train = typer.Typer(
    name="train",
    help="Train a language model, a draft for one, or an n-gram model.",
    context_settings=_SETTINGS,
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(train)
bench = typer.Typer(
    name="bench",
    help="Measure a server, or the engine itself, under load.",
    context_settings=_SETTINGS,
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Say which.")
    ] = False,
) -> None:
    warn_of_unknown_variables(context.command)


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(RunOptions)
def run(options: RunOptions) -> None:
    """Answer prompts, speculatively.

    Without a prompt: a chat on a terminal, otherwise the prompt is read from standard input.

    Speculation is on: prompt lookup, and with the embedded model its draft model too. It changes
    the speed and never the tokens.
    """
    from paceline.commands.run import run_command

    raise typer.Exit(run_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model to OpenAI's clients.

    Completions, chats, tools and schemas, all of them with speculation, which changes the speed and
    never the tokens. A page at the address shows the server at work. Interrupted, the server
    finishes what it has begun; interrupted twice, it ends at once.
    """
    from paceline.commands.serve import serve_command

    raise typer.Exit(serve_command(options))


@app.command("run-batch", epilog=ENVIRONMENT_NOTE)
@takes(RunBatchOptions)
def run_batch(options: RunBatchOptions) -> None:
    """Answer a file of requests as the server would.

    The file is in OpenAI's batch format: each line has custom_id, method, url and body. Answers are
    written as they come, in any order. Interrupted, the same command continues. Exit code 1 when a
    request failed.
    """
    from paceline.commands.run_batch import run_batch_command

    raise typer.Exit(run_batch_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(TraceOptions)
def trace(options: TraceOptions) -> None:
    """Record a model's answers and log-probs.

    Training and simulation read them.
    Interrupted, the same command continues after the last complete file.
    """
    from paceline.commands.trace import trace_command

    raise typer.Exit(trace_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Predict from traces what speculation brings.

    Drafts do not change what a model answers, so its traced answers tell what every draft would
    have been worth: they are replayed through real proposers and the planner, and each step takes
    what the cost table says. Beside them: fixed configurations, and the best that hindsight could
    have chosen.
    """
    from paceline.commands.simulate import simulate_command

    raise typer.Exit(simulate_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the best way to speculate for a model.

    Its answers to usual prompts are replayed with every proposer in many settings, with what a
    step costs on this machine. The ranking says how sure it is, and whether anything beats plain
    decoding at all. The best is written as options, and each draft model is compared with the
    target.
    """
    from paceline.commands.tune import tune_command

    raise typer.Exit(tune_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Pack a model for the native kernels.

    The folder that it writes loads at once: weights are mapped as they are, not quantised again.
    """
    from paceline.commands.convert import convert_command

    raise typer.Exit(convert_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(ProfileOptions)
def profile(options: ProfileOptions) -> None:
    """Measure how long a step takes, by its width.

    The target's steps and its draft model's are measured at every width, in shuffled rounds, as the
    engine runs them. The result is kept for this machine, model, precision and number of threads.
    """
    from paceline.commands.profile import profile_command

    raise typer.Exit(profile_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Check that speculation changes no token.

    Every prompt is decoded plainly and speculatively with one seed, and the speculative output is
    scored again token by token. Exit code 1 when it fails. With --quality: what the arithmetic
    costs in accuracy, against float32.
    """
    from paceline.commands.verify import verify_command

    raise typer.Exit(verify_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(DemoOptions)
def demo(options: DemoOptions) -> None:
    """See the embedded models at work.

    A dozen prompts are decoded plainly and speculatively, and compared.
    """
    from paceline.commands.demo import demo_command

    raise typer.Exit(demo_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Look at this machine, and say what would make it faster.

    Instruction set, cores, memory and its bandwidth, optional parts, and how the model would run.
    """
    from paceline.commands.doctor import doctor_command

    raise typer.Exit(doctor_command(options))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """See step by step what was drafted, verified and accepted, and why.

    The prompt is answered speculatively and then plainly. Each step shows its candidates, where
    they were cut and why, what was accepted, and what it cost as predicted and as measured.
    """
    from paceline.commands.explain import explain_command

    raise typer.Exit(explain_command(options))


@train.command("lm", epilog=ENVIRONMENT_NOTE)
@takes_training(LM)
def train_lm(values: Values) -> None:
    """Train a small language model on text.

    It begins from scratch or from a model that exists.
    Interrupted, the same command continues where the last saved state was.
    """
    from paceline.commands.train import train_lm_command

    raise typer.Exit(train_lm_command(values))


@train.command("draft", epilog=ENVIRONMENT_NOTE)
@takes_training(DRAFT)
def train_draft(values: Values) -> None:
    """Train a draft model for a target.

    It imitates the target, and begins from scratch or is cut out of a bigger model.
    Interrupted, the same command continues where the last saved state was.
    """
    from paceline.commands.train import train_draft_command

    raise typer.Exit(train_draft_command(values))


@train.command("ngram", epilog=ENVIRONMENT_NOTE)
@takes(TrainNgramOptions)
def train_ngram(options: TrainNgramOptions) -> None:
    """Train an n-gram model that drafts for a target.

    It learns the target's own answers best. The figures are those of text that was held out, beside
    prompt lookup on the same text.
    """
    from paceline.commands.train_ngram import train_ngram_command

    raise typer.Exit(train_ngram_command(options))


@bench.command("serve", epilog=ENVIRONMENT_NOTE)
@takes(BenchServeOptions)
def bench_serve(options: BenchServeOptions) -> None:
    """Measure any server that speaks OpenAI's protocol.

    Requests arrive as told, and the answers are streamed: throughput, the times to the first and
    between further tokens, and what speculation did if the server's metrics say so. With
    --compare-with, two servers take turns on the same requests.
    """
    from paceline.commands.bench import bench_serve_command

    raise typer.Exit(bench_serve_command(options))


@bench.command("throughput", epilog=ENVIRONMENT_NOTE)
@takes(BenchThroughputOptions)
def bench_throughput(options: BenchThroughputOptions) -> None:
    """Measure how many tokens per second the engine makes, without a server.

    All prompts are given to it at once. With --compare, plainly and speculatively in turns.
    """
    from paceline.commands.bench_throughput import bench_throughput_command

    raise typer.Exit(bench_throughput_command(options))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake of the user's is one line on stderr and exit code 2."""
    try:
        app(args=arguments, prog_name="paceline")
    except PacelineError as error:
        from paceline.commands.display import printable

        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()
