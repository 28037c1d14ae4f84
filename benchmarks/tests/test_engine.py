"""The engine: nothing lost, nothing twice, in order, whatever stops it."""

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.synthesis.engine import JOURNAL, ItemFailed, Job, RunFailed, run_job
from qtsplus.common.journals import Journal
from qtsplus.data.records import Caption
from scripted_server import KEY, files_with_key, scripted_server
from synthesis_run import captions

HERE = Path(__file__).parent
FILES = ("vscq1.jsonl", "dropped.jsonl", "failed.jsonl")


class Counting:
    """A step that keeps every caption's number, drops every fifth, fails at those in `failing`; counts its calls."""

    def __init__(self, failing=(), raising=None):
        self.failing, self.raising = set(failing), raising
        self.calls, self.together, self.most_together = [], 0, 0

    async def __call__(self, item, ledger):
        self.calls.append(item.position)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        await asyncio.sleep(item.seed % 3 / 1000)  # so that they end in another order
        self.together -= 1
        ledger.costs.update(requests=1, prompt_tokens=10, completion_tokens=2)
        if item.position == self.raising:
            raise RuntimeError("a fault")
        if item.position in self.failing:
            ledger.reasons.append("It was to fail.")
            raise ItemFailed
        if item.position % 5 == 4:
            ledger.dropped.append({"number": item.position, "reason": "fifth: of all"})
        else:
            ledger.kept.append({"number": item.position, "seed": item.seed})


def job(step, count=60, **settings):
    return Job("set", lambda: captions(count), step, contextlib.nullcontext(), settings)


def numbers(path):
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def files(folder, names=("set.jsonl", "dropped.jsonl", "failed.jsonl")):
    return [(folder / name).read_text() for name in names]


def test_rows_stand_in_the_input_s_order(tmp_path):
    step = Counting(failing=[7])
    kept = run_job(job(step), tmp_path, concurrency=8)
    assert kept == tmp_path / "set.jsonl"
    assert numbers(kept) == [number for number in range(60) if number % 5 != 4 and number != 7]
    assert numbers(tmp_path / "dropped.jsonl") == list(range(4, 60, 5))
    assert json.loads((tmp_path / "failed.jsonl").read_text()) == {"id": "caption-7", "reasons": ["It was to fail."]}
    assert step.most_together == 8
    summary = json.loads((tmp_path / "summary.json").read_text())
    told = {"finished": 60, "kept": 47, "dropped": 12, "dropped_because": {"fifth": 12}, "failed": 1}
    costs = {"requests": 60, "prompt_tokens": 600, "completion_tokens": 120}
    assert {name: summary[name] for name in (*told, *costs)} == {**told, **costs}


def test_a_finished_run_asks_nothing_again(tmp_path):
    run_job(job(Counting()), tmp_path)
    before, again = files(tmp_path), Counting()
    run_job(job(again), tmp_path)
    assert again.calls == []
    assert files(tmp_path) == before


def test_a_fault_stops_the_run_and_loses_nothing(tmp_path):
    step = Counting(raising=30)
    with pytest.raises(RuntimeError, match="a fault"):
        run_job(job(step), tmp_path / "a", concurrency=4)
    assert not (tmp_path / "a" / "set.jsonl").exists()
    finished = set(Journal(tmp_path / "a" / JOURNAL).done)
    assert finished
    again = Counting()
    run_job(job(again), tmp_path / "a", concurrency=4)
    assert set(again.calls) == set(range(60)) - finished
    run_job(job(Counting()), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_failed_items_are_tried_again(tmp_path):
    run_job(job(Counting(failing=[3, 9])), tmp_path)
    again = Counting(failing=[9])
    run_job(job(again), tmp_path)
    assert sorted(again.calls) == [3, 9]
    assert 3 in numbers(tmp_path / "set.jsonl")
    assert json.loads((tmp_path / "failed.jsonl").read_text())["id"] == "caption-9"


def test_a_run_that_only_fails_is_stopped(tmp_path):
    step = Counting(failing=range(1000))
    with pytest.raises(RunFailed, match="The last 20 items failed, the last one because It was to fail."):
        run_job(job(step, 1000), tmp_path, concurrency=4)
    assert len(step.calls) < 40


def test_the_first_items_alone_and_then_all(tmp_path):
    run_job(job(Counting()), tmp_path, limit=10)
    assert numbers(tmp_path / "set.jsonl") == [0, 1, 2, 3, 5, 6, 7, 8]
    rest = Counting()
    run_job(job(rest), tmp_path)
    assert sorted(rest.calls) == list(range(10, 60))


@pytest.mark.parametrize("other", [{"model": "another"}, {"count": 61}])
def test_another_run_in_the_folder_is_refused(tmp_path, other):
    run_job(job(Counting(), model="one"), tmp_path)
    with pytest.raises(ValueError, match="was begun with .*, not .*choose another folder"):
        run_job(job(Counting(), **{"model": "one", **other}), tmp_path)


def test_one_process_at_a_time(tmp_path):
    class Nested(Counting):
        async def __call__(self, item, ledger):
            with pytest.raises(ValueError, match="Another process works in"):
                await asyncio.to_thread(run_job, job(Counting()), tmp_path)
            await super().__call__(item, ledger)

    run_job(job(Nested(), 1), tmp_path)


def test_files_that_no_run_has_made_are_left_alone(tmp_path):
    (tmp_path / "set.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="set.jsonl is there already, and not from this run"):
        run_job(job(Counting()), tmp_path)
    assert (tmp_path / "set.jsonl").read_text() == "mine"


def test_of_items_that_all_fail_no_set_is_made(tmp_path):
    with pytest.raises(RunFailed, match="All 3 items failed, because It was to fail. No set was written"):
        run_job(job(Counting(failing=range(3)), 3), tmp_path)
    assert not (tmp_path / "set.jsonl").exists() and not (tmp_path / "summary.json").exists()
    assert len((tmp_path / "failed.jsonl").read_text().splitlines()) == 3
    run_job(job(Counting(), 3), tmp_path)
    assert numbers(tmp_path / "set.jsonl") == [0, 1, 2]


def test_a_full_disk_loses_nothing_and_says_how_to_go_on(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # no file may grow beyond it
    try:
        with pytest.raises(OSError, match=f"{JOURNAL}"):
            run_job(job(Counting()), tmp_path, concurrency=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    before, again = finished(tmp_path), Counting()
    assert before
    run_job(job(again), tmp_path)
    assert set(again.calls) == set(range(60)) - before


@pytest.mark.parametrize("place", ["file", "file/folder", "locked/folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o500)
    if place.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    step = Counting()
    with pytest.raises(ValueError, match="is a file; expected a folder|cannot be written"):
        run_job(job(step), tmp_path / place)
    assert step.calls == []


def test_an_empty_input(tmp_path):
    with pytest.raises(ValueError, match="holds no record"):
        run_job(job(Counting(), 0), tmp_path)


def test_few_items_are_in_memory(tmp_path):
    """However long the input, no more records live than are worked on."""
    living, most = set(), 0

    class Seen(Caption):
        def model_post_init(self, context):
            nonlocal most
            living.add(id(self))
            most = max(most, len(living))

        def __del__(self):
            living.discard(id(self))

    def read():
        for number in range(2000):
            yield Seen(vision_id="v", id=str(number), caption="A dog runs.")

    async def step(item, ledger):
        await asyncio.sleep(0)
        ledger.kept.append({"id": item.id})

    run_job(Job("set", read, step, contextlib.nullcontext(), {}), tmp_path, concurrency=16)
    assert most < 50


# --------------------------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------------------------


def start(url, folder, items, concurrency=16):
    command = [sys.executable, str(HERE / "synthesis_run.py"), url, str(folder), str(items), str(concurrency)]
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(command, env={**os.environ, "OPENAI_API_KEY": KEY, "PYTHONPATH": path})


def finished(folder):
    """The positions of the items that a run has finished so far."""
    try:
        lines = (folder / JOURNAL).read_text().splitlines()[1:]
    except FileNotFoundError:
        return set()
    keys = (json.loads(line)["key"] for line in lines if line.endswith("}"))
    return {key for key in keys if isinstance(key, int)}


def kill_and_go_on(url, folder, items, points, concurrency=16):
    """Starts a run, kills it at each of the points (in finished items), and then lets it end."""
    for point in points:
        process = start(url, folder, items, concurrency)
        while len(finished(folder)) < point and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert len(finished(folder)) >= point
    assert start(url, folder, items, concurrency).wait() == 0


def check_killed(tmp_path, items, kills, seed):
    points = sorted(random.Random(seed).sample(range(1, items), kills))
    rules = [
        {"contains": "number 3", "then": ["malformed", "good"], "each": True},
        {"contains": "number 5", "then": ["429", "good"], "each": True},
        {"contains": "number 7", "then": ["500", "good"], "each": True},
        {"contains": "number 17 ", "then": ["400"]},
    ]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with scripted_server(tmp_path / "one", rules=rules) as (url, log):
        kill_and_go_on(url, tmp_path / "whole", items, [])
    with scripted_server(tmp_path / "two", rules=rules) as (url, log):
        kill_and_go_on(url, tmp_path / "killed", items, points)
    assert files(tmp_path / "killed", FILES) == files(tmp_path / "whole", FILES)
    ids = [json.loads(line)["id"] for line in (tmp_path / "killed" / "vscq1.jsonl").read_text().splitlines()]
    assert len(set(ids)) == len(ids) == 3 * (items - 1)
    good = [json.loads(line)["text"] for line in log.read_text().splitlines() if '"behaviour": "good"' in line]
    # Only what was under way at a kill, or answered and not yet written, is asked again.
    assert len(good) - len(set(good)) <= kills * 16
    assert files_with_key(tmp_path) == []


def test_killed_and_restarted(tmp_path):
    check_killed(tmp_path, items=120, kills=2, seed=0)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    check_killed(tmp_path, items=2000, kills=20, seed=1)
