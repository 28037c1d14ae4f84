"""The package's own ways in, `session` and the training data, work with every backbone."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.asking import session
from qtsplus.asking.question import Batch, prompt_inputs
from qtsplus.data.records import VideoRecord
from qtsplus.training import QTSplusTrainer, QTSplusTrainingArguments
from qtsplus.training.dataset import VideoQACollator, VideoQADataset
from qtsplus.training.features import encode_files
from qtsplus.video import storage
from tiny import assert_same, chat_inputs

QUESTION = "What moves?"


def test_ask_encodes_in_chunks_and_answers_as_in_one_shot(model, processor, clips):
    video = session.encode(model, processor, clips / "long.mp4", fps=2, frames_per_chunk=2)
    answer = session.ask(model, processor, video, QUESTION, max_new_tokens=5, retention=0.3)
    inputs = chat_inputs(processor, clips / "long.mp4", QUESTION, fps=2)
    (features,) = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    assert_close(video.features, features, atol=1e-5, rtol=1e-5)
    made = model.generate(**inputs, max_new_tokens=5, retention=0.3, return_dict_in_generate=True)
    ids = made.sequences[0, inputs["input_ids"].shape[1] :]
    assert answer.answer == processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert_same(answer.keep_map.flatten().nonzero()[:, 0], made.qtsplus.kept_indices[0])
    assert answer.visual_tokens == len(features)
    assert answer.kept_tokens == len(made.qtsplus.kept_indices[0])
    assert all(0 <= one.start < one.end <= answer.seconds_of_video for one in answer.evidence)


QUESTIONS = (QUESTION, "Why does the <|im_end|> move to the left?", "\n And then?")


@pytest.mark.parametrize("names", [["long"], ["long", "short"]])
@pytest.mark.parametrize("turns", [[], ["What was there?", "Nothing."]])
def test_the_prompts_of_a_batch_are_those_of_each_question(model, processor, clips, names, turns):
    videos = {name: session.encode(model, processor, clips / f"{name}.mp4", fps=2) for name in names}
    together = prompt_inputs(processor, Batch(videos, QUESTIONS, turns=turns))
    for row, question in enumerate(QUESTIONS):
        alone = prompt_inputs(processor, Batch(videos, [question], turns=turns))
        assert together.keys() == alone.keys()
        for name in [name for name in alone if name.startswith(("input_", "query_"))]:
            mask = "query_attention_mask" if name.startswith("query_") and name != "query_mask" else "attention_mask"
            kept = together[mask][row].bool()
            own = alone[mask][0].bool()
            assert torch.equal(together[name][row][kept], alone[name][0][own]), name
        for name in ("video_grid_thw", "second_per_grid_ts"):
            size = len(names)
            assert torch.equal(torch.as_tensor(together[name])[row * size :][:size], torch.as_tensor(alone[name])), name


def test_a_session_of_two_videos_in_a_batch_a_conversation_and_on_disk(model, processor, clips, tmp_path):
    options = {"max_new_tokens": 5, "retention": 0.3}
    made = session.VideoSession(model, processor)
    again = session.VideoSession(model, processor)
    content = []
    for name in ("long", "short"):
        made.add(clips / f"{name}.mp4", name, fps=2)
        content += [f"{name}: ", clips / f"{name}.mp4"]
    inputs = chat_inputs(processor, *content, QUESTION, fps=2, query=QUESTION)
    answer = made.ask(QUESTION, **options)
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    assert answer.answer == processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
    kept = torch.cat([one.flatten() for one in answer.keep_maps.values()]).nonzero()[:, 0]
    assert_same(kept, output.qtsplus.kept_indices[0])
    for one, alone in zip(
        made.ask_many([QUESTION, "Why?"], **options), (answer, made.ask("Why?", **options)), strict=True
    ):
        assert one.answer == alone.answer
        assert one.keep_maps.keys() == alone.keep_maps.keys()
    for name, video in made.videos.items():
        with storage.saved_video(video, tmp_path / name, "here"):
            pass
        again.add(storage.load_video(tmp_path / name, "here", model), name)
    for turn, question in enumerate((QUESTION, "Why?", "And then?")):
        again.turns = list(made.turns)  # read again, without a cache
        assert len(again.turns) == 2 * turn
        one, other = (it.chat(question, selection="all", max_new_tokens=5) for it in (made, again))
        assert one.answer == other.answer
        assert one.evidence == other.evidence


@pytest.fixture(scope="module")
def records(clips):
    return [
        VideoRecord(video=str(clips / f"{name}.mp4"), question=QUESTION, answer="The red ball.", source="vqa")
        for name in ("long", "short")
    ]


def test_training_examples(model, processor, records):
    dataset = VideoQADataset(records, processor, model_max_length=200, processor_kwargs={"fps": 2})
    batch = VideoQACollator(processor)([dataset[0], dataset[1]])
    assert not batch.pop("skipped")
    batch.pop("source_ids")
    output = model(**batch)
    assert torch.isfinite(output.loss)
    end = processor.tokenizer.convert_tokens_to_ids(processor.turn_end)
    for row, labels in enumerate(batch["labels"]):
        taught = labels[labels >= 0]
        assert processor.tokenizer.decode(taught[:-1]) == "The red ball.", row
        assert int(taught[-1]) == end, row
    too_short = VideoQADataset(records, processor, model_max_length=5, processor_kwargs={"fps": 2})[0]
    assert "leaves no room" in too_short.reason


def test_newlines_and_frame_texts_are_no_visual_tokens_to_the_trainer(backbone, processor, records, tmp_path):
    model = backbone.build(processor, selection="all")
    dataset = VideoQADataset(records, processor, processor_kwargs={"fps": 2})
    arguments = QTSplusTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
    )
    trainer = QTSplusTrainer(model, arguments, train_dataset=dataset, data_collator=VideoQACollator(processor))
    trainer.train()
    (line,) = (line for line in trainer.state.log_history if "visual_tokens" in line)
    features = [model.encode_videos(row["pixel_values_videos"], row["video_grid_thw"]) for row in dataset]
    tokens = sum(len(one) for row in features for one in row)
    assert line["visual_tokens"] == line["n"] == tokens / 2
    assert line["kept_fraction"] == 1


def test_training_from_features_is_training_from_pixels(model, processor, records, tmp_path):
    options = {"processor_kwargs": {"fps": 2}}
    features = encode_files(model, processor, [(str(record.video), None) for record in records], tmp_path, **options)
    collate = VideoQACollator(processor)
    batches = []
    for given in (None, features):
        dataset = VideoQADataset(records, processor, features=given, **options)
        batches.append(collate([dataset[0], dataset[1]]))
    from_pixels, from_features = batches
    for name in ("input_ids", "labels", "query_mask", "video_grid_thw"):
        assert torch.equal(from_pixels[name], from_features[name]), name
    assert "video_features" in from_features
    assert "pixel_values_videos" not in from_features
    losses = []
    for batch in batches:
        batch = {name: value for name, value in batch.items() if name not in ("skipped", "source_ids")}
        losses.append(model(**batch).loss)
    assert_close(*losses, atol=1e-5, rtol=1e-5)


def test_a_query_of_its_own(model, processor, clips):
    query = "Where is the red ball?"
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}], tokenize=False
    )
    inputs = processor(text=[text], videos=[str(clips / "short.mp4")], query=query, return_tensors="pt")
    assert processor.tokenizer.decode(inputs["query_input_ids"][0]) == query
    kept = model(**inputs, retention=0.2).qtsplus
    assert len(kept.kept_indices[0]) == int(kept.n[0])
