"""Checkpoints on disk, read and written tensor by tensor: memory does not grow with a shard, however large it is."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import str_to_torch_dtype

from .folder import read_json

_DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # as safetensors names them
_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that stays where it is until it is written elsewhere."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]  # gives the tensor itself; from a safetensors file as a view of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def same_as(self, other: "StoredTensor") -> bool:
        """Whether dtype, shape and every byte agree."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(_bytes(self.load()), _bytes(other.load()))


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    """A tensor of this process (or of a memory-mapped file) as a [`StoredTensor`]."""
    return StoredTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def weight_files(folder: Path) -> list[Path]:
    """
    The one file of a folder's weights, or their index and its shards.

    Raises:
        ValueError: there are none, the index is not one, or a shard that it names is missing.
    """
    if (folder / _FILE).is_file():
        return [folder / _FILE]
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has no weights; expected {_FILE} or {INDEX}. Load others with Transformers and save them again."
        )
    shards = sorted({folder / name for name in weight_map(folder / INDEX).values()})
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}, which its {INDEX} names.")
    return [folder / INDEX, *shards]


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """
    The tensors of a folder's weights, whole or in shards.

    Raises:
        ValueError: no weights, or a missing, cut or unreadable file.
    """
    files = [path for path in weight_files(folder) if path.suffix != ".json"]
    return {name: tensor for path in files for name, tensor in _read_file(path).items()}


def write_checkpoint(
    tensors: Mapping[str, StoredTensor],
    folder: Path,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes `model.safetensors`, or shards with their index, under the names that Transformers uses."""
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file_name, names in split.filename_to_tensors.items():
        # The widest first keeps every tensor aligned.
        ordered = sorted(names, key=lambda name: -tensors[name].dtype.itemsize)
        with (folder / file_name).open("wb") as file:
            write_tensors({name: tensors[name] for name in ordered}, file, format="pt")
    if split.is_sharded:
        total = sum(math.prod(tensor.shape) for tensor in tensors.values())
        index = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": dict(sorted(split.tensor_to_filename.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weight_map(index: Path) -> dict[str, str]:
    """By the name of a tensor the shard that holds it; a `ValueError` for an index that leads out of its folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no weight_map: it is no index of a checkpoint.")
    # An index from elsewhere must not reach files outside its folder.
    strange = sorted(str(name) for name in shards.values() if not _is_file_name(name))
    if strange:
        raise ValueError(f"{index} names {strange[0]!r}; expected names of files beside it.")
    return shards


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _read_file(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    unknown = sorted(name for name, entry in slices.items() if entry.get_dtype() not in str_to_torch_dtype)
    if unknown:
        raise ValueError(f"{path} holds tensors of a dtype that is not supported here: {', '.join(unknown)}.")
    return {
        name: StoredTensor(
            str_to_torch_dtype[entry.get_dtype()], tuple(entry.get_shape()), partial(_load_tensor, path, name)
        )
        for name, entry in slices.items()
    }


def _load_tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def write_tensors(tensors: Mapping[str, StoredTensor], file: IO[bytes], **metadata: str) -> None:
    """Writes a safetensors file, one tensor at a time."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        file.write(_bytes(tensor.load()).numpy().data)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_bytes]` uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
