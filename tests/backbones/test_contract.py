"""What every backbone has to hold: [`TestBackbone`] runs once for each of them."""

import math
from itertools import pairwise

import pytest
import torch

from qtsplus.model.methods_qtsplus import METHODS, Candidates
from qtsplus.model.prompt_qtsplus import CACHE, IMAGE, VIDEO
from tiny import chat_inputs, compress
from tiny_backbones import each_unlike

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
NEW = 5
CALL = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
STEPS = {"return_dict_in_generate": True, "output_logits": True}


def close(one, other, tolerance=1e-5):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def logits(model, inputs, **call):
    return model(**inputs, **call).logits


def with_features(model, inputs, **options):
    inputs = dict(inputs)
    pixels = inputs.pop("pixel_values_videos")
    return {**inputs, "video_features": model.encode_videos(pixels, inputs["video_grid_thw"], **options)}


def longer(mask, count, value):
    """A mask with further columns behind it."""
    return torch.nn.functional.pad(mask, (0, count), value=value)


class TestBackbone:
    """Make this green to add a backbone: one entry in `BACKBONES` of tiny_backbones.py."""

    @pytest.mark.parametrize("name", NAMES)
    def test_with_all_tokens_it_is_the_stock_model(self, backbone, all_tokens, stock, prepare, name):
        inputs = prepare(name)
        expected = backbone.stock_inputs(all_tokens, inputs)
        close(logits(all_tokens, inputs), logits(stock, expected))
        ours = all_tokens.generate(**inputs, **CALL)
        theirs = stock.generate(**expected, **CALL)
        width = inputs["input_ids"].shape[1]
        assert torch.equal(ours[:, width:], theirs[:, width:])
        assert torch.equal(ours[:, :width], inputs["input_ids"])

    @pytest.mark.parametrize("names", [NAMES[1:5], ("video", "text", "earlier turns")], ids=len)
    def test_with_all_tokens_a_padded_batch_is_the_stock_model(self, backbone, all_tokens, stock, prepare, names):
        inputs = prepare(*names)  # with videos of one length, for some stock models take no others
        expected = backbone.stock_inputs(all_tokens, inputs)
        real = inputs["attention_mask"].bool()
        close(logits(all_tokens, inputs)[real], logits(stock, expected)[real])

    def test_embeddings_beside_an_image_are_the_stock_model(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image")
        expected = backbone.stock_inputs(all_tokens, inputs)
        inputs_embeds = all_tokens.get_input_embeddings()(inputs["input_ids"])
        for call in (inputs, expected):
            call.update(input_ids=None, inputs_embeds=inputs_embeds)
            call.pop("mm_token_type_ids", None)
        stock.model.rope_deltas = None  # stock would take them from its prompt before
        close(logits(all_tokens, inputs), logits(stock, expected))

    @pytest.mark.parametrize("padding_side", ["left", "right"])
    @each_unlike
    def test_batch_is_single(self, model, prepare, padding_side):
        together = prepare(*NAMES, processor_kwargs={"padding_side": padding_side})
        with torch.no_grad():
            batch = model(**together)
        for row, name in enumerate(NAMES):
            with torch.no_grad():
                alone = model(**prepare(name))
            real = batch.qtsplus.columns[row] >= 0
            # A recurrent state gathers rounding errors over the whole row: 2.2e-4 here, where the logits reach 8. With
            # the state alone in float64 the two differ by 1.5e-5, with all in float64 by 1.4e-13.
            tolerance = 5e-4 if model.config.model_type == "qwen3_5_qtsplus" else 1e-4
            close(batch.logits[row][real], alone.logits[0], tolerance)
            if alone.qtsplus is not None:
                assert torch.equal(batch.qtsplus.kept_indices[row], alone.qtsplus.kept_indices[0])

    @each_unlike
    def test_generate_batch_is_single(self, model, prepare):
        together = model.generate(**prepare(*NAMES), **CALL)
        for row, name in enumerate(NAMES):
            alone = model.generate(**prepare(name), **CALL)
            assert torch.equal(together[row, -NEW:], alone[0, -NEW:])

    def test_without_a_mask_gaps_are_no_seams(self, model, prepare):
        """Attention without mask and cache takes jumps in 1-D positions for packed sequences."""
        inputs = prepare("video")
        expected = logits(model, inputs, retention=0.3)
        inputs.pop("attention_mask")
        torch.testing.assert_close(logits(model, inputs, retention=0.3, use_cache=False), expected)

    @each_unlike
    def test_packed_rows_are_refused(self, model, prepare):
        """Stock attends within each of the sequences; here one question would select for all."""
        inputs = prepare("video")
        length = inputs["input_ids"].shape[1]
        positions = torch.cat([torch.arange(length - 9), torch.arange(9)])[None]
        with pytest.raises(ValueError, match="several sequences packed into one row"):
            model(**inputs, position_ids=positions)

    @pytest.mark.parametrize("selection", ["temporal_redundancy", "diversity"])
    @each_unlike
    def test_query_free_methods_choose_by_features_in_their_grid(self, model, prepare, selection):
        inputs = prepare("two videos")
        width = model.config.text_config.hidden_size
        visual = [features[:, :width] for features in with_features(model, inputs)["video_features"]]
        candidates = Candidates(
            visual=visual,
            query=visual[0][:0],
            positions=torch.zeros(3, sum(map(len, visual))),
            grids=model.model.merged_grid(inputs["video_grid_thw"]),
            score=lambda _: pytest.fail("no question"),
        )
        (kept,) = model(**inputs, selection=selection, retention=0.3).qtsplus.kept_indices
        assert torch.equal(kept, METHODS[selection](candidates, len(kept)))

    def test_outputs_name_what_was_encoded_as_stock_does(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image and video")
        with torch.no_grad():
            ours = all_tokens(**inputs)
            theirs = stock(**backbone.stock_inputs(all_tokens, inputs))
        stock_fields = {"image_outputs", "video_outputs"} & set(type(theirs).__dataclass_fields__)
        assert stock_fields <= set(type(ours).__dataclass_fields__)
        types = all_tokens.model.token_types(inputs["input_ids"])
        for modality, output in ((IMAGE, ours.image_outputs), (VIDEO, ours.video_outputs)):
            tokens = [] if output is None else output.pooler_output[0]
            assert len(tokens) == int((types == modality).sum())

    def test_outputs_of_what_is_not_there_are_none(self, model, prepare):
        with torch.no_grad():
            text = model(**prepare("text"))
            video = model(**prepare("video"))
        assert text.image_outputs is text.video_outputs is None
        assert video.image_outputs is None
        assert len(video.video_outputs.pooler_output) == 1

    def test_stock_arguments_without_an_effect_are_named(self, model, prepare):
        inputs = prepare("video")
        for name in model.model.fixed_arguments:
            for call in (model, model.generate):
                with pytest.raises(ValueError, match=f"{name} has no effect on .*Model: leave it out"):
                    call(**inputs, **{name: 1})
            logits(model, inputs, **{name: None})
            logits(model, inputs, **{name: getattr(model.config, name, None)})

    def test_a_prompt_is_not_shared_out_to_ranks(self, model):
        assert not model._supports_context_parallel
        assert not model.model._supports_context_parallel

    def test_trainers_average_its_loss_themselves(self, backbone):
        """Else they add up the penalties of the micro-batches, as they do with InternVL's sum over all tokens."""
        assert backbone.model.accepts_loss_kwargs is False

    def test_forward_and_generate_see_the_same(self, model, prepare):
        inputs = prepare(*NAMES)
        steps = model.generate(**inputs, **CALL, **STEPS)
        with torch.no_grad():
            output = model(**inputs)
        close(steps.logits[0], output.logits[:, -1], 1e-4)
        assert all(map(torch.equal, steps.qtsplus.kept_indices, output.qtsplus.kept_indices))

    def test_decoding_goes_on_where_the_full_prompt_ends(self, model, prepare):
        """With a cache as without one, where every step lays the whole text out again."""
        inputs = prepare("video", "two videos")
        cached = model.generate(**inputs, **CALL, **STEPS)
        again = {
            **inputs,
            "input_ids": cached.sequences[:, :-1],
            "attention_mask": longer(inputs["attention_mask"], NEW - 1, 1),
            "query_mask": longer(inputs["query_mask"], NEW - 1, 0),
        }
        close(torch.stack(cached.logits, dim=1), logits(model, again)[:, -NEW:], 1e-4)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("full_width", [True, False], ids=["the prompt's mask", "the cached columns' mask"])
    def test_a_callers_own_loop_is_generate(self, model, prepare, full_width, attention):
        """A mask of the full prompt's width beside the cache of the shortened one is understood."""
        before = model.config._attn_implementation
        model.set_attn_implementation(attention)
        inputs = prepare("video", "two videos", "text")
        expected = model.generate(**inputs, **CALL, **STEPS)
        ids = expected.sequences[:, inputs["input_ids"].shape[1] :]
        with torch.no_grad():
            output = model(**inputs, use_cache=True)
            mask = inputs["attention_mask"] if full_width else (output.qtsplus.columns >= 0).long()
            steps = [output.logits[:, -1]]
            for step in range(NEW - 1):
                mask = longer(mask, 1, 1)
                call = {"input_ids": ids[:, step : step + 1], "attention_mask": mask}
                output = model(**call, past_key_values=output[CACHE], use_cache=True)
                steps.append(output.logits[:, -1])
        model.set_attn_implementation(before)
        close(torch.stack(steps), torch.stack(expected.logits), 1e-4)

    def test_seconds_that_a_collator_dropped_are_named(self, model, prepare):
        inputs = prepare("video", "two videos")
        seconds = inputs.pop("second_per_grid_ts")
        for call in (model.generate, model, model.train()):
            with pytest.raises(ValueError, match="The videos came without second_per_grid_ts"):
                call(**inputs)
        model.eval()
        with torch.no_grad():
            model(**inputs, second_per_grid_ts=seconds)

    @pytest.mark.parametrize("seconds", [1.0, [0.0, 1.0], [1.0, -1.0], [float("nan"), 1.0], [1.0]])
    def test_seconds_that_no_video_has_are_refused(self, model, prepare, seconds):
        inputs = prepare("video", "two videos")
        count = len(inputs["video_grid_thw"])
        if isinstance(seconds, list) and len(seconds) > 1:
            seconds = [1.0] * (count - 2) + seconds
        with pytest.raises(ValueError, match="second_per_grid_ts"):
            model(**{**inputs, "second_per_grid_ts": seconds})

    @pytest.mark.parametrize("change", [lambda grid: grid.tolist(), lambda grid: grid.float()])
    def test_a_grid_that_is_no_tensor_of_numbers_is_refused(self, model, prepare, change):
        inputs = prepare("video")
        with pytest.raises(ValueError, match="expected a tensor of whole numbers"):
            model(**{**inputs, "video_grid_thw": change(inputs["video_grid_thw"])})

    def test_padding_without_its_mask_is_named(self, model, prepare):
        inputs = prepare("video", "text")
        del inputs["attention_mask"]
        for call in (model.generate, model):
            with pytest.raises(ValueError, match="padded, but came without attention_mask"):
                call(**inputs)

    def test_chunk_is_whole(self, model, prepare):
        inputs = prepare("two videos")
        pixels = inputs["pixel_values_videos"]
        grid = inputs["video_grid_thw"]
        whole = model.encode_videos(pixels, grid)
        for frames in (1, 3, 5):
            close(model.encode_videos(pixels, grid, frames_per_chunk=frames), whole)

    def test_no_chunk_has_more_patches_than_it_may(self, model, prepare, monkeypatch):
        inputs = prepare("two videos", "video")
        patches = []

        def count(_, given, out):
            patches.append(out.numel() // out.shape[1])

        embed = next(layer for layer in model.modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Conv3d)))
        hook = embed.register_forward_hook(count)
        whole = logits(model, inputs)
        room = max(patches) // 3
        total = sum(patches)
        patches.clear()
        monkeypatch.setattr("qtsplus.model.encoding_qtsplus.PATCHES_PER_CHUNK_ON_CPU", room)
        close(logits(model, inputs), whole)
        hook.remove()
        assert max(patches) <= room
        assert sum(patches) == total
        for chunk, following in pairwise(patches):
            assert chunk + following > room

    @each_unlike
    def test_encode_once_is_one_shot(self, model, prepare):
        inputs = prepare(*NAMES)
        features = with_features(model, inputs, frames_per_chunk=2)
        grids = model.model.merged_grid(inputs["video_grid_thw"])
        for tokens, grid in zip(features["video_features"], grids, strict=True):
            assert tokens.shape == (math.prod(grid), model.model.token_width)
        torch.testing.assert_close(logits(model, features), logits(model, inputs), atol=5e-5, rtol=1e-5)
        assert torch.equal(model.generate(**features, **CALL), model.generate(**inputs, **CALL))

    @pytest.mark.parametrize("call", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
    @each_unlike
    def test_generates_with_beams_and_samples(self, model, prepare, call):
        inputs = prepare("video", "text")
        sequences = model.generate(**inputs, **{**CALL, **call}, retention=0.2)
        width = inputs["input_ids"].shape[1]
        copies = len(sequences) // 2
        assert sequences.shape[1] == width + NEW
        assert torch.equal(sequences[::copies, :width], inputs["input_ids"])

    def test_a_training_step_reaches_the_selector_alone(self, backbone, processor, prepare):
        model = backbone.build(processor).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".qtsplus." in name)
        model.model.qtsplus.freeze_unused()
        inputs = prepare(*NAMES)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        assert torch.isfinite(loss)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all(), name
                assert "rho" in name or parameter.grad.any(), name

    @each_unlike
    def test_training_and_inference_keep_the_same(self, backbone, processor, prepare):
        """With a gate that does not soften the choice."""
        model = backbone.build(processor)
        inputs = prepare("video", "two videos")
        model.config.qtsplus_config.gate = "detached"
        evaluated = model(**inputs).qtsplus.kept_indices
        trained = model.train()(**inputs).qtsplus.kept_indices
        assert all(map(torch.equal, evaluated, trained))

    def test_the_question_alone_is_the_query(self, processor, model, prepare, rows):
        inputs = prepare(*NAMES)
        derived = dict(inputs)
        mask = derived.pop("query_mask").bool()
        for row, name in enumerate(NAMES):
            question = rows[name][-1]["content"][-1]["text"]
            words = inputs["input_ids"][row][mask[row]]
            assert processor.tokenizer.decode(words).strip() == question
        torch.testing.assert_close(logits(model, derived), logits(model, inputs))
        for key, value in processor.query_token_ids.items():
            assert getattr(model.config, key) == value, key

    def test_a_question_before_the_video(self, processor, clips):
        inputs = chat_inputs(processor, "Which frame is it?", clips / "short.mp4")
        asked = inputs["input_ids"][0][inputs["query_mask"][0].bool()]
        assert processor.tokenizer.decode(asked).strip() == "Which frame is it?"

    def test_separators_go_with_what_they_end(self, model, prepare):
        """What is no candidate stays in order; of the rest what the rule names."""
        inputs = prepare("two videos")
        output = model(**inputs, retention=1.0, max_visual_tokens=3)
        columns = output.qtsplus.columns[0]
        assert torch.equal(columns, columns.sort().values)
        ids = inputs["input_ids"][0]
        kept = ids[columns]
        assert int((model.model.token_types(kept) == VIDEO).sum()) >= 3
        turns = {model.config.user_turn_token_ids[0], model.config.turn_end_token_id}
        for token in turns.intersection(model.config.special_token_ids, ids.tolist()):
            assert int((kept == token).sum()) == int((ids == token).sum())
        question = inputs["query_mask"][0]
        assert torch.equal(question[columns].sum(), question.sum())
        whole = model(**inputs, retention=1.0)
        assert whole.logits.shape[1] == len(ids)
        tokens = sum(map(math.prod, model.model.merged_grid(inputs["video_grid_thw"])))
        assert whole.qtsplus.num_tokens.tolist() == whole.qtsplus.n.tolist() == [tokens]

    def test_whoever_keeps_a_token_keeps_all_of_it(self, backbone, processor, prepare):
        model = backbone.build(processor, reencode_layers=0).model
        inputs = prepare("video")
        (source,) = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        prompt = compress(model, **inputs, retention=0.3)
        (kept,) = prompt.qtsplus.kept_indices
        (tokens,) = prompt.features["video"]
        assert source.shape[1] == tokens.shape[1] == model.token_width
        assert len(source) >= 12
        if len(tokens) > len(kept):
            is_newline = (tokens == model.line_end).all(1)
            tokens = tokens[~is_newline]
        assert torch.equal(tokens, source[kept])
        assert not torch.equal(tokens, source[: len(kept)])

    def test_positions_original_and_sequential(self, backbone, processor, prepare):
        inputs = prepare("video", "two videos")
        original = backbone.build(processor, position_ids="original").model
        sequential = backbone.build(processor, position_ids="sequential").model
        full = compress(original, **inputs, retention=1.0)
        short = compress(original, **inputs, retention=0.3)
        for row in range(2):
            is_kept = short.qtsplus.columns[row] >= 0
            places = torch.searchsorted(full.qtsplus.columns[row], short.qtsplus.columns[row][is_kept])
            expected = original.language_axes(full.position_ids)[:, row]
            axes = original.language_axes(short.position_ids)[:, row]
            assert torch.equal(axes[:, is_kept], expected[:, places])
        assert torch.equal(short.next_position, full.next_position)
        numbered = compress(sequential, **inputs, retention=0.3)
        counts = numbered.attention_mask.sum(-1)
        assert torch.equal(numbered.next_position, counts)
        for row, count in enumerate(counts.tolist()):
            axes = sequential.language_axes(numbered.position_ids)[:, row, -count:]
            assert torch.equal(axes, torch.arange(count).expand(len(axes), -1))

    def test_the_reencoder_sees_absolute_time(self, model, prepare):
        """Twice the seconds between frames: other features, where no token moves in the text."""
        inputs = prepare("video")
        slower = {**inputs, "second_per_grid_ts": 3 * inputs["second_per_grid_ts"]}
        prompt = compress(model.model, **inputs, retention=0.5)
        other = compress(model.model, **slower, retention=0.5)
        assert torch.equal(prompt.qtsplus.kept_indices[0], other.qtsplus.kept_indices[0])
        assert not torch.allclose(prompt.features["video"][0], other.features["video"][0], atol=1e-4)

    @pytest.mark.parametrize(
        ("changed", "change", "message"),
        [
            ("video_grid_thw", lambda grid: grid + 1, "rows of video pixels"),
            ("video_grid_thw", lambda grid: None, "without grid_thw"),
            ("pixel_values_videos", lambda pixels: pixels * float("nan"), "NaN"),
            ("query_mask", torch.zeros_like, "no question"),
        ],
        ids=["grid", "no grid", "NaN", "no question"],
    )
    @each_unlike
    def test_bad_input_is_named(self, model, prepare, changed, change, message):
        inputs = prepare("video")
        inputs[changed] = change(inputs[changed])
        if inputs["video_grid_thw"] is None:
            del inputs["second_per_grid_ts"]
        with pytest.raises(ValueError, match=message):
            model(**inputs)

    @each_unlike
    def test_a_retention_above_one_is_named(self, model, prepare):
        with pytest.raises(ValueError, match="retention"):
            model(**prepare("video"), retention=1.5)

    @pytest.mark.parametrize("own_positions", [False, True])
    @each_unlike
    def test_placeholders_without_pixels_are_named(self, model, prepare, own_positions):
        inputs = prepare("video")
        call = {name: inputs[name] for name in ("input_ids", "attention_mask", "query_mask")}
        if own_positions:
            call["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        with pytest.raises(ValueError, match="placeholders"):
            model(**call)
