"""A tiny published folder that vLLM can run, and what vLLM answers from it, in a process of its own.

The models have random weights and the usual rotary positions: those of qtsplus-tiny (longrope with sections) and heads
of 16 numbers do not run in vLLM on a CPU.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from qtsplus.hub.publish import assemble_folder
from server_process import running_server

TOKENS = 6  # of every answer
POSITIONS = ("original", "sequential")
SECTIONS = {
    "qwen2_5_vl": [8, 4, 4],
    "qwen2_vl": [8, 4, 4],
    "qwen3_vl": [8, 4, 4],
    "qwen3_5": [4, 2, 2],
}
WHICH = "What is in the red ring?"
WHERE = "Where does the blue square go?"


def request(question: str, videos=(), images: int = 0, before: str = "", **settings: Any) -> dict[str, Any]:
    """
    A question about videos, each of them a number of frames.

    Args:
        before: a text in front of the videos.
        settings: the request's mm_processor_kwargs.
    """
    return {
        "question": question,
        "videos": list(videos),
        "images": images,
        "before": before,
        "settings": settings,
    }


def requests_of(positions: str, attention: bool) -> dict[str, dict[str, Any]]:
    """
    Named requests, with those to the method `lm_attention` where the backbone takes them. Those whose name ends in
    "again" are about videos that were encoded before. With the original positions the engine has [`DEFAULTS`] for
    those that state nothing, with the others the model's own budget counts.
    """
    both = {
        "trained": request(WHICH, [12], retention=0.3),
        "other question again": request(WHERE, [12], retention=0.3),
        "two videos": request(WHICH, [12, 8], retention=0.25),
        "image and two videos": request(WHERE, [12, 8], 1, max_visual_tokens=7),
        "text": request("Hello you"),
        "image": request("Hello you", images=1),
    }
    if attention:
        by_attention = {"selection": "lm_attention"}
        both |= {
            "attention": request(WHICH, [12], retention=0.3, **by_attention),
            "attention of two videos": request(WHERE, [12, 8], retention=0.25, **by_attention),
            "attention up to a cap": request(WHICH, [12, 8], max_visual_tokens=7, **by_attention),
            "attention behind a text": request(WHERE, [12, 8], before="Look: ", retention=0.25, **by_attention),
        }
        if positions == "sequential":
            both["attention with its own budget"] = request(WHERE, [12, 8], **by_attention)
    if positions == "sequential":
        return {
            **both,
            "learned": request(WHICH, [10]),
            "learned again": request(WHERE, [10]),
            "learned of two videos": request(WHERE, [10, 8]),
            "learned up to a cap again": request(WHICH, [10], max_visual_tokens=4),
            "learned for another method again": request(WHICH, [10], selection="diversity"),
        }
    for stated in both.values():
        stated["settings"].setdefault("selection", "qtsplus")
    for name in ("diversity", "temporal_redundancy", "uniform", "random"):
        both[name] = request(WHICH, [12, 8], retention=0.2, selection=name)
    return {
        **both,
        "all": request(WHICH, [12, 8], selection="all"),
        "as they are": request(WHICH, [12], retention=0.3, selection="qtsplus", reencode=False),
        "both budgets": request(WHERE, [8], retention=0.5, max_visual_tokens=11, selection="qtsplus"),
        "the engine's defaults": request(WHICH, [8]),
    }


def last_tokens(candidates: Any, n: int) -> torch.Tensor:
    """A method of the operator's own."""
    num_tokens = candidates.num_tokens
    return torch.arange(num_tokens - n, num_tokens, device=candidates.device)


BREAKING = (1, 2, 3, 4, 5, 6, 7, 13)  # numbers of kept tokens for which `breaking` does not do what a method has to
ONCE = 11  # a number of kept tokens that `breaking` takes only once
once_taken = []
LOST = 12  # a number of kept tokens that the engine loses before their answer is complete, with [`Losing`]


def breaking(candidates: Any, n: int) -> torch.Tensor:
    """A method that fails in a way of its own for each number of tokens in [`BREAKING`]; else the last tokens."""
    if n == ONCE and once_taken:
        raise RuntimeError("broken later")
    if n == ONCE:
        once_taken.append(n)
    if n == LOST:
        from qtsplus.vllm.models import QTSplusForVLLM

        QTSplusForVLLM._remember = lambda *_: None  # as where the cache is full
    if n == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # its time is nearly over
        while True:
            pass
    if n == 2:
        raise RuntimeError("broken")
    if n == 3:
        return torch.full((n,), torch.nan)
    if n == 4:
        return torch.arange(n) + candidates.num_tokens
    if n == 5:
        return torch.zeros(n, dtype=torch.long)
    if n == 6:
        torch.empty(10**15)  # out of memory
    if n == 7:
        return "nothing"
    if n == 13:
        raise BaseException("over \udcff")  # as `sys.exit`, a cancelled task and a panic in Rust do
    return last_tokens(candidates, n)


class Losing:
    """A middleware that releases a request of [`LOST`] tokens as soon as vLLM answers it."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from qtsplus.vllm.server import _ASKED

        async def release(message: Any) -> None:
            if message["type"] == "http.response.start":
                call = scope["app"].state.engine_client.collective_rpc
                for key in _ASKED.get([]):
                    (basis,) = await call("qtsplus_basis", args=(key,))
                    if basis["kept_tokens"] == LOST:
                        await call("qtsplus_release", args=(key,))
            await send(message)

        await self.app(scope, receive, release)


DEFAULTS = {"retention": 0.4, "selection": "engine_runs:last_tokens"}


def frames_of(count: int) -> np.ndarray:
    """`[T, 112, 112, 3]` uint8: a video that is known by its number of frames."""
    rng = np.random.default_rng(count)
    return rng.integers(0, 255, (count, 112, 112, 3), dtype=np.uint8)


def described(count: int) -> dict[str, Any]:
    return {
        "fps": 2.0,
        "total_num_frames": count,
        "duration": count / 2,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
    }


def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (84, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def processor_of(backbone: Any) -> Any:
    """vLLM gives videos the mean and the deviation of images, which are the same in all published models."""
    processor = backbone.processor()
    of_images = processor.image_processor
    of_videos = processor.video_processor
    of_images.image_mean = of_videos.image_mean
    of_images.image_std = of_videos.image_std
    return processor


def build(backbone: Any, processor: Any, **selector: Any) -> Any:
    """A random model whose shape vLLM takes."""
    fields = backbone.config(processor, selector).to_dict()
    for name in ("model_type", "dtype", "architectures"):
        fields.pop(name, None)
    text = fields["text_config"]
    text["hidden_size"] = 128
    text["head_dim"] = 32
    rope = text["rope_parameters"]
    rope["rope_type"] = "default"
    rope["rope_theta"] = 1e4
    rope["mrope_section"] = SECTIONS[backbone.name]
    if backbone.name == "qwen3_5":
        text["linear_key_head_dim"] = 128
        text["linear_value_head_dim"] = 128
    vision = fields["vision_config"]
    if backbone.name == "qwen2_vl":
        vision["hidden_size"] = 128
    else:
        vision["out_hidden_size"] = 128
    torch.manual_seed(0)
    model = backbone.model(backbone.model.config_class(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.12)
    return model.eval()


def write_folder(model: Any, processor: Any, folder: Path) -> Path:
    saved = folder / "saved"
    published = folder / "published"
    model.save_pretrained(saved)
    processor.save_pretrained(saved)
    assemble_folder(saved, published)
    return published


def prompt_of(processor: Any, asked: dict[str, Any]) -> str:
    content = [{"type": "text", "text": asked["before"]}]
    content += [{"type": "image"}] * asked["images"]
    content += [{"type": "video"}] * len(asked["videos"])
    content.append({"type": "text", "text": asked["question"]})
    message = {"role": "user", "content": content}
    return processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)


@dataclass
class Engine:
    """
    The same weights here and there.

    Args:
        alone: per request what vLLM answers when it is asked alone: `tokens`, `logprobs` of the first of them by id,
            `length` of the prompt, `kept` of the visual tokens, `tower_calls`, the `basis` of the answer.
        together: the same, when all requests are one batch.
        defaults: of requests that state nothing; if `None`, the engine can be asked for the model's own budget.
        dtype: of the weights. In half precision both round at other places.
    """

    model: Any
    processor: Any
    requests: dict[str, dict[str, Any]]
    alone: dict[str, dict[str, Any]]
    together: dict[str, dict[str, Any]]
    defaults: dict[str, Any] | None
    dtype: str = "float32"

    @property
    def exact(self) -> bool:
        return self.dtype == "float32"

    def here(self, asked: dict[str, Any], **overrides: Any) -> Any:
        """What our Transformers model generates: (tokens, log-probabilities of the first, qtsplus)."""
        counts = asked["videos"]
        given: dict[str, Any] = {}
        if counts:
            given["videos"] = [frames_of(count) for count in counts]
            given["video_metadata"] = [VideoMetadata(**described(count)) for count in counts]
            given["do_sample_frames"] = False
        if asked["images"]:
            given["images"] = [picture()] * asked["images"]
        prompt = prompt_of(self.processor, asked)
        inputs = self.processor(text=[prompt], return_tensors="pt", **given)
        inputs.pop("mm_token_type_ids", None)
        budget = dict(asked["settings"])
        if counts and self.defaults is not None:
            if not budget:
                budget = {**self.defaults, "selection": last_tokens}
            elif "max_visual_tokens" in budget:
                budget.setdefault("retention", 1.0)
        budget.update(overrides)
        output = self.model.generate(
            **inputs,
            **budget,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompt_length = inputs["input_ids"].shape[1]
        tokens = output.sequences[0, prompt_length:].tolist()
        return tokens, output.logits[0][0].log_softmax(-1), output.qtsplus


def start(backbone: Any, positions: str, requests: dict[str, Any], folder: Path) -> Engine:
    """Asks vLLM everything, and waits for it."""
    processor = processor_of(backbone)
    dtype = "float32"
    if backbone.name == "qwen3_5":
        dtype = "bfloat16"  # all that its linear attention takes on a CPU
    model = build(backbone, processor, position_ids=positions, attention_group=64)
    model = model.to(getattr(torch, dtype))
    published = write_folder(model, processor, folder)
    defaults = DEFAULTS if positions == "original" else None
    content: dict[str, Any] = {"dtype": dtype, "defaults": defaults}
    for name, asked in requests.items():
        content[name] = {**asked, "prompt": prompt_of(processor, asked)}
    (folder / "requests.json").write_text(json.dumps(content))
    here = Path(__file__).parent
    command = [
        sys.executable,
        str(here / "ask_engine.py"),
        str(published),
        str(folder),
    ]
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(here), *sys.path])
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    answers = json.loads((folder / "answers.json").read_text())
    return Engine(
        model,
        processor,
        requests,
        answers["alone"],
        answers["together"],
        defaults,
        dtype,
    )


def by_place(span: dict[str, Any]) -> tuple[str, float]:
    return span["video"], span["start"]


def same_evidence(told: list[dict[str, Any]], here: list[dict[str, Any]]) -> None:
    assert len(told) == len(here)
    told = sorted(told, key=by_place)
    here = sorted(here, key=by_place)
    for span, expected in zip(told, here, strict=True):
        for name in ("start", "end", "weight"):
            assert span[name] == pytest.approx(expected[name], abs=1e-4)
        for name in ("video", "box", "pixels"):
            assert span[name] == expected[name]


def same_basis(told: dict[str, Any], here: dict[str, Any]) -> None:
    """Asserts that an engine says of an answer what [`Answer.as_dict`] says, but its text and the names of videos."""
    assert told.keys() == here.keys() - {"answer", "video", "timings"}
    same_evidence(
        [{**span, "video": ""} for span in told["evidence"]],
        [{**span, "video": ""} for span in here["evidence"]],
    )
    for name in ("rho", "seconds_of_video", "seen"):
        assert told.get(name) == pytest.approx(here.get(name), abs=1e-4)
    for name in ("frames", "visual_tokens", "kept_tokens", "warnings", "unheard"):
        assert told[name] == here[name], name


def engine_environment() -> dict[str, str]:
    """One process, a gigabyte of keys and values, one thread."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


@contextmanager
def serving(published: Path, media: Path, *options: Any, own: tuple[Any, ...] = ()) -> Iterator[str]:
    """
    The address of `qtsplus serve` with a folder, called `tiny`.

    Args:
        media: the folder with the videos.
        options: vLLM's, behind `--`.
        own: those in front of it.
    """
    command = ["-m", "qtsplus.cli", "serve", published, "--port", "{port}", "--allow-media-root", media, *own, "--"]
    command += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", 1024, *options]
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    log = published.parent / "server.log"
    with running_server(log, *map(str, command), environment=environment) as port:
        yield f"http://127.0.0.1:{port}"
    assert "its answer is void" not in log.read_text()


def ask_server(server: str, model: str, video: Path, question: str, budget: dict[str, Any]) -> Any:
    """The first choice of the response."""
    content = [{"type": "video_url", "video_url": {"url": video.as_uri()}}, {"type": "text", "text": question}]
    return send(server, content, budget, model=model).choices[0]


def send(server, content, budget, *, key="none", model="tiny", timeout=300.0, stream=False, **more):
    """The response to a message, or the events of a stream."""
    fields = {"mm_processor_kwargs": budget, "ignore_eos": True, "min_tokens": TOKENS}
    with openai.OpenAI(base_url=f"{server}/v1", api_key=key, max_retries=0, timeout=timeout) as client:
        response = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=TOKENS,
            stream=stream,
            extra_body=fields | more,
        )
        return list(response) if stream else response


def forget(server: str, key: str = "none") -> None:
    """What vLLM remembers of prompts and videos; what the engine keeps of them stays."""
    for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{server}/{name}", method="POST", headers=headers)
        urllib.request.urlopen(request, timeout=30).close()


def shown_text(answer: str) -> str:
    """An answer without white space around it, and a last character that is not whole: vLLM may wait for its rest."""
    return answer.strip().rstrip("\N{REPLACEMENT CHARACTER}").strip()
