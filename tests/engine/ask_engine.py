"""Asks vLLM the requests of a folder, first one by one and then together, and writes answers.json into it."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from engine_runs import TOKENS, described, frames_of, picture
from qtsplus.vllm import models


class Watch:
    """Counts calls of the tower, and keeps what the selector keeps, and what the answer rests on."""

    def __init__(self, model: Any):
        self.forget()
        model._basis = functools.partial(self._rests, model._basis)
        model.visual.register_forward_hook(self._saw)
        model.qtsplus.register_forward_hook(self._chose)
        model.language_model.model.layers[0].register_forward_pre_hook(self._passes, with_kwargs=True)

    def forget(self) -> None:
        self.tower_calls = 0
        self.passed: list[int] = []
        self.kept: list[int] = []
        self.basis: Any = None

    def seen(self) -> dict[str, Any]:
        return {
            "kept": self.kept,
            "tower_calls": self.tower_calls,
            "passed": self.passed,
            "basis": self.basis,
        }

    def _saw(self, *args: Any) -> None:
        self.tower_calls += 1

    def _passes(self, layer: Any, args: Any, named: Any) -> None:
        _, states, _ = [*args, *named.values()]
        self.passed.append(len(states))

    def _chose(self, module: Any, args: Any, output: Any) -> None:
        _, chosen = output
        self.kept = chosen.kept_indices[0].tolist()

    def _rests(self, work: Any, *args: Any) -> Any:
        self.basis = work(*args)
        return self.basis


def prompt_of(asked: dict[str, Any]) -> dict[str, Any]:
    videos = []
    for count in asked["videos"]:
        about = described(count)
        about["do_sample_frames"] = False
        videos.append((frames_of(count), about))
    data: dict[str, Any] = {}
    if videos:
        data["video"] = videos
    if asked["images"]:
        data["image"] = [picture()] * asked["images"]
    return {
        "prompt": asked["prompt"],
        "multi_modal_data": data,
        "mm_processor_kwargs": asked["settings"],
    }


def ask(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    settings = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        min_tokens=TOKENS,
        ignore_eos=True,
        logprobs=5,
    )
    prompts = [prompt_of(asked) for asked in requests]
    answers = []
    for output in llm.generate(prompts, settings, use_tqdm=False):
        answer = output.outputs[0]
        logprobs = {}
        for token, known in answer.logprobs[0].items():
            logprobs[str(token)] = known.logprob
        answers.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": logprobs,
                "length": len(output.prompt_token_ids),
            }
        )
    return answers


def main(model: str, folder: Path) -> None:
    requests = json.loads((folder / "requests.json").read_text())
    defaults = requests.pop("defaults")
    models.CHUNK = 64  # one step in time of most of the videos
    llm = LLM(
        model=model,
        dtype=requests.pop("dtype"),
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=192,  # prompts of a batch are read in pieces
        limit_mm_per_prompt={"video": 3, "image": 2},
        mm_processor_kwargs=defaults,
        enable_prefix_caching=False,
        additional_config={"qtsplus_keep_keys": True},
        worker_extension_cls="qtsplus.vllm.worker.Worker",
    )
    if defaults is None:
        processor = llm.llm_engine.renderer.get_mm_processor()
        processor.call_engine = lambda method, args: llm.collective_rpc(method, args=args)
        processor.release = lambda videos: None
    (watch,) = llm.apply_model(Watch)
    alone = {}
    for name, asked in requests.items():
        llm.llm_engine.reset_encoder_cache()  # or two requests that keep as many tokens would be one
        watch.forget()
        (answer,) = ask(llm, [asked])
        alone[name] = answer | watch.seen()
    llm.llm_engine.reset_encoder_cache()
    answers = ask(llm, list(requests.values()))
    together = dict(zip(requests, answers, strict=True))
    (folder / "answers.json").write_text(json.dumps({"alone": alone, "together": together}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
