"""Steps that no command of `qtsplus` takes: each a function, called in a process of its own; prints JSON."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from qtsplus.asking import session
from qtsplus.hub.loading import load_processor
from qtsplus.training.lora import load_lora, merge_lora

from ..world.clip import read_video
from .films import CLIPS, FILM, QUESTION, SECOND_QUESTION
from .stock import SPECIAL_TOKENS, write_stock

NEW_TOKENS = 8


def stock(folder: str, variant: str, wheel: str | None, shards: str) -> dict[str, Any]:
    """A stock model with random weights."""
    parameters = write_stock(variant, Path(folder), None if wheel is None else Path(wheel), shards)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "parameters": parameters,
        "shards": len(list(Path(folder).glob("*.safetensors"))),
        "user_turn": tokenizer.encode("<|im_start|>user"),
        "less_than": tokenizer.encode("<"),
        "special": tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)),
    }


def load(folder: str) -> dict[str, Any]:
    """A model and its processor as `qtsplus ask` loads them; and the film's grid in visual tokens."""
    model, processor = session.load(Path(folder, "model"))
    steps, height, width = processor.video_chunks(Path(folder, FILM)).video_grid_thw[0].tolist()
    merge = processor.video_processor.merge_size
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "selector": sum(weight.numel() for weight in model.model.qtsplus.parameters()),
        "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}),
        "grid": [steps, height // merge, width // merge],
    }


def two_questions(folder: str) -> dict[str, Any]:
    """Two questions about a film that is encoded once."""
    model, processor = session.load(Path(folder, "model"))
    video = session.encode(model, processor, Path(folder, FILM))
    answers = [
        session.ask(model, processor, video, question, max_new_tokens=NEW_TOKENS)
        for question in (QUESTION, SECOND_QUESTION)
    ]
    first, second = (answer.keep_map for answer in answers)
    return {
        "answers": [answer.answer for answer in answers],
        "encode": video.seconds,
        "seconds": [answer.timings["generate"] for answer in answers],
        "shared": int((first & second).sum()) / int((first | second).sum()),
    }


def stock_logits(folder: str) -> dict[str, Any]:
    """What the stock model says of a clip, every token read."""
    processor = AutoProcessor.from_pretrained(Path(folder, "stock"))
    model = AutoModelForImageTextToText.from_pretrained(Path(folder, "stock"), dtype="auto").eval()
    return _read(model, processor, folder, "stock")


def every_token(folder: str) -> dict[str, Any]:
    """The same of ours with every token kept, beside what the stock model said."""
    model, processor = session.load(Path(folder, "model"))
    return {
        **_read(model, processor, folder, "model", selection="all"),
        "difference": _difference(folder, "stock", "model"),
    }


def merge_and_save(folder: str) -> dict[str, Any]:
    """The adapters and the trained selector become a model of their own."""
    processor = load_processor(Path(folder, "trained"))
    merged: Any = merge_lora(load_lora(str(Path(folder, "trained")), Path(folder, "lora")))
    merged.save_pretrained(Path(folder, "saved"))
    processor.save_pretrained(Path(folder, "saved"))
    return _read(merged.eval(), processor, folder, "merged")


def load_again(folder: str) -> dict[str, Any]:
    """What was saved, beside what it said before."""
    model, processor = session.load(Path(folder, "saved"))
    return {
        **_read(model, processor, folder, "saved"),
        "difference": _difference(folder, "merged", "saved"),
    }


def _read(model: Any, processor: Any, folder: str, name: str, **choice: Any) -> dict[str, Any]:
    """Keeps the logits `[S, V]` of the prompt about a clip, a frame a second; and decodes greedily."""
    frames, metadata = read_video(str(Path(folder, CLIPS[0])), lambda count, rate: np.arange(0, count, round(rate)))
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(
        text=[prompt], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
    with torch.no_grad():
        if choice:  # in one piece and by a convolution, as stock does: other matrix products round in other ways
            projection = model.model.visual.patch_embed.proj
            projection.forward = partial(torch.nn.Conv3d.forward, projection)
            pixels, grid = inputs.pop("pixel_values_videos"), inputs["video_grid_thw"]
            choice["video_features"] = model.encode_videos(pixels, grid, frames_per_chunk=len(frames))
        logits = model(**inputs, **choice).logits[0]
    torch.save(logits.clone(), _logits_file(folder, name))
    generated = model.generate(**inputs, **choice, max_new_tokens=NEW_TOKENS, do_sample=False)
    return {
        "prompt_tokens": inputs["input_ids"].shape[1],
        "tokens": len(logits),
        "dtype": str(logits.dtype).removeprefix("torch."),
        "ids": generated[0, inputs["input_ids"].shape[1] :].tolist(),
    }


def _difference(folder: str, one: str, other: str) -> float:
    """The largest between two tensors of logits."""
    left, right = (torch.load(_logits_file(folder, name), mmap=True) for name in (one, other))
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(left, right, strict=True))


def _logits_file(folder: str, name: str) -> Path:
    return Path(folder, f"logits-{name}.pt")


TASKS = (stock, load, two_questions, stock_logits, every_token, merge_and_save, load_again)

if __name__ == "__main__":
    task = next(task for task in TASKS if task.__name__ == sys.argv[1])
    print(json.dumps(task(**json.loads(sys.argv[2]))))
