"""Steps whose peak memory test_memory.py measures, in MB beyond what stood before, in a process of their own."""

import ctypes
import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch

MB = 1e6


def extra_mb(step) -> float:
    """Peak resident memory while `step` runs, less that before it."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def status(name: str) -> float:
    """A field of the process's status, in MB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / MB


def relevance() -> dict[str, float]:
    """180,000 visual tokens, a sixth naively and in training; 16 heads over 2 of keys. Less results and gradients."""
    from naive import naive_log_relevance
    from qtsplus.model.fields_qtsplus import REDUCTIONS
    from qtsplus.model.relevance_qtsplus import log_relevance

    num_tokens = 180_000
    head_dim = 16
    queries = torch.randn(16, 32, head_dim)
    keys = torch.randn(num_tokens, 2, head_dim).transpose(0, 1)
    result = num_tokens * 4 / MB
    fewer = keys[:, : num_tokens // 6]
    gradients = fewer.numel() * 4 / MB + result / 6

    def forward(kernel, keys):
        with torch.no_grad():
            return kernel(queries, keys)

    def training(reduction):
        states = queries.clone().requires_grad_(), fewer.detach().requires_grad_()
        torch.autograd.grad(log_relevance(*states, reduction=reduction).sum(), states)

    training("mean")  # what the libraries import, and their own buffers
    return {
        "chunked": extra_mb(lambda: forward(log_relevance, keys)) - result,
        **{f"training_{name}": extra_mb(lambda name=name: training(name)) - gradients for name in REDUCTIONS},
        "naive": extra_mb(lambda: forward(naive_log_relevance, fewer)) - result / 6,
    }


def path() -> dict[str, float]:
    """From a video's features, 100,000 tokens in bfloat16, to the first generated token; and the features alone."""
    import tiny
    from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration

    hidden = 512
    config = tiny.tiny_config(n_max=2000)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = hidden
    text.num_attention_heads = 32
    text.num_key_value_heads = 4
    torch.manual_seed(0)
    model = Qwen2_5_VLQTSplusForConditionalGeneration(config).bfloat16().eval()
    grid = (1000, 20, 20)
    num_tokens = grid[0] * grid[1] * grid[2] // 4
    inputs = tiny.batch(tiny.prompt(videos=[(1, 2, 2)]))
    run(model, tiny, (2, 20, 20), torch.randn(200, hidden, dtype=torch.bfloat16), inputs)
    features = torch.randn(num_tokens, hidden, dtype=torch.bfloat16)
    measured = extra_mb(lambda: run(model, tiny, grid, features, inputs))
    return {"path": measured, "features": features.nbytes / MB}


def run(model, tiny, grid, features, inputs):
    ids = inputs["input_ids"][0].tolist()
    place = ids.index(tiny.VIDEO_PAD)
    ids[place : place + 1] = [tiny.VIDEO_PAD] * len(features)
    ids = torch.tensor([ids])
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        video_features=[features],
        video_grid_thw=torch.tensor([grid]),
        second_per_grid_ts=[0.5],
        max_new_tokens=1,
    )


def forecasts() -> dict[str, float]:
    """Of frames of a 720p video that are looked at, the memory to answer as a share of what was forecast."""
    import tiny
    from clips import render_clip, write_mp4
    from qtsplus.asking import session
    from qtsplus.video.forecast import forecast

    model, processor = tiny.load_bundled()
    shares = {}
    with TemporaryDirectory() as folder:
        render_clip(f"{folder}/small.mp4")
        session.ask(model, processor, f"{folder}/small.mp4", "What?", max_new_tokens=1)
        for frames in (24, 64):
            path = f"{folder}/{frames}.mp4"
            write_mp4(path, (np.full((720, 1280, 3), index, np.uint8) for index in range(frames)), 2)
            told = forecast(model, processor.video_chunks(path, fps=2)).memory / MB
            shares[f"{frames}"] = extra_mb(lambda path=path: session.ask(model, processor, path, "What?")) / told
    return shares


def training() -> dict[str, float]:
    """The share that a step of training takes of what is counted: taught by attention, and with all parts trained."""
    import tiny
    from qtsplus.training.plan import step_memory
    from training_examples import make_trainer

    tiny.TEXT.update(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32)
    tiny.VISION.update(out_hidden_size=512, depth=12, hidden_size=128, intermediate_size=256)
    kinds = {
        "taught": {"relevance_weight": 1.0, "gradient_checkpointing": True},
        "whole": {"freeze_language_model": False, "freeze_vision_model": False},
        "recomputed": {"freeze_language_model": False, "freeze_vision_model": False, "gradient_checkpointing": True},
    }
    shares = {}
    for kind, settings in kinds.items():
        with TemporaryDirectory() as folder:
            trainer = make_trainer(
                folder,
                {"gate": "detached", "reduction": "mean", "n_max": 5000},
                max_steps=1,
                per_device_train_batch_size=1,
                retention_range=[0.3, 0.3],
                retention_share=1.0,
                **settings,
            )
            trainer.train_dataset = [tiny.prompt(videos=[(50, 20, 20)], generation=False)]
            recipe = SimpleNamespace(training=trainer.args, data=SimpleNamespace(model_max_length=100, features=None))
            counted = step_memory(trainer.model, recipe, 5000)
            gradients = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
            shares[kind] = (extra_mb(trainer.train) * MB - gradients) / counted
    return shares


if __name__ == "__main__":
    print(json.dumps({name: mb for step in sys.argv[1:] for name, mb in globals()[step]().items()}))
