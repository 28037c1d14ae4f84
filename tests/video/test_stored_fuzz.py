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
from qtsplus.library import indexing, library
from qtsplus.library.library import Library
from qtsplus.training.features import FEATURES, read_tensors
from qtsplus.video import storage

SEED = int(os.environ.get("FUZZ_SEED", "45"))
CASES = int(os.environ.get("FUZZ_CASES", "400"))
NUMBERS = [0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
TEXTS = ["", "0", "a", "\0", "\n", "\ud800", "%2e%2e/x", "a" * 5000]
PLACES = ["../x", "../../victim", "/etc/passwd", "C:\\x", "file:///etc/passwd", "http://127.0.0.1/x", "~/x"]
DOCUMENTS = [None, True, False, [], {}, [[]], {"a": None}, ["../x"], {"../x": "../x"}]
VALUES = NUMBERS + TEXTS + PLACES + DOCUMENTS


def as_json(video):
    """What a video holds, with every feature."""
    fields = dict(vars(video.about))
    fields["metadata"] = vars(video.about.metadata)
    fields["subtitles"] = [vars(line) for line in video.subtitles]
    fields["seconds_per_step"] = video.seconds_per_step
    return json.dumps(fields), video.video_grid_thw.tolist(), video.features.tolist()


@pytest.fixture(scope="module")
def whole(loaded, tmp_path_factory):
    """One of each kind of stored file, and beside them a file that nobody may touch."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "victim").write_bytes(b"mine")
    (folder / "videos").mkdir()
    write_mp4(folder / "videos/a.mp4", render_world(make_world(160, 1, 2)), 2)
    write_mp4(folder / "videos/b.mp4", render_world(make_world(161, 1, 2)), 2)
    indexing.index(folder / "videos", folder / "library", *loaded, name="org/model", say=lambda line: None)
    journal = Journal(folder / "batch.jsonl", {"model": "org/model"}, batch._ENTRIES)
    evidence = [{"start": 0.0, "end": 1.5, "video": "a.mp4", "box": [0.0, 0.5, 1.0, 1.0]}]
    answer = {
        "answer": "A ball.",
        "kept_tokens": 3,
        "visual_tokens": 9,
        "evidence": evidence,
        "warnings": [],
        "unheard": False,
    }
    for key in ("0", "1", "2"):
        journal.add(key, answer)
    tensors = {
        "video_features": torch.rand(4, 8),
        "video_grid_thw": torch.ones(1, 3, dtype=torch.int64),
        "second_per_grid_ts": torch.ones(1),
    }
    FEATURES.write(folder / "features/0.safetensors", tensors, {})
    return folder


def read_library(folder, model):
    found = Library(folder / "library", *model)
    if found.missing:  # the commands say so
        raise ValueError(f"{folder} lacks {found.missing}")
    return {name: as_json(found.video(name)) for name in found.names}


def read_journal(folder, model):
    return dict(Journal(folder / "batch.jsonl", schema=batch._ENTRIES).done)


def read_features(folder, model):
    tensors = read_tensors(folder / "features/0.safetensors", FEATURES)
    return {name: values.tolist() for name, values in tensors.items()}


READERS = {"library": read_library, "batch.jsonl": read_journal, "features": read_features}


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


def keys_of(content):
    if isinstance(content, dict):
        return list(content)
    if isinstance(content, list):
        return list(range(len(content)))
    return []


def holders(content):
    """Every value of a document that is inside another: by the object or array and the key in it."""
    for key in keys_of(content):
        yield content, key
        yield from holders(content[key])


def change(content, draw):
    """A document of which a value is replaced, is deeper, has another name, or is gone."""
    content = json.loads(json.dumps(content))
    holder, key = draw.choice(list(holders(content)))
    kind = draw.choice(["swap", "nest", "name", "drop"])
    if kind == "nest":
        for _ in range(draw.choice([1, 2, 300])):
            holder[key] = draw.choice([[holder[key]], {"a": holder[key]}])
    elif kind == "name" and isinstance(holder, dict):
        name = draw.choice(TEXTS + PLACES)
        holder[name] = holder.pop(key)
    elif kind == "drop":
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    return content


def change_lines(data, draw, sealed):
    """A line or a document, with its old digest or the digest that belongs to it."""
    lines = [data.decode()]
    if data.count(b'{"check"') > 1:
        lines = data.decode().splitlines()
    number = draw.randrange(len(lines))
    content = json.loads(lines[number])
    check = content.pop("check")
    content = change(content, draw)
    if sealed:
        lines[number] = seal(content)
    else:
        lines[number] = json.dumps({"check": check, **content})
    return ("\n".join(lines) + "\n").encode()


def change_features(data, draw):
    """Other values, another shape or another type, or another header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]).get("__metadata__")
    tensors = load(data)
    name = draw.choice(sorted(tensors))
    if "about" in header and draw.random() < 0.7:
        header["about"] = json.dumps(change(json.loads(header["about"]), draw))
    else:
        values = tensors[name].float()
        spoilt = [
            values.flatten(),
            values[None],
            values[:-1],
            values[..., :-1],
            values.double(),
            values.to(torch.int8),
        ]
        tensors[name] = draw.choice(spoilt).contiguous()
    return save(tensors, header)


def change_content(data, draw, sealed):
    if data.startswith(b"{"):
        return change_lines(data, draw, sealed)
    return change_features(data, draw)


def note_in_library(folder):
    """Writes the size and digest of changed features into the journal, as a stranger does."""
    journal = folder / "library.jsonl"
    sealed = []
    for text in journal.read_text().splitlines():
        line = json.loads(text)
        del line["check"]
        value = line["value"] if isinstance(line.get("key"), str) else {}
        if value.get("features"):
            name = value["content"][:32]
            value["features"] = storage.measure(folder / f"{name}.safetensors")
        sealed.append(seal(line) + "\n")
    journal.write_text("".join(sealed))


def note_in_features(folder):
    path = folder / "0.safetensors"
    FEATURES.write(path, load(path.read_bytes()), {})


NOTED = {"library": note_in_library, "features": note_in_features}


class Opened:
    """Notes the paths that Python opens, makes or removes while it is switched on."""

    EVENTS = {"open", "os.remove", "os.rename", "os.truncate", "os.mkdir", "os.rmdir", "socket.connect"}
    EVENTS |= {"subprocess.Popen"}

    def __init__(self):
        self.is_on = False
        self.places = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if not self.is_on or event not in self.EVENTS:
            return
        place = arguments[0]
        if isinstance(place, str | bytes):
            self.places.append(os.fsdecode(place))
        elif event not in ("open", "os.truncate"):  # a number is that of a file that was opened before
            self.places.append(event)


OPENED = Opened()  # once, because an audit hook cannot be removed


@contextmanager
def only_in(*folders):
    """Fails where something else is opened; the files of Python's packages may be."""
    OPENED.places.clear()
    OPENED.is_on = True
    try:
        yield
    finally:
        OPENED.is_on = False
    source = Path(library.__file__).parents[2]
    roots = [Path(root) for root in ("/proc/meminfo", sys.prefix, sys.base_prefix, source, *folders)]
    for place in OPENED.places:
        path = Path(place).resolve()
        assert any(path.is_relative_to(root) for root in roots), place


def spoil(name, path, draw):
    """Damages a file, or writes it as a stranger would, with the right digests. Returns whether as a stranger."""
    damage = draw.choice([flip, flip, cut, garble, change_content, change_content, change_content])
    hostile = damage is change_content and draw.random() < 0.6
    path.write_bytes(damage(path.read_bytes(), draw, hostile))
    if hostile and path.suffix == ".safetensors" and name in NOTED:
        NOTED[name](path.parent)
    return hostile


def state(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_message(error, folder):
    text = str(error)
    assert text.isprintable()
    assert str(folder) in text
    assert "Error(" not in text


def check_value(name, path, value, whole):
    """Damage is found: the value is whole. A journal without its last lines is that of a run that was stopped."""
    if path.suffix == ".jsonl":
        assert value.items() <= whole.items()
    else:
        assert value == whole


def copy_one(source, draw, folder):
    """A copy of what is stored, and the file in it that is to be changed."""
    folder.mkdir()
    copy = folder / source.name
    if not source.is_dir():
        shutil.copyfile(source, copy)
        return copy
    shutil.copytree(source, copy)
    stored = [path for path in copy.rglob("[!.]*.*") if path.is_file() and path.suffix != ".lock"]
    return draw.choice(sorted(stored))


@pytest.fixture
def one_fingerprint(loaded, monkeypatch):
    """The fingerprint of the model is computed once."""
    made_by = storage.fingerprint(*loaded)
    for module in (library, indexing):
        monkeypatch.setattr(module, "fingerprint", lambda *_: made_by)


def test_no_file_that_is_read_back_is_trusted(whole, loaded, one_fingerprint, tmp_path):
    draw = random.Random(SEED)
    expected = {name: read(whole, loaded) for name, read in READERS.items()}
    assert all(expected.values())
    outcomes = Counter()
    for case in range(CASES):
        name = draw.choice(sorted(READERS))
        read = READERS[name]
        folder = tmp_path / str(case)
        path = copy_one(whole / name, draw, folder)
        hostile = spoil(name, path, draw)
        before = state(folder)
        print(f"Seed {SEED}, case {case}: {path}")
        try:
            with only_in(folder):
                value = read(folder, loaded)
        except ValueError as error:
            outcomes["refused"] += 1
            check_message(error, folder)
        else:
            outcomes["read"] += 1
            if not hostile:
                check_value(name, path, value, expected[name])
            if name in NOTED:
                text = json.dumps(value)
                assert "NaN" not in text
                assert "Infinity" not in text
        assert state(folder) == before
        if name == "library" and case % 4 == 0:
            try:
                with only_in(folder, whole / "videos"):
                    indexing.index(whole / "videos", folder / name, *loaded, say=lambda line: None)
                again = read(folder, loaded)
            except ValueError as error:
                check_message(error, folder)
            else:
                outcomes["made again"] += 1
                assert hostile or again == expected[name]
            assert (whole / "victim").read_bytes() == b"mine"
        shutil.rmtree(folder)
    print(dict(outcomes))
    assert outcomes["refused"] > CASES / 2
    assert outcomes["made again"]
