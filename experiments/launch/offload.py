"""Models that wait on the host until they are called."""


def keep_on_host(trainer, model) -> None:
    """The reference or a reward model comes to the device when it is called and leaves it before the policy trains."""
    import torch
    from accelerate import cpu_offload_with_hook

    model, hook = cpu_offload_with_hook(trainer.accelerator.unwrap_model(model).cpu(), trainer.accelerator.device)

    def before_forward(module, args):
        if torch.is_grad_enabled():
            hook.offload()

    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(before_forward)
