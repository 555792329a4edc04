"""What a step leaves behind that fails, and what is said of models and trainers that are at fault themselves."""

import copy
import gc
import weakref

import image_rows
import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.checks.family_check import prepared
from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing import enabling
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.nodes import Node
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

from .sharing_trainers import SMALL, build_trainer
from .test_passes import TRAINERS, load, make_inputs

pytestmark = pytest.mark.slow

MODEL_ID = "tiny-Qwen3ForCausalLM"
WITH_WINDOWS = "tiny-Cohere2ForCausalLM"


def make(name):
    """A model that shares prompts, its inputs, and how they go through it: the recomputation is that of passes."""
    options = {"tokens_per_forward": 1}
    inputs, prompt_length = make_inputs()
    if name == "images":
        model = image_rows.build_with_images("qwen2_5_vl", torch.float32)
        inputs, prompt_length, counts = image_rows.batch("qwen2_5_vl", model.config.image_token_id)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, :prompt_length] = -100
        inputs |= {"labels": labels, "fused_lm_head": True}
        options |= counts
    elif name == "states":
        model = prepared(build(family("bamba")), torch.float32)
    else:
        model = load(WITH_WINDOWS if name == "windows" else MODEL_ID)
    enable_prefix_sharing(model.train())
    return model, inputs, SharedPrefixPasses(prompt_length, **options)


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


def step(model, inputs, passes):
    model.zero_grad()
    log_probs = model(**inputs, passes=passes).log_probs
    log_probs.sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return log_probs.detach(), grads


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
    @pytest.mark.parametrize("stage", ["prompt", "completions", "recomputation", "backward", "no backward"])
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("name", ["text", "windows", "states", "images"])
    def test_nothing_stays(self, name, gradient_checkpointing, stage, alive):
        error = KeyboardInterrupt  # behind which not even the hooks run that are always called
        model, inputs, passes = make(name)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        whole = model(**inputs).log_probs
        counter = FailAtCall(last_projection(model), 0, error)
        with torch.no_grad():
            model(**inputs, passes=passes)
        num_calls, num_prompts = -counter.number, 4 if name == "images" else 2
        counter.handle.remove()
        expected, expected_grads = step(model, inputs, passes)

        fail_at = {"prompt": 1, "completions": num_prompts + 1, "recomputation": num_calls + 1}.get(stage, 0)
        for _ in range(2):
            failing = FailAtCall(last_projection(model), fail_at, error)
            if stage == "backward":
                failing = FailInBackward(model.get_input_embeddings().weight, error)
            try:
                if stage == "no backward":
                    model(**inputs, passes=passes)
                else:
                    step(model, inputs, passes)
            except error:
                pass
            assert stage == "no backward" or failing.number <= 0, "nothing failed: the test would be empty"
            failing.handle.remove()
        assert alive() == 0
        assert model.config.get_text_config()._attn_implementation == "sdpa"
        assert torch.equal(model(**inputs).log_probs, whole)
        log_probs, grads = step(model, inputs, passes)
        assert torch.equal(log_probs, expected)
        assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())

    # The calls of the last attention: 8 in generation, 2 in scoring, then each micro-batch's
    @pytest.mark.parametrize(
        "config_class, trainer_class, fail_at",
        [(*TRAINERS[0], 3), (*TRAINERS[1], 11), (*TRAINERS[0], 12), (*TRAINERS[1], 15)],
    )
    def test_the_next_training_is_one_of_a_new_process(self, config_class, trainer_class, fail_at, alive):
        def make_trainer(model):
            options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "learning_rate": 0.1}
            options |= {"generation_kwargs": {"min_new_tokens": 8}, "bf16": False, "prefix_sharing": True}
            args = config_class(output_dir=self.tmp_dir, **SMALL | options)
            prompts = ["the sky is blue and", "the sea"] * 3
            return build_trainer(trainer_class, args, prompts, model, lambda completions, **_: [0.0, 1.0, 0.0])

        fresh = make_trainer(MODEL_ID)
        fresh.train()

        model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype=torch.float32)
        failed = make_trainer(model)
        failing = FailAtCall(last_projection(model), fail_at, torch.OutOfMemoryError)
        try:
            failed.train()
        except torch.OutOfMemoryError:
            pass
        assert failing.number <= 0, "nothing failed: the test would be empty"
        failing.handle.remove()
        assert alive() == 0
        model.zero_grad()
        make_trainer(model).train()
        expected = fresh.model.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())

    def test_no_number_stays_in_its_row(self):
        model, inputs, passes = make("windows")
        inputs["input_ids"][0, passes.prefix_length + 1] = 299
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: output.masked_fill(args[0][..., None] == 299, torch.nan)
        )
        enable_prefix_sharing(model)  # with the hook
        with torch.no_grad():
            expected = model(**inputs).log_probs[:, passes.prefix_length - 1 :]
            log_probs = model(**inputs, passes=SharedPrefixPasses(passes.prefix_length)).log_probs
        assert expected.isnan().any(1).tolist() == [True, False, False, False, False, False]
        # Of its row, the tokens before it are lost, too: a mask does not hide what is no number
        torch.testing.assert_close(log_probs, expected, equal_nan=True)

    def test_router_loss_in_half_precision(self):
        torch.manual_seed(0)
        input_ids = torch.randint(10, 300, (8, 400))
        input_ids[:, :300] = input_ids[:1, :300]
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "output_router_logits": True}
        inputs |= {"labels": input_ids.index_fill(1, torch.arange(300), -100), "fused_lm_head": True}
        losses = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = load("tiny-Qwen3MoeForCausalLM").to(dtype).train()
            enable_prefix_sharing(model)
            with torch.no_grad():
                losses[dtype] = model(**inputs, passes=SharedPrefixPasses(300, 101)).aux_loss.double()
        torch.testing.assert_close(losses[torch.bfloat16], losses[torch.float32], rtol=2e-4, atol=0)

    def test_other_model_in_a_pass(self):
        model, inputs, passes = make("windows")
        other = make("text")[0]
        expected = step(model, inputs, passes)[0]
        expected_of_other = other(**inputs, passes=passes).log_probs
        seen = []
        last_projection(model).register_forward_pre_hook(
            lambda module, args: seen.append(other(**inputs, passes=passes).log_probs)
        )
        assert torch.equal(step(model, inputs, passes)[0], expected)
        assert all(torch.equal(x, expected_of_other) for x in seen)

    def test_copied_layers(self):
        model = load(MODEL_ID).train()
        layers = model.model.layers
        layers.append(copy.deepcopy(layers[1]))  # with its own config, as PEFT's `layer_replication` has it
        layers[2].self_attn.layer_idx = 2
        model.config.num_hidden_layers = 3
        model.config.layer_types = ["full_attention"] * 3
        inputs, prompt_length = make_inputs()
        expected = model(**inputs).log_probs[:, prompt_length - 1 :]
        enable_prefix_sharing(model)
        log_probs = model(**inputs, passes=SharedPrefixPasses(prompt_length)).log_probs
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)

    def test_model_at_fault_itself(self):
        model = load(MODEL_ID)
        model.model.layers[0].mlp.forward = lambda x: x[..., :1] @ x
        with pytest.raises(ValueError, match="fails, with its rows whole") as error:
            enable_prefix_sharing(model)
        assert "prefix_sharing=False" not in str(error.value)

    def test_version_that_states_need(self, monkeypatch):
        def fail(*args, **kwargs):
            raise AttributeError("'RecordStates' object has no attribute 'has_previous_state'")

        model = build(family("bamba"))
        monkeypatch.setattr(enabling, "error_of_passes", fail)
        monkeypatch.setattr(enabling.transformers, "__version__", "5.20.0")
        with pytest.raises(ValueError, match="need transformers 5.22.0 or higher, but 5.20.0 is installed"):
            enable_prefix_sharing(model)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_trainer_with_a_forward_of_its_own(self, config_class, trainer_class, caplog):
        class OwnLoss(trainer_class):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
                return model(input_ids=ids).logits.mean()

        for own, count in ((OwnLoss, 1), (trainer_class, 0)):
            options = {"per_device_train_batch_size": 3, "max_completion_length": 4, "max_steps": 2, "bf16": False}
            args = config_class(output_dir=self.tmp_dir, prefix_sharing=True, **SMALL | options)
            trainer = build_trainer(own, args, ["sky", "sea"], MODEL_ID, lambda completions, **_: [0.0, 1.0, 0.0])
            caplog.clear()
            trainer.train()
            assert sum("no effect" in record.message for record in caplog.records) == count
