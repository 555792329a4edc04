"""Models as people have them in a loop of their own: scored by threads, copied, offloaded, checkpointed, adapted."""

import copy
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.state import AcceleratorState
from peft import LoraConfig, XLoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import build, family
from rloo_memory import log_probs, logits_of, shared_prompts
from rloo_memory.prefix_sharing.enabling import shares_starts

from .conftest import llama
from .test_own_loops import COMPLETIONS, FAMILIES, LONG, PROMPTS, ROWS, WEIGHTS, assert_same, gradient, whole_rows

LAST_IS_CONV = family("lfm2", layer_types=["full_attention", "full_attention", "conv"], num_hidden_layers=3)


class OwnLogits(LlamaForCausalLM):
    """Scales logits by token ids, or by positions."""

    def forward(self, input_ids=None, by_position=False, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        scales = torch.arange(input_ids.shape[1]) if by_position else input_ids[0]
        output.logits *= 1 + 0.01 * scales[:, None]
        return output


def test_logits_may_be_made_of_the_token_too_and_of_nothing_else():
    model = OwnLogits(llama().config).double()
    with pure_float64(), torch.no_grad():
        values = log_probs(model, [PROMPTS[row] for row in ROWS], COMPLETIONS, temperature=0.7)
        assert_same(values, whole_rows(model))
    by_position = OwnLogits(model.config)
    by_position.forward = partial(by_position.forward, by_position=True)
    reward_model, wrapper = LlamaForSequenceClassification(model.config), torch.nn.Sequential(model)
    for other in (by_position, model.model, reward_model, wrapper, "Qwen/Qwen3-0.6B"):
        with pytest.raises(
            ValueError, match="does not make logits of a token's last state|must be a causal language model"
        ):
            log_probs(other, PROMPTS[0], COMPLETIONS)


def test_a_model_that_accelerate_prepared_computes_in_its_precision():
    AcceleratorState._reset_state(True)  # of tests before this one
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    with accelerator.autocast():  # where a first call may be
        expected = log_probs(llama(), PROMPTS[0], COMPLETIONS)
    model = accelerator.prepare(llama())
    assert torch.equal(log_probs(model, PROMPTS[0], COMPLETIONS), expected)
    accelerator.state._reset_state(True)
    assert log_probs(model, PROMPTS[0], COMPLETIONS).isfinite().all()


def test_a_backward_with_other_weights_is_refused():
    """Logits are computed again in it: the gradient was 2 % off."""
    model = llama()
    values = log_probs(model, PROMPTS[0], COMPLETIONS)
    model.lm_head.weight.data.mul_(1.1)
    with pytest.raises(RuntimeError, match="whose backward computes logits again"):
        values.sum().backward()


def test_x_lora_is_refused(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(llama(), config).save_pretrained(tmp_path)
    model = llama()
    model.config.use_cache = False
    config = XLoraConfig("CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path)}, xlora_dropout_p=0.0)
    with pytest.raises(ValueError, match="X-LoRA scales its adapters by what the model makes of whole sequences"):
        log_probs(get_peft_model(model, config), PROMPTS[0], COMPLETIONS)


@pytest.mark.parametrize(
    "of, trained",
    [(FAMILIES["llama"], ""), (FAMILIES["llama"], "layers.2.self_attn.v_proj"), (LAST_IS_CONV, "layers.2.conv")],
)
def test_gradients_that_are_not_whole_are_refused_whatever_is_trained(of, trained):
    """Of all, and of a last layer's values, or states, alone."""
    model = build(of)
    for path, param in model.named_parameters():
        param.requires_grad_(trained in path)
    with shared_prompts(model, PROMPTS[0]) as shared:
        values = shared.log_probs([[5, 6]])
        with pytest.raises(RuntimeError, match="ask `log_probs` in place of `shared_prompts`"):
            params = [param for param in model.parameters() if param.requires_grad]
            torch.autograd.grad(shared.log_probs([[5, 6]]).sum(), params, allow_unused=True)
    with pytest.raises(RuntimeError, match="comes behind that of its prompts"):
        values.sum().backward()


def test_a_hook_that_takes_gradients_of_parameters_gets_them_whole_or_none():
    model = llama()
    handle = model.model.norm.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with shared_prompts(model, PROMPTS[0]) as shared:
        with pytest.raises(RuntimeError, match="A hook takes the gradient of a parameter behind each part"):
            shared.log_probs(COMPLETIONS)
        with torch.no_grad():
            expected = shared.log_probs(COMPLETIONS)
        assert torch.allclose(log_probs(model, PROMPTS[0], COMPLETIONS), expected)
        handle.remove()
        shared.log_probs(COMPLETIONS).sum().backward()


@contextmanager
def doubled(model):
    """As averages of weights are put into the place of the trained ones for a while."""
    for factor in (2.0, 0.5):
        for param in model.parameters():
            param.data.mul_(factor)
        if factor > 1:
            yield


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "changed",
    [partial(rescale_adapter_scale, multiplier=0.3), lambda _: torch.autocast("cpu", torch.bfloat16), doubled],
)
def test_a_model_that_is_changed_for_a_while_has_prompts_of_its_own(changed, mixed):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(llama(), config, mixed=mixed)
    with torch.no_grad(), shared_prompts(model, PROMPTS[0]) as shared:
        before = shared.log_probs(COMPLETIONS)
        with changed(model):
            assert torch.equal(shared.log_probs(COMPLETIONS), log_probs(model, PROMPTS[0], COMPLETIONS))
        assert torch.equal(shared.log_probs(COMPLETIONS), before)
    with torch.no_grad(), shared_prompts(model, PROMPTS[0]) as shared:
        with changed(model):  # first
            shared.log_probs(COMPLETIONS)
        assert torch.equal(shared.log_probs(COMPLETIONS), before)


def test_adapters_on_experts_change_no_weight():
    """PEFT puts those weights in their places anew in each forward."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = build(family("qwen3_moe"))
    model.set_experts_implementation("eager")
    config = LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(model, config).double()
    with pure_float64():
        (whole_rows(model) * WEIGHTS).sum().backward()
        expected = gradient(model)
        with shared_prompts(model, PROMPTS, temperature=0.7) as shared:
            for row, completion in enumerate(COMPLETIONS):
                values = shared.log_probs([completion], [ROWS[row]])
                (values * WEIGHTS[row, : len(completion)]).sum().backward()
        assert_same(gradient(model), expected)


def test_dropout_matters_where_it_is_active():
    """GPT-2 has 0.1 of it everywhere, also in attention, and is loaded in evaluation mode."""
    model = build(family("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)).double().eval()
    with pure_float64():
        expected = whole_rows(model)
        values = log_probs(model, [PROMPTS[row] for row in ROWS], COMPLETIONS, temperature=0.7)
        assert_same(values, expected)
    with pytest.raises(ValueError, match=r"would share its dropout \(that of `transformer.drop` is 0.1\)"):
        log_probs(model.train(), PROMPTS[0], COMPLETIONS)
    model = build(family("llama", attention_dropout=0.1)).eval()
    assert log_probs(model, PROMPTS[0], COMPLETIONS).isfinite().all()
    with pytest.raises(ValueError, match=r"load it with `attention_dropout=0.0`"):
        log_probs(model.train(), PROMPTS[0], COMPLETIONS)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_reentrant_checkpointing_is_refused_whoever_asks_for_it(name):
    """It runs a layer without a graph first: the gradient was half of what it is."""
    model = build(FAMILIES[name])
    for layer in model.model.layers:
        own = layer.forward
        layer.forward = lambda x, own=own, **kwargs: checkpoint(lambda y: own(y, **kwargs), x, use_reentrant=True)
    values = log_probs(model, PROMPTS[0], COMPLETIONS)
    with pytest.raises(RuntimeError, match="is in reentrant gradient checkpointing, which cuts the gradient"):
        values.sum().backward()
    assert log_probs(model, PROMPTS[0], COMPLETIONS).isfinite().all()


@torch.no_grad()
def test_a_model_scores_whose_weights_are_elsewhere():
    expected, model = log_probs(llama(), PROMPTS[0], COMPLETIONS), llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta" and torch.equal(log_probs(model, PROMPTS[0], COMPLETIONS), expected)
    assert not shares_starts(model)  # which could not be tried


def test_a_copy_of_a_hybrid_shares_as_it_does():
    """As a reference is made of a policy that has trained already."""
    model = build(FAMILIES["hybrid"])
    expected = log_probs(model, PROMPTS[0], COMPLETIONS)
    for _ in range(2):
        model = copy.deepcopy(model)
        assert torch.equal(log_probs(model, PROMPTS[0], COMPLETIONS), expected)


def test_tensors_of_the_host_are_there_whatever_the_default_device_is():
    model, expected = build(FAMILIES["windows and caps"]), log_probs(build(FAMILIES["windows and caps"]), LONG, [LONG])
    with torch.device("meta"):
        assert torch.equal(log_probs(model, LONG, [LONG]), expected)


def test_logits_are_those_of_a_model_that_is_compiled_in_one_graph():
    model = llama()
    expected = log_probs(model, PROMPTS[0], COMPLETIONS)
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(log_probs(model, PROMPTS[0], COMPLETIONS), expected)


@torch.no_grad()
def test_threads_can_score_with_one_model():
    model = build(FAMILIES["llama"])
    states = model.model(input_ids=LONG[None]).last_hidden_state
    expected, errors = log_probs(build(FAMILIES["llama"]), PROMPTS[0], COMPLETIONS), []

    @torch.no_grad()
    def score():
        try:
            for _ in range(20):
                torch.testing.assert_close(log_probs(model, PROMPTS[0], COMPLETIONS), expected)
                torch.testing.assert_close(model.model(input_ids=LONG[None]).last_hidden_state, states)
        except Exception as error:
            errors.append(error)

    threads, interval = [threading.Thread(target=score) for _ in range(3)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and "forward" not in vars(model.model)


@torch.no_grad()
def test_hooks_of_the_backbone_run_while_another_thread_is_in_the_head():
    model, seen = llama(), []
    other = threading.Thread(target=lambda: model.model(input_ids=LONG[None]))
    model.model.register_forward_hook(lambda *given: seen.append(given))
    model.lm_head.register_forward_pre_hook(lambda *given: other.start() or other.join())
    logits_of(model, torch.zeros(2, 32))
    assert len(seen) == 1
