"""What a selector's budget follows: the analysis of the paper's appendix, of any model on any videos."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from qtsplus.common.files import check_folder, check_output
from qtsplus.common.journals import write_json
from qtsplus.data.records import VideoRecord
from qtsplus.model.selector_qtsplus import find_threshold
from qtsplus.training.features import encode_files

from ..intervals import correlation, share_interval
from ..prompts import compress, model_inputs

# What the paper's budget head sees, and the gate's threshold: what the paper holds against rho.
QUANTITIES = ("sq_mean", "log_m", "r_max", "entropy", "threshold", "log_threshold")
# Of QTSplus-3B, in the paper's appendix.
PUBLISHED = {"sq_mean": 0.2868, "log_m": -0.4834, "r_max": -0.0788, "entropy": -0.4911, "threshold": -0.8998}


def run_analysis(
    model: Any,
    processor: Any,
    records: Sequence[VideoRecord],
    out: Path,
    *,
    work: Path = Path("runs/analysis"),
    progress: bool = True,
) -> Path:
    """
    Lets the model choose for every question with its own budget: `analysis.json`. Questions about videos
    that cannot be read are left out, and counted.

    Args:
        records: questions about at least two videos; records without a video are left out.
        work: where the videos' features are kept; what an earlier run has encoded is not encoded again.

    Raises:
        ValueError: fewer than two videos that can be read, or results that are
            there already.
    """
    target = check_output(out / "analysis.json")
    check_folder(work)
    records = [record for record in records if record.video is not None]
    features = encode_files(model, processor, [(str(record.video), record.fps) for record in records], work)
    measured: list[dict[str, float] | None] = []
    for record in track(records, "Asking", console=Console(stderr=True), disable=not progress):
        video = features.load(str(record.video), record.fps)
        measured.append(None if video is None else measure(model, processor, record, video))
    document = summarise_choices(records, measured)
    write_json(target, document)
    return target


@torch.no_grad()
def measure(model: Any, processor: Any, record: VideoRecord, video: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """
    What the model decides for one question, and from what.

    Args:
        video: its `video_features` `[M, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`.

    Returns:
        [`QUANTITIES`], `rho`, the tokens `m` and the kept ones `n`. `threshold` solves the paper's Algorithm 2 on r,
        `log_threshold` on log r, whatever gate the model was trained with.
    """
    inputs = model_inputs(processor, [record], {str(record.video): video})
    on_device = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    chosen, config = compress(model.model, **on_device, selection="qtsplus").qtsplus, model.config.qtsplus_config
    words = model.get_input_embeddings()(on_device["query_input_ids"][on_device["query_attention_mask"].bool()])
    log_relevance, rho, total = chosen.log_relevance[0].float(), float(chosen.rho[0]), int(chosen.num_tokens[0])
    target = torch.tensor(min(rho * total, config.n_max))
    scores = {"threshold": log_relevance.exp(), "log_threshold": log_relevance}
    shares = log_relevance.log_softmax(0)
    return {
        "sq_mean": float(words.float().mean()),
        "log_m": math.log(total),
        "r_max": float(log_relevance.max().exp()),
        "entropy": -float((shares.exp() * shares).sum()),
        **{name: float(find_threshold(values, target.to(values), config.tau_s)) for name, values in scores.items()},
        "rho": rho,
        "m": total,
        "n": int(chosen.n[0]),
    }


def summarise_choices(records: Sequence[VideoRecord], measured: Sequence[Mapping[str, float] | None]) -> dict[str, Any]:
    """
    Correlations with rho beside the published ones, and the mean of rho, each with its interval over videos.

    Args:
        measured: per record what [`measure`] says, `None` where its video could not be read.

    Raises:
        ValueError: fewer than two videos could be read.
    """
    read = [(record, one) for record, one in zip(records, measured, strict=True) if one is not None]
    names = [str(record.video) for record, _ in read]
    videos, clusters = np.unique(names, return_inverse=True)
    if len(videos) < 2:
        raise ValueError(f"{len(videos)} of the videos could be read; expected at least two.")
    columns = {name: np.array([one[name] for _, one in read], dtype=float) for name in (*QUANTITIES, "rho", "n", "m")}
    return {
        "questions": len(read),
        "videos": len(videos),
        "unreadable": len(measured) - len(read),
        "correlations": {name: correlation(columns[name], columns["rho"], clusters) for name in QUANTITIES},
        "published": PUBLISHED,
        "rho": {"mean": float(columns["rho"].mean()), **share_interval(columns["rho"], clusters)},
        "pairs": [{"video": name, "kind": record.kind, **one} for name, (record, one) in zip(names, read, strict=True)],
    }
