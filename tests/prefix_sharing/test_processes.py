import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rloo_memory.prefix_sharing.enabling import CannotShare, enable_prefix_sharing, shares_starts
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses, takes_whole_rows

from .conftest import llama

pytestmark = pytest.mark.slow


class TestPrefixSharingProcesses:
    def test_a_process_alone_waits_for_no_other(self, monkeypatch):
        model = llama()
        ids = torch.randint(10, 100, (4, 12))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: pytest.fail("waited"))
        output = TokenBudgetPasses(4, tokens_per_forward=24).forward(model.base_model, ids, torch.ones_like(ids))
        assert output.last_hidden_state.shape[:2] == (4, 9)

    def test_where_weights_are_divided_equal_prompts_are_shared_and_nothing_that_was_not_tried(self):
        distributed, model = torch.distributed, llama()
        enable_prefix_sharing(model)
        assert shares_starts(model) and takes_whole_rows(model)
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            enable_prefix_sharing(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
        finally:
            distributed.destroy_process_group()
        assert not shares_starts(model) and not takes_whole_rows(model)

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
