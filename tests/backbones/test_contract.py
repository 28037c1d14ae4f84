"""What every backbone has to hold: [`TestBackbone`] runs once for each of them."""

import pytest
import torch

from qtsplus.model.methods_qtsplus import METHODS, Candidates
from qtsplus.model.prompt_qtsplus import CACHE, IMAGE, VIDEO
from tiny import chat_inputs, compress
from tiny_backbones import each_unlike

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
CALL = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@torch.no_grad()
def logits(model, inputs, **call):
    return model(**inputs, **call).logits


def with_features(model, inputs, **options):
    inputs = dict(inputs)
    pixels = inputs.pop("pixel_values_videos")
    return {**inputs, "video_features": model.encode_videos(pixels, inputs["video_grid_thw"], **options)}


def without_pixels(inputs):
    return {name: None for name in inputs if "video" in name or "second" in name}


def positions(inputs):
    return torch.arange(inputs["input_ids"].shape[1])[None]


class TestBackbone:
    """Make this green to add a backbone: one entry in `BACKBONES` of tiny_backbones.py."""

    @pytest.mark.parametrize("name", NAMES)
    def test_with_all_tokens_it_is_the_stock_model(self, backbone, all_tokens, stock, prepare, name):
        inputs = prepare(name)
        expected = backbone.stock_inputs(all_tokens, inputs)
        torch.testing.assert_close(logits(all_tokens, inputs), logits(stock, expected), atol=1e-5, rtol=1e-5)
        ours, theirs = all_tokens.generate(**inputs, **CALL), stock.generate(**expected, **CALL)
        width = inputs["input_ids"].shape[1]
        assert torch.equal(ours[:, width:], theirs[:, width:])
        assert torch.equal(ours[:, :width], inputs["input_ids"])

    @pytest.mark.parametrize("names", [NAMES[1:5], ("video", "text", "earlier turns")], ids=len)
    def test_with_all_tokens_a_padded_batch_is_the_stock_model(self, backbone, all_tokens, stock, prepare, names):
        inputs = prepare(*names)  # with videos of one length, for some stock models take no others
        expected = backbone.stock_inputs(all_tokens, inputs)
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(
            logits(all_tokens, inputs)[real], logits(stock, expected)[real], atol=1e-5, rtol=1e-5
        )

    def test_embeddings_beside_an_image_are_the_stock_model(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image")
        expected = backbone.stock_inputs(all_tokens, inputs)
        inputs_embeds = all_tokens.get_input_embeddings()(inputs["input_ids"])
        for call in (inputs, expected):
            call.update(input_ids=None, inputs_embeds=inputs_embeds)
            call.pop("mm_token_type_ids", None)
        stock.model.rope_deltas = None  # stock would take them from its prompt before
        torch.testing.assert_close(logits(all_tokens, inputs), logits(stock, expected), atol=1e-5, rtol=1e-5)

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
            close = 5e-4 if model.config.model_type == "qwen3_5_qtsplus" else 1e-4
            torch.testing.assert_close(batch.logits[row][real], alone.logits[0], atol=close, rtol=close)
            if alone.qtsplus is not None:
                assert torch.equal(batch.qtsplus.kept_indices[row], alone.qtsplus.kept_indices[0])

    @each_unlike
    def test_generate_batch_is_single(self, model, prepare):
        together = model.generate(**prepare(*NAMES), **CALL)[:, -5:]
        alone = torch.cat([model.generate(**prepare(name), **CALL)[:, -5:] for name in NAMES])
        assert torch.equal(together, alone)

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
        grids, width = model.model.merged_grid(inputs["video_grid_thw"]), model.config.text_config.hidden_size
        visual = [features[:, :width] for features in with_features(model, inputs)["video_features"]]
        nothing = torch.zeros(3, sum(map(len, visual)))
        candidates = Candidates(visual, visual[0][:0], nothing, grids, score=lambda _: pytest.fail("no question"))
        (kept,) = model(**inputs, selection=selection, retention=0.3).qtsplus.kept_indices
        assert torch.equal(kept, METHODS[selection](candidates, len(kept)))

    def test_outputs_name_what_was_encoded_as_stock_does(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image and video")
        with torch.no_grad():
            ours, theirs = all_tokens(**inputs), stock(**backbone.stock_inputs(all_tokens, inputs))
        visual = {"image_outputs", "video_outputs"}
        assert visual & set(type(theirs).__dataclass_fields__) <= set(type(ours).__dataclass_fields__)
        outputs = [getattr(ours, name) for name in sorted(visual)]
        kept = [output.pooler_output[0] if output is not None else [] for output in outputs]
        places = all_tokens.model.token_types(inputs["input_ids"])[0].tolist()
        assert [len(tokens) for tokens in kept] == [places.count(IMAGE), places.count(VIDEO)]

    def test_outputs_of_what_is_not_there_are_none(self, model, prepare):
        with torch.no_grad():
            outputs = {name: model(**prepare(name)) for name in ("text", "video")}
        assert outputs["text"].image_outputs is outputs["text"].video_outputs is None
        assert outputs["video"].image_outputs is None
        assert len(outputs["video"].video_outputs.pooler_output) == 1

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
        steps = model.generate(**inputs, **CALL, return_dict_in_generate=True, output_logits=True)
        torch.testing.assert_close(steps.logits[0], logits(model, inputs)[:, -1], atol=1e-4, rtol=1e-4)
        assert all(map(torch.equal, steps.qtsplus.kept_indices, model(**inputs).qtsplus.kept_indices))

    def test_decoding_goes_on_where_the_full_prompt_ends(self, model, prepare):
        """With a cache as without one, where every step lays the whole text out again."""
        inputs = prepare("video", "two videos")
        cached = model.generate(**inputs, **CALL, return_dict_in_generate=True, output_logits=True)
        ids = torch.cat([inputs["input_ids"], cached.sequences[:, inputs["input_ids"].shape[1] :]], dim=1)[:, :-1]
        longer = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
        mask = torch.nn.functional.pad(inputs["query_mask"], (0, 4))
        again = logits(model, {**inputs, "input_ids": ids, "attention_mask": longer, "query_mask": mask})
        torch.testing.assert_close(torch.stack(cached.logits, dim=1), again[:, -5:], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("full_width", [True, False], ids=["the prompt's mask", "the cached columns' mask"])
    def test_a_callers_own_loop_is_generate(self, model, prepare, full_width, attention):
        """A mask of the full prompt's width beside the cache of the shortened one is understood."""
        before = model.config._attn_implementation
        model.set_attn_implementation(attention)
        inputs = prepare("video", "two videos", "text")
        expected = model.generate(**inputs, **CALL, return_dict_in_generate=True, output_logits=True)
        ids = expected.sequences[:, inputs["input_ids"].shape[1] :]
        with torch.no_grad():
            output = model(**inputs, use_cache=True)
            mask = inputs["attention_mask"] if full_width else (output.qtsplus.columns >= 0).long()
            steps = [output.logits[:, -1]]
            for step in range(4):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                call = {"input_ids": ids[:, step : step + 1], "attention_mask": mask}
                output = model(**call, past_key_values=output[CACHE], use_cache=True)
                steps.append(output.logits[:, -1])
        model.set_attn_implementation(before)
        torch.testing.assert_close(torch.stack(steps), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)

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
        pixels, grid = inputs["pixel_values_videos"], inputs["video_grid_thw"]
        whole = model.encode_videos(pixels, grid)
        for frames in (1, 3, 5):
            for one, other in zip(whole, model.encode_videos(pixels, grid, frames_per_chunk=frames), strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    def test_no_chunk_has_more_patches_than_it_may(self, model, prepare, monkeypatch):
        inputs, patches = prepare("two videos", "video"), []
        embed = next(one for one in model.modules() if isinstance(one, (torch.nn.Conv2d, torch.nn.Conv3d)))
        hook = embed.register_forward_hook(lambda _, given, out: patches.append(out.numel() // out.shape[1]))
        whole = logits(model, inputs)
        room, total = max(patches) // 3, sum(patches)
        patches.clear()
        monkeypatch.setattr("qtsplus.model.encoding_qtsplus.PATCHES_PER_CHUNK_ON_CPU", room)
        torch.testing.assert_close(logits(model, inputs), whole, atol=1e-5, rtol=1e-5)
        hook.remove()
        assert max(patches) <= room and sum(patches) == total
        assert all(sum(pair) > room for pair in zip(patches, patches[1:], strict=False))

    @each_unlike
    def test_encode_once_is_one_shot(self, model, prepare):
        inputs = prepare(*NAMES)
        features = with_features(model, inputs, frames_per_chunk=2)
        lengths = [t * h * w for t, h, w in model.model.merged_grid(inputs["video_grid_thw"])]
        assert [tuple(one.shape) for one in features["video_features"]] == [
            (length, model.model.token_width) for length in lengths
        ]
        torch.testing.assert_close(logits(model, features), logits(model, inputs), atol=5e-5, rtol=1e-5)
        assert torch.equal(model.generate(**features, **CALL), model.generate(**inputs, **CALL))

    @pytest.mark.parametrize("call", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
    @each_unlike
    def test_generates_with_beams_and_samples(self, model, prepare, call):
        inputs = prepare("video", "text")
        made = model.generate(**inputs, **{**CALL, **call}, retention=0.2)
        width = inputs["input_ids"].shape[1]
        assert made.shape[1] == width + 5 and torch.equal(made[:: len(made) // 2, :width], inputs["input_ids"])

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
            if parameter.requires_grad:
                assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
                if "rho" not in name:
                    assert parameter.grad.abs().sum() > 0, name
            else:
                assert parameter.grad is None, name

    @each_unlike
    def test_training_and_inference_keep_the_same(self, backbone, processor, prepare):
        """With a gate that does not soften the choice."""
        model, inputs = backbone.build(processor), prepare("video", "two videos")
        model.config.qtsplus_config.gate = "detached"
        evaluated = model(**inputs).qtsplus.kept_indices
        assert all(map(torch.equal, evaluated, model.train()(**inputs).qtsplus.kept_indices))

    def test_the_question_alone_is_the_query(self, processor, model, prepare, rows):
        inputs = prepare(*NAMES)
        derived = dict(inputs)
        mask = derived.pop("query_mask")
        for row, name in enumerate(NAMES):
            question = rows[name][-1]["content"][-1]["text"]
            assert processor.tokenizer.decode(inputs["input_ids"][row][mask[row].bool()]).strip() == question
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
        assert int((model.model.token_types(kept[None]) == VIDEO).sum()) >= 3
        special = set(ids.tolist()) & set(model.config.special_token_ids)
        turns = {model.config.user_turn_token_ids[0], model.config.turn_end_token_id}
        for one in special & turns:
            assert int((kept == one).sum()) == int((ids == one).sum())
        assert torch.equal(inputs["query_mask"][0][columns].sum(), inputs["query_mask"][0].sum())
        whole = model(**inputs, retention=1.0)
        assert whole.logits.shape[1] == len(ids)
        tokens = sum(t * h * w for t, h, w in model.model.merged_grid(inputs["video_grid_thw"]))
        assert whole.qtsplus.num_tokens.tolist() == whole.qtsplus.n.tolist() == [tokens]

    def test_whoever_keeps_a_token_keeps_all_of_it(self, backbone, processor, prepare):
        model = backbone.build(processor, reencode_layers=0).model
        inputs = prepare("video")
        (source,) = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        prompt = compress(model, **inputs, retention=0.3)
        (kept,), got = prompt.qtsplus.kept_indices, prompt.features["video"][0]
        assert source.shape[1] == got.shape[1] == model.token_width and len(source) >= 12
        if len(got) > len(kept):
            got = got[(got != model.line_end).any(1)]
        assert torch.equal(got, source[kept]) and not torch.equal(got, source[: len(kept)])

    def test_positions_original_and_sequential(self, backbone, processor, prepare):
        inputs = prepare("video", "two videos")
        original, sequential = (
            backbone.build(processor, position_ids=kind).model for kind in ("original", "sequential")
        )
        full = compress(original, **inputs, retention=1.0)
        short = compress(original, **inputs, retention=0.3)
        for row in range(2):
            kept = short.qtsplus.columns[row] >= 0
            places = {int(column): place for place, column in enumerate(full.qtsplus.columns[row]) if column >= 0}
            at = [places[int(column)] for column in short.qtsplus.columns[row][kept]]
            expected, got = (original.language_axes(one.position_ids)[:, row] for one in (full, short))
            assert torch.equal(got[:, kept], expected[:, at])
        assert torch.equal(short.next_position, full.next_position)
        numbered = compress(sequential, **inputs, retention=0.3)
        counts = numbered.attention_mask.sum(-1)
        assert torch.equal(numbered.next_position, counts)
        for row, count in enumerate(counts.tolist()):
            axes = sequential.language_axes(numbered.position_ids)[:, row, -count:]
            assert torch.equal(axes, torch.arange(count).expand(len(axes), -1))

    def test_the_reencoder_sees_absolute_time(self, backbone, processor, model, prepare):
        """Twice the seconds between frames: other features, where no token moves in the text."""
        inputs = prepare("video")
        slower = {**inputs, "second_per_grid_ts": 3 * inputs["second_per_grid_ts"]}
        one, other = (compress(model.model, **each, retention=0.5) for each in (inputs, slower))
        assert torch.equal(one.qtsplus.kept_indices[0], other.qtsplus.kept_indices[0])
        assert not torch.allclose(one.features["video"][0], other.features["video"][0], atol=1e-4)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda inputs: {"video_grid_thw": inputs["video_grid_thw"] + 1}, "rows of video pixels"),
            (lambda inputs: {"video_grid_thw": None, "second_per_grid_ts": None}, "without grid_thw"),
            (lambda inputs: {"pixel_values_videos": inputs["pixel_values_videos"] * float("nan")}, "NaN"),
            (lambda inputs: {"query_mask": 0 * inputs["query_mask"]}, "no question"),
            (lambda inputs: {"retention": 1.5}, "retention"),
            (without_pixels, "placeholders"),
            (lambda inputs: {**without_pixels(inputs), "position_ids": positions(inputs)}, "placeholders"),
        ],
        ids=["grid", "no grid", "NaN", "no question", "retention", "no pixels", "no pixels, own positions"],
    )
    @each_unlike
    def test_bad_input_is_named(self, model, prepare, change, message):
        inputs = prepare("video")
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, **change(inputs)})
