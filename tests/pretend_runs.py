"""
Everything the package does, on the pretend device and on the CPU, with equal results.

`test_pretend.py` runs this file in a process of its own, because the device stays registered. By hand:
`pytest tests/pretend_runs.py`.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import pretend_device
from clips import LIBRARY, render_world, write_mp4, write_records
from model_checks import TRANSFORMERS
from qtsplus import Stream, VideoSession, ask, encode, summarise
from qtsplus.evaluation.calibration import calibrate
from qtsplus.evaluation.evaluate import evaluate_records
from qtsplus.evaluation.labelled import labelled_questions
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.model.methods_qtsplus import METHODS
from qtsplus.training.attention import AttentionChoice, answer_attention, relevance_divergences
from qtsplus.training.budget import RunningMeans
from qtsplus.training.lora import add_lora, lora_config, merge_lora
from scenes import Scene
from tiny import TEXT, VISION, batch, load_bundled, prompt, stock_twin, tiny_model, without
from tiny_backbones import BACKBONES
from training_examples import collate, examples, make_trainer

pretend_device.start()

QUESTION = "What is in the red circle?"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "do_sample": False,
}
METHOD_NAMES = list(METHODS)
METHOD_NAMES.remove("all")


def seeded(function, inputs: dict, options: dict):
    """What a function of a model returns; random methods and gates draw the same each time."""
    torch.manual_seed(0)
    return function(**inputs, **options)


@dataclass(frozen=True)
class Pair:
    """One model twice: on the CPU and on the device."""

    host: nn.Module
    device: nn.Module

    @classmethod
    def of(cls, host: nn.Module) -> "Pair":
        return cls(host, pretend_device.to_device(copy.deepcopy(host)))

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.host, self.device

    def generate(self, inputs: dict, **options) -> None:
        """Both write the same, from inputs on their own device."""
        on_device = pretend_device.inputs_to_device(inputs)
        expected = seeded(self.host.generate, inputs, options)
        written = seeded(self.device.generate, on_device, options)
        assert written.device.type == pretend_device.NAME
        assert torch.equal(written.cpu(), expected)

    def forward(self, inputs: dict, **options):
        """
        Logits, kept tokens and the loss are equal; the outputs, for what else is to be compared. The device is also the
        default, as where a script says `torch.set_default_device("cuda")`.
        """
        on_device = pretend_device.inputs_to_device(inputs)
        expected = seeded(self.host, inputs, options)
        with torch.device(pretend_device.NAME):
            output = seeded(self.device, on_device, options)
        assert_close(output.logits, expected.logits)
        rows = zip(output.qtsplus.kept_indices, expected.qtsplus.kept_indices, strict=True)
        for kept, expected_kept in rows:
            assert torch.equal(kept, expected_kept)
        return output, expected

    def train(self, inputs: dict) -> None:
        """The loss and every gradient are equal, with labels on the host, which stock takes too."""
        self.host.zero_grad()
        self.device.zero_grad()
        output, expected = self.forward(without(inputs, "labels"), labels=inputs["labels"])
        self.compare_gradients(output.loss, expected.loss)

    def compare_gradients(self, loss: Tensor, expected: Tensor) -> None:
        """Two losses are equal, and so is every gradient of theirs."""
        loss.backward()
        expected.backward()
        assert_close(loss, expected)
        parameters = zip(self.device.parameters(), self.host.parameters(), strict=True)
        for parameter, on_host in parameters:
            gradient = gradient_or_zero(parameter)
            expected_gradient = gradient_or_zero(on_host)
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-3, rtol=1e-3)


def gradient_or_zero(parameter: torch.nn.Parameter) -> Tensor:
    """On the CPU; a parameter without a gradient on one device may have a zero gradient on the other."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return parameter.grad.cpu()


def assert_close(on_device: Tensor, expected: Tensor) -> None:
    """Each number in float32; in 16 bits as a whole, since rounding changes single numbers by much."""
    on_device = on_device.detach().cpu()
    if expected.dtype.itemsize == 2:
        assert (on_device - expected).float().norm() <= 0.05 * expected.float().norm()
    else:
        torch.testing.assert_close(on_device, expected, **CLOSE)


@pytest.fixture(scope="module")
def inputs():
    """Two rows: two videos, and a video with a longer question."""
    two_videos = prompt(videos=[(4, 4, 6), (2, 4, 4)])
    return batch(two_videos, prompt(videos=[(6, 6, 4)], question=9, seed=1))


@pytest.fixture(scope="module")
def pair():
    return Pair.of(tiny_model())


@pytest.fixture(scope="module")
def bundled():
    """The trained model, with its processor."""
    model, processor = load_bundled()
    return Pair.of(model), processor


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """A folder with two videos."""
    folder = tmp_path_factory.mktemp("videos")
    for name in list(LIBRARY)[:2]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mp4(path, render_world(LIBRARY[name]), 2)
    return folder


@pytest.fixture(scope="module")
def video(videos):
    return str(min(videos.rglob("*.mp4")))


def test_a_tensor_that_was_left_on_the_host_is_noticed(inputs):
    pair = Pair.of(tiny_model())
    layer = pair.device.model.qtsplus.scoring_layers[0]
    path, weight = next(layer.named_parameters())
    owner, _, name = path.rpartition(".")
    left_on_host = torch.nn.Parameter(weight.detach().cpu())
    setattr(layer.get_submodule(owner), name, left_on_host)
    with pytest.raises(RuntimeError, match="same device"):
        pair.forward(inputs)


def test_a_wait_is_counted_with_its_line():
    values = torch.ones(3, device=pretend_device.NAME)
    pretend_device.counts.reset()
    assert (values > 0).sum().item() == 3
    ((line, count),) = pretend_device.counts.waits.items()
    assert "pretend_runs.py" in line
    assert count == 1


@pytest.mark.parametrize(
    "backbone",
    BACKBONES,
    ids=lambda backbone: backbone.name,
)
def test_backbone(backbone, video):
    """The model's own budget, methods that ask the backbone for what it knows, waits, a training step, and 16 bits."""
    processor = backbone.processor()
    pair = Pair.of(backbone.build(processor))
    about_video = [{"type": "video", "video": video}, {"type": "text", "text": QUESTION}]
    rows = [[{"role": "user", "content": content}] for content in (about_video, about_video[1:])]
    encoded = processor.apply_chat_template(
        rows,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        padding=True,
    )
    inputs = dict(encoded)
    pair.generate(inputs, **GREEDY)
    for name in ("temporal_redundancy", "lm_attention"):
        pair.generate(inputs, **GREEDY, selection=name, retention=0.3)
    assert waits_of(pair.device, inputs) == waits_of(pair.device, twice(inputs))
    asked_later = dict(inputs)
    pixels = asked_later.pop("pixel_values_videos")
    features = pair.device.encode_videos(pixels, inputs["video_grid_thw"])
    for name in ("qtsplus", "lm_attention"):
        waits = waits_of(pair.device, asked_later, video_features=features, selection=name)
        if Version("5.24") > TRANSFORMERS:
            continue  # Qwen2.5-VL of 5.17 itself waits once for each row that `lm_attention` reads
        # A dynamic RoPE, as in InternVL2.5's own configuration, adds two waits for each of the two passes.
        assert waits.total() <= (9 if backbone.name == "qwen3_5" else 8), waits
        assert waits == waits_of(pair.device, twice(asked_later), video_features=features * 2, selection=name)
    pair.host.train()
    pair.device.train()
    pair.train({**inputs, "labels": inputs["input_ids"]})
    for dtype in (torch.bfloat16, torch.float16):
        half = Pair.of(pair.host.eval().to(dtype))
        with torch.no_grad():
            half.forward(inputs, selection="uniform", retention=0.3)  # which rounding cannot change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(inputs, dtype):
    half = Pair.of(tiny_model().to(dtype))
    half.generate(inputs, **GREEDY)


BUDGETS = {
    "own": {},
    "share": {"retention": 0.3},
    "count": {"max_visual_tokens": 5},
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_method(pair, inputs, method, budget):
    with torch.no_grad():
        pair.forward(inputs, selection=method, **BUDGETS[budget])


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("method", ["diversity", "coverage"])
def test_features_of_16_bits_are_multiplied_as_they_are_and_choose_the_same(method, drift, monkeypatch):
    monkeypatch.setattr("qtsplus.model.methods_qtsplus.FAST_16_BITS", {pretend_device.NAME})
    scene = Scene.changing(drift, seed=0)
    choices = []
    for device in ("cpu", pretend_device.NAME):
        scene.visual = [features.bfloat16().to(device) for features in scene.visual]
        kept = METHODS[method](scene.candidates(), 500)
        choices.append(kept.cpu())
    assert torch.equal(*choices)


def waits_of(model, inputs, **options):
    on_device = pretend_device.inputs_to_device(inputs)
    pretend_device.counts.reset()
    with torch.no_grad():
        model(**on_device, **options)
    return pretend_device.counts.waits


def twice(inputs):
    """Every row and every video two times."""
    return {name: torch.cat([value, value]) for name, value in inputs.items()}


def test_waits_do_not_grow_with_the_rows_where_losses_are_predicted(inputs):
    model = pretend_device.to_device(tiny_model(budget="loss"))
    assert waits_of(model, inputs) == waits_of(model, twice(inputs))


def test_features_are_not_copied_to_the_host(pair):
    inputs = batch(prompt(videos=[(16, 8, 8)]))
    waits_of(pair.device, inputs)
    features = pair.host.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    assert 0 < pretend_device.counts.largest_copy < features[0].numel() / 10


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_waits_do_not_grow_with_the_kept_tokens(pair, inputs, method):
    few = waits_of(pair.device, inputs, selection=method, retention=0.1)
    assert few == waits_of(pair.device, inputs, selection=method, retention=0.9)


def test_waits_grow_with_neither_steps_nor_layers_and_are_hardly_more_than_stocks(pair, monkeypatch):
    waits = []
    for steps in (4, 16):
        inputs = batch(prompt(videos=[(steps, 8, 8)]))
        waits.append(waits_of(pair.device, inputs, retention=0.3))
    stock = stock_twin(tiny_model(selection="all", reencode_layers=0))
    waits_of_stock = waits_of(pretend_device.to_device(stock), inputs)
    assert waits[0].total() <= waits_of_stock.total() + 15
    monkeypatch.setitem(TEXT, "num_hidden_layers", 4)
    monkeypatch.setitem(VISION, "depth", 8)
    deep = pretend_device.to_device(tiny_model())
    waits.append(waits_of(deep, inputs, retention=0.3))
    assert waits[0] == waits[1] == waits[2]
    assert torch.float64 not in pretend_device.counts.dtypes


@pytest.mark.parametrize("videos", [[(16, 8, 8)], [(4, 8, 8)] * 4])
def test_encoding_waits_four_times_in_chunks_of_any_number_and_for_several_videos(pair, videos, monkeypatch):
    inputs = pretend_device.inputs_to_device(batch(prompt(videos=videos)))
    for steps in (16, 2):
        monkeypatch.setattr("qtsplus.model.encoding_qtsplus.PATCHES_PER_CHUNK", 64 * steps)
        pretend_device.counts.reset()
        with torch.no_grad():
            pair.device.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        assert pretend_device.counts.total_waits <= 4


WAYS = {
    "sampling": {"do_sample": True, "temperature": 0.9, "max_new_tokens": 4},
    "beams": {"num_beams": 3, "max_new_tokens": 4},
    "several": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4},
    "static cache": {**GREEDY, "cache_implementation": "static"},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate(pair, way):
    rows = [prompt(videos=[(4, 4, 6)])] * 2
    pair.generate(batch(*rows), **WAYS[way])


def test_a_decoding_step_with_a_static_cache_does_not_wait(pair, inputs):
    steps = []

    def begin(module, args):
        pretend_device.counts.reset()

    def end(module, args, output):
        steps.append(pretend_device.counts.total_waits)

    hooks = [pair.device.register_forward_pre_hook(begin), pair.device.register_forward_hook(end)]
    pair.device.generate(**pretend_device.inputs_to_device(inputs), **WAYS["static cache"])
    for hook in hooks:
        hook.remove()
    assert steps[1:] == [0, 0, 0]


def test_assisted_generation(pair):
    if Version("5.24") > TRANSFORMERS:
        pytest.skip("a stock assistant does not take the features of images and videos")
    inputs = batch(prompt(videos=[(4, 4, 6)]))
    assistants = Pair.of(stock_twin(tiny_model(seed=1)))
    expected = pair.host.generate(
        **inputs,
        **GREEDY,
        assistant_model=assistants.host,
    )
    written = pair.device.generate(
        **pretend_device.inputs_to_device(inputs),
        **GREEDY,
        assistant_model=assistants.device,
    )
    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize("on_host", [["attention_mask"], ["pixel_values_videos", "video_grid_thw"]])
def test_pixels_grids_and_masks_may_stay_on_the_host(pair, inputs, on_host):
    call = pretend_device.inputs_to_device(inputs)
    call |= {name: inputs[name] for name in on_host}
    written = pair.device.generate(**call, **GREEDY)
    expected = pair.host.generate(**inputs, **GREEDY)
    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize("features_on", ["cpu", pretend_device.NAME])
def test_features_in_place_of_pixels(pair, inputs, features_on):
    rest = dict(inputs)
    pixels = rest.pop("pixel_values_videos")
    pixels_on_device = pixels.to(pretend_device.NAME)
    grid = rest["video_grid_thw"]
    expected = pair.host.encode_videos(pixels, grid)
    features = pair.device.encode_videos(pixels_on_device, grid, device=features_on)
    for mine, other in zip(features, expected, strict=True):
        assert mine.device.type == features_on
        assert_close(mine, other)
    written = pair.device.generate(
        **pretend_device.inputs_to_device(rest),
        video_features=features,
        **GREEDY,
    )
    expected_ids = pair.host.generate(
        **rest,
        video_features=expected,
        **GREEDY,
    )
    assert torch.equal(written.cpu(), expected_ids)


@pytest.mark.parametrize("gate", ["gumbel", "soft", "detached"])
def test_gate(gate):
    model = tiny_model(
        gate=gate,
        rho_min=0.1,
        rho_max=0.9,
        lambda_t=0.1,
        lambda_m=0.1,
        lambda_s=0.1,
    )
    pair = Pair.of(model.train())
    rows = collate(examples(4))
    pair.train(rows)
    assert waits_of(pair.device, rows) == waits_of(pair.device, twice(rows))


def test_gradient_checkpointing():
    pair = Pair.of(tiny_model(gate="soft").train())
    for model in pair.models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    pair.train(collate(examples(4)))


def test_the_terms_of_the_objective_need_neither_float64_nor_a_wait_for_each_source(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("qtsplus.training.budget.widest_float", lambda device: torch.float32)
    trainer = make_trainer(tmp_path)
    for training, means in trainer.running.items():
        trainer.running[training] = RunningMeans(means.names, torch.device(pretend_device.NAME))
    rows = pretend_device.inputs_to_device(collate(examples(4)))
    pretend_device.counts.reset()
    _, output = trainer.compute_loss(pair.device, rows, return_outputs=True)
    waits = "\n".join(pretend_device.counts.waits.elements())
    assert waits.count("trainer.py") == 2
    trainer.budget.loss(output.qtsplus, torch.ones(()), training=True, unlimited=True)
    assert torch.float64 not in pretend_device.counts.dtypes


def test_adapters_and_merged_weights(inputs):
    adapted = add_lora(tiny_model(gate="soft").train(), lora_config(4))
    pair = Pair.of(adapted)
    pair.train(collate(examples(4)))
    merged = Pair(
        merge_lora(pair.host).eval(),
        merge_lora(pair.device).eval(),
    )
    merged.generate(inputs, **GREEDY)


def test_attention_distillation():
    pair = Pair.of(tiny_model())
    rows = collate(examples(4))
    del rows["source_ids"]

    def teach(labels, **inputs):
        answer_attention(pair.device, inputs, labels, AttentionChoice())

    assert waits_of(teach, rows) == waits_of(teach, twice(rows))
    rows_of_each = [rows, pretend_device.inputs_to_device(rows)]
    losses = []
    for model, inputs in zip(pair.models, rows_of_each, strict=True):
        targets = answer_attention(model, inputs, inputs.pop("labels"), AttentionChoice())
        relevance = model(**inputs).qtsplus.log_relevance
        losses.append(relevance_divergences(relevance, targets).mean())
    expected, loss = losses
    pair.compare_gradients(loss, expected)


def test_asking_about_encoded_videos(bundled, video):
    pair, processor = bundled
    answers = []
    for model in pair.models:
        session = VideoSession(model, processor)
        session.add(video, "front")
        session.add(video, "back", fps=1)
        encoded = encode(model, processor, video)
        questions = [QUESTION, "Which colours does the cross take?"]
        of_model = [ask(model, processor, encoded, QUESTION, max_new_tokens=4)]
        of_model += session.ask_many(questions, max_new_tokens=4)
        of_model.append(session.chat(QUESTION, max_new_tokens=4))
        of_model.append(session.chat("And the ball?", max_new_tokens=4))
        answers.append(of_model)
    for expected, mine in zip(*answers, strict=True):
        assert mine.answer == expected.answer
        assert mine.kept_tokens == expected.kept_tokens
        for name, keep_map in expected.keep_maps.items():
            assert torch.equal(mine.keep_maps[name].cpu(), keep_map)
        for place, expected_place in zip(mine.evidence, expected.evidence, strict=True):
            assert place.start == expected_place.start


def test_library(bundled, videos, tmp_path):
    pair, processor = bundled
    results = []
    for model in pair.models:
        folder = tmp_path / model.device.type
        index(videos, folder, model, processor, say=lambda line: None)
        library = Library(folder, model, processor)
        places = [(moment.name, moment.start) for moment in library.find(QUESTION, top=2)]
        results.append((places, library.ask(QUESTION).answer))
    assert results[0] == results[1]


def test_stream(bundled):
    pair, processor = bundled
    frames = render_world(next(iter(LIBRARY.values())))
    answers = []
    for model in pair.models:
        stream = Stream(model, processor, fps=2, memory_tokens=100, question=QUESTION)
        for frame in frames:
            stream.append([frame])
        answers.append(stream.ask(QUESTION, max_new_tokens=4))
    expected, answer = answers
    assert answer.answer == expected.answer
    assert torch.equal(answer.keep_map.cpu(), expected.keep_map)


def test_summary(bundled, video):
    pair, processor = bundled
    texts = []
    for model in pair.models:
        session = VideoSession(model, processor)
        session.add(video, "front")
        texts.append(summarise(session, QUESTION, chapter_seconds=2, max_new_tokens=4).text)
    assert texts[0] == texts[1]


def test_calibration_and_evaluation(bundled, tmp_path):
    pair, processor = bundled
    file = write_records(tmp_path, 2, seconds=2, objects=6)
    by_video = {}
    for question in labelled_questions(file):
        record = question.record
        if record.kind not in ("caption", "moment", "summary"):
            by_video[record.video] = question
    questions = list(by_video.values())
    records = [question.record for question in questions]
    written = []
    calibrations = []
    for model in pair.models:
        outcomes = evaluate_records(model, processor, records)
        written.append([outcome.said for outcome in outcomes])
        calibrations.append(calibrate(model, processor, questions))
    assert written[0] == written[1]
    expected, calibration = calibrations
    assert calibration == expected
