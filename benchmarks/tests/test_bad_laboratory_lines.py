"""Whatever is typed wrongly behind `python -m benchmarks` ends in exit code 2 and one line."""

import pytest

from bad_laboratory_lines import laboratory_lines
from benchmarks.cli import app
from refusals import assert_refused, fill

LINES = laboratory_lines()


@pytest.mark.parametrize("line", LINES, ids=[f"{i}-{' '.join(line)[:60]!a}" for i, line in enumerate(LINES)])
def test_a_bad_command_line_is_refused(line, corpus, shared_model):
    assert_refused([fill(argument, corpus) for argument in line], app)
