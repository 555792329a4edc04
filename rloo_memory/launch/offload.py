"""Models that wait on the host until they are called, and activations that wait there for the backward."""


def keep_on_host(trainer, model) -> None:
    """The reference or a reward model comes to the device when it is called and leaves it before the policy trains.

    Nothing is copied when it leaves: its weights do not change, and the host has them all the time."""
    import torch

    model, device = trainer.accelerator.unwrap_model(model).cpu(), trainer.accelerator.device
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if getattr(model, "is_quantized", False):  # weights with states of their own, which move with them
        from accelerate import cpu_offload_with_hook

        model, hook = cpu_offload_with_hook(model, device)
        policy.register_forward_pre_hook(lambda *_: hook.offload() if torch.is_grad_enabled() else None)
        return
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]

    def come(*_) -> None:
        for tensor, host in kept:
            if tensor.device.type != device.type:
                tensor.data = host.to(device)

    def leave(*_) -> None:
        if torch.is_grad_enabled():
            for tensor, host in kept:
                tensor.data = host

    model.register_forward_pre_hook(come)
    policy.register_forward_pre_hook(leave)


def offload_activations(trainer) -> None:
    """What is saved for the backward goes to the host, as TRL's SFT and DPO trainers have it."""
    from trl.models import get_act_offloading_ctx_manager

    context, training_step = get_act_offloading_ctx_manager(model=trainer.model), trainer.training_step

    def offloading(*args, **kwargs):
        with context:
            output = training_step(*args, **kwargs)
        for name in ("tracker", "storage_to_tensor_id", "_storage_key_by_tensor_id"):  # TRL keeps them until the next
            getattr(context, name, {}).clear()
        return output

    trainer.training_step = offloading
