"""Run by an interpreter that has vLLM: load exports and write tokens. It imports nothing of this project.

Standard input is a list of jobs in JSON. A job has the ``folder`` of an export, a ``backend`` (``auto`` or ``transformers``),
``texts`` of tokens and the number of ``new`` tokens. It also has the size of the ``vocabulary`` or 0, and the ``repeats`` of a
timed call. Standard output has an answer for each job: an ``error``, or the ``tokens``, the log ``probabilities`` after the
first text and the ``seconds``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as this process has
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process for each model, so that its errors are seen
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Job = dict[str, Any]


def main() -> None:
    """Do all jobs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    os.environ.update(SETTINGS)
    import vllm  # noqa: F401 (once for all models, which are forked from here, because it takes many seconds)

    json.dump([_in_process(job) for job in json.load(sys.stdin)], answers)
    answers.close()


def _in_process(job: Job) -> Job:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(there, job), daemon=True)
    process.start()
    there.close()  # so that the end of the process is seen here
    try:
        answer: Job = here.recv()
    except EOFError:
        process.join()
        answer = {"error": f"its process ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return answer


def _serve(connection: Connection, job: Job) -> None:
    try:
        connection.send(_written(_load(Path(job["folder"]), job["backend"]), job))
    except Exception as error:  # of any kind; the table shows the message
        where = traceback.extract_tb(error.__traceback__)[-1].line  # assertions have no message
        connection.send({"error": f"{type(error).__name__}: {(str(error).strip() or str(where)).splitlines()[0]}"})


def _load(folder: Path, backend: str) -> Any:
    """Load a model in float32 that takes tokens and reads every text as a whole."""
    from vllm import LLM

    pruned = json.loads((folder / "config.json").read_text()).get("pruned_attention")
    own = {} if pruned is None or backend == "auto" else {"hf_overrides": heads_by_layer(pruned)}
    return LLM(
        str(folder),
        model_impl=backend,
        trust_remote_code=pruned is not None,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        max_logprobs=-1,
        **own,
    )


def heads_by_layer(pruned_attention: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the overrides of a pruned decoder's config that state the numbers of heads of each layer."""
    layers = {
        int(re.findall(r"\d+", name)[0]): {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
        for name, shape in pruned_attention.items()
    }
    return {"allow_global_per_layer_attribute_access": True, "per_layer_config": layers}


def _written(model: Any, job: Job) -> Job:
    from vllm import SamplingParams

    length = {"max_tokens": job["new"], "min_tokens": job["new"], "temperature": 0.0, "detokenize": False}
    parameters = SamplingParams(**length, ignore_eos=True, logprobs=job["vocabulary"] or None)
    texts, seconds = [{"prompt_token_ids": text} for text in job["texts"]], []
    for _ in range(job["repeats"] + 1):
        start = time.perf_counter()
        texts_written = [one.outputs[0] for one in model.generate(texts, parameters, use_tqdm=False)]
        seconds.append(time.perf_counter() - start)
    probabilities = [{token: one.logprob for token, one in step.items()} for step in texts_written[0].logprobs or ()]
    return {"tokens": [list(one.token_ids) for one in texts_written], "probabilities": probabilities, "seconds": seconds[1:]}


if __name__ == "__main__":
    main()
