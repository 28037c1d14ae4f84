"""The command `speed`: seconds per stage, from an mp4 to the first token, stock and ours in turn in one process.

Ours reads the video once; if it is asked for, a third side reads it in two passes.
"""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import BatchFeature

from qtsplus.asking.session import EncodedVideo, encode
from qtsplus.common.journals import Journal, write_json
from qtsplus.model import selector_qtsplus
from qtsplus.model.sampling_qtsplus import choose_frames

from ..files import begin, finish
from ..machine import environment, steps
from ..world.clip import read_video
from .clock import StageClock, TokenClock, now, timed
from .cost import Cost, faster_dtype, probe, stage_costs
from .plots import draw_frames, draw_stages
from .results import SUMMARY, device_name, label, spread, summarise, write_overview
from .shapes import (
    FRAME_BOUNDS,
    FRAMES_PER_SECOND,
    QUESTION,
    SECOND_QUESTION,
    SIDES,
    Shape,
    best_attention,
    build_pair,
    find_device,
    find_shape,
    make_config,
    make_processor,
    make_stock_processor,
    prompt_text,
    render_video,
)

STAGES = (
    *("decode", "preprocess", "reading", "vision", "relevance", "gate", "re-encode", "prefill", "per_token"),
    *("features_to_first_token", "pixels_to_first_token", "file_to_first_token", "second_question"),
)


def run_speed(
    shape_name: str,
    out: Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    repeats: int = 5,
    retention: float = 0.11,
    new_tokens: int = 5,
    selection: str = "qtsplus",
    sweep: bool = True,
    progress: bool = True,
) -> Path:
    """
    Measures, and writes `speed-LABEL.json` with its two figures, or `speed-lm-attention-LABEL.json`. An interrupted run
    goes on where it stopped.

    Args:
        shape_name: of [`MODEL_SHAPES`].
        out: folder of the results.
        device: the shape's own when `None`.
        dtype: of both sides; "auto" is bfloat16 or float32, whichever the device multiplies faster.
        repeats: of each side at each size, behind one to warm up.
        retention: fraction of the visual tokens that our side keeps.
        new_tokens: to generate, at least 2.
        selection: of our side, `"qtsplus"` or `"lm_attention"`, which re-encodes nothing.
        sweep: also measure over the number of frames.
        progress: show a progress bar.

    Raises:
        ValueError: no such shape, device or selection, or a number out of its range.
    """
    shape = find_shape(shape_name)
    if selection not in ("qtsplus", "lm_attention"):
        raise ValueError(f"selection={selection!r}: expected 'qtsplus' or 'lm_attention'.")
    if repeats < 1 or new_tokens < 2 or not 0 < retention <= 1:
        raise ValueError(
            f"repeats={repeats}, new_tokens={new_tokens}, retention={retention}: expected at least 1, at least 2 and a "
            "fraction in (0, 1]."
        )
    device = find_device(shape, device)
    torch_dtype = faster_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    attention = best_attention(device)
    swept = find_shape(shape.sweep_shape or shape_name)
    points = [(shape, shape.frames)]
    if sweep:
        points += [(swept, frames) for frames in swept.sweep]
    settings = {
        "shape": shape_name,
        "device": device,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "attention": attention or "sdpa",
        "retention": retention,
        "new_tokens": new_tokens,
    }
    parts = ["speed"]
    if selection == "lm_attention":
        settings["selection"] = selection
        parts.append("lm-attention")
    name = "-".join([*parts, label(shape_name)])
    # With the sweep or without it: what has been measured is the same.
    journal = begin(out / f".{name}.jsonl", settings)
    settings |= {"repeats": repeats, "sweep": [list(swept.sweep), swept.name] if sweep else None}
    pairs = len(dict.fromkeys(points)) * repeats
    with tempfile.TemporaryDirectory() as folder, steps(name, pairs, progress) as step:
        for measured in dict.fromkeys(point for point, _ in points):
            bench = None  # the weights of the one before go first
            for frames in dict.fromkeys(frames for point, frames in points if point is measured):
                video, warm = None, False
                for repeat in range(repeats):
                    key = _key(measured, frames, repeat)
                    if key not in journal.done:
                        if bench is None:
                            bench = _Bench(measured, device, torch_dtype, attention, retention, new_tokens, selection)
                        video = video or render_video(measured, frames, Path(folder))
                        if not warm:
                            bench.measure(video)
                            warm = True
                        journal.add(key, bench.measure(video))
                    sides = journal.done[key].items()
                    seconds = (f"{side} {run['file_to_first_token']:.2f} s" for side, run in sides)
                    step(f"{measured.name}, {frames} frames, {repeat + 1} of {repeats}: {', '.join(seconds)}")
    return _write(shape, points, settings, journal, out / f"{name}.json")


def _key(shape: Shape, frames: int, repeat: int) -> str:
    return f"{shape.name}/{frames}/{repeat}"


# --------------------------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------------------------


class _Bench:
    """Both models of a shape on the same weights, and what they are asked."""

    def __init__(self, shape, device, dtype, attention, retention, new_tokens, selection):
        self.models = build_pair(shape, device, dtype, attention)
        self.processor, self.stock_processor = make_processor(shape), make_stock_processor(shape)
        self.device, self.retention, self.new_tokens = device, retention, new_tokens
        self.by_attention = selection == "lm_attention"
        self.how = {"selection": selection, "reencode": not self.by_attention}

    def measure(self, video: Path) -> dict[str, dict[str, float]]:
        """Seconds and tokens of one run of stock, then of ours."""
        return {"stock": self.run_stock(video), "ours": self.run_ours(video)}

    def run_stock(self, video: Path) -> dict[str, float]:
        """Reads the file, then generates from the pixels."""
        model, processor, tokens = self.models["stock"], self.stock_processor, TokenClock()
        visual_tokens = self._count(self.processor.video_chunks(video).video_grid_thw)
        began = now(self.device)
        frames, metadata = read_video(
            str(video), functools.partial(choose_frames, fps=FRAMES_PER_SECOND, **FRAME_BOUNDS)
        )
        decoded = now(self.device)
        inputs = processor(
            text=[prompt_text(processor, QUESTION)],
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        ).to(self.device)
        prepared = now(self.device)
        with StageClock(self.device, model.model, language_model=model.model.language_model) as stages:
            model.generate(**inputs, max_new_tokens=self.new_tokens, streamer=tokens)
        return {
            "decode": decoded - began,
            "preprocess": prepared - decoded,
            "vision": stages.seconds("vision"),
            "pixels_to_first_token": tokens.first_token - prepared,
            **self._figures(stages, tokens, visual_tokens, visual_tokens, began=began, encoded=stages.ended("vision")),
        }

    def run_ours(self, video: Path) -> dict[str, float]:
        """Reads and encodes the file chunk by chunk, then generates from the features, twice."""
        model, tokens = self.models["ours"], TokenClock()
        selector = model.model.qtsplus
        modules = {"selection": selector, "language_model": model.model.language_model}
        modules.update({f"re-encode {i}": layer for i, layer in enumerate(selector.reencode_layers)})
        began = now(self.device)
        clock = StageClock(self.device, model.model, **modules)
        with clock as stages, timed(self.device, selector_qtsplus, "score") as scoring:
            # Stock encodes every frame too.
            known = encode(model, self.processor, video)
            inputs = self._ask(QUESTION, known)
            encoded = now(self.device)
            output = self._generate(inputs, streamer=tokens)
        kept = len(output.qtsplus.kept_indices[0])
        relevance = sum(scoring)
        reencode = sum(stages.seconds(name) for name in modules if name.startswith("re-encode"))

        selected = {
            "relevance": relevance,
            "gate": stages.seconds("selection") - relevance - reencode,
            "re-encode": reencode,
        }
        if self.by_attention:
            selected = {"relevance": stages.seconds("selection")}
        later = TokenClock()
        asked = now(self.device)
        self._generate(self._ask(SECOND_QUESTION, known), streamer=later)
        visual_tokens = self._count(known.video_grid_thw)
        return {
            "reading": encoded - began - stages.seconds("vision"),
            "vision": stages.seconds("vision"),
            **selected,
            "selection": stages.seconds("selection"),
            "second_question": later.first_token - asked,
            "question_tokens": int(inputs["query_mask"].sum()),
            **self._figures(stages, tokens, visual_tokens, kept, began=began, encoded=encoded),
        }

    def _ask(self, question: str, known: EncodedVideo) -> BatchFeature:
        """The inputs of a question about a video that has been encoded."""
        text = [prompt_text(self.processor, question)]
        seconds = [known.seconds_per_step]
        inputs = self.processor(
            text=text,
            video_grid_thw=known.video_grid_thw,
            second_per_grid_ts=seconds,
            return_tensors="pt",
        )
        inputs = inputs.to(self.device)
        inputs["second_per_grid_ts"] = seconds
        inputs["video_features"] = [known.features]
        inputs["retention"] = self.retention
        return inputs

    def _generate(self, inputs: BatchFeature, streamer: TokenClock) -> Any:
        call = {"max_new_tokens": self.new_tokens, "return_dict_in_generate": True, "streamer": streamer}
        return self.models["ours"].generate(**inputs, **self.how, **call)

    def _count(self, video_grid_thw: torch.Tensor) -> int:
        """Visual tokens."""
        return sum(map(math.prod, self.models["ours"].model.merged_grid(video_grid_thw)))

    def _figures(
        self,
        stages: StageClock,
        tokens: TokenClock,
        visual_tokens: int,
        visual_tokens_to_lm: int,
        began: float,
        encoded: float,
    ) -> dict[str, float]:
        """What both sides have alike."""
        prefill_began, prefill_ended = stages.spans["language_model"][0]
        return {
            "prefill": prefill_ended - prefill_began,
            "per_token": tokens.seconds_per_token,
            "features_to_first_token": tokens.first_token - encoded,
            "file_to_first_token": tokens.first_token - began,
            "visual_tokens": visual_tokens,
            "visual_tokens_to_lm": visual_tokens_to_lm,
            "text_tokens": stages.lengths["language_model"][0] - visual_tokens_to_lm,
        }


# --------------------------------------------------------------------------------------------------------------------
# Reporting
# --------------------------------------------------------------------------------------------------------------------


def _write(shape: Shape, points, settings: dict[str, Any], journal: Journal, target: Path) -> Path:
    device, repeats = settings["device"], settings["repeats"]

    def all_repeats(measured: Shape, frames: int) -> dict[str, list[dict[str, float]]]:
        runs = [journal.done[_key(measured, frames, repeat)] for repeat in range(repeats)]
        return {side: [run[side] for run in runs] for side in runs[0]}

    runs = all_repeats(shape, shape.frames)
    counted = runs["ours"][0]
    dtype = getattr(torch, settings["dtype"])
    costs = stage_costs(
        make_config(shape),
        shape.grid,
        int(counted["text_tokens"]),
        int(counted["question_tokens"]),
        settings["retention"],
        dtype.itemsize,
        stock_text_tokens=int(runs["stock"][0]["text_tokens"]),
        selection=settings.get("selection", "qtsplus"),
    )
    reached = probe(device, dtype)
    stages = _spreads(runs)
    document = {
        "command": f"python -m benchmarks speed --shape {shape.name} --device {device} --dtype {settings['dtype']} "
        + (f"--selection {settings['selection']} " if "selection" in settings else "")
        + f"--retention {settings['retention']:g} --repeats {repeats} --{'sweep' if settings['sweep'] else 'no-sweep'}",
        "environment": environment(device),
        "settings": settings,
        "tokens": {key: int(counted[key]) for key in ("visual_tokens", "visual_tokens_to_lm", "text_tokens")},
        "figures": speed_figures(stages),
        "seconds": stages,
        "device": {"flops_per_second": reached.flops, "bytes_per_second": reached.bandwidth},
        "cost": {
            side: {stage: _distance(reached.floor(cost), cost, stages[side][stage]) for stage, cost in of_side.items()}
            for side, of_side in costs.items()
        },
        "repeats": runs,
        "frames": [
            {
                "shape": measured.name,
                "frames": frames,
                **{
                    side: {
                        "visual_tokens_to_lm": int(of_side[0]["visual_tokens_to_lm"]),
                        "file_to_first_token": spread(run["file_to_first_token"] for run in of_side),
                    }
                    for side, of_side in all_repeats(measured, frames).items()
                },
                "repeats": all_repeats(measured, frames),
            }
            for measured, frames in points[1:]
        ],
    }
    finish(journal, target, document)
    if "selection" in settings:  # a column of its own
        figures = speed_figures(stages)
        document = {"summary": {key: figures.get(key) for key in SUMMARY}, **document}
        write_json(target, document)
        write_overview(target.parent)
    else:
        summarise(target.parent, shape.name)
    draw_stages(document, target.with_suffix(""))
    if document["frames"]:
        draw_frames({device_name(document): document}, target.with_name(target.stem.replace("speed", "frames")))
    return target


def _spreads(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        side: {stage: spread(run[stage] for run in of_side) for stage in (*STAGES, "selection") if stage in of_side[0]}
        for side, of_side in runs.items()
    }


def speed_figures(stages: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Ratios of medians: the speed benchmark's share of the summary."""
    medians = {side: {stage: values["median"] for stage, values in own.items()} for side, own in stages.items()}
    stock, ours = (medians[side] for side in SIDES)
    return {
        "first_token_speedup": stock["features_to_first_token"] / ours["features_to_first_token"],
        "file_to_first_token_speedup": stock["file_to_first_token"] / ours["file_to_first_token"],
        "selection_share_of_stock_prefill": ours["selection"] / stock["prefill"],
        "vision_speedup": stock["vision"] / ours["vision"],
        "second_question_speedup": stock["pixels_to_first_token"] / ours["second_question"],
    }


def _distance(floor: float, cost: Cost, measured: dict[str, float]) -> dict[str, float]:
    """A stage's cost, its floor here, and how many times the floor it took."""
    seconds = measured["median"]
    return {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "floor": floor,
        "seconds": seconds,
        "times_floor": seconds / floor,
    }
