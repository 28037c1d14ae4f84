"""
An index of a library: a question looks at few of the keys that the selector scores tokens by, and scores what they
bring exactly. Its twin is [`Scorer.rank`], which reads all and is right.

A file has the keys of some films, in 8 bits and in cells of keys that are alike, which faiss finds. It is no file of
faiss's, whose reader trusts what it reads. Its name is a hash of all but the cells, of which each has its own: so it is
known to be whole without being read.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from .output import counted, first_line, whole_file
from .ranking import PIECE, Piece, Ranking, Scorer
from .results import is_plain_file
from .storage import LARGE, load_video
from .videos import EncodedVideo

try:
    import faiss
except ImportError:  # the extra `index`, which making an index needs, and asking does not
    faiss = None

if TYPE_CHECKING:
    from .library import Index

MOST = 2**20  # tokens of a file
LEAST = 2**14  # tokens; fewer are scanned as fast
CELL = 512  # tokens of a cell, on average
LOOK = 0.02  # of the cells that a question looks into
FEWEST = 64  # cells that it looks into
SPARE = 5  # pieces, since 8 bits do not put them in order
BRING = 50  # steps for each moment that is wanted

_Names = Mapping[str, Sequence[str]]  # of films, by the digests of their features
_Read = Callable[[str], EncodedVideo]
logger = logging.get_logger(__name__)


def _hash(*tensors: torch.Tensor, text: str = "") -> bytes:
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _steps(rows: torch.Tensor) -> torch.Tensor:
    """`[k]`, of which step of the file each row is."""
    return rows[:, -4:].contiguous().view(torch.int32)[:, 0].long()


def _selector(model: Any) -> str:
    """A hash of what makes the keys; none for a selector whose best tokens are not those with the best keys."""
    *earlier, layer = model.model.qtsplus.scoring_layers
    if earlier or model.model.qtsplus.config.reduction != "sum":
        return ""
    return _hash(layer.kv_norm.weight, *layer.k_proj.parameters()).hex()


@torch.no_grad()
def grow(index: "Index", model: Any, say: Callable[[str], None]) -> None:
    """
    Puts films that are in no file into new ones, and with them those of files that are no larger. Damaged files, those
    of another selector and those from which a film has left are made again. `say` takes a line on what was done.
    """
    selector, entries = _selector(model), index.entries
    files = [(path, noted) for name, path in index.files.items() if (noted := entries[name]["features"])]
    stored = {noted["digest"]: (path, noted) for path, noted in files}
    width = model.model.token_width * model.dtype.itemsize
    tokens = {film: noted["size"] // width for film, (_, noted) in stored.items()}
    good = [file for file in Nearest(index.folder, model, whole=True).files if tokens.keys() >= {*file.films}]
    waiting = tokens.keys() - {film for file in good for film in file.films}
    for file in sorted(good, key=lambda file: len(file.keys)):
        if len(file.keys) <= min(sum(tokens[film] for film in waiting), MOST / 2):
            waiting |= {*file.films}
            good.remove(file)
    films = [film for film in tokens if film in waiting]
    ends = list(accumulate(tokens[film] for film in films))
    if not selector or not films or ends[-1] < LEAST:
        films = []
    elif faiss is None:
        say("Questions read all of it. With `pip install faiss-cpu`, the same command lets them look at a fiftieth.")
        films = []
    kept = {file.path for file in good}
    for _, group in groupby(zip(films, ends, strict=False), lambda film: (film[1] - 1) // MOST):
        own = [film for film, _ in group]
        videos = [load_video(stored[film][0], index.settings["made_by"], model, stored[film][1]) for film in own]
        kept.add(_write(index.folder, selector, own, videos, model))
    for path in {*index.folder.glob("*.keys")} - kept:
        path.unlink()
    if films:
        say(f"Indexed {counted(len(films), 'video')}: a question looks at a fiftieth of their tokens.")


def _write(folder: Path, selector: str, films: Sequence[str], videos: Sequence[EncodedVideo], model: Any) -> Path:
    layer = model.model.qtsplus.scoring_layers[-1]
    parts = (layer.keys(video.features[:, : layer.k_proj.in_features].to(layer.k_proj.weight)) for video in videos)
    keys = torch.cat([part.transpose(0, 1).flatten(1).float().cpu() for part in parts])
    cells = faiss.Kmeans(keys.shape[1], max(1, len(keys) // CELL), niter=10, max_points_per_centroid=64)
    cells.train(keys.numpy())
    cell, order = torch.from_numpy(cells.index.search(keys.numpy(), 1)[1][:, 0]).sort(stable=True)
    low, high = keys.aminmax(dim=0)
    scale = (high - low).clamp(min=1e-6) / 255
    counts = torch.tensor([video.count for video in videos])
    each = torch.tensor([len(video.features) // video.count for video in videos]).repeat_interleave(counts)
    steps = torch.arange(len(each), dtype=torch.int32).repeat_interleave(each)
    edges = [torch.tensor(video.steps, dtype=torch.float64) + video.start for video in videos]
    rows = torch.cat([((keys - low) / scale).round().byte(), steps[:, None].view(torch.uint8)], 1)[order]
    tensors = {
        "centroids": torch.from_numpy(cells.centroids),
        "counts": counts,  # of the steps of each film
        "ranges": torch.stack([low, scale]),
        "seconds": torch.cat([torch.stack([own[:-1], own[1:]]) for own in edges], 1),  # of each step
        "sizes": cell.bincount(minlength=cells.k),
    }
    return _save(folder, {"selector": selector, "films": " ".join(films)}, tensors, rows)


def _save(folder: Path, head: dict[str, str], tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> Path:
    """What [`_File`] reads; of rows, one a token, those of a cell lie together, in the order of `sizes`."""
    parts = rows.split(tensors["sizes"].tolist())
    tensors["hashes"] = torch.tensor([[*_hash(part)] for part in parts], dtype=torch.uint8)
    tensors = {name: tensors[name] for name in sorted(tensors)}
    path = folder / f"{_hash(*tensors.values(), text=str(head)).hex()[:32]}.keys"
    with whole_file(path, "wb") as file:
        save_file({**tensors, "keys": rows}, file.name, head)
    return path


class _File:
    """Films that can be searched; a `ValueError` for what was changed since it was written, or does not fit."""

    def __init__(self, path: Path, selector: str, width: int):
        if not is_plain_file(path):
            raise ValueError("it is no file")
        with safe_open(path, "pt") as file:
            head, names = file.metadata() or {}, sorted(file.keys())
            self.tensors = {name: file.get_tensor(name) for name in names}
        self.size = path.stat().st_size
        self.path, self.keys, self.films = path, self.tensors.pop("keys"), head.get("films", "").split()
        head = {name: head.get(name) for name in ("selector", "films")}
        if _hash(*self.tensors.values(), text=str(head)).hex()[:32] != path.stem:
            raise ValueError("it was changed since it was written")
        if head["selector"] != selector:
            raise ValueError("it is another selector's")
        other = ValueError("it holds something else than its films")
        both = self.sizes, self.counts = self.tensors["sizes"], self.tensors["counts"]
        if any((one.dtype, one.ndim) != (torch.int64, 1) or (one.abs() >= 2**31).any() for one in both):
            raise other
        self.ends, self.seen, self.steps = self.sizes.cumsum(0).tolist(), set[int](), int(self.counts.sum())
        cells, steps = len(self.sizes), self.steps
        kinds: dict[str, tuple[Any, ...]] = {"sizes": (torch.int64, cells), "counts": (torch.int64, len(self.films))}
        kinds |= {"ranges": (torch.float32, 2, width), "seconds": (torch.float64, 2, steps)}
        kinds |= {"hashes": (torch.uint8, cells, 32), "centroids": (torch.float32, cells, width)}
        found = {name: (tensor.dtype, *tensor.shape) for name, tensor in self.tensors.items()}
        good = found == kinds and (self.keys.dtype, *self.keys.shape) == (torch.uint8, self.ends[-1], width + 4)
        if not (good and self.films) or self.sizes.min() < 0 or self.counts.min() < 1:
            raise other
        if not all((self.tensors[name].abs() < LARGE).all() for name in ("ranges", "seconds", "centroids")):
            raise other

    def read(self, cells: Sequence[int]) -> list[torch.Tensor]:
        """Of each cell `[k, width + 4]` bytes, which are checked when they are first read."""
        parts = {cell: self.keys[self.ends[cell] - int(self.sizes[cell]) : self.ends[cell]] for cell in cells}
        for cell in parts.keys() - self.seen:
            steps = _steps(parts[cell])
            strange = ((steps < 0) | (steps >= self.steps)).any()
            if strange or _hash(parts[cell]) != bytes(self.tensors["hashes"][cell].tolist()):
                raise ValueError("it was changed since it was written")
        self.seen.update(cells)
        return list(parts.values())

    def look(self, queries: torch.Tensor, cells: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[k]`, the scores of the tokens in cells, by keys in 8 bits; and of which step they are."""
        rows, (low, scale) = torch.cat([self.keys[:0], *self.read(cells)]), self.tensors["ranges"]
        scores = (queries * scale) @ rows[:, :-4].float().T + (queries @ low)[:, None]
        return scores.logsumexp(0), _steps(rows)


def _warn(path: Path, error: object) -> None:
    why = f"{path} is not searched: {first_line(error)}"
    logger.warning(f"{why}; its films are read whole until `qtsplus index` makes it again.")


class Nearest:
    """The index of a library, for one selector: `films` are the digests of the features that it holds."""

    def __init__(self, folder: Path, model: Any, whole: bool = False):
        """What cannot be used is said; with `whole` all is read, and else a cell when it is looked at."""
        self.files: list[_File] = []
        self.films: set[str] = set()
        selector, width = _selector(model), model.model.qtsplus.scoring_layers[-1].k_proj.out_features
        for path in sorted(folder.glob("*.keys")) if selector else ():
            try:
                file = _File(path, selector, width)
                if whole:
                    file.read(range(len(file.sizes)))
            except (OSError, SafetensorError, LookupError, ValueError) as error:
                _warn(path, error)
            else:
                if self.films.isdisjoint(file.films):  # else `index` was ended before it could remove this one
                    self.films |= {*file.films}
                    self.files.append(file)

    def _leave(self, file: _File, error: object) -> None:
        self.files.remove(file)
        self.films -= {*file.films}
        _warn(file.path, error)

    def rank(self, scorer: Scorer, names: _Names, window: tuple[float, float], top: int, read: _Read) -> Ranking:
        """
        Of the films of `names` and a window of seconds the `top` pieces with the most relevant tokens, and some more.
        Their peaks are exact, the total is an estimate. `read` gives the film of a name. A file that turns out to be
        damaged is said and left: what `films` has then was searched.
        """
        queries, total = scorer.scores.rows, torch.tensor(-torch.inf)
        asked = []
        for file in [*self.files]:
            if file.path.exists() and file.path.stat().st_size != file.size:
                self._leave(file, "it was changed since it was opened")
                continue
            often = torch.tensor([len(names.get(film, ())) for film in file.films]).repeat_interleave(file.counts)
            begin, end = file.tensors["seconds"]
            if (often := often * (begin < window[1]) * (end > window[0])).any():  # [steps], the copies that are asked
                asked.append((file, often.float(), (queries @ file.tensors["centroids"].T).logsumexp(0)))
        if not asked:
            return Ranking([], -torch.inf)
        cells = torch.cat([near for _, _, near in asked])
        share = torch.cat([often > 0 for _, often, _ in asked]).float().mean()
        least = cells.topk(min(len(cells), max(FEWEST, int(LOOK * len(cells) / share)))).values[-1]
        brought: list[tuple[float, str, int]] = []
        for file, often, near in asked:
            try:
                scores, steps = file.look(queries, (near >= least).nonzero().flatten().tolist())
                inside = often[steps] > 0
            except (IndexError, ValueError) as error:
                self._leave(file, error)
                continue
            scores, steps = scores[inside], steps[inside]
            rest = (near + file.sizes.log() + often.mean().log())[near < least]
            total = torch.cat([total[None], scores + often[steps].log(), rest]).logsumexp(0)
            peaks = torch.full([file.steps], -torch.inf).scatter_reduce(0, steps, scores, "amax")
            scores, steps = peaks.topk(min(BRING * top, int(peaks.isfinite().sum())))
            ends = file.counts.cumsum(0)
            film = torch.searchsorted(ends, steps, right=True)
            steps = steps - (ends - file.counts)[film]
            brought += zip(scores.tolist(), map(file.films.__getitem__, film.tolist()), steps.tolist(), strict=True)
        own: dict[tuple[str, int, int], list[int]] = {}
        for _, digest, step in sorted(brought, reverse=True)[: BRING * top]:
            if len(own) == top + SPARE:
                break  # no better moment is in what is left
            video = read(names[digest][0])
            size = max(1, PIECE * video.count // len(video.features))
            first, last = video.within(*window)
            if first <= step < last:  # else a stranger wrote it
                own.setdefault((digest, step // size * size, size), []).append(step)
        pieces = []
        for (digest, at, size), some in own.items():
            for name in names[digest]:
                video = read(name)
                first, last = video.within(*window)
                peak = scorer.relevance(video.features.unflatten(0, (video.count, -1))[some].flatten(0, 1)).max()
                pieces.append(Piece(name, max(first, at), min(last, at + size), float(peak), tuple(some)))
        return Ranking(pieces, float(total))
