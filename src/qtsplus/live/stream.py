"""Video without an end: a stream remembers a fixed number of tokens, and a model answers any question about them.

Appending frames looks only at the memory and at the new frames, so its cost does not grow with time. A token that stays
keeps its time and its place in the frame.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata

from ..asking.answers import Answer, answer_questions
from ..asking.question import check_name
from ..asking.ranking import StandingQuestion
from ..asking.recall import Remembered, mark_gaps
from ..common.validation import show
from ..model.frames_qtsplus import stack_frames
from ..model.methods_qtsplus import Candidates, Method, check_kept, diversity, find_method, most_relevant
from ..model.numbers_qtsplus import is_number, require_count
from ..model.video_qtsplus import AboutVideo, naming, resize_frame

STEPS_AT_A_TIME = 8  # the most steps in time that are encoded together
EARLY = 0.1  # A frame may come early by this fraction of the time between two frames.
_TICKS = 1000  # ticks per second: the metadata of a prompt state the times of frames in ticks


@dataclass(frozen=True)
class Tokens:
    """The tokens of one camera that are in memory, in the order of time."""

    features: Tensor  # [m, token_width]
    steps: Tensor  # [m] int64, the step in time of each token, counted from the beginning of the stream
    cells: Tensor  # [m] int64, the place of each token in its frame, counted row by row
    scores: Tensor  # [m, k] float32, as `StandingQuestion.add` gives them; k is 0 without a standing question

    def __len__(self) -> int:
        return len(self.features)

    def take(self, kept: Tensor) -> "Tokens":
        chosen = [tensor[kept] for tensor in vars(self).values()]
        return Tokens(*chosen)

    def join(self, newer: "Tokens") -> "Tokens":
        if len(self) == 0:
            return newer
        pairs = zip(vars(self).values(), vars(newer).values(), strict=True)
        joined = [torch.cat(pair) for pair in pairs]
        return Tokens(*joined)


@dataclass(frozen=True)
class Step:
    """The frames of one step in time: at least one, at most `Stream.frames_per_step`."""

    number: int
    frames: list[np.ndarray]  # [H, W, 3] uint8 each, of the camera's size


@dataclass
class Camera:
    """One video of a stream."""

    size: tuple[int, int]  # height and width of its frames
    grid: Tensor  # [1, 3] in patches; its height and width are those of each frame, its number of steps means nothing
    cells: tuple[int, int]  # height and width of the grid in tokens
    tokens: Tokens
    waiting: list[np.ndarray] = field(default_factory=list)  # frames that are not encoded yet, all of the newest step
    newest_step: int = -1  # the number of the newest step that was encoded
    missing: int = 0  # how many frames the newest encoded step lacks, as at the end of a video
    newest_frame: int = -1  # the number of the newest frame that was taken, counted at `fps` frames a second
    last_time: float = -math.inf  # seconds: the time of the newest frame that came, taken or left out
    begins: dict[int, float] = field(default_factory=dict)  # seconds: when the first frame of each step was taken


class Stream:
    """
    A memory of a fixed number of visual tokens for videos without an end, such as those of cameras.

    Args:
        memory_tokens: the most visual tokens that stay, over all cameras together.
        question: a standing question: the tokens that matter most for it stay. Without it, tokens that are unlike each
            other stay. Other questions can be asked in both cases.
        fps: frames per second that are looked at, even if more come. A step in time lasts as long as its frames.

    The attribute `policy` chooses what stays, and may be set to a function like those of `methods_qtsplus.py`. Its
    candidates are all tokens in memory, the old and the new ones.
    """

    def __init__(
        self,
        model,
        processor,
        *,
        memory_tokens: int = 4096,
        question: str | None = None,
        fps: float = 2.0,
    ):
        if not (is_number(fps) and 1e-3 <= fps <= 1e3):
            raise ValueError(f"fps={fps!r}: expected frames per second, a number from 0.001 to 1000.")
        self.model = model
        self.processor = processor
        self.memory_tokens = require_count("memory_tokens", memory_tokens)
        self.question = None
        self.policy: Method = diversity
        if question is not None:
            self.question = StandingQuestion(model, processor, question)
            self.policy = most_relevant
        self.frames_per_step = processor.video_processor.temporal_patch_size
        self.fps = float(fps)
        self.seconds_per_step = self.frames_per_step / self.fps
        # Some backbones, such as Qwen3-VL, make frames smaller if a video has many. Here frames are as large as in a
        # video with this many.
        max_frames = getattr(processor.video_processor, "max_frames", None)
        self.sized_as = int(max_frames or 768)
        self.cameras: dict[str, Camera] = {}
        self._changing = threading.Lock()  # held while the memory changes, since another thread may ask meanwhile
        # The first numbers of a token's features are the token. A backbone may add others, such as DeepStack's.
        self._width = model.config.text_config.hidden_size

    @property
    def num_tokens(self) -> int:
        """Tokens in memory."""
        return sum(len(camera.tokens) for camera in self.cameras.values())

    def append(
        self,
        frames: Sequence[np.ndarray],
        times: Sequence[float] | np.ndarray | None = None,
        name: str = "video",
    ) -> None:
        """
        Encodes frames and remembers the tokens that the policy chooses.

        A frame waits until all frames of its step in time are there, or until a later step begins. In place of frames
        that did not come, the last frame of the step is encoded again. If frames come faster than `fps`, those in
        between are left out.

        Args:
            frames: `[H, W, 3]` uint8 each; they are resized to the size of the camera's first frame.
            times: when each frame was taken, in seconds from the beginning of the stream, ascending; several cameras
                share one clock. If absent, the frames follow the earlier ones at `fps`.
            name: the camera's name; a new name adds a camera.
        """
        check_frames(frames, check_name(name))
        if not len(frames):
            return
        newest = -1
        last_time = -math.inf
        if name in self.cameras:
            newest = self.cameras[name].newest_frame
            last_time = self.cameras[name].last_time
        if times is None:
            first = newest + 1
            times = np.arange(first, first + len(frames)) / self.fps
        seconds = seconds_of(times, len(frames), last_time, name)
        camera = self.camera(name, np.shape(frames[0]))
        camera.last_time = seconds[-1]
        steps = []
        for pixels, time in zip(frames, seconds, strict=True):
            steps += self._into_steps(camera, np.asarray(pixels), time)
        for first in range(0, len(steps), STEPS_AT_A_TIME):
            self._add(camera, steps[first : first + STEPS_AT_A_TIME])

    def _into_steps(
        self,
        camera: Camera,
        pixels: np.ndarray,
        time: float,
    ) -> list[Step]:
        """Adds a frame to its step in time, unless it comes too fast. Returns the steps that are over now."""
        exact = time * self.fps
        number = math.floor(exact + EARLY)
        if number <= camera.newest_frame:
            return []
        step = number // self.frames_per_step
        camera.begins.setdefault(step, time)
        ended = []
        if camera.waiting and step > camera.newest_frame // self.frames_per_step:
            ended.append(self._end_step(camera))
        camera.newest_frame = number
        camera.waiting.append(resize_frame(self.processor.video_processor, camera.size, pixels))
        if number == self._last_frame(step):
            ended.append(self._end_step(camera))
        return ended

    def shown_until(self, name: str, time: float) -> None:
        """Notes until when the newest frame of a camera is shown. Its step ends then, as if the next step began."""
        camera = self.cameras[name]
        camera.begins[camera.newest_frame // self.frames_per_step + 1] = time

    def _end_step(self, camera: Camera) -> Step:
        """Makes a step of the frames that wait."""
        step = Step(camera.newest_frame // self.frames_per_step, camera.waiting)
        camera.waiting = []
        return step

    def finish(self) -> None:
        """Encodes the frames that wait, as at the end of a video."""
        for camera in self.cameras.values():
            if camera.waiting:
                step = self._end_step(camera)
                last = self._last_frame(step.number)
                missing = last - camera.newest_frame
                camera.newest_frame = last
                self._add(camera, [step])
                camera.missing = missing  # only now, since `_add` sets it to 0

    def _last_frame(self, step: int) -> int:
        """The number of the last frame of a step."""
        return (step + 1) * self.frames_per_step - 1

    def camera(self, name: str, shape: tuple[int, ...]) -> Camera:
        """The camera with a name. If there is none, it is added, for frames of this shape, `(H, W, 3)`."""
        if name not in self.cameras:
            with naming(name):
                grid = self.processor.grid_of(self.sized_as, *shape[:2])
            ((_, height, width),) = self.model.model.merged_grid(grid)
            features = self.model.model.no_features(self.model.device)
            no_places = torch.empty(0, dtype=torch.long, device="cpu")
            tokens = Tokens(features, no_places, no_places, torch.empty(0, 0, device="cpu"))
            self.cameras[name] = Camera(
                size=(shape[0], shape[1]),
                grid=grid,
                cells=(height, width),
                tokens=tokens,
            )
        return self.cameras[name]

    def _add(self, camera: Camera, steps: Sequence[Step]) -> None:
        """Encodes steps, each filled up with its last frame, and remembers them."""
        frames = []
        for step in steps:
            missing = self.frames_per_step - len(step.frames)
            frames += step.frames + step.frames[-1:] * missing
        pixels, grid = self.processor.preprocess_frames(stack_frames(frames), camera.grid)
        (features,) = self.model.encode_videos(pixels, grid)
        camera.missing = 0
        self.remember(camera, features, [step.number for step in steps])

    @torch.no_grad()
    def remember(
        self,
        camera: Camera,
        features: Tensor,
        steps: Sequence[int],
    ) -> None:
        """
        Adds tokens to the memory, and forgets those that the policy does not keep.

        Args:
            features: `[t * h * w, token_width]`, the tokens of whole steps in time.
            steps: `[t]`, the numbers of these steps.
        """
        cells = len(features) // len(steps)
        scores = torch.empty(len(features), 0, device="cpu")
        if self.question is not None:
            scores = self.question.add(features[:, : self._width])
        step_of = torch.tensor(steps, device="cpu").repeat_interleave(cells)
        new = Tokens(features, step_of, torch.arange(cells, device="cpu").repeat(len(steps)), scores)
        with self._changing:
            camera.tokens = camera.tokens.join(new)
            camera.newest_step = int(steps[-1])
            if self.num_tokens > self.memory_tokens:
                self._forget(self.memory_tokens)

    def _forget(self, count: int) -> None:
        """Keeps `count` of the tokens of all cameras, as the policy chooses."""
        cameras = [camera for camera in self.cameras.values() if len(camera.tokens)]
        policy = find_method(self.policy)  # refuses what is neither a function nor the name of a method
        kept = policy(self._competing(cameras), count)
        (kept,) = check_kept([(kept, count, self.num_tokens)], policy)  # as for a batch with one row
        first = 0
        for camera in cameras:
            end = first + len(camera.tokens)
            is_of_camera = (kept >= first) & (kept < end)
            camera.tokens = camera.tokens.take(kept[is_of_camera] - first)
            first = end
            steps = set(camera.tokens.steps.tolist())
            # A step ends when the next one begins, so both times of a remembered step stay. The times of steps that are
            # not encoded yet stay too.
            camera.begins = {
                step: time
                for step, time in camera.begins.items()
                if step in steps or step - 1 in steps or step > camera.newest_step
            }

    def _competing(self, cameras: Sequence[Camera]) -> Candidates:
        """The whole memory as candidates; each camera's tokens are a grid of one frame with one row."""
        visual = []
        positions = []
        scores = []
        grids = []
        for camera in cameras:
            tokens = camera.tokens
            width = camera.cells[1]
            visual.append(tokens.features[:, : self._width])
            rows = tokens.cells // width
            columns = tokens.cells % width
            positions.append(torch.stack([tokens.steps, rows, columns]))
            scores.append(tokens.scores)
            grids.append((1, 1, len(tokens)))

        def score(_: Tensor) -> Tensor:
            if self.question is None:
                raise ValueError("The policy asks for relevance, and there is no standing question.")
            return self.question.log_relevance(torch.cat(scores))

        no_text = visual[0][:0]
        return Candidates(visual, no_text, torch.cat(positions, dim=1), grids, score)

    def ask(self, question: str, **options) -> Answer:
        """
        Answers a question about what is in memory; the options are those of `answer_questions`.

        The evidence has the seconds of the stream and the names of the cameras. The keep maps have a row for each step
        with tokens in memory, and an empty row for each gap between such steps.
        """
        videos = self.videos()
        (answer,) = answer_questions(self.model, self.processor, videos, [question], **options)
        return answer

    def videos(self) -> dict[str, Remembered]:
        """What is in memory now, by camera; `ValueError` if nothing is."""
        with self._changing:
            videos = {name: self._video(name, camera) for name, camera in self.cameras.items() if len(camera.tokens)}
        if not videos:
            raise ValueError("The stream has no step in time yet: append frames, or finish it, before asking.")
        return videos

    def _video(self, name: str, camera: Camera) -> Remembered:
        """What is left of a camera, as a video whose frames have their true times."""
        steps = camera.tokens.steps.tolist()
        step_numbers = mark_gaps(steps)
        missing = 0
        if steps[-1] == camera.newest_step:
            missing = camera.missing
        frames: list[int] = []
        for step in step_numbers:
            first = step * self.frames_per_step
            frames += range(first, first + self.frames_per_step)
        present = frames[: len(frames) - missing]
        end_frame = self._last_frame(camera.newest_step) + 1 - camera.missing
        end_seconds = camera.begins.get(camera.newest_step + 1, end_frame / self.fps)
        ticks_per_frame = _TICKS / self.fps
        ticks = [round(frame * ticks_per_frame) for frame in present]
        # The indices count from the beginning of the stream, the total from the first frame that is left, as in the
        # metadata of a video that is looked at from a later second on.
        begin = ticks[0]
        metadata = VideoMetadata(
            total_num_frames=round(end_seconds * _TICKS) - begin,
            fps=_TICKS,
            frames_indices=ticks,
            height=camera.size[0],
            width=camera.size[1],
        )
        grid = camera.grid.clone()
        grid[0, 0] = len(step_numbers)
        cells = math.prod(camera.cells)
        step_of_token = torch.searchsorted(torch.tensor(step_numbers, device="cpu"), camera.tokens.steps)
        return Remembered(
            video=name,
            features=camera.tokens.features,
            video_grid_thw=grid,
            seconds_per_step=self.seconds_per_step,
            about=AboutVideo(metadata, begin / _TICKS),
            seconds=0.0,
            frames_per_step=self.frames_per_step,
            cells=cells,
            step_numbers=step_numbers,
            missing=missing,
            begins=dict(camera.begins),
            places=step_of_token * cells + camera.tokens.cells,
        )


def check_frames(frames: Sequence[np.ndarray], name: str) -> None:
    """Raises `ValueError` for frames of a camera that are not pictures."""
    if not isinstance(frames, (Sequence, np.ndarray, Tensor)):
        raise ValueError(f"Got frames of type {type(frames).__name__}; expected a list of arrays.")
    for frame in frames:
        pixels = np.asarray(frame)
        is_picture = pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size > 0
        if not is_picture or pixels.dtype != np.uint8:
            raise ValueError(
                f"Got {pixels.dtype} of shape {pixels.shape} of {name!r}; expected (height, width, 3) of uint8."
            )


def seconds_of(
    times: Sequence[float] | np.ndarray,
    count: int,
    last_time: float,
    name: str,
) -> list[float]:
    """
    The times of `count` frames of a camera, as a list.

    Raises:
        ValueError: there is not one number for each frame; one is negative, infinite or NaN; or they do not ascend from
            `last_time` on, the time of the camera's previous frame.
    """
    try:
        seconds = np.array(times, dtype=np.float64, ndmin=1)
        waits = np.diff(seconds, prepend=last_time)
    except (TypeError, ValueError):
        waits = np.empty(0)
    ascends = waits.shape == (count,) and (waits > 0).all()
    if not ascends or seconds[0] < 0 or seconds[-1] == math.inf:
        raise ValueError(
            f"times={show(times)} for {count} frames of {name!r}; expected a number for each frame: the seconds from "
            "the beginning of the stream, from 0 on, ascending, and later than those of earlier frames."
        )
    return seconds.tolist()
