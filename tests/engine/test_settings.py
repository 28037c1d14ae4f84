"""What a request and a start of vLLM may ask for, without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig
from vllm.multimodal.parse import MultiModalDataItems, VideoProcessorItems
from vllm.multimodal.processing import ProcessorInputs

from qtsplus import QTSplusConfig
from qtsplus.model.methods_qtsplus import METHODS, add_method
from qtsplus.vllm.models import TOGETHER, batches, check_engine
from qtsplus.vllm.processing import QTSplusMultiModalProcessor, check_settings, count_kept, settings_of_request
from qtsplus.vllm.server import mark_of


def start(stages=1, **graphs):
    """The parts of a start that the plugin looks at."""
    parallel = ParallelConfig(pipeline_parallel_size=stages)
    vllm_config = SimpleNamespace(compilation_config=CompilationConfig(**graphs), parallel_config=parallel)
    check_engine(vllm_config)


REFUSED = {
    "pipeline_parallel_size above 1": {"stages": 2},
    "cudagraph_mode FULL": {"cudagraph_mode": CUDAGraphMode.FULL},
    "cudagraph_mm_encoder": {"cudagraph_mm_encoder": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_start_that_would_be_wrong_in_silence_is_refused(reason):
    with pytest.raises(ValueError, match=f"^{reason}.*: expected .*"):
        start(**REFUSED[reason])


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])
def test_any_other_start_is_taken(mode):
    start(cudagraph_mode=mode)


def test_without_a_way_to_ask_for_the_models_budget_one_has_to_be_stated():
    with pytest.raises(ValueError, match="give retention or max_visual_tokens"):
        count_kept(QTSplusConfig(), 100, {"selection": "qtsplus"})
    assert count_kept(QTSplusConfig(), 100, {"selection": "qtsplus", "max_visual_tokens": 7}) == 7
    assert count_kept(QTSplusConfig(), 100, {"selection": "uniform", "retention": 0.05}) == 5


def test_a_function_is_a_method_where_the_operator_names_it():
    name = "engine_runs:last_tokens"
    with pytest.raises(ValueError, match="expected one of"):  # a client's code is never imported
        check_settings(settings_of_request({}, {"selection": name, "retention": 0.5}))
    add_method(name)
    check_settings(settings_of_request({"selection": name}, {"retention": 0.5}))
    METHODS.pop(name)
    with pytest.raises(ValueError, match="cannot be imported"):
        add_method("no_such_module:method")


def test_questions_about_a_video_are_chosen_for_side_by_side_and_not_too_many_at_once():
    def asked(key, video, length, **settings):
        settings = {"key": key, "hashes": [video], "selection": "qtsplus", **settings}
        return {"settings": settings, "prompt_ids": range(length)}

    half = TOGETHER // 2
    items = [asked("a", "2", half), asked("b", "1", 9), asked("c", "2", half), asked("d", "3", 9, reencode=False)]
    items += [asked("e", "2", 3 * half), asked("f", "1", half - 9), asked("g", "1", 9), asked("h", "1", 9)]
    together = ["".join(item["settings"]["key"] for item in batch) for batch in batches(items, {"g"})]
    assert together == ["d", "bfh", "ac", "e", "g"]


def test_a_video_goes_by_its_mark_and_its_frames_are_not_read():
    class Stock:
        def _get_mm_hashes(self, inputs):
            return inputs.mm_data_items["video"].get_all()

    class Processor(QTSplusMultiModalProcessor, Stock):
        def __init__(self):
            pass

    videos = VideoProcessorItems([("frames", {"fps": 2, "mark": "7"}), ("others", {"fps": 2})])
    inputs = ProcessorInputs([], MultiModalDataItems({"video": videos}))
    assert Processor()._get_mm_hashes(inputs) == ["7", ("others", {"fps": 2})]
    frames, about = np.zeros((2, 4, 4, 3), dtype=np.uint8), {"fps": 2.0, "frames_indices": [0, 1]}
    marks = {mark_of(frames, about), mark_of(frames + 1, about), mark_of(frames, {**about, "fps": 1.0})}
    assert len({*marks, mark_of(frames.reshape(2, 2, 8, 3), about)}) == 4
