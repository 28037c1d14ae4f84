"""Video without an end: a memory of so many tokens, to which frames are added and of which anything can be asked.

Appending looks at the memory and at what is new, never at what has gone, so that its price is flat. What stays keeps
its time and its place in the frame.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.utils import logging
from transformers.video_utils import VideoMetadata

from ..asking.answers import Answer, answer_questions, check_name
from ..asking.ranking import StandingQuestion
from ..asking.recall import Remembered, places_of, rows_of
from ..common.files import printable
from ..common.validation import check_count
from ..hub.loading import find_device
from ..model.methods_qtsplus import Candidates, Method, check_kept, diversity, is_number, most_relevant
from ..model.video_qtsplus import naming, resize_frame, stack_frames

logger = logging.get_logger(__name__)

STEPS_AT_A_TIME = 8  # that are encoded together
EARLY = 0.1  # the part of the time between two frames by which one may come too early
_TICKS = 1000  # of a second: the rate at which a prompt's metadata state the times of frames


@dataclass(frozen=True)
class Tokens:
    """What is left of one camera, in the order of time."""

    features: torch.Tensor  # [m, token_width]
    steps: torch.Tensor  # [m] int64, the step in time of each, counted from the beginning of the stream
    cells: torch.Tensor  # [m] int64, its place in the frame, row by row
    scores: torch.Tensor  # [m, rows] float32, of the standing question; no row without one

    def __len__(self) -> int:
        return len(self.features)

    def take(self, kept: torch.Tensor) -> "Tokens":
        return Tokens(*(values[kept] for values in vars(self).values()))

    def join(self, newer: "Tokens") -> "Tokens":
        older = self if len(self) else newer.take(torch.arange(0))
        return Tokens(*map(torch.cat, zip(vars(older).values(), vars(newer).values(), strict=True)))


@dataclass
class Camera:
    """One video of a stream."""

    size: tuple[int, int]  # height and width of its frames
    patches: torch.Tensor  # [1, 2], those of its grid in patches
    cells: tuple[int, int]  # those of its grid in tokens
    tokens: Tokens
    # Frames of a step that may go on, and its number
    waiting: list[tuple[int, np.ndarray]] = field(default_factory=list)
    newest: int = -1  # the number of the newest step
    missing: int = 0  # frames that it lacks, as at the end of a video
    frame: int = -1  # the number of the newest frame, where there are `fps` a second
    last_time: float = -math.inf  # of the newest frame that came, in seconds
    is_resized: bool = False  # whether frames of another size came
    begins: dict[int, float] = field(default_factory=dict)  # when the first frame of each step was taken, in seconds


class Stream:
    """
    Videos without an end, such as those of cameras, of which a model remembers so many tokens.

    Args:
        memory_tokens: the most visual tokens that stay, those of all cameras together.
        question: a standing question, to which the tokens that stay matter most; without one they are those that are
            unlike each other. Any other can be asked too.
        policy: another choice of what stays, a function like those of `methods_qtsplus.py`, which is given what was
            kept and what is new.
        fps: frames per second, also where more come. A step in time lasts as long as its frames.
        device: where the memory lives, such as `"cpu"`; the model's when absent.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        memory_tokens: int = 4096,
        question: str | None = None,
        policy: Method | None = None,
        fps: float = 2.0,
        device: str | None = None,
    ):
        if policy is not None and not callable(policy):
            raise ValueError(f"policy={policy!r}; expected a function from candidates and a count to indices.")
        check_count("memory_tokens", memory_tokens, "tokens")
        if not (is_number(fps) and 1e-3 <= fps <= 1e3):
            raise ValueError(f"fps={fps!r}: expected frames per second, a number from 0.001 to 1000.")
        self.model, self.processor, self.memory_tokens = model, processor, memory_tokens
        self.policy: Method = policy or (diversity if question is None else most_relevant)
        self.question = None if question is None else StandingQuestion(model, processor, question)
        self.frames_per_step = processor.video_processor.temporal_patch_size
        self.fps, self.seconds_per_step = fps, self.frames_per_step / fps
        # As large as in a video of so many: backbones such as Qwen3-VL share a number of pixels among its frames.
        self.sized_as = int(getattr(processor.video_processor, "max_frames", None) or 768)
        self.device = torch.device(model.device if device is None else find_device(device))
        self.cameras: dict[str, Camera] = {}
        self._changing = threading.Lock()  # the memory, of which another thread may ask
        self._width = model.config.text_config.hidden_size  # a backbone may put more behind a token

    @property
    def num_tokens(self) -> int:
        """Tokens in memory."""
        return sum(len(camera.tokens) for camera in self.cameras.values())

    def append(self, frames: Sequence[np.ndarray], times: Sequence[float] | None = None, name: str = "video") -> None:
        """
        Encodes frames and remembers what the policy says. A frame waits until its step in time is full or over; then it
        stands for those that did not come. Of frames that come faster than `fps`, those between are left out.

        If it fails, the same frames can be appended again with their times: those that were encoded are known.

        Args:
            frames: `[H, W, 3]` uint8 each; of another size than the camera's first, they are brought to that.
            times: when each was taken, in seconds from the beginning of the stream, ascending; at `fps` behind those
                before if absent. Of several cameras, on one clock.
            name: of the camera; that of a new one adds it.
        """
        if not isinstance(frames, (Sequence, np.ndarray, torch.Tensor)):
            raise ValueError(f"Got frames of type {type(frames).__name__}; expected a list of arrays.")
        if not len(frames):
            return
        times = self._check(frames, times, name)
        camera = self.camera(name, np.shape(frames[0]))
        steps, waiting, newest = [], list(camera.waiting), camera.frame
        for frame, time in zip(frames, times, strict=True):
            number = math.floor(time * self.fps + EARLY)
            if number <= newest:
                continue
            newest, step = number, number // self.frames_per_step
            camera.begins.setdefault(step, time)
            if waiting and step > waiting[0][0]:
                steps.append(waiting)
                waiting = []
            if np.shape(frame)[:2] != camera.size and not camera.is_resized:
                camera.is_resized = True
                logger.warning(f"Frames of {printable(name)} have another size now, and are brought to the first one.")
            waiting.append((step, resize_frame(self.processor.video_processor, camera.size, np.asarray(frame))))
            if number % self.frames_per_step == self.frames_per_step - 1:
                steps.append(waiting)
                waiting = []
        for first in range(0, len(steps), STEPS_AT_A_TIME):
            self._add(camera, steps[first : first + STEPS_AT_A_TIME])
        camera.waiting, camera.frame, camera.last_time = waiting, newest, times[-1]

    def _check(self, frames: Sequence[np.ndarray], times: Sequence[float] | None, name: str) -> list[float]:
        """The frames' times; a `ValueError` for what cannot follow what came before."""
        known = self.cameras.get(check_name(name))
        for frame in frames:
            shape, kind = np.shape(frame), np.asarray(frame).dtype
            if len(shape) != 3 or shape[2] != 3 or 0 in shape or kind != np.uint8:
                raise ValueError(f"Got {kind} of shape {shape} of {name!r}; expected (height, width, 3) of uint8.")
        first = -1 if known is None else known.frame
        clock = [(first + number) / self.fps for number in range(1, len(frames) + 1)] if times is None else times
        try:
            taken = np.asarray(clock, dtype=np.float64)
        except (TypeError, ValueError):
            taken = np.empty(0)
        before = -math.inf if known is None else known.last_time
        ascending = taken.shape == (len(frames),) and bool((np.diff(taken, prepend=before) > 0).all())
        if not (ascending and taken[0] >= 0 and taken[-1] < math.inf):
            raise ValueError(
                f"Got times that do not ascend, or not one for each of {len(frames)} frames of {name!r}; expected "
                "seconds from the beginning of the stream."
            )
        return taken.tolist()

    def finish(self) -> None:
        """Encodes the frames that wait, each step filled up with its last one, as at the end of a video."""
        for camera in self.cameras.values():
            if camera.waiting:
                missing = (camera.waiting[0][0] + 1) * self.frames_per_step - 1 - camera.frame
                self._add(camera, [camera.waiting])
                camera.missing = missing

    def camera(self, name: str, shape: tuple[int, ...]) -> Camera:
        """The camera of a name, which is added if there is none; its frames have this shape, `(H, W, 3)`."""
        if name not in self.cameras:
            with naming(name):
                grid = self.processor.grid_of(self.sized_as, *shape[:2])
            ((_, height, width),) = self.model.model.merged_grid(grid)
            index, features = torch.empty(0, dtype=torch.long), self.model.model.no_features(self.device)
            tokens = Tokens(features, index, index, torch.empty(0, 0))
            self.cameras[name] = Camera((shape[0], shape[1]), grid[:, 1:], (height, width), tokens)
        return self.cameras[name]

    def _add(self, camera: Camera, steps: Sequence[list[tuple[int, np.ndarray]]]) -> None:
        """Encodes steps, each of frames with its number, and thins the memory; if encoding fails, all is as it was."""
        filled = [step + step[-1:] * (self.frames_per_step - len(step)) for step in steps]
        grid = torch.cat([torch.ones(1, 1, dtype=torch.long), camera.patches], dim=1)
        frames = stack_frames([frame for step in filled for _, frame in step])
        pixels, grid = self.processor.preprocess_frames(frames, grid)
        (features,) = self.model.encode_videos(pixels, grid, device=self.device)
        numbers = [step[0][0] for step in steps]
        camera.waiting, camera.missing, camera.frame = [], 0, (numbers[-1] + 1) * self.frames_per_step - 1
        self.remember(camera, features, numbers)

    @torch.no_grad()
    def remember(self, camera: Camera, features: torch.Tensor, steps: Sequence[int]) -> None:
        """Adds steps `[t * h * w, token_width]` by their numbers in time, and forgets what the policy drops."""
        cells = len(features) // len(steps)
        own = features[:, : self._width]
        scores = torch.empty(len(own), 0) if self.question is None else self.question.add(own)
        places = torch.tensor([*steps]).repeat_interleave(cells), torch.arange(cells).repeat(len(steps))
        new = Tokens(features, *places, scores)
        with self._changing:
            camera.tokens, camera.newest = camera.tokens.join(new), int(steps[-1])
            if self.num_tokens > self.memory_tokens:
                self._forget(self.memory_tokens)

    def _forget(self, count: int) -> None:
        cameras = [camera for camera in self.cameras.values() if len(camera.tokens)]
        sizes = [len(camera.tokens) for camera in cameras]
        kept = self.policy(self._competing(cameras), count).cpu()
        check_kept(kept, count, sum(sizes), self.policy)
        first = 0
        for camera, size in zip(cameras, sizes, strict=True):
            own = kept[(kept >= first) & (kept < first + size)] - first
            camera.tokens, first = camera.tokens.take(own), first + size
            there = {*camera.tokens.steps.tolist(), camera.newest + 1}
            camera.begins = {step: time for step, time in camera.begins.items() if step in there or step - 1 in there}

    def _competing(self, cameras: Sequence[Camera]) -> Candidates:
        """The whole memory; a camera's tokens are one line of one frame."""
        tokens = [camera.tokens for camera in cameras]
        widths = [camera.cells[1] for camera in cameras]
        places = [(one.steps, one.cells // width, one.cells % width) for one, width in zip(tokens, widths, strict=True)]
        positions = torch.cat(list(map(torch.stack, places)), dim=1)

        def score(_: torch.Tensor) -> torch.Tensor:
            if self.question is None:
                raise ValueError("The policy asks for relevance, and there is no standing question.")
            return self.question.log_relevance(torch.cat([one.scores for one in tokens]))

        visual = [one.features[:, : self._width] for one in tokens]
        return Candidates(visual, visual[0][:0], positions, [(1, 1, len(one)) for one in tokens], score)

    def ask(self, question: str, **options: Any) -> Answer:
        """
        Answers a question about what is in memory; the options are those of `answer_questions`.

        The evidence has the seconds of the stream and the names of the cameras. The keep maps have a row for each step
        of which something is in memory, and one that is empty where others are missing.
        """
        (answer,) = answer_questions(self.model, self.processor, self.videos(), [question], **options)
        return answer

    def videos(self) -> dict[str, Remembered]:
        """What is in memory now, by camera; `ValueError` if nothing is."""
        with self._changing:
            cameras = {name: camera for name, camera in self.cameras.items() if len(camera.tokens)}
            if not cameras:
                raise ValueError("The stream has no step in time yet: append frames, or finish it, before asking.")
            return {name: self._video(name, camera) for name, camera in cameras.items()}

    def _video(self, name: str, camera: Camera) -> Remembered:
        """What is left of a camera; its frames have their true times."""
        steps = camera.tokens.steps.tolist()
        rows = rows_of(steps)
        starts = [row * self.seconds_per_step for row in rows]
        times = [start + frame / self.fps for start in starts for frame in range(self.frames_per_step)]
        missing = camera.missing if steps[-1] == camera.newest else 0
        times = times[: len(times) - missing]
        metadata = VideoMetadata(
            total_num_frames=round(((camera.newest + 1) * self.frames_per_step - camera.missing) / self.fps * _TICKS),
            fps=_TICKS,
            frames_indices=[round(time * _TICKS) for time in times],
            height=camera.size[0],
            width=camera.size[1],
        )
        grid = torch.tensor([[len(rows), *camera.patches[0].tolist()]])
        video = (name, camera.tokens.features, grid, [self.seconds_per_step], metadata, 0.0)
        more: dict[str, Any] = {"begins": dict(camera.begins), "places": places_of(camera, rows)}
        return Remembered(*video, clock=self, rows=rows, missing=missing, **more)
