"""Files that name what every visual token of a video shows, for `token_words` of a record."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

UNNAMED = -100  # as PyTorch's losses leave out


class NamedTokens(NamedTuple):
    """
    What the visual tokens of a video show.

    Attributes:
        labels: `[T, H, W, k]` int64, of each of k aspects (such as colour and shape) an index into `words`, or -100.
        words: all of them.
        aspects: per aspect that a token shows by itself the words that it can be.
        context: the same for the aspects behind those, which a token has beside earlier ones: such as where its object
            has moved.
        things: `[T, H, W]` int64, the number of the thing that a token names, or -1; `None` where no two things of a
            video have the same words and none changes.
    """

    labels: np.ndarray
    words: Sequence[str]
    aspects: Sequence[Sequence[str]]
    context: Sequence[Sequence[str]] = ()
    things: np.ndarray | None = None


def write_token_words(path: str | os.PathLike, named: NamedTokens) -> None:
    """Writes a safetensors file, whole or not at all."""
    part = f"{os.fspath(path)}.part"
    aspects = {name: [list(aspect) for aspect in getattr(named, name)] for name in ("aspects", "context")}
    content = {"words": list(named.words), **aspects}
    tensors = {"labels": named.labels} if named.things is None else {"labels": named.labels, "things": named.things}
    tensors = {name: np.ascontiguousarray(tensor.astype(np.int16)) for name, tensor in tensors.items()}
    save_file(tensors, part, metadata={"token_words": json.dumps(content)})
    os.replace(part, path)


def read_token_words(path: str | os.PathLike) -> NamedTokens:
    """
    Raises:
        ValueError: no such file, or another one.
    """
    try:
        with safe_open(path, framework="np") as file:
            content = json.loads((file.metadata() or {})["token_words"])
            tensors = {name: file.get_tensor(name).astype(np.int64) for name in file.keys()}  # noqa: SIM118
            labels, things = tensors["labels"], tensors.get("things")
            return NamedTokens(labels, content["words"], content["aspects"], content.get("context", ()), things)
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"{path} does not name the tokens of a video: {error}.") from error
