"""Tiny models that take images, prompts with images, and what went through the vision towers.

Token ids and pixels are made by hand, so no processor is needed. One batch has what there is to get wrong: a prompt
with two images, one without any, and two prompts of equal text with different images; left padding, completions of
different length, one of them empty.
"""

import copy
import itertools

import torch

from experiments.checks import family_check
from experiments.checks.family_check import error_of, gradient_of, prepared
from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import FIRST_TOKEN, LAST_TOKEN, build, family
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

ROWS_PER_PROMPT = 3
# Images of each prompt: height and width, in blocks of 8 x 8 pixels. The last two have the same text.
PROMPTS = ([(2, 2), (2, 4)], [], [(2, 2)], [(2, 2)])
LENGTHS = (7, 3, 1, 5, 0, 2, 4, 4, 6, 1, 2, 7)  # of the completions
COLUMNS = max(LENGTHS)
PATCHES = {"image_size": 16, "patch_size": 4}
# Gemma 4 has no tower unless it is asked for, so one is not made small with the rest
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
}  # fmt: skip
# What makes a tiny model take such images
CONFIGS = {
    "gemma3": {"mm_tokens_per_image": 4, "vision_config": PATCHES},
    "gemma4": {"vision_config": GEMMA4_VISION},
    # In the large ones, the tokens of an image see each other
    "gemma4-blocks": {"vision_config": GEMMA4_VISION, "text_config": {"use_bidirectional_attention": "vision"}},
    "mistral3": {"vision_config": PATCHES},
    "qwen2_vl": {"vision_config": {"patch_size": 4}},
    "qwen2_5_vl": {"vision_config": {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {"vision_config": {"patch_size": 4, "deepstack_visual_indexes": [0]}},
    "qwen3_5": {"vision_config": {"patch_size": 4}},
    "glm4v": {"vision_config": PATCHES},
    "internvl": {"image_seq_length": 4, "vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "llava": {"vision_config": PATCHES},
    "smolvlm": {"scale_factor": 2, "vision_config": PATCHES},
}


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


def flat(images):
    return dict(pixel_values=torch.stack([x[:, :16, :16] for x in images]))


def qwen(images):
    """Patches of two equal frames, four neighbors after one another, and the grid of each image."""
    rows, grids = [], []
    for x in images:
        height, width = x.shape[1] // 4, x.shape[2] // 4
        x = x.view(3, 1, height // 2, 2, 4, width // 2, 2, 4).expand(-1, 2, -1, -1, -1, -1, -1, -1)
        rows.append(x.permute(2, 5, 3, 6, 0, 1, 4, 7).reshape(height * width, 3 * 2 * 4 * 4))
        grids.append([1, height, width])
    return dict(pixel_values=torch.cat(rows), image_grid_thw=torch.tensor(grids))


def sized(images):
    height, width = (max(x.shape[i] for x in images) for i in (1, 2))
    pixels = [torch.nn.functional.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]
    return dict(pixel_values=torch.stack(pixels), image_sizes=torch.tensor([x.shape[1:] for x in images]))


def positioned(images):
    """Flattened patches, padded to the image with the most, and the place of each (Gemma 4)."""
    rows, places = [], []
    for x in images:
        height, width = x.shape[1] // 4, x.shape[2] // 4
        rows.append(torch.nn.functional.unfold(x[None], 4, stride=4)[0].T + 0.5)
        places.append(
            torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1).view(-1, 2)
        )
    return dict(
        pixel_values=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        image_position_ids=torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1),
    )


def per_sample(images_of_row):
    """A row for each sample, padded with empty images, and which pixels are there (Idefics, SmolVLM)."""
    most = max(len(images) for images in images_of_row)
    pixels = torch.zeros(len(images_of_row), most, 3, 16, 16)
    mask = torch.zeros(len(images_of_row), most, 16, 16, dtype=torch.bool)
    for row, images in enumerate(images_of_row):
        for i, x in enumerate(images):
            pixels[row, i], mask[row, i] = x[:, :16, :16], True
    return dict(pixel_values=pixels, pixel_attention_mask=mask)


def blocks(image):
    """Number of 8 x 8 blocks."""
    return image.shape[1] * image.shape[2] // 64


def tiles(image):
    """InternVL cuts an image in tiles of 16 x 16."""
    return image.shape[2] // 16


# (layout of the pixels, number of tokens of an image, field of the token types)
FAMILIES = {
    "gemma3": (flat, lambda image: 4, "token_type_ids"),
    "gemma4": (positioned, blocks, "mm_token_type_ids"),
    "gemma4-blocks": (positioned, blocks, "mm_token_type_ids"),
    "mistral3": (sized, blocks, None),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"), (qwen, blocks, "mm_token_type_ids")),
    "internvl": (lambda images: dict(pixel_values=torch.cat([torch.stack(x.split(16, 2)) for x in images])),
                 lambda image: 4 * tiles(image), None),
    "llava": (flat, lambda image: 16, None),
    "smolvlm": (None, lambda image: 4, None),
}  # fmt: skip


def batch(family, image_token, seed=7, start=0):
    """Inputs of the model, number of prompt columns, images and tiles of each row. All prompts begin with two tokens
    of text, and some more at the `start`."""
    layout, tokens_of, types = FAMILIES[family]
    torch.manual_seed(seed)
    text = torch.randint(FIRST_TOKEN, LAST_TOKEN, (6 + start,)).tolist()
    begin, between, end = text[: 2 + start], text[2 + start : 4 + start], text[4 + start :]
    # (channels, height, width)
    images_of_prompt = [[torch.rand(3, 8 * x, 8 * y) - 0.5 for x, y in images] for images in PROMPTS]
    prompts = []
    for images in images_of_prompt:
        with_text = ([image_token] * tokens_of(image) + between for image in images)
        prompts.append([*begin, *itertools.chain.from_iterable(with_text), *end])
    prompt_columns = max(map(len, prompts))
    ids, mask = in_rows(prompts, prompt_columns)
    images_of_row = [images_of_prompt[row // ROWS_PER_PROMPT] for row in range(len(ids))]
    flat_images = [image for images in images_of_row for image in images]
    inputs = per_sample(images_of_row) if layout is None else layout(flat_images)
    if types:
        inputs[types] = ((ids == image_token) & (mask == 1)).long()
    counts = dict(num_images=[len(images) for images in images_of_row])
    if family == "internvl":
        counts["num_tiles"] = [sum(map(tiles, images)) for images in images_of_row]
    inputs = {name: x.to(torch.get_default_dtype()) if x.is_floating_point() else x for name, x in inputs.items()}
    return dict(input_ids=ids, attention_mask=mask, **inputs), prompt_columns, counts


def in_rows(prompts, columns):
    """Ids and mask: prompts that end at that column, and behind it random completions of `LENGTHS`."""
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (len(LENGTHS), columns + COLUMNS))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        prompt = prompts[row // ROWS_PER_PROMPT]
        padding = columns - len(prompt)
        ids[row, :padding], mask[row, :padding] = 0, 0
        ids[row, padding:columns] = torch.tensor(prompt)
        mask[row, columns + length :] = 0
    return ids, mask


def build_with_images(name, dtype):
    return prepared(build(family(name.removesuffix("-blocks"), **copy.deepcopy(CONFIGS[name]))), dtype)


def run(model, inputs, prompt, **shared):
    """(log-probabilities and entropies, gradient of all parameters, gradient of the tower)"""
    return *family_check.run(model, inputs, prompt, **shared), gradient_of(tower(model))


def errors_beside_float64(name, ways, seeds=(7,), device="cpu"):
    """Of bfloat16 weights: {"whole rows" or way: [errors of what `run` gives] of each batch}, beside the same rounded
    weights in float64 on the host. `ways` are settings of passes by name."""
    model, exact = build_with_images(name, torch.bfloat16), build_with_images(name, torch.bfloat16).double()
    batches = [batch(name, model.config.image_token_id, seed) for seed in seeds]
    with pure_float64():
        truths = [run(exact, inputs, prompt) for inputs, prompt, _ in batches]
    model.to(device)

    def errors(settings=None):
        found = []
        for (inputs, prompt, counts), truth in zip(batches, truths, strict=True):
            passes = None if settings is None else SharedPrefixPasses(prompt, **settings, **counts)
            found.append(error_of(run(model, inputs, prompt, passes=passes), truth))
        return found

    whole = errors()
    enable_prefix_sharing(model)
    return {"whole rows": whole, **{way: errors(settings) for way, settings in ways.items()}}
