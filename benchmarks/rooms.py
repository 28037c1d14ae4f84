"""How often one `generate` of one token calls a function of ours, and how often the next call is in another file.

python -m benchmarks.rooms
"""

import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from qtsplus.demo import CLIP, QUESTIONS
from qtsplus.hub.files import TINY, hub_root
from qtsplus.hub.publish import assemble_folder
from qtsplus.loading import load


def calls_of_one_token() -> list[tuple[str, str]]:
    """File and name of every named function of the Hub's files that the bundled model calls for one token."""
    with tempfile.TemporaryDirectory() as folder:
        model, processor = load(assemble_folder(TINY, Path(folder) / TINY))
    content = [{"type": "video", "video": str(CLIP)}, {"type": "text", "text": QUESTIONS[0].question}]
    inputs: Any = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and path.parent == hub_root() and "_qtsplus" in path.name and name[0] != "<":
            calls.append((path.name, name))

    sys.setprofile(note)
    try:
        model.generate(**inputs, max_new_tokens=1)
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    calls = calls_of_one_token()
    changes = sum(before != after for (before, _), (after, _) in pairwise(calls))
    print(f"{len(calls)} calls, {changes} changes of file")
    for file, count in Counter(file for file, _ in calls).most_common():
        names = Counter(name for place, name in calls if place == file).most_common()
        print(f"{count:4} {file}: {', '.join(f'{name} {times}' for name, times in names)}")


if __name__ == "__main__":
    main()
