from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from cpu_offloading import get_act_offloading_ctx_manager

from experiments.checks.family_check import COMPLETION, PROMPT, TOLERANCE, error_of, in_float64, prepared, run
from experiments.checks.tiny_families import build, family
from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.offloaded import offloaded
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from tests.probes.tiny import build_trainer

from .conftest import TRAINERS, llama

pytestmark = pytest.mark.slow


def count_layer_forwards(model):
    # A norm and not the layer, whose hooks do not run when it is computed again
    counts = []
    norm = model.get_decoder().layers[0].input_layernorm
    norm.register_forward_pre_hook(lambda *args: counts.append(1) if torch.is_grad_enabled() else None)
    return counts


def offloading(way, model, memory):
    if way == "planner":
        return offloaded(model, memory)
    if not way.startswith("TRL"):
        return nullcontext()
    manager = get_act_offloading_ctx_manager(model, use_streams="streams" in way)
    pack = manager.pack_hook

    def counted(tensor):
        with memory.of_kind("host"):
            return pack(tensor)

    manager.pack_hook = counted
    return manager


def bytes_before_the_backward(way, num_layers, num_rows):
    """On the device and on the host, when all passes of the completions of a prompt went through the model."""
    prompt, completion = 40, 30
    model = build(family("qwen3", num_hidden_layers=num_layers, layer_types=["full_attention"] * num_layers))
    enable_prefix_sharing(prepared(model, torch.float32))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(3, 3 + prompt + completion).repeat(num_rows, 1)
    labels = ids.index_fill(1, torch.arange(prompt), -100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "fused_lm_head": True}
    passes = SharedPrefixPasses(prompt, 2 * (completion + 1), activation_offloading=way != "again")
    memory = LiveBytes()
    memory.watch(model)
    before = memory.total
    with memory, offloading(way, model, memory):
        outputs = model(**inputs, passes=passes)
        assert outputs.log_probs.requires_grad
        return memory.total - before, memory.live["host"]


class TestPrefixSharingOffloading:
    def test_what_waits_for_the_backward_does_not_grow_with_the_passes_on_the_device(self):
        """Per completion, the inputs of layers are on the device where passes are kept, neither computed again nor
        offloaded, and on the host if TRL's own code offloads them, or the planner by its rules: to the byte."""
        of_a_layer = 32 * 4 * (30 + 1)  # a completion's hidden states, with the prompt's last token
        alive = {}
        for way in ("again", "kept", "TRL", "TRL, streams", "planner"):
            alive[way] = [bytes_before_the_backward(way, layers, k) for layers in (3, 6) for k in (4, 12)]
            for place, ways_that_keep in enumerate(({"kept"}, {"TRL", "TRL, streams", "planner"})):
                few, more, few_in_six, more_in_six = (found[place] for found in alive[way])
                grows = (more_in_six - few_in_six - (more - few)) / 8
                assert grows == (3 * of_a_layer if way in ways_that_keep else 0), (way, place, alive)
        assert alive["planner"] == alive["TRL, streams"]

    # Two prompts, and two passes or more for each. Number of times that a layer runs: prompts and passes in the
    # forward, each again by layer, and all passes but the last as a whole
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize(
        "make_passes, prompts, passes",
        [
            (partial(SharedPrefixPasses, PROMPT, 1), 2, 6),
            (partial(SharedPrefixPasses, PROMPT, 8), 2, 4),
            (partial(TokenBudgetPasses, PROMPT, 2 * (PROMPT + COMPLETION)), 0, 3),
        ],
    )
    def test_log_probs_and_gradients(self, make_passes, prompts, passes, gradient_checkpointing):
        with in_float64():
            model = llama()
            truth = run(model)
            enable_prefix_sharing(model)
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            counts = count_layer_forwards(model)
            for activation_offloading in (False, True):
                counts.clear()
                with get_act_offloading_ctx_manager(model):
                    found = run(model, passes=make_passes(activation_offloading=activation_offloading))
                assert max(error_of(found, truth)) <= TOLERANCE
                by_layer = prompts + passes if gradient_checkpointing else 0
                whole = 0 if activation_offloading and gradient_checkpointing else passes - 1
                assert len(counts) == prompts + passes + by_layer + whole

    @pytest.mark.parametrize("prefix_sharing, prompts", [(True, 1), (False, 0)])
    @pytest.mark.parametrize("trainer_class", TRAINERS)
    def test_train(self, trainer_class, prefix_sharing, prompts):
        managers = []

        def make(model):
            managers.append(get_act_offloading_ctx_manager(model))
            return managers[-1]

        for activation_offloading in (False, True):
            options = {"prefix_sharing": prefix_sharing, "activation_offloading": activation_offloading}
            given = "tiny", ["w50 w51 w52"], "tiny-Qwen2ForSequenceClassification-2.5"
            with patch("trl.models.get_act_offloading_ctx_manager", make):
                trainer = build_trainer(trainer_class, self.tmp_dir, *given, tokens_per_forward=1, **options)
            counts = count_layer_forwards(trainer.model)
            trainer.train()
            whole = 0 if activation_offloading else 4 - 1
            assert len(counts) == 2 * (prompts + 4) + whole
            assert len(managers) == activation_offloading
            assert not any(manager.tracker or manager.storage_to_tensor_id for manager in managers)  # behind a step
