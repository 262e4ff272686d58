"""lm-eval's scores of a local task, by a server and by transformers. Prints one JSON line.

Runs in an environment of its own: ``python lm_eval_scores.py URL KEY MODEL FOLDER``, where FOLDER
holds the served model's weights and tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """task: endings
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: start
doc_to_choice: ends
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ENDINGS = [
    ("def add(a, b):\n    return", [" a + b", " the dog", " once upon"], 0),
    ("Once upon a time there was a little", [" import", " girl", " = 0"], 1),
    ("import os\nimport", [" sys", " girl", " happy"], 0),
    ("class Point:\n    def __init__(", ["was, said", "self, x", "the, a"], 1),
    ("for i in", [" apple", " day", " range(10):"], 2),
    ("She was very happy and", [" def", " she smiled", " ): return"], 1),
    ("if x is", [" None:", " dog.", " sun,"], 0),
    ("The sun was", [" lambda", " __init__", " shining"], 2),
    ("    return", [" upon", " self.value", " a time"], 1),
    ("They went to the", [" park", " assert", " isinstance"], 0),
    ("try:\n    pass\nexcept", [" The", " bird", " ValueError:"], 2),
    ('"""Return the', [" elephant", " value", " sad"], 1),
    ('He said, "I am', [" sorry", " def", " None"], 0),
    ("with open(path) as", [" sad", " f:", " her"], 1),
    ("Tom and his mom", [" %", " raise", " went home"], 2),
    ("assert len(", ["happy", "values) == 3", "Once"], 1),
]


def main(url: str, key: str, model: str, folder: str) -> None:
    os.environ["OPENAI_API_KEY"] = key
    with tempfile.TemporaryDirectory() as work:
        tasks = _task(Path(work))
        api: dict[str, Any] = {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": 4,
            "max_length": 512,
        }
        served = _scores(tasks, "local-completions", tokenizer=folder, **api)
        api |= {"tokenizer_backend": "remote", "auth_token": key}
        remote = _scores(tasks, "local-completions", **api)
        plain = _scores(tasks, "hf", pretrained=folder, dtype="float32", device="cpu")
    print(json.dumps({"served": served, "remote": remote, "transformers": plain}))


def _task(work: Path) -> TaskManager:
    data = work / "endings.jsonl"
    rows = [{"start": start, "ends": ends, "label": label} for start, ends, label in ENDINGS]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (work / "endings.yaml").write_text(TASK.format(data=data))
    return TaskManager(include_path=str(work), include_defaults=False)


def _scores(tasks: TaskManager, kind: str, **options: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=kind, model_args=options, tasks=["endings"], task_manager=tasks, batch_size=1
    )
    own = found["results"]["endings"]
    samples = sorted(found["samples"]["endings"], key=lambda sample: sample["doc_id"])
    return {
        "acc": own["acc,none"],
        "acc_norm": own["acc_norm,none"],
        "loglikelihoods": [[float(each[0]) for each in s["filtered_resps"]] for s in samples],
        "is_greedy": [[bool(each[1]) for each in s["filtered_resps"]] for s in samples],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
