"""
Files of tensors: a format declares what such a file holds, and one reader and one writer serve all formats.

Such formats are the features of videos and the keys of a library (`qtsplus.video.storage`), and the features for
training (`qtsplus.training.features`). A new kind of stored tensor needs a [`TensorFormat`], and no code of its own
for reading and checking.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .files import first_line, whole_file

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


Tensors = Mapping[str, Tensor]  # by name
Texts = Mapping[str, str]


@contextmanager
def in_place(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While it lasts, the weights of these modules are in memory, even if Accelerate has offloaded them."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(align_module_device(module))
        yield


def digest_of(tensors: Tensors, settings) -> str:
    """A hash of tensors by name, in their order, and of settings that JSON can hold."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        heading = f"{name} {tensor.dtype} {shape}"
        digest.update(heading.encode())
        as_bytes = _on_cpu(tensor).flatten().view(torch.uint8)
        digest.update(as_bytes.numpy().data)
    return digest.hexdigest()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


Sizes = dict[str | int, int]  # by symbol, see [`TensorKind`]


@dataclass(frozen=True)
class TensorKind:
    """
    What one tensor of a file has to be.

    Args:
        shape: a number, or a symbol that stands for the same number wherever it is used: `("M", "d")`, or `(1, 3)`.
        dtypes: one of these.
    """

    shape: tuple[str | int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def check(
        self,
        name: str,
        tensor: Tensor,
        sizes: Sizes,
    ) -> None:
        """A `ValueError` for another tensor. `sizes` has the number of each symbol, and gets those that are new."""
        shape = list(tensor.shape)
        for symbol, size in zip(self.shape, shape, strict=False):
            if isinstance(symbol, str):
                sizes.setdefault(symbol, size)
        expected = [sizes.get(symbol, symbol) for symbol in self.shape]
        if shape != expected or tensor.dtype not in self.dtypes:
            dtypes = " or ".join(map(str, self.dtypes))
            raise ValueError(f"{name} is {shape} {tensor.dtype}; expected {expected} of {dtypes}")


@dataclass(frozen=True)
class TensorFile:
    """What was read: tensors by name, and the texts beside them."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


@dataclass(frozen=True)
class TensorFormat:
    """
    What a kind of file holds.

    Args:
        what: what messages call such a file, such as "stored video".
        remedy: what to do about a damaged file, such as "encode the video again".
        tensors: by name.
        texts: the names of the texts beside them.
        has_digest: whether the file has a digest of all of it. If not, its tensors stay on disk until they are looked
            at, and who stores the file notes a digest elsewhere.
    """

    what: str
    remedy: str
    tensors: Mapping[str, TensorKind]
    texts: frozenset[str] = frozenset()
    has_digest: bool = True

    @contextmanager
    def writing(
        self,
        path: Path,
        tensors: Tensors,
        texts: Texts,
    ) -> Iterator[Path]:
        """Writes a file that is at `path` once the context ends; yields its place until then."""
        ordered = {name: _on_cpu(tensors[name]) for name in sorted(tensors)}
        header = dict(texts)
        if self.has_digest:
            header["digest"] = digest_of(ordered, header)
        with whole_file(path, "wb") as part:
            save_file(ordered, part.name, header)
            yield Path(part.name)

    def write(
        self,
        path: Path,
        tensors: Tensors,
        texts: Texts,
    ) -> None:
        """Writes a file that is never seen half written."""
        with self.writing(path, tensors, texts):
            pass

    @contextmanager
    def reading(self, path: Path) -> Iterator[TensorFile]:
        """
        Reads a file and checks it. A `ValueError` for one that is missing, damaged or of another format says what to
        do; so does any that is raised within the context, where the caller checks what the format does not declare.
        """
        try:
            yield self._read(path)
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            reason = first_line(error).removesuffix(".")
            raise ValueError(f"The {self.what} {str(path)!r} cannot be used: {reason}; {self.remedy}.") from error

    def _read(self, path: Path) -> TensorFile:
        tensors = {}
        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
            for name in sorted(file.keys()):
                tensors[name] = file.get_tensor(name)
        if self.has_digest and texts.pop("digest", None) != digest_of(tensors, texts):
            raise ValueError("it was changed since it was written")
        has_names = tensors.keys() == self.tensors.keys()
        if not has_names or texts.keys() != self.texts:
            raise ValueError(f"it is no {self.what}")
        sizes: Sizes = {}
        for name, kind in self.tensors.items():
            kind.check(name, tensors[name], sizes)
        return TensorFile(tensors, texts)
