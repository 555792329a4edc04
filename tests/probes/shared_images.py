"""Prompts with images, shared against whole: log-probabilities, gradients of all parameters and the images encoded.

    shared_images.py scores|decodes|refusals, or half-precision FAMILY ...

Token ids and pixels are made by hand, so no processor is needed, and all but half precision computes in float64 (see
shared_exactness). One batch has what there is to get wrong: a prompt with two images, one without any, and two prompts
of equal text with different images; left padding, completions of different length, one of them empty.
"""

import copy
import functools
import json
import sys
from unittest import mock

import torch
from architectures import ARCHITECTURES, FIRST_SPECIAL
from shared_exactness import build, error, gradient_of, passes_of, pure_float64, run_inputs
from towers import Encoded, tower
from transformers import GenerationConfig

from rloo_memory.prefix_sharing import images as prefix_images
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.images import MultimodalInputs

ROWS_PER_PROMPT = 3
# Images of each prompt: height and width, in blocks of 8 x 8 pixels. The last two have the same text.
PROMPTS = ([(2, 2), (2, 4)], [], [(2, 2)], [(2, 2)])
LENGTHS = (7, 3, 1, 5, 0, 2, 4, 4, 6, 1, 2, 7)  # of the completions
COLUMNS = max(LENGTHS)


def add_pixels(images):
    """Random pixels of each image: (channels, height, width)."""
    return [torch.rand(3, 8 * height, 8 * width) - 0.5 for height, width in images]


def flat(images, height=16, width=16):
    return torch.stack([x[:, :height, :width] for x in images])


def patches(image, size):
    """(number of patches, channels * size * size), row after row."""
    return torch.nn.functional.unfold(image[None], size, stride=size)[0].T


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
        rows.append(patches(x, 4) + 0.5)
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


def fixed(number):
    return lambda image: number


def tiles(image):
    """InternVL cuts an image in tiles of 16 x 16."""
    return image.shape[2] // 16


# (layout of the pixels, number of tokens of an image, field of the token types)
FAMILIES = {
    "gemma3": (lambda images: dict(pixel_values=flat(images)), fixed(4), "token_type_ids"),
    "gemma4": (positioned, blocks, "mm_token_type_ids"),
    "gemma4-blocks": (positioned, blocks, "mm_token_type_ids"),
    "mistral3": (sized, blocks, None),
    "qwen2-vl": (qwen, blocks, "mm_token_type_ids"),
    "qwen2.5-vl": (qwen, blocks, "mm_token_type_ids"),
    "qwen3-vl": (qwen, blocks, "mm_token_type_ids"),
    "qwen3.5": (qwen, blocks, "mm_token_type_ids"),
    "glm4v": (qwen, blocks, "mm_token_type_ids"),
    "internvl": (lambda images: dict(pixel_values=torch.cat([torch.stack(x.split(16, 2)) for x in images])),
                 lambda image: 4 * tiles(image), None),
    "llava": (lambda images: dict(pixel_values=flat(images)), fixed(16), None),
    "smolvlm": (None, fixed(4), None),
}  # fmt: skip
GEMMA4_VISION = dict(pooling_kernel_size=2, position_embedding_size=16, num_key_value_heads=2, head_dim=8)
ARCHITECTURES["gemma4-nested"][1]["vision_config"] = GEMMA4_VISION | ARCHITECTURES["gemma4-nested"][1]["vision_config"]
# In the large ones, the tokens of an image see each other
ARCHITECTURES["gemma4-blocks-nested"] = copy.deepcopy(ARCHITECTURES["gemma4-nested"])
ARCHITECTURES["gemma4-blocks-nested"][1]["text_config"]["use_bidirectional_attention"] = "vision"
ARCHITECTURES["internvl-nested"][1]["image_seq_length"] = 4


def batch(family, image_token, seed=7):
    """Inputs of the model, number of prompt columns, images and tiles of each row."""
    layout, tokens_of, types = FAMILIES[family]
    torch.manual_seed(seed)
    text = torch.randint(3, FIRST_SPECIAL, (6,)).tolist()
    prompts, images_of_prompt = [], []
    for images in PROMPTS:
        images_of_prompt.append(add_pixels(images))
        ids = text[:2]
        for image in images_of_prompt[-1]:
            ids = ids + [image_token] * tokens_of(image) + text[2:4]
        prompts.append(ids + text[4:])
    prompt_columns = max(map(len, prompts))
    num_rows = len(PROMPTS) * ROWS_PER_PROMPT
    ids = torch.randint(3, FIRST_SPECIAL, (num_rows, prompt_columns + COLUMNS))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        prompt = prompts[row // ROWS_PER_PROMPT]
        padding = prompt_columns - len(prompt)
        ids[row, :padding], mask[row, :padding] = 0, 0
        ids[row, padding:prompt_columns] = torch.tensor(prompt)
        mask[row, prompt_columns + length :] = 0
    images_of_row = [images_of_prompt[row // ROWS_PER_PROMPT] for row in range(num_rows)]
    flat_images = [image for images in images_of_row for image in images]
    inputs = per_sample(images_of_row) if layout is None else layout(flat_images)
    if types:
        inputs[types] = ((ids == image_token) & (mask == 1)).long()
    counts = dict(num_images=[len(images) for images in images_of_row])
    if family == "internvl":
        counts["num_tiles"] = [sum(map(tiles, images)) for images in images_of_row]
    inputs = {name: x.to(torch.get_default_dtype()) if x.is_floating_point() else x for name, x in inputs.items()}
    return dict(input_ids=ids, attention_mask=mask, **inputs), prompt_columns, counts


def build_with_images(family, dtype):
    model = build(f"{family}-nested", dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # Gemma 3's projector: no image would matter
            torch.nn.init.normal_(parameter)
    return model


def run(model, inputs, prompt, **shared):
    tokens, gradient, _ = run_inputs(model, inputs, prompt, **shared)
    return tokens, gradient, gradient_of(tower(model))


SETTINGS = (
    # (gradient checkpointing, tower trained, settings)
    (False, True, dict()),
    (False, True, dict(tokens_per_forward=1)),
    (False, False, dict(completions_per_forward=2)),
    (True, True, dict(completions_per_forward=2)),
    (True, True, dict(tokens_per_forward=9)),
)


def scores(family):
    model = build_with_images(family, torch.float64)
    inputs, prompt, counts = batch(family, model.config.image_token_id)
    encoded = Encoded(model)
    tower(model).requires_grad_(True)
    truth = run(model, inputs, prompt)
    whole = encoded.since()
    enable_prefix_sharing(model)
    result = {"tokens": [], "gradient": [], "tower_gradient": [], "encoded": []}
    for checkpointing, trained, settings in SETTINGS:
        tower(model).requires_grad_(trained)
        expected = truth if trained else run(model, inputs, prompt)
        encoded.since()
        if checkpointing:
            model.gradient_checkpointing_enable()
        got = run(model, inputs, prompt, passes=passes_of(prompt, **settings, **counts))
        model.gradient_checkpointing_disable()
        result["encoded"].append(encoded.since() / whole)
        for name, x, y in zip(("tokens", "gradient", "tower_gradient"), got, expected, strict=True):
            result[name].append(error(x, y) if y.norm() > 0 else x.norm().item())
    result["tower_gradient_norm"] = truth[2].norm().item()
    return result


def decode(model, inputs, prompt, generate):
    """Logits of five steps, of shape (steps, rows, vocabulary). What is written differs between rows."""
    config = GenerationConfig(
        max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=1, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    of_tokens = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    inputs = {name: x[:, :prompt] if name in of_tokens else x for name, x in inputs.items()}
    with torch.no_grad():
        return torch.stack(generate(model, **inputs, generation_config=config).logits)


def decodes(family):
    model = build_with_images(family, torch.float64).eval()
    inputs, prompt, counts = batch(family, model.config.image_token_id)
    encoded = Encoded(model)

    def forced(row, tokens):
        return [3 + (5 * row + len(tokens)) % 50]

    whole_generate = functools.partial(type(model).generate, prefix_allowed_tokens_fn=forced)
    truth = decode(model, inputs, prompt, whole_generate)
    whole = encoded.since()
    enable_prefix_sharing(model)
    model.generate = functools.partial(whole_generate, model)
    result = {"logits": [], "encoded": []}
    for options in (counts, dict(group_size=ROWS_PER_PROMPT, **counts)):
        logits = decode(model, inputs, prompt, functools.partial(generate_with_shared_prefix, **options))
        result["logits"].append(error(logits, truth))
        result["encoded"].append(encoded.since() / whole)
    return result


def half_precision(family):
    """Errors with bfloat16 weights against the same rounded weights in float64, shared over stock's: root mean
    squares over some batches, as the rounding errors of one are a small sample."""
    errors = {"stock": [], "shared": []}
    model = build_with_images(family, torch.bfloat16)
    exact = build_with_images(family, torch.bfloat16).double()
    for shared in (False, True):
        if shared:
            enable_prefix_sharing(model)
        for seed in range(5):
            inputs, prompt, counts = batch(family, model.config.image_token_id, seed)
            with pure_float64():
                truth = run(exact, inputs, prompt)
            passes = dict(passes=passes_of(prompt, completions_per_forward=2, **counts)) if shared else {}
            got = run(model, inputs, prompt, **passes)
            errors["shared" if shared else "stock"].append([error(*pair) for pair in zip(got, truth, strict=True)])
    means = {name: torch.tensor(values).square().mean(0).sqrt() for name, values in errors.items()}
    ratios = (means["shared"] / means["stock"]).tolist()
    return dict(zip(("tokens", "gradient", "tower_gradient"), ratios, strict=True))


def refusals():
    model = build("qwen2.5-vl-nested", torch.float64)
    inputs, prompt, counts = batch("qwen2.5-vl", model.config.image_token_id)
    enable_prefix_sharing(model)

    def score(inputs=inputs, **settings):
        run(model, inputs, prompt, passes=passes_of(prompt, **{**counts, **settings}))

    def score_sharded():  # as if its layers were
        with mock.patch.object(prefix_images, "FSDPModule", torch.nn.Linear):
            score()

    def generate_behind_an_image():  # the last one, as it changes the inputs
        inputs["input_ids"][1, prompt - 1] = model.config.image_token_id
        decode(model, inputs, prompt, functools.partial(generate_with_shared_prefix, **counts))

    def divide_too_many():
        MultimodalInputs.of({"pixel_values": torch.zeros(5, 3, 4, 4)}, num_rows=4, num_images=[1, 1, 1, 1])

    messages = {}
    for name, function in {
        "fine": score,
        "no counts": functools.partial(score, num_images=None),
        "positions": functools.partial(score, dict(inputs, position_ids=inputs["input_ids"])),
        "more images than counted": divide_too_many,
        "sharded, a prompt without an image": score_sharded,
        "generation behind an image": generate_behind_an_image,
    }.items():
        try:
            messages[name] = function()
        except ValueError as problem:
            messages[name] = str(problem)
    return messages


if __name__ == "__main__":
    part, *families = sys.argv[1:]
    measure = {"scores": scores, "decodes": decodes, "half-precision": half_precision}.get(part)
    if part == "half-precision":
        results = {family: measure(family) for family in families}
    else:
        torch.set_default_dtype(torch.float64)
        with pure_float64():
            results = {family: measure(family) for family in FAMILIES} if measure else refusals()
    print(json.dumps(results))
