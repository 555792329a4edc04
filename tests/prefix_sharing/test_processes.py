from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing.enabling import CannotShare, enable_prefix_sharing, shares_starts
from rloo_memory.prefix_sharing.probe import can_be_tried
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses, takes_whole_rows
from rloo_memory.prefix_sharing.trainer import TrainerPasses

from .conftest import llama

pytestmark = pytest.mark.slow


SHARED = SimpleNamespace(
    prefix_sharing=True, tokens_per_forward=None, shares_dropout=False, gradient_checkpointing=False, use_vllm=False,
    use_transformers_continuous_batching=False, num_generations=2, per_device_train_batch_size=2,
)  # fmt: skip
ONE_PROCESS = SimpleNamespace(
    distributed_type=DistributedType.NO, device="cpu", num_processes=1, state=SimpleNamespace(deepspeed_plugin=None)
)


@pytest.fixture
def divided():
    """What divides the weights of a model, as FSDP2 does, between this process and no other."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    torch.distributed.destroy_process_group()


class TestPrefixSharingProcesses:
    def test_a_process_alone_waits_for_no_other(self, monkeypatch):
        model = llama()
        ids = torch.randint(10, 100, (4, 12))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: pytest.fail("waited"))
        output = TokenBudgetPasses(4, tokens_per_forward=24).forward(model.base_model, ids, torch.ones_like(ids))
        assert output.last_hidden_state.shape[:2] == (4, 9)

    @pytest.mark.parametrize(
        "policy, reference, is_shared",
        [("llama", "llama", True), ("gpt2", "gpt2", False), ("llama", "mistral", False), (None, "llama", False)],
    )
    def test_a_reference_whose_weights_are_divided_shares_what_the_policy_was_tried_with(
        self, policy, reference, is_shared, divided
    ):
        """TRL divides it before. Of a kind that was not tried, only equal prompts are shared."""
        reference = divided(build(family(reference)))
        policy = divided(llama()) if policy is None else build(family(policy))
        assert takes_whole_rows(policy) is (True if can_be_tried(policy) else None)
        passes = TrainerPasses(SHARED, ONE_PROCESS, policy, reference)
        assert ("what different prompts begin with, too" in passes.what_is_shared()) == is_shared
        assert shares_starts(policy) == shares_starts(reference) == is_shared
        assert takes_whole_rows(reference) is None

    @pytest.mark.parametrize(
        "message, error", [("CUDA error: no kernel image is available", RuntimeError), ("other shapes", ValueError)]
    )
    def test_a_fault_of_the_device_is_not_the_models(self, message, error, monkeypatch):
        def fails(*args, **kwargs):
            raise RuntimeError(message)

        monkeypatch.setattr("rloo_memory.prefix_sharing.enabling.error_of_passes", fails)
        model = llama()
        with pytest.raises(error) as caught:
            enable_prefix_sharing(model)
        assert isinstance(caught.value, CannotShare) == (error is ValueError)
