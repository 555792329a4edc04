"""What a step leaves behind that fails, and what is said of models and trainers that are at fault themselves."""

import copy
import gc
import weakref
from contextlib import suppress

import image_rows
import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.checks.family_check import PROMPT, TOLERANCE, batch, error_of, in_float64, prepared, run, scored
from experiments.checks.tiny_families import VOCAB, build, family
from rloo_memory.prefix_sharing import enabling
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.nodes import Node
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from tests.probes.tiny import build_trainer

from .conftest import TRAINERS, llama

pytestmark = pytest.mark.slow


def make(name):
    """A model that shares prompts, its inputs, the columns of their prompts, and how they go through it: the
    recomputation is that of passes."""
    if name == "images":
        model = image_rows.build_with_images("qwen2_5_vl", torch.float32)
        inputs, prompt, counts = image_rows.batch("qwen2_5_vl", model.config.image_token_id)
    else:
        model_type = {"text": "llama", "windows": "cohere2", "states": "bamba"}[name]
        model = prepared(build(family(model_type)), torch.get_default_dtype())
        inputs, prompt, counts = batch(), PROMPT, {}
    enable_prefix_sharing(model)
    return model, inputs, prompt, SharedPrefixPasses(prompt, tokens_per_forward=1, **counts)


def last_projection(model):
    """What runs in the last attention, where the model is as far from what it was as it gets."""
    return [module for module in model.modules() if hasattr(module, "o_proj")][-1].o_proj


class FailAtCall:
    def __init__(self, module, number, error):
        self.number, self.error = number, error
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.number -= 1
        if self.number == 0:
            raise self.error("out of memory")


class FailInBackward(FailAtCall):
    def __init__(self, param, error):
        self.number, self.error = 1, error
        self.handle = param.register_hook(lambda grad: self(None, grad))


@pytest.fixture
def alive(monkeypatch):
    """How many nodes are still there."""
    references, init = [], Node.__init__

    def remember(self, *args, **kwargs):
        references.append(weakref.ref(self))
        init(self, *args, **kwargs)

    def find():
        # On the CPU, autograd lets go of what was ready when a backward failed in the next one
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        return sum(reference() is not None for reference in references)

    monkeypatch.setattr(Node, "__init__", remember)
    return find


class TestPrefixSharingFailures:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("name", ["text", "windows", "states", "images"])
    def test_nothing_stays(self, name, gradient_checkpointing, alive):
        error = KeyboardInterrupt  # behind which not even the hooks run that are always called
        model, inputs, prompt, passes = make(name)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        whole = run(model, inputs, prompt)
        counter = FailAtCall(last_projection(model), 0, error)
        with torch.no_grad():
            scored(model, inputs, prompt, passes=passes)
        num_calls, num_prompts = -counter.number, 4 if name == "images" else 2
        counter.handle.remove()
        expected = run(model, inputs, prompt, passes=passes)

        fail_at = {"prompt": 1, "completions": num_prompts + 1, "recomputation": num_calls + 1}
        for stage in (*fail_at, "backward", "no backward"):
            for _ in range(2):
                failing = FailAtCall(last_projection(model), fail_at.get(stage, 0), error)
                if stage == "backward":
                    failing = FailInBackward(model.get_input_embeddings().weight, error)
                with suppress(error):
                    (scored if stage == "no backward" else run)(model, inputs, prompt, passes=passes)
                assert stage == "no backward" or failing.number <= 0, "nothing failed: the test would be empty"
                failing.handle.remove()
            assert alive() == 0, stage
            assert all(map(torch.equal, run(model, inputs, prompt), whole)), stage
            assert all(map(torch.equal, run(model, inputs, prompt, passes=passes), expected)), stage

    # The calls of the last attention: 8 in generation, 2 in scoring, then each micro-batch's
    @pytest.mark.parametrize(
        "trainer_class, fail_at", [(TRAINERS[0], 3), (TRAINERS[1], 11), (TRAINERS[0], 12), (TRAINERS[1], 15)]
    )
    def test_the_next_training_is_one_of_a_new_process(self, trainer_class, fail_at, alive):
        def make_trainer(model):
            options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "num_generations": 3}
            options |= {"generation_kwargs": {"min_new_tokens": 8}, "max_completion_length": 8, "learning_rate": 0.1}
            rewards = [lambda completions, **_: [0.0, 1.0, 0.0]]
            prompts = ["w50 w51 w52 w53", "w54 w55"]
            return build_trainer(trainer_class, self.tmp_dir, model, prompts, rewards, prefix_sharing=True, **options)

        fresh = make_trainer("tiny")
        fresh.train()

        model = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
        failed = make_trainer(model)
        failing = FailAtCall(last_projection(model), fail_at, torch.OutOfMemoryError)
        with suppress(torch.OutOfMemoryError):
            failed.train()
        assert failing.number <= 0, "nothing failed: the test would be empty"
        failing.handle.remove()
        assert alive() == 0
        model.zero_grad()
        make_trainer(model).train()
        expected = fresh.model.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())

    def test_no_number_stays_in_its_row(self):
        with in_float64():
            model, inputs, *_ = make("windows")
            inputs["input_ids"][0, PROMPT + 1] = VOCAB - 1
            model.get_input_embeddings().register_forward_hook(
                lambda module, args, output: output.masked_fill(args[0][..., None] == VOCAB - 1, torch.nan)
            )
            enable_prefix_sharing(model)  # with the hook
            with torch.no_grad():
                ways = (None, SharedPrefixPasses(PROMPT))
                expected, found = (scored(model, inputs, PROMPT, passes=passes)[0] for passes in ways)
        assert expected.isnan().any(0).any(1).tolist() == [True, False, False, False, False, False]
        # Of its row, the tokens before it are lost, too: a mask does not hide what is no number
        torch.testing.assert_close(found, expected, equal_nan=True)

    def test_router_loss_in_half_precision(self):
        torch.manual_seed(0)
        input_ids = torch.randint(3, VOCAB, (8, 400))
        input_ids[:, :300] = input_ids[:1, :300]
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "output_router_logits": True}
        inputs |= {"labels": input_ids.index_fill(1, torch.arange(300), -100), "fused_lm_head": True}
        losses = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = prepared(build(family("qwen3_moe")), dtype)
            enable_prefix_sharing(model)
            with torch.no_grad():
                losses[dtype] = model(**inputs, passes=SharedPrefixPasses(300, 101)).aux_loss.double()
        torch.testing.assert_close(losses[torch.bfloat16], losses[torch.float32], rtol=2e-4, atol=0)

    def test_other_model_in_a_pass(self):
        (model, inputs, prompt, passes), (other, *_), seen = make("windows"), make("text"), []
        expected, expected_of_other = (scored(x, inputs, prompt, passes=passes)[0] for x in (model, other))
        last_projection(model).register_forward_pre_hook(
            lambda module, args: seen.append(scored(other, inputs, prompt, passes=passes)[0])
        )
        assert torch.equal(run(model, inputs, prompt, passes=passes)[0], expected)
        assert len(seen) > 0 and all(torch.equal(x, expected_of_other) for x in seen)

    def test_copied_layers(self):
        with in_float64():
            model = llama()
            layers = model.model.layers
            layers.append(copy.deepcopy(layers[1]))  # with its own config, as PEFT's `layer_replication` has it
            layers[-1].self_attn.layer_idx = len(layers) - 1
            model.config.num_hidden_layers = len(layers)
            truth = run(model)
            enable_prefix_sharing(model)
            assert max(error_of(run(model, passes=SharedPrefixPasses(PROMPT)), truth)) <= TOLERANCE

    def test_model_at_fault_itself(self):
        model = llama()
        model.model.layers[0].mlp.forward = lambda x: x[..., :1] @ x
        with pytest.raises(ValueError, match="fails, with its rows whole") as error:
            enable_prefix_sharing(model)
        assert "prefix_sharing=False" not in str(error.value)

    @pytest.mark.parametrize("finds_mixers", [True, False])  # older ones hide the names of their arguments
    def test_version_that_states_need(self, finds_mixers, monkeypatch):
        def fail(*args, **kwargs):
            raise AttributeError("'States' object has no attribute 'has_previous_state'")

        model = build(family("bamba"))
        monkeypatch.setattr(enabling, "error_of_passes", fail)
        if not finds_mixers:
            monkeypatch.setattr(enabling, "find_mixers", lambda model: [])
        monkeypatch.setattr(enabling.transformers, "__version__", "5.20.0")
        with pytest.raises(ValueError, match="need transformers 5.22.0 or higher, but 5.20.0 is installed"):
            enable_prefix_sharing(model)
