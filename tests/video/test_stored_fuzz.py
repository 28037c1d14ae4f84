"""
Damaged or hostile versions of every file that is read back: each is one line or what was stored.

`make fuzz SEED=7` tries a thousand others.
"""

import json
import os
import random
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from clips import make_world, render_world, write_mp4
from qtsplus.asking import batch
from qtsplus.common.journals import Journal, seal
from qtsplus.common.tensors import TensorKind
from qtsplus.library import indexing, library
from qtsplus.library.library import Library
from qtsplus.training.features import read_tensors, write_tensors
from qtsplus.video import storage

SEED, CASES = int(os.environ.get("FUZZ_SEED", "45")), int(os.environ.get("FUZZ_CASES", "400"))
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "0", "a", "\0", "\n", "\ud800", "../x", "../../victim", "/etc/passwd", "C:\\x", "file:///etc/passwd"),
    *("http://127.0.0.1/x", "~/x", "%2e%2e/x", "a" * 5000, [], {}, [[]], {"a": None}, ["../x"], {"../x": "../x"}),
]
KINDS = {
    "video_features": TensorKind(("k", "d")),
    "video_grid_thw": TensorKind((1, 3)),
    "second_per_grid_ts": TensorKind((1,)),
}


def as_json(video):
    """What a video holds, with every feature."""
    fields = dict(vars(video.about))
    fields["metadata"] = vars(video.about.metadata)
    fields["subtitles"] = [vars(line) for line in video.subtitles]
    fields["seconds_per_step"] = video.seconds_per_step
    return json.dumps(fields), video.video_grid_thw.tolist(), video.features.tolist()


@pytest.fixture(scope="module")
def whole(loaded, tmp_path_factory):
    """One of each that is stored, and beside them a file that nobody may touch."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("whole")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "victim").write_bytes(b"mine")
        (folder / "films").mkdir()
        for number, name in enumerate(("a.mp4", "b.mp4")):
            write_mp4(folder / "films" / name, render_world(make_world(160 + number, 1, 2)), 2)
        indexing.index(folder / "films", folder / "library", *loaded, name="org/model", say=lambda line: None)
        journal = Journal(folder / "batch.jsonl", {"model": "org/model"}, batch._ENTRIES)
        evidence = [{"start": 0.0, "end": 1.5, "video": "a.mp4", "box": [0.0, 0.5, 1.0, 1.0]}]
        answer = {"answer": "A ball.", "kept_tokens": 3, "visual_tokens": 9, "evidence": evidence, "warnings": []}
        for number, value in enumerate((answer, {"error": "no video"}, answer)):
            journal.add(str(number), value)
        tensors = {
            "video_features": torch.rand(4, 8),
            "video_grid_thw": torch.ones(1, 3),
            "second_per_grid_ts": torch.ones(1),
        }
        write_tensors(folder / "features/0.safetensors", tensors)
        yield folder


def read_library(folder, model):
    found = Library(folder / "library", *model)
    if found.missing:  # which the commands say
        raise ValueError(f"{folder} lacks {found.missing}")
    return {name: as_json(found.stored(name)) for name in found.names}


def read_journal(name, schema):
    return lambda folder, model: dict(Journal(folder / name, schema=schema).done)


READERS = {
    "library": read_library,
    "batch.jsonl": read_journal("batch.jsonl", batch._ENTRIES),
    "features": lambda folder, model: {
        name: value.tolist() for name, value in read_tensors(folder / "features/0.safetensors", KINDS).items()
    },
}


# --- What is done to a file ---


def flip(data, draw, _):
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def cut(data, draw, _):
    return data[: draw.randrange(len(data))]


def garble(data, draw, _):
    first = draw.randrange(len(data))
    last = min(len(data), first + draw.randrange(1, 64))
    return data[:first] + draw.randbytes(draw.choice([0, last - first])) + data[last:]


def places(content, path=()):
    """Where something stands in a document."""
    yield path
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from places(content[key], (*path, key))


def change(content, draw):
    """A document of which one value is another, stands deeper, stands under another name, or is gone."""
    content = json.loads(json.dumps(content))
    path = draw.choice([place for place in places(content) if place])
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    kind = draw.choice(["swap", "nest", "name", "drop"])
    if kind == "nest":
        for _ in range(draw.choice([1, 2, 300])):
            holder[path[-1]] = draw.choice([[holder[path[-1]]], {"a": holder[path[-1]]}])
    elif kind == "name" and isinstance(holder, dict):
        holder[draw.choice([one for one in VALUES if isinstance(one, str)])] = holder.pop(path[-1])
    elif kind == "drop":
        del holder[path[-1]]
    else:
        holder[path[-1]] = draw.choice(VALUES)
    return content


def change_lines(data, draw, sealed):
    """A line or a document, with its digest as it was or as it ought to be."""
    lines = data.decode().splitlines() if data.count(b'{"check"') > 1 else [data.decode()]
    number = draw.randrange(len(lines))
    content = json.loads(lines[number])
    check = content.pop("check")
    content = change(content, draw)
    lines[number] = seal(content) if sealed else json.dumps({"check": check, **content})
    return ("\n".join(lines) + "\n").encode()


def change_features(data, draw, *_):
    """Other values, another shape or another type, or another header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]).get("__metadata__")
    tensors = load(data)
    name = draw.choice(sorted(tensors))
    if "about" in header and draw.random() < 0.7:
        header["about"] = json.dumps(change(json.loads(header["about"]), draw))
    else:
        spoil = [
            lambda one: one.flatten(),
            lambda one: one[None],
            lambda one: one[:-1],
            lambda one: one[..., :-1],
            lambda one: one.double(),
            lambda one: one.to(torch.int8),
            lambda one: torch.full_like(one, draw.choice([torch.nan, torch.inf, -torch.inf])),
        ]
        tensors[name] = draw.choice(spoil)(tensors[name].float()).contiguous()
    return save(tensors, header)


def change_it(data, draw, sealed):
    return (change_lines if data.startswith(b"{") else change_features)(data, draw, sealed)


def note_in_library(folder):
    """As a stranger does who has changed features: their size and digest stand in the journal."""
    lines = [json.loads(line) for line in (folder / "library.jsonl").read_text().splitlines()]
    for line in lines:
        del line["check"]
        if isinstance(line.get("key"), str) and line["value"]["features"]:
            line["value"]["features"] = storage.measure(folder / f"{line['value']['content'][:32]}.safetensors")
    (folder / "library.jsonl").write_text("".join(seal(line) + "\n" for line in lines))


def note_in_features(folder):
    write_tensors(folder / "0.safetensors", load((folder / "0.safetensors").read_bytes()))


NOTED = {"library": note_in_library, "features": note_in_features}


OPENED: list[str] | None = None  # what is opened, made or removed meanwhile
EVENTS = ("open", "os.remove", "os.rename", "os.truncate", "os.mkdir", "os.rmdir", "socket.connect", "subprocess.Popen")


@sys.addaudithook
def note_opened(event, arguments):
    if OPENED is not None and event in EVENTS:
        OPENED.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else event)


@contextmanager
def only_in(*folders):
    """Fails where something else is opened; the files of Python's packages may be."""
    global OPENED
    OPENED = opened = []
    try:
        yield
    finally:
        OPENED = None
    roots = ("/proc/meminfo", *map(str, folders), sys.prefix, sys.base_prefix, str(Path(library.__file__).parents[2]))
    assert not [one for one in opened if one != "open" and not str(Path(one).resolve()).startswith(roots)]


def spoil(name, path, draw):
    """Damages a file, or writes it as a stranger would, with the digests that belong to it: whether as a stranger."""
    damage = draw.choice([flip, flip, cut, garble, change_it, change_it, change_it])
    hostile, data = damage is change_it and draw.random() < 0.6, path.read_bytes()
    path.write_bytes(damage(data, draw, hostile))
    if hostile and path.suffix == ".safetensors" and name in NOTED:
        NOTED[name](path.parent)
    return hostile


def state(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_one_line(error, folder):
    text = str(error)
    return text.isprintable() and str(folder) in text and "Error(" not in text


def test_no_file_that_is_read_back_is_trusted(whole, loaded, tmp_path, monkeypatch):
    made_by, draw = storage.fingerprint(*loaded), random.Random(SEED)
    for module in (library, indexing):
        monkeypatch.setattr(module, "fingerprint", lambda *_: made_by)
    expected, outcomes = {name: read(whole, loaded) for name, read in READERS.items()}, Counter()
    assert all(expected.values())
    for case in range(CASES):
        name = draw.choice(sorted(READERS))
        folder, copy = tmp_path / str(case), shutil.copytree if (whole / name).is_dir() else shutil.copyfile
        folder.mkdir()
        copy(whole / name, folder / name)
        stored = [one for one in [folder / name, *folder.rglob("[!.]*.*")] if one.is_file() and one.suffix != ".lock"]
        path = draw.choice(sorted(stored))
        hostile = spoil(name, path, draw)
        before, what = state(folder), f"seed {SEED}, case {case}, {path.name}"
        try:
            with only_in(folder):
                value = READERS[name](folder, loaded)
        except ValueError as error:
            outcomes["refused"] += 1
            assert in_one_line(error, folder), f"{what}: {error}"
        except Exception as error:
            raise AssertionError(what) from error
        else:
            same = (
                "equal" if value == expected[name] else "less" if value.items() <= expected[name].items() else "other"
            )
            outcomes["hostile" if hostile else same] += 1
            # A journal without its last lines is that of a run that was stopped.
            stopped = same == "less" and path.suffix == ".jsonl"
            assert hostile or same == "equal" or stopped, f"{what}: {same}"
            assert name not in NOTED or not any(word in json.dumps(value) for word in ("NaN", "Infinity")), what
        assert state(folder) == before, what
        if name == "library" and case % 4 == 0:
            try:
                with only_in(folder, whole / "films"):
                    indexing.index(whole / "films", folder / name, *loaded, say=lambda line: None)
            except ValueError as error:
                assert in_one_line(error, folder), f"{what}, index: {error}"
            else:
                outcomes["made anew"] += 1
                assert hostile or READERS[name](folder, loaded) == expected[name], f"{what}, index"
            assert (whole / "victim").read_bytes() == b"mine"
        shutil.rmtree(folder)
    print(dict(outcomes))
    assert outcomes["refused"] > CASES / 2 and outcomes["made anew"]
