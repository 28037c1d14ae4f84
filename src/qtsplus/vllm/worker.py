"""
What the server asks vLLM's engine apart from the requests themselves. Before a request runs, the engine is asked to
choose its tokens, since vLLM must know their number first and an error then costs one request. Frames are sent once per
video and not with every question. Afterwards it is asked what an answer rests on.

[`prepare`] runs in the server, [`Worker`] in the engine: `qtsplus serve` passes it as `--worker-extension-cls`.

What a selection method raises costs its request alone: `Worker.qtsplus_prepare` catches it in the engine and returns
its text, and [`prepare`] raises that in the server as a `ValueError`, which vLLM answers with status 400. A method of
one's own that does not return is ended by [`time_limit`]. A vLLM that `qtsplus serve` did not start asks nothing
beforehand: there, the error of a method ends the engine.
"""

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from time import sleep
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from ..common.files import printable

logger = logging.getLogger(__name__)

PIXELS = "pixel_values_videos"
# In place of the number of tokens that a request keeps:
Frames = list[int]  # the engine needs these patches of a video: its index, the first, and the one behind the last
REFUSED = "refused: "  # with the reason behind it
BUSY = "busy"  # other requests hold too much memory, so ask later
AGAIN = "again"  # the engine has made a part of the choice, so ask it again
PIECES = ThreadPoolExecutor(1)  # where one piece of the work is asked for at a time; others' tokens come between
BUSY_SECONDS = 0.1
METHOD_SECONDS = 60  # after which a method of one's own is ended


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Ends a block of Python with `TimeoutError`, since what hangs in the engine stops it for everyone."""

    def end(*_):
        raise TimeoutError(f"the method did not return within {seconds} seconds")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Worker:
    """Methods that are added to vLLM's worker."""

    get_model: Callable[[], Any]

    def qtsplus_prepare(self, item: bytes) -> int | Frames | str:
        """Calls the model's `prepare` with an item of [`prepare`]. An error is returned: [`REFUSED`] and its text."""
        try:
            return self.get_model().prepare(load(item))
        except BaseException as error:  # the operator's own method may raise anything; the engine must go on
            logger.exception("The tokens of a request could not be chosen.")
            return printable(f"{REFUSED}{type(error).__name__}: {error}")  # vLLM cannot send half a character

    def qtsplus_release(self, key: str) -> None:
        """Calls the model's `release`."""
        self.get_model().release(key)

    def qtsplus_basis(self, key: str) -> dict | None:
        """What the answers to a request rest on, by the hash of its video item; `None` if this worker does not know."""
        choice = self.get_model().find_choice(key)
        return choice and choice.basis


def prepare(call_engine: Callable[..., Any], item, sending: Lock) -> int:
    """
    Has the engine choose a request's tokens and hold them, and returns their number. Frames are sent only if the engine
    does not have their features, and only by the question that holds `sending`; other questions wait for it.

    Args:
        item: what [`processing.merged_item`] has made.
    """
    fields = item.get_data()
    pixels = fields.pop(PIXELS)
    fields = {name: value.contiguous() for name, value in fields.items()}

    def ask(**frames: Tensor) -> Any:
        content = save(fields | frames)
        while True:
            answer = call_engine("qtsplus_prepare", (content,))[0]
            if answer != BUSY:
                return answer
            sleep(BUSY_SECONDS)

    answer = ask()
    if isinstance(answer, list):
        with sending:
            answer = ask()  # another question may have sent the frames meanwhile
            while isinstance(answer, list):
                video, start, stop = answer
                answer = PIECES.submit(ask, **{PIXELS: pixels[video][start:stop]}).result()
    while answer == AGAIN:
        answer = PIECES.submit(ask).result()
    if isinstance(answer, str):
        raise ValueError(f"The request's tokens could not be chosen: {answer.removeprefix(REFUSED)}")
    return answer
