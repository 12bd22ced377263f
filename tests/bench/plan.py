"""Measures `runner plan` on a study of 1,000 settings over 5 rungs, process start included.

python tests/bench/plan.py [--runs 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUDY = """\
name: thousand
engine: {kind: sglang, profile: rtx-pro-6000-x8-kimi-k2.6, model: /models/Kimi-K2.6}
parameters:
  tp_size: {choices: [1, 2, 4, 8]}
  pp_size: {choices: [1, 2, 4, 8]}
  pp_async_batch_depth: {int: [0, 8], when: pp_size > 1}
  pp_max_micro_batch_size: {choices: [1, 2, 3, 4, 6, 8, 12, 16, 64], when: pp_size > 1}
  cuda_graph: {choices: [true, false]}
  attention_backend: {choices: [triton, flashinfer]}
constraints: [tp_size * pp_size == 8]
baselines:
  - {name: tp8, tp_size: 8, pp_size: 1}
  - {name: pp8-auto, tp_size: 1, pp_size: 8, max_running_requests: 64}
workload:
  prompt_tokens: 256
  output_tokens: {uniform: [64, 192]}
  concurrency: [1, 8, 16, 32, 64]
"""


def measure(study: Path) -> tuple[float, dict[str, object]]:
    """Seconds of one run of the command, and its document."""
    command = [sys.executable, "-m", "runner.cli", "plan", str(study), "--json"]
    started_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started_s, json.loads(done.stdout)


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "thousand.yaml"
        study.write_text(STUDY, encoding="utf-8")
        for _ in range(runs):
            seconds, document = measure(study)
            ranking = document["ranking"]
            assert isinstance(ranking, list)
            rungs = [rung for row in ranking for rung in row["rungs"]]
            simulated = sum(rung["basis"] == "simulation" for rung in rungs)
            print(  # noqa: T201 - the figures are the product
                f"{seconds:.1f} s for {document['space']} over 5 rungs; of the {len(rungs)} rungs "
                f"that are ranked {simulated} were simulated; first: {ranking[0]['label']}"
            )


if __name__ == "__main__":
    main()
