"""Worker: OpenVINO GenAI on an int8 export, with its draft model and its prompt lookup.

Generation is GenAI's pipeline; single forwards run the same model in OpenVINO's runtime, which the
pipeline does not expose. Runs under ``.peers/openvino``.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from peers_worker import UnsupportedError, generated, serve, timed

SHORT_CONTEXT = 128


class OpenVino:
    """One exported folder on ``threads`` threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.properties = {"INFERENCE_NUM_THREADS": options["threads"], "NUM_STREAMS": 1}
        core = ov.Core()
        model = core.read_model(options["model"] + "/openvino_model.xml")
        self.compiled = core.compile_model(model, "CPU", self.properties)
        self.request = self.compiled.create_infer_request()
        self._pipelines: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        asked = ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION", "INFERENCE_NUM_THREADS")
        found = {name: str(self.compiled.get_property(name)) for name in asked}
        return {"engine": "openvino-genai", "version": genai.__version__, **found}

    # --- forwards ----------------------------------------------------------------------------

    def _infer(self, tokens: list[int], start: int) -> None:
        end = start + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(start, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        names = {name for port in self.compiled.inputs for name in port.names}
        self.request.infer({name: value for name, value in inputs.items() if name in names})

    def _read(self, tokens: list[int]) -> None:
        self.request.reset_state()
        self._infer(tokens, 0)

    def forward(self, width: int, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of forwards over ``width`` tokens after ``context`` ones, without the first.

        The runtime cannot drop what a forward has added, so each reads its context anew. After a
        long context one forward is all that there is time for, and the reading has warmed it up.
        """
        rows, extra = tokens[context : context + width], context <= SHORT_CONTEXT
        times = timed(
            lambda: self._infer(rows, context),
            repeats + 1 if extra else 1,
            before=lambda: self._read(tokens[:context]),
        )
        return times[1:] if extra else times

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        """Seconds to read a prompt; this form of the model computes the logits of every row."""
        return timed(lambda: self._infer(tokens, 0), repeats, before=self.request.reset_state)

    def parallel(self, sequences: int, tokens: list[int], steps: int) -> dict[str, Any]:
        """Greedy steps of a batch: a longer generation less a shorter one."""
        pipeline = self._pipeline("plain")
        prompts = ov.Tensor(np.array([tokens] * sequences, dtype=np.int64))
        inputs = genai.TokenizedInputs(prompts, ov.Tensor(np.ones_like(prompts.data)))
        short, long = (
            timed(lambda: pipeline.generate(inputs, self._wish(count)), 1)[0]  # noqa: B023
            for count in (1, 1 + steps)
        )
        return {"seconds": long - short, "tokens": sequences * steps}

    # --- generating --------------------------------------------------------------------------

    def _pipeline(self, method: str) -> Any:
        if method not in self._pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1  # gigabytes
            scheduler.max_num_batched_tokens = 2048  # a prompt is read at once
            scheduler.enable_prefix_caching = False
            wish: dict[str, Any] = {**self.properties, "scheduler_config": scheduler}
            if method == "draft":
                draft = genai.draft_model(self.options["draft"], "CPU", **self.properties)
                wish["draft_model"] = draft
            elif method == "lookup":
                wish["prompt_lookup"] = True
            elif method != "plain":
                raise UnsupportedError(f"OpenVINO GenAI has no mode {method!r}")
            self._pipelines[method] = genai.LLMPipeline(self.options["model"], "CPU", **wish)
        return self._pipelines[method]

    @staticmethod
    def _wish(max_tokens: int) -> Any:
        wish = genai.GenerationConfig()
        wish.max_new_tokens = wish.min_new_tokens = max_tokens
        wish.ignore_eos = True
        wish.do_sample = False
        wish.apply_chat_template = False
        return wish

    def prepare(self, mode: str) -> None:
        self._pipeline(mode.partition(" ")[0])

    def generate(self, mode: str, prompt: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        method, _, most = mode.partition(" ")
        wish = self._wish(max_tokens)
        if method != "plain":
            wish.num_assistant_tokens = int(most)
        if method == "lookup":
            wish.max_ngram_size = 3
        ids = ov.Tensor(np.array([prompt["token_ids"]], dtype=np.int64))
        inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones_like(ids.data)))
        stamps: list[float] = []

        def note(_: str) -> Any:
            stamps.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        began = time.perf_counter()
        found = self._pipeline(method).generate(inputs, wish, note)
        stamps.append(time.perf_counter())
        return generated(began, stamps, list(found.tokens[0]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(OpenVino)
