"""What a trained selector does: the analysis of the paper's appendix, and how it spends its tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.records import VideoRecord
from ..results import Journal, environment, steps
from ..selector_qtsplus import find_threshold
from ..training.dataset import require_rates
from ..training.features import encode_videos, fingerprint
from .analysis_report import write_analysis_report
from .exact_match import model_inputs
from .intervals import clustered_interval, correlation
from .labelled import LabelledQuestion

# What the budget head sees, and the gate's threshold: what the paper holds against rho.
QUANTITIES = ("sq_mean", "log_m", "r_max", "entropy", "threshold", "log_threshold")
# Of relevance over its mean, in powers of ten.
_RELEVANCE_EDGES = np.linspace(-6, 4, 201)
_TIME_BINS = 20


def run_analysis(
    model: Any,
    processor: Any,
    questions: Sequence[LabelledQuestion],
    out: Path,
    *,
    name: str,
    work: Path = Path("runs/analysis"),
    command: str = "",
    progress: bool = True,
) -> Path:
    """
    Lets the model choose for every question with its own budget: `analysis-NAME.json`, `.md` and two figures. An
    interrupted run goes on where it stopped. Questions about videos that cannot be read are left out, and counted.

    Args:
        model, processor: as `qtsplus.session.load` gives them.
        questions: about at least two videos.
        out: folder of the results.
        name: of the results.
        work: where the videos' features are kept.
        command: what was typed, for the record.
        progress: show progress on standard error.

    Raises:
        ValueError: questions about fewer than two videos that can be read, or a folder of frames without its rate.
    """
    records = [question.record for question in questions]
    require_rates(records)
    features = encode_videos(model, processor, [(str(record.video), record.fps) for record in records], work)

    @lru_cache(maxsize=1)
    def load(video: str, fps: float | None) -> dict[str, torch.Tensor] | None:
        return features.load(video, fps)

    asked = [[features.file(str(record.video), record.fps).name, record.question, record.query] for record in records]
    settings = {"model": fingerprint({"model": model}, model.config.to_dict()), "records": asked}
    journal = Journal(out / f".analysis-{name}.jsonl", settings)
    with steps("analysis", len(questions), progress) as step:
        for number, question in enumerate(questions):
            if str(number) not in journal.done:
                found = load(str(question.record.video), question.record.fps)
                journal.add(str(number), None if found is None else measure(model, processor, question, found))
            if number % 50 == 49 or number + 1 == len(questions):
                step(f"{number + 1} of {len(questions)} questions")
    measured = [journal.done[str(number)] for number in range(len(questions))]
    document = {
        "command": command,
        "environment": environment(str(model.device)),
        "selector": {field: getattr(model.config.qtsplus_config, field) for field in ("gate", "reduction", "tau_s")},
        **summarise_choices(records, measured),
    }
    target = journal.finish(out / f"analysis-{name}.json", document)
    write_analysis_report(document, out / f"analysis-{name}")
    return target


# --------------------------------------------------------------------------------------------------------------------
# One question
# --------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    model: Any, processor: Any, question: LabelledQuestion, video: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """
    What the model decides for one question, and from what.

    Args:
        video: its `video_features` `[M, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`.

    Returns:
        [`QUANTITIES`], `rho`, the tokens `m` and the kept ones `n`; histograms of the relevance of the needles' tokens
        and of the `others`, in powers of ten of the mean; and per twentieth of the video the tokens `kept` of `all`.
        `threshold` solves the paper's Algorithm 2 on r, `log_threshold` on log r, whatever gate the model was trained
        with.
    """
    inputs = model_inputs(processor, [question.record], {str(question.record.video): video})
    given = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    with _budget_inputs(model) as seen:
        chosen = model.model.compress(**given, selection="qtsplus").qtsplus
    features, config = seen[0].float(), model.config.qtsplus_config
    log_m, r_max, entropy = features[-3:].tolist()
    log_relevance, rho, total = chosen.log_relevance[0].float(), float(chosen.rho[0]), int(chosen.num_tokens[0])
    target = torch.tensor(min(rho * total, config.n_max))
    scores = {"threshold": log_relevance.exp(), "log_threshold": log_relevance}
    return {
        "sq_mean": float(features[:-3].mean()),
        "log_m": log_m,
        "r_max": r_max,
        "entropy": entropy,
        **{name: float(find_threshold(values, target.to(values), config.tau_s)) for name, values in scores.items()},
        "rho": rho,
        "m": total,
        "n": int(chosen.n[0]),
        **_histograms(model, question, log_relevance.cpu().numpy() + math.log(total), video),
        **_over_time(model, chosen.kept_indices[0].cpu().numpy(), video),
    }


@contextmanager
def _budget_inputs(model: Any) -> Iterator[list[torch.Tensor]]:
    """What the budget head sees in this context, `[d + 3]` for each question."""
    seen: list[torch.Tensor] = []
    hook = model.model.qtsplus.budget.register_forward_pre_hook(lambda head, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _grid(model: Any, video: Mapping[str, torch.Tensor]) -> tuple[int, int, int]:
    (grid,) = model.model.merged_grid(video["video_grid_thw"])
    return grid


def _histograms(
    model: Any, question: LabelledQuestion, log_ratio: np.ndarray, video: Mapping[str, torch.Tensor]
) -> dict[str, list[int]]:
    values = np.clip(log_ratio / math.log(10), _RELEVANCE_EDGES[0], _RELEVANCE_EDGES[-1])
    is_needle = np.zeros(len(values), dtype=bool)
    is_needle[question.tokens(_grid(model, video), float(video["second_per_grid_ts"][0]))] = True
    return {
        title: np.histogram(values[mask], _RELEVANCE_EDGES)[0].tolist()
        for title, mask in (("needles", is_needle), ("others", ~is_needle))
    }


def _over_time(model: Any, kept: np.ndarray, video: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Tokens of every twentieth of the video; a step of the grid that lies in two counts to both by its parts."""
    count, height, width = _grid(model, video)
    bins, edges = np.arange(_TIME_BINS + 1) / _TIME_BINS, np.arange(count + 1) / count
    overlap = np.minimum(bins[1:, None], edges[None, 1:]) - np.maximum(bins[:-1, None], edges[None, :-1])
    parts = np.clip(overlap, 0, None) * count
    by_step = np.bincount(kept // (height * width), minlength=count)
    return {"kept_over_time": (parts @ by_step).tolist(), "all_over_time": (parts.sum(1) * height * width).tolist()}


# --------------------------------------------------------------------------------------------------------------------
# All questions
# --------------------------------------------------------------------------------------------------------------------


def summarise_choices(records: Sequence[VideoRecord], measured: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """
    Correlations with rho, budgets by kind, histograms and the kept tokens over time, each interval over videos.

    Args:
        measured: per record what [`measure`] says, `None` where its video could not be read.

    Raises:
        ValueError: fewer than two videos could be read.
    """
    read = [(record, found) for record, found in zip(records, measured, strict=True) if found is not None]
    videos = list(dict.fromkeys(str(record.video) for record, _ in read))
    if len(videos) < 2:
        raise ValueError(f"{len(videos)} of the videos could be read; expected at least two.")
    clusters = np.array([videos.index(str(record.video)) for record, _ in read])
    kinds = np.array([record.kind for record, _ in read])
    columns = {
        name: np.array([found[name] for _, found in read], dtype=float) for name in (*QUANTITIES, "rho", "n", "m")
    }
    return {
        "questions": len(read),
        "videos": len(videos),
        "unreadable": sum(found is None for found in measured),
        "correlations": {name: correlation(columns[name], columns["rho"], clusters) for name in QUANTITIES},
        "budgets": {str(kind): _budget(columns, clusters, kinds == kind) for kind in np.unique(kinds)},
        "relevance": {"edges": np.round(_RELEVANCE_EDGES, 3).tolist(), **_sums(read, ("needles", "others"))},
        "time": {
            "all": _density([found for _, found in read]),
            **{
                str(kind): _density([found for record, found in read if record.kind == kind])
                for kind in np.unique(kinds)
            },
        },
        "pairs": [
            {"video": int(video), "kind": record.kind, **{name: float(f"{found[name]:.6g}") for name in columns}}
            for video, (record, found) in zip(clusters, read, strict=True)
        ],
    }


def _budget(columns: Mapping[str, np.ndarray], clusters: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    rho = columns["rho"][mask]
    return {
        "questions": int(mask.sum()),
        "rho": {"mean": float(rho.mean()), **clustered_interval(rho, clusters[mask])},
        "kept": float(columns["n"][mask].mean()),
    }


def _sums(read: Sequence[tuple[VideoRecord, Mapping[str, Any]]], names: Sequence[str]) -> dict[str, list[int]]:
    return {name: np.sum([found[name] for _, found in read], axis=0).tolist() for name in names}


def _density(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """Per twentieth of the videos the share of its tokens that is kept, over that of all."""
    kept, tokens = (np.sum([one[f"{name}_over_time"] for one in found], axis=0) for name in ("kept", "all"))
    return ((kept / tokens) / (kept.sum() / tokens.sum())).tolist()


__all__ = ["QUANTITIES", "measure", "run_analysis", "summarise_choices"]
