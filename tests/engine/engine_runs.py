"""A tiny published folder that vLLM can run, and what vLLM answers from it, in a process of its own.

The models have random weights and the usual rotary positions: those of qtsplus-tiny (longrope with sections) and heads
of 16 numbers do not run in vLLM on a CPU.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from qtsplus.hub.publish import assemble_folder

TOKENS = 6  # of every answer
POSITIONS = ("original", "sequential")
SECTIONS = {"qwen2_5_vl": [8, 4, 4], "qwen2_vl": [8, 4, 4], "qwen3_vl": [8, 4, 4], "qwen3_5": [4, 2, 2]}
WHICH, WHERE = "What is in the red ring?", "Where does the blue square go?"


def request(question: str, videos=(), images: int = 0, **settings: Any) -> dict[str, Any]:
    """
    A question about videos, each of them a number of frames.

    Args:
        settings: the request's mm_processor_kwargs.
    """
    return {"question": question, "videos": list(videos), "images": images, "settings": settings}


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
            "attention up to a cap": request(WHERE, [12, 8], max_visual_tokens=7, **by_attention),
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
    fixed = ("diversity", "temporal_redundancy", "uniform", "random")
    methods = {name: request(WHICH, [12, 8], retention=0.2, selection=name) for name in fixed}
    trained = {name: {**one, "settings": {"selection": "qtsplus", **one["settings"]}} for name, one in both.items()}
    return {
        **trained,
        **methods,
        "all": request(WHICH, [12, 8], selection="all"),
        "as they are": request(WHICH, [12], retention=0.3, selection="qtsplus", reencode=False),
        "both budgets": request(WHERE, [8], retention=0.5, max_visual_tokens=11, selection="qtsplus"),
        "the engine's defaults": request(WHICH, [8]),
    }


def last_tokens(candidates: Any, n: int) -> torch.Tensor:
    """A method of the operator's own."""
    return torch.arange(candidates.num_tokens - n, candidates.num_tokens, device=candidates.device)


BREAKING = range(2, 8)  # numbers of kept tokens for which `breaking` does not do what a method has to


def breaking(candidates: Any, n: int) -> torch.Tensor:
    """A method that fails in a way of its own for each number of tokens in [`BREAKING`]; else the last tokens."""
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
    return last_tokens(candidates, n)


DEFAULTS = {"retention": 0.4, "selection": "engine_runs:last_tokens"}


def frames_of(count: int) -> np.ndarray:
    """`[T, 112, 112, 3]` uint8: a video that is known by its number of frames."""
    return np.random.default_rng(count).integers(0, 255, (count, 112, 112, 3), dtype=np.uint8)


def described(count: int) -> dict[str, Any]:
    times = {"fps": 2.0, "total_num_frames": count, "duration": count / 2, "frames_indices": list(range(count))}
    return {**times, "video_backend": "opencv"}


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 56, 3), dtype=np.uint8))


def processor_of(backbone: Any) -> Any:
    """vLLM gives videos the mean and the deviation of images, which are the same in all published models."""
    processor = backbone.processor()
    for name in ("image_mean", "image_std"):
        setattr(processor.image_processor, name, getattr(processor.video_processor, name))
    return processor


def build(backbone: Any, processor: Any, **selector: Any) -> Any:
    """A random model whose shape vLLM takes."""
    fields = backbone.config(processor, selector).to_dict()
    for name in ("model_type", "dtype", "architectures"):
        fields.pop(name, None)
    rope = fields["text_config"]["rope_parameters"]
    rope |= {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS[backbone.name]}
    fields["text_config"] |= {"hidden_size": 128, "head_dim": 32, "rope_parameters": rope}
    if backbone.name == "qwen3_5":
        fields["text_config"] |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    width = "hidden_size" if backbone.name == "qwen2_vl" else "out_hidden_size"
    fields["vision_config"][width] = 128
    torch.manual_seed(0)
    model = backbone.model(backbone.model.config_class(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, 0.12)
    return model.eval()


def write_folder(model: Any, processor: Any, folder: Path) -> Path:
    for part in (model, processor):
        part.save_pretrained(folder / "saved")
    assemble_folder(folder / "saved", folder / "published")
    return folder / "published"


def prompt_of(processor: Any, asked: dict[str, Any]) -> str:
    content = [{"type": "image"}] * asked["images"] + [{"type": "video"}] * len(asked["videos"])
    message = {"role": "user", "content": [*content, {"type": "text", "text": asked["question"]}]}
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
        videos = [frames_of(count) for count in asked["videos"]]
        metadata = [VideoMetadata(**described(count)) for count in asked["videos"]]
        given = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
        images = [picture()] * asked["images"] or None
        inputs = self.processor(text=[prompt_of(self.processor, asked)], images=images, return_tensors="pt", **given)
        inputs.pop("mm_token_type_ids", None)
        budget = dict(asked["settings"])
        if videos and self.defaults is not None:
            if not budget:
                budget = {**self.defaults, "selection": last_tokens}
            elif "max_visual_tokens" in budget:
                budget.setdefault("retention", 1.0)
        output = self.model.generate(
            **inputs,
            **{**budget, **overrides},
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, output.logits[0][0].log_softmax(-1), output.qtsplus


def start(backbone: Any, positions: str, requests: dict[str, Any], folder: Path) -> Engine:
    """Asks vLLM everything, and waits for it."""
    processor = processor_of(backbone)
    dtype = "bfloat16" if backbone.name == "qwen3_5" else "float32"  # all that its linear attention takes on a CPU
    model = build(backbone, processor, position_ids=positions, attention_group=64).to(getattr(torch, dtype))
    published = write_folder(model, processor, folder)
    prompts = {name: {**asked, "prompt": prompt_of(processor, asked)} for name, asked in requests.items()}
    defaults = DEFAULTS if positions == "original" else None
    (folder / "requests.json").write_text(json.dumps({**prompts, "dtype": dtype, "defaults": defaults}))
    command = [sys.executable, str(Path(__file__).with_name("ask_engine.py")), str(published), str(folder)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(command, env={**engine_environment(), "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    answers = json.loads((folder / "answers.json").read_text())
    return Engine(model, processor, requests, answers["alone"], answers["together"], defaults, dtype)


def same_evidence(*both: list[dict[str, Any]]) -> None:
    one, other = (sorted(spans, key=lambda span: (span["video"], span["start"])) for spans in both)
    assert len(one) == len(other)
    for span, expected in zip(one, other, strict=True):
        about = pytest.approx([expected[name] for name in ("start", "end", "weight")], abs=1e-4)
        assert [span[name] for name in ("start", "end", "weight")] == about
        assert [span[name] for name in ("video", "box", "pixels")] == [
            expected[name] for name in ("video", "box", "pixels")
        ]


def same_basis(told: dict[str, Any], here: dict[str, Any]) -> None:
    """Asserts that an engine says of an answer what [`Answer.as_dict`] says, but its text and the names of videos."""
    assert told.keys() == here.keys() - {"answer", "video", "timings"}
    same_evidence(*([{**span, "video": ""} for span in basis["evidence"]] for basis in (told, here)))
    for name in ("rho", "seconds_of_video"):
        assert told[name] == pytest.approx(here[name], abs=1e-4)
    assert told.get("seen") == pytest.approx(here.get("seen"), abs=1e-4)
    for name in ("frames", "visual_tokens", "kept_tokens", "warnings", "unheard"):
        assert told[name] == here[name], name


def engine_environment() -> dict[str, str]:
    """One process, a gigabyte of keys and values, one thread."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
