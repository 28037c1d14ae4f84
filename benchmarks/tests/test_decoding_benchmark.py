"""What it costs to see some frames of a film, at toy size."""

from benchmarks.files import read_result
from benchmarks.speed.decoding import run_decoding


def test_frames_are_the_same_however_few_are_decoded(tmp_path):
    document = read_result(run_decoding(tmp_path, minutes=2, side=36, counts=[4, 12], progress=False))
    assert document["figures"]["equal_to_the_byte"]
    assert [one["frames"] for one in document["measured"].values()] == [4, 4, 12, 12]
    assert not (tmp_path / ".decoding.mp4").exists()
