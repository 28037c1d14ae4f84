"""What a request and a start of vLLM may ask for, without an engine."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import numpy as np
from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.multimodal.parse import VideoProcessorItems
from vllm.utils.argparse_utils import FlexibleArgumentParser

from qtsplus import QTSplusConfig
from qtsplus.model.methods_qtsplus import METHODS, add_method
from qtsplus.vllm.attention import check_attention
from qtsplus.vllm.models import check_engine
from qtsplus.vllm.processing import QTSplusMultiModalProcessor, check_settings, count_kept, settings_of_request


def start(stages=1, engine=0, **graphs):
    """The parts of a start that the plugin looks at."""
    parallel = ParallelConfig(pipeline_parallel_size=stages)
    parallel.data_parallel_index = engine
    vllm_config = SimpleNamespace(
        compilation_config=CompilationConfig(**graphs),
        parallel_config=parallel,
    )
    check_engine(vllm_config)


REFUSED = {
    "data_parallel_size above 1": {"engine": 1},
    "pipeline_parallel_size above 1": {"stages": 2},
    "cudagraph_mode FULL": {"cudagraph_mode": CUDAGraphMode.FULL},
    "cudagraph_mm_encoder": {"cudagraph_mm_encoder": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_start_that_would_be_wrong_in_silence_is_refused(reason):
    with pytest.raises(ValueError, match=f"^{reason}.*: expected .*"):
        start(**REFUSED[reason])


def test_any_other_start_is_taken():
    start(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)


def test_vllm_refuses_a_bare_word_behind_that_of_serve(capsys):
    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--trust-request-mm-kwargs", "folder", "--enforce-eager", "false"])
    assert "unrecognized arguments: false" in capsys.readouterr().err


def test_without_a_way_to_ask_for_the_models_budget_one_has_to_be_stated():
    with pytest.raises(ValueError, match="give retention or max_visual_tokens"):
        count_kept(QTSplusConfig(), 100, {"selection": "qtsplus"})
    assert count_kept(QTSplusConfig(), 100, {"selection": "uniform", "retention": 0.05}) == 5


def test_a_function_is_a_method_where_the_operator_names_it():
    name = "engine_runs:last_tokens"
    with pytest.raises(ValueError, match="expected one of"):  # a client's code is never imported
        check_settings(settings_of_request({}, {"selection": name, "retention": 0.5}))
    add_method(name)
    check_settings(settings_of_request({"selection": name}, {"retention": 0.5}))
    METHODS.pop(name)


class Stock:
    """In the place of vLLM's processor."""

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        return {}


class Processor(QTSplusMultiModalProcessor, Stock):
    def __init__(self):
        config = SimpleNamespace(vision_config=SimpleNamespace(temporal_patch_size=2))
        self.info = SimpleNamespace(get_hf_config=lambda: config)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"total_num_frames": 900}, ["vLLM or its caller took 4 of the 900 frames of a video"]),
        ({"total_num_frames": 4}, []),
        ({"total_num_frames": 900, "mark": "read as qtsplus ask reads"}, []),
    ],
)
def test_it_is_said_where_vllm_takes_frames_by_itself(about, said, recwarn):
    known = {"fps": 2.0, "frames_indices": [0, 1, 2, 3]} | about
    videos = VideoProcessorItems([(np.zeros((4, 28, 28, 3), np.uint8), known)])
    Processor()._apply_hf_processor_main({"video": videos}, {})
    assert [str(warning.message).partition(", and")[0] for warning in recwarn] == said


def test_attention_is_refused_where_an_engine_cannot_read_it():
    layers = ["linear_attention", "full_attention"]
    text = SimpleNamespace(num_hidden_layers=2, layer_types=layers, num_attention_heads=4)
    config = SimpleNamespace(text_config=text, qtsplus_config=QTSplusConfig())
    with pytest.raises(ValueError, match="does not work in vLLM with .*recurrent layers.* Expected another selection"):
        check_attention(config, False, 1)
