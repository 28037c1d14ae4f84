"""Waits for the host are counted on a device that is not there."""

import json

from benchmarks.speed.waits import run_waits


def test_waits_are_written_for_both_models(tmp_path):
    target = run_waits(tmp_path, shapes=["tiny"], frames=(4, 8), retentions=(0.5,))
    document = json.loads(target.read_text())
    short, long = document["frames"]["tiny"].values()
    assert short["decoding step"]["ours"] == long["decoding step"]["ours"] == short["decoding step"]["stock"]
    assert long["prefill"]["stock"][1] > short["prefill"]["stock"][1]  # stock loops over windows
