"""Run by an interpreter that has vLLM, and nothing of this project: loads exports and says what vLLM makes of them.

The first line of its standard output has the ``versions`` of vLLM and of what it stands on. Then one request in JSON is read
from each line of standard input, and one answer is written for it, which has an ``error`` where the request could not be met:

* ``{"load": NAME, "folder": PATH, "backend": "auto" or "transformers"}``: a process of its own loads the export;
* ``{"ask": NAME, "texts": [[TOKEN, ...], ...], "new": NUMBER, "vocabulary": NUMBER}``: as many ``new`` tokens are written after
  each text, greedily. The answer has the ``tokens`` after each text and, for each one after the first text, the log
  ``probabilities`` of as many tokens of the vocabulary as could have stood there;
* ``{"end": NAME}``: the model goes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as this process was given
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process for each model, whose errors are told as they are
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CACHE = 2**28
"""Bytes for the keys and values of each model."""
Request = dict[str, Any]
Models = dict[str, tuple[BaseProcess, Connection]]


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    os.environ.update(SETTINGS)
    import torch
    import transformers
    import vllm  # once for all models, which are forked from here, since it takes many seconds

    modules = (vllm, transformers, torch)
    print(json.dumps({"versions": {module.__name__: module.__version__ for module in modules}}), file=answers)
    models: Models = {}
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), models)), file=answers)


def _answer(request: Request, models: Models) -> Request:
    if "load" in request:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(there, request), daemon=True)
        process.start()
        there.close()  # so that the end of the process is seen here
        models[request["load"]] = process, here
        return _received(process, here)
    if "end" in request:
        ended, here = models.pop(request["end"])
        ended.kill()
        ended.join()
        here.close()
        return {}
    asked, here = models[request["ask"]]
    here.send(request)
    return _received(asked, here)


def _received(process: BaseProcess, connection: Connection) -> Request:
    try:
        received: Request = connection.recv()
    except EOFError:
        process.join()
        return {"error": f"its process ended with exit code {process.exitcode}"}
    return received


def _serve(connection: Connection, request: Request) -> None:
    """Load a model and answer what is asked of it, until this process is ended or vLLM fails."""
    try:
        model = _load(Path(request["folder"]), request["backend"])
        connection.send({})
        while True:
            connection.send(_written(model, connection.recv()))
    except Exception as error:  # of any kind; the message is what is wanted
        where = traceback.extract_tb(error.__traceback__)[-1].line  # of an assertion, which says nothing else
        connection.send({"error": f"{type(error).__name__}: {(str(error).strip() or str(where)).splitlines()[0]}"})


def _load(folder: Path, backend: str) -> Any:
    """A model in float32, of which only tokens are asked, and every text is read as a whole each time."""
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
        kv_cache_memory_bytes=CACHE,
        max_logprobs=-1,
        **own,
    )


def heads_by_layer(pruned_attention: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What vLLM has to be told of a pruned decoder's config: the numbers of heads of each layer.

    Args:
        pruned_attention: what the config says of each attention module, whose name has the layer's number.

    >>> heads_by_layer({"layers.1.self_attn": {"heads": 3, "kv_heads": 2}})["per_layer_config"]
    {1: {'num_attention_heads': 3, 'num_key_value_heads': 2}}
    """
    layers = {
        int(re.findall(r"\d+", name)[0]): {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
        for name, shape in pruned_attention.items()
    }
    return {"allow_global_per_layer_attribute_access": True, "per_layer_config": layers}


def _written(model: Any, request: Request) -> Request:
    from vllm import SamplingParams

    wanted = {"max_tokens": request["new"], "min_tokens": request["new"], "temperature": 0.0, "detokenize": False}
    parameters = SamplingParams(**wanted, ignore_eos=True, logprobs=request["vocabulary"] or None)
    texts = [{"prompt_token_ids": text} for text in request["texts"]]
    written = [one.outputs[0] for one in model.generate(texts, parameters, use_tqdm=False)]
    probabilities = [{token: one.logprob for token, one in step.items()} for step in written[0].logprobs or ()]
    return {"tokens": [list(one.token_ids) for one in written], "probabilities": probabilities}


if __name__ == "__main__":
    main()
