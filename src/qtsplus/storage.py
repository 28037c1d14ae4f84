"""Encoded videos on disk: their features as safetensors, and all else about them as JSON in the same file's header."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.video_utils import VideoMetadata

from .output import whole_file
from .videos import EncodedVideo

SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")  # a stored video says its own


def fingerprint(model: Any, processor: Any) -> str:
    """A hash of what features depend on: the vision tower's weights and settings, and the processor's for pixels."""
    others = (*SAMPLING, "do_sample_frames")
    settings = {
        "vision": {**model.config.vision_config.to_dict(), "transformers_version": None},
        "pixels": {name: at for name, at in processor.video_processor.to_dict().items() if name not in others},
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in model.model.state_dict().items():
        if not name.startswith(("language_model.", "qtsplus.")):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_video(encoded: EncodedVideo, path: str | Path, made_by: str) -> None:
    """Writes an encoded video to one file, which is whole or not there, with the [`fingerprint`] of what encoded it."""
    if encoded.large is not None:
        raise ValueError(f"{encoded.video!r} was encoded for two passes and cannot be stored; encode it in one.")
    about = {
        **{name: getattr(encoded, name) for name in ("video", "seconds", "start", "warnings")},
        "video_grid_thw": encoded.video_grid_thw.tolist(),
        "second_per_grid_ts": [float(seconds) for seconds in encoded.second_per_grid_ts],
        "metadata": vars(encoded.metadata),
    }
    header = {"made_by": made_by, "about": json.dumps(about)}
    with whole_file(path, "wb") as part:
        save_file({"features": encoded.features.cpu().contiguous()}, part.name, header)


def load_video(path: str | Path, made_by: str, device: Any = "cpu") -> EncodedVideo:
    """
    Reads what [`save_video`] wrote, for a device; a `ValueError` for what is broken, or made with another vision tower.
    On the CPU the features stay on disk until they are looked at.
    """
    try:
        Path(path).open("rb").close()  # says why it cannot be opened
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            features = file.get_tensor("features") if "made_by" in header else None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The stored video {str(path)!r} cannot be read ({error}); encode the video again.") from error
    if features is None:
        raise ValueError(f"{str(path)!r} is no stored video; expected a file that `save_video` wrote.")
    if header["made_by"] != made_by:
        raise ValueError(
            f"{str(path)!r} was made with another vision tower or processor than this model's; encode the video again."
        )
    try:
        about = json.loads(header["about"])
        grid, metadata = torch.tensor(about.pop("video_grid_thw")), VideoMetadata(**about.pop("metadata"))
        if int(grid.prod()) % len(features) or len(features) % int(grid[0, 0]):
            raise KeyError("tokens are missing")
        return EncodedVideo(features=features.to(device), video_grid_thw=grid, metadata=metadata, **about)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError, json.JSONDecodeError) as error:
        raise ValueError(f"The stored video {str(path)!r} is broken; encode the video again.") from error
