"""A file of tensors holds what its format declares, or is refused in one line that says what to do."""

from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import save_file

from qtsplus.common.tensors import TensorFormat, TensorKind

CODES = TensorKind(("M", "d"), (torch.uint8,))
SCALE = TensorKind(("d",), (torch.float32,))
FORMAT = TensorFormat("stored scale", "make it again", {"codes": CODES, "scale": SCALE}, frozenset(["of"]))
TENSORS = {"codes": torch.arange(6, dtype=torch.uint8).view(2, 3), "scale": torch.ones(3)}
TEXTS = {"of": "a video"}


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "file"
    FORMAT.write(path, TENSORS, TEXTS)
    with FORMAT.reading(path) as file:
        assert file.texts == TEXTS
        assert file.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(file.tensors[name], tensor)


@dataclass
class OtherFile:
    """What a file holds that is not of the format, and why it is refused."""

    reason: str
    tensors: dict = field(default_factory=dict)
    texts: dict = field(default_factory=lambda: TEXTS)


OTHERS = {
    "a symbol with two sizes": OtherFile(
        r"scale is \[2\] torch.float32; expected \[3\] of",
        {"scale": torch.ones(2)},
    ),
    "another dtype": OtherFile(
        "scale is .*float64; expected .* of torch.float32",
        {"scale": torch.ones(3, dtype=torch.float64)},
    ),
    "another rank": OtherFile(r"codes is \[3\]", {"codes": TENSORS["codes"][0]}),
    "one more tensor": OtherFile("it is no stored scale", {"more": torch.ones(1)}),
    "another text": OtherFile("it is no stored scale", texts={"from": "a video"}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_file_is_refused(tmp_path, other):
    path = tmp_path / "file"
    FORMAT.write(path, TENSORS | other.tensors, other.texts)
    refusal = f"The stored scale '.*file' cannot be used: {other.reason}.*; make it again"
    with pytest.raises(ValueError, match=refusal), FORMAT.reading(path):
        pass


def test_a_file_without_its_digest_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "file", TEXTS)
    changed = "it was changed since it was written"
    with pytest.raises(ValueError, match=changed), FORMAT.reading(tmp_path / "file"):
        pass


def test_an_error_of_the_reader_is_about_the_file(tmp_path):
    FORMAT.write(tmp_path / "file", TENSORS, TEXTS)
    refusal = "'.*file' cannot be used: it is of another video; make it again"
    with pytest.raises(ValueError, match=refusal), FORMAT.reading(tmp_path / "file"):
        raise ValueError("it is of another video")
