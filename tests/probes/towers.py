"""The vision tower of a model with images, and how many pixels went through it."""


def tower(model):
    decoder = model.base_model.get_decoder()
    return next(x for x in model.base_model.children() if hasattr(x, "config") and x is not decoder)


class Encoded:
    """Counts the pixels that go into the vision tower."""

    def __init__(self, model):
        self.pixels = 0
        tower(model).register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        self.pixels += (args[0] if args else kwargs["pixel_values"]).numel()

    def since(self):
        pixels, self.pixels = self.pixels, 0
        return pixels
