"""The laboratory's commands: an entry point of ``paceline.commands`` refers to each of these."""

from __future__ import annotations

from paceline.cli.registry import CHECK, SPEED_UP, Command

TRACE = Command(
    "trace",
    "paceline_lab.trace.command:TraceOptions",
    "paceline_lab.trace.command:trace_command",
    """Record a model's answers with their log-probabilities.

    Training and simulation read these traces. If interrupted, run the same command again: it
    continues after the last complete file.
    """,
    section=SPEED_UP,
)
SIMULATE = Command(
    "simulate",
    "paceline_lab.simulate.command:SimulateOptions",
    "paceline_lab.simulate.command:simulate_command",
    """Predict from traces how much speculation would gain.

    Drafts do not change what a model answers, so recorded answers show what any draft would
    have been worth. They are replayed through the real proposers and the real planner, and a
    cost table says how long each step takes. Fixed configurations and the best choices in
    hindsight are shown for comparison.
    """,
    section=SPEED_UP,
)
TUNE = Command(
    "tune",
    "paceline_lab.tune.setup:TuneOptions",
    "paceline_lab.tune.command:tune_command",
    """Find the fastest way to speculate with a model.

    The model's answers to your usual prompts are replayed with every proposer in many settings,
    with the cost of a step as measured on this machine. The ranking includes what you run by
    default, says how certain it is, and whether anything beats plain decoding at all. Each
    draft model is also compared with the target.
    """,
    section=SPEED_UP,
)
VERIFY = Command(
    "verify",
    "paceline_lab.verify.options:VerifyOptions",
    "paceline_lab.verify.command:verify_command",
    """Check that speculation changes no token.

    Every prompt is decoded plainly and speculatively with the same seed, and the speculative
    output is scored again token by token. The exit code is 1 if the check fails. With
    --quality, it measures instead how much accuracy the arithmetic costs compared with float32.
    """,
    section=CHECK,
)
TRAIN_LM = Command(
    "lm",
    "paceline_lab.train.command:LMOptions",
    "paceline_lab.train.command:train_lm_command",
    """Train a small language model on text.

    Training starts from scratch or from an existing model. If interrupted, run the same command
    again to continue from the last saved state.
    """,
    group="train",
)
TRAIN_DRAFT = Command(
    "draft",
    "paceline_lab.train.command:DraftOptions",
    "paceline_lab.train.command:train_draft_command",
    """Train a draft model for a target model.

    The draft learns to imitate the target. It starts from scratch or is cut out of a larger
    model. If interrupted, run the same command again to continue from the last saved state.
    """,
    group="train",
)
TRAIN_HEAD = Command(
    "head",
    "paceline_lab.train.heads.command:HeadOptions",
    "paceline_lab.train.heads.command:train_head_command",
    """Train a head that drafts from its target's hidden states.

    The head learns from the target's own answers and starts as a copy of the target's last
    layer. If interrupted, run the same command again to continue from the last saved state.
    """,
    group="train",
)
TRAIN_NGRAM = Command(
    "ngram",
    "paceline_lab.train.ngram.command:TrainNgramOptions",
    "paceline_lab.train.ngram.command:train_ngram_command",
    """Train an n-gram model that drafts for a target model.

    It learns best from the target's own answers. The figures are for held-out text, next to
    those of prompt lookup on the same text.
    """,
    group="train",
)
BENCH_SERVE = Command(
    "serve",
    "paceline_lab.bench.options:BenchServeOptions",
    "paceline_lab.bench.command:bench_serve_command",
    """Benchmark any server that speaks the OpenAI protocol.

    Requests arrive as configured, and answers are streamed. Reports throughput, the time to the
    first token, the time between tokens, and what speculation did if the server's metrics tell.
    With --compare-with, two servers take turns on the same requests.
    """,
    group="bench",
)
BENCH_THROUGHPUT = Command(
    "throughput",
    "paceline_lab.bench.options:BenchThroughputOptions",
    "paceline_lab.bench.throughput:bench_throughput_command",
    """Measure the engine's tokens per second, without a server.

    All prompts are submitted at once. With --compare, plain and speculative decoding take
    turns.
    """,
    group="bench",
)
