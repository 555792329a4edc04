"""Whole training runs on prompts with images, with and without prefix sharing (see shared_trainer, whose settings it
takes): what is logged, the trained parameters, and the images that went through the vision towers.

    shared_images_trainer.py [START]

START is how the names of the wanted scenarios begin.

The processors are made here, of tiny tokenizers and the image processors that need no torchvision. Those of Qwen,
InternVL and SmolVLM leave out the part for videos, which needs it.
"""

import copy
import functools
import json
import logging
import re
import sys

import shared_trainer
import torch
from datasets import Dataset
from image_rows import Encoded, tower
from peft import LoraConfig
from shared_trainer import TOKENIZER
from transformers import AutoModelForImageTextToText, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from experiments.workload.pictures import TEMPLATE, QwenProcessor, WithoutVideos, picture, with_image_tokens

SIZE = dict(height=16, width=16)


class InternVL(WithoutVideos, InternVLProcessor):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        WithoutVideos.__init__(self, image_processor, tokenizer, chat_template)
        self.image_seq_length = 4
        self.start_image_token, self.start_image_token_id = tokenizer.start, tokenizer.start_id
        self.end_image_token, self.end_image_token_id = tokenizer.end, tokenizer.end_id
        self.multimodal_pattern = re.compile("(?P<image><image>)|(?P<video><video>)")


class SmolVLM(WithoutVideos, SmolVLMProcessor):
    apply_chat_template = ProcessorMixin.apply_chat_template

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        WithoutVideos.__init__(self, image_processor, tokenizer, chat_template)
        self.fake_image_token, self.global_image_token, self.image_seq_len = "<start>", "<end>", 4


def qwen_images():
    return Qwen2VLImageProcessorPil(patch_size=4, size=dict(shortest_edge=64, longest_edge=1024))


def pixtral(tokenizer, template):
    # Both have the function that the processor imports, but this one comes without torchvision
    sys.modules["transformers.models.pixtral.image_processing_pixtral"] = image_processing_pil_pixtral
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    class Pixtral(PixtralProcessor):
        text_kwargs = {}  # lists, as prompts differ in length

    images = image_processing_pil_pixtral.PixtralImageProcessorPil(patch_size=4, size=dict(longest_edge=32))
    tokens = dict(image_token="<image>", image_break_token="<start>", image_end_token="<end>")
    return Pixtral(images, tokenizer, patch_size=4, spatial_merge_size=2, chat_template=template, **tokens)


# (processor, what stands for an image in a prompt)
PROCESSORS = {
    "gemma3": (lambda tokenizer, template: Gemma3Processor(
        Gemma3ImageProcessorPil(size=SIZE), tokenizer, chat_template=template, image_seq_length=4), "<boi>"),
    "llava": (lambda tokenizer, template: LlavaProcessor(
        CLIPImageProcessorPil(size=SIZE, crop_size=SIZE), tokenizer, chat_template=template, patch_size=4,
        vision_feature_select_strategy="default", num_additional_image_tokens=1), "<image>"),
    "qwen2_5_vl": (lambda *parts: QwenProcessor(qwen_images(), *parts), "<start><image><end>"),
    "qwen3_vl": (lambda *parts: QwenProcessor(qwen_images(), *parts), "<start><image><end>"),
    "internvl": (lambda tokenizer, template: InternVL(
        GotOcr2ImageProcessorPil(size=SIZE, crop_to_patches=True, min_patches=1, max_patches=3), tokenizer, template),
        "<image>"),
    "smolvlm": (lambda tokenizer, template: SmolVLM(
        SmolVLMImageProcessorPil(size=dict(longest_edge=16), max_image_size=dict(longest_edge=16),
                                 do_image_splitting=False), tokenizer, template), "<image>"),
    "mistral3": (pixtral, "<image>"),
}  # fmt: skip


def rows(text_too, text_alone, alike):
    """Prompts with two images of different sizes, with equal texts and different images, and one without an image; all
    behind the same words if `alike`."""
    system = [{"role": "system", "content": shared_trainer.COMMON}] if alike else []
    images = [
        [picture(16, 16, 0), picture(32, 16, 1)],
        [picture(16, 16, 2)],
        [picture(16, 16, 3)],
        [picture(16, 32, 4)],
    ]
    texts = ["apple stone river", "green paper", "green paper", "tiger tiger"]
    if text_too:
        images.insert(1, [])
        texts.insert(1, "seven")
    prompts = [[*system, {"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts} if text_alone else {"prompt": prompts, "images": images})


SCENARIOS = {
    "rloo gemma3": dict(family="gemma3", tokens_per_forward=2 * 7),
    "rloo gemma3, text alone": dict(family="gemma3", text_alone=True),
    "rloo llava": dict(family="llava", evaluate=True),
    "rloo qwen2_5_vl, lora": dict(family="qwen2_5_vl", lora=True, tokens_per_forward=2 * 7),
    "rloo qwen3_vl, some without": dict(family="qwen3_vl", text_too=True, batch=8, tokens_per_forward=1, alike=True),
    "rloo qwen3_vl, one of 4 a micro-batch": dict(
        family="qwen3_vl", text_too=True, batch=1, gradient_accumulation_steps=8, alike=True
    ),
    "rloo smolvlm, some without": dict(family="smolvlm", text_too=True, batch=8),
    "rloo mistral3": dict(family="mistral3", batch=8, beta=0.0),
    "grpo gemma3": dict(trainer="grpo", family="gemma3", batch=8, beta=0.05, evaluate=True, alike=True),
    "grpo llava": dict(trainer="grpo", family="llava", gradient_checkpointing=False, tower_trained=False),
    "grpo qwen2_5_vl": dict(trainer="grpo", family="qwen2_5_vl", beta=0.05, batch=8, tokens_per_forward=9),
    "grpo internvl": dict(trainer="grpo", family="internvl", steps_per_generation=2),
    "grpo internvl, two of 4 a micro-batch": dict(
        trainer="grpo",
        family="internvl",
        batch=2,
        lora=True,
        gradient_accumulation_steps=4,
        num_iterations=2,
        alike=True,
    ),
}


def build_model(family, processor):
    tokenizer = processor.tokenizer
    token_of = dict(image_token_id="image", image_token_index="image", boi_token_index="boi", eoi_token_index="eoi",
                    vision_start_token_id="start", vision_end_token_id="end", video_token_id="video")  # fmt: skip
    config = shared_trainer.multimodal_config(
        family, lambda name: tokenizer.convert_tokens_to_ids(f"<{token_of[name]}>"), len(tokenizer)
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # Gemma 3's projector: no image would matter
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.suppress_tokens = list(range(len(TOKENIZER), len(tokenizer)))
    return model


def train(
    folder, shared, family, trainer="rloo", batch=4, text_too=False, text_alone=False, evaluate=False, lora=False,
    tower_trained=True, tokens_per_forward=None, alike=False, **options,
):  # fmt: skip
    make_processor, image = PROCESSORS[family]
    processor = make_processor(with_image_tokens(copy.deepcopy(TOKENIZER)), TEMPLATE.replace("IMAGE", image))
    shared_trainer.save_policy(folder, build_model(family, processor))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    tower(model).requires_grad_(tower_trained)
    lora_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    run = shared_trainer.build_trainer(
        trainer,
        folder,
        model,
        rows(text_too, text_alone, alike),
        evaluate,
        dict(reward_funcs=reward_of_text, processing_class=processor, peft_config=lora_config),
        per_device_train_batch_size=batch,
        generation_kwargs={"suppress_tokens": model.generation_config.suppress_tokens},
        prefix_sharing=shared,
        tokens_per_forward=tokens_per_forward if shared else None,
        **{"learning_rate": 1e-3, **options},
    )
    if shared:
        run.prompt_sharing.compared = True  # whole rows beside the first batch would be encoded, too
    models = [x for x in (run.model.get_base_model() if lora else run.model, run.ref_model) if x is not None]
    encoded = [Encoded(x) for x in models]
    counts = shared_trainer.train_counting(run)
    return *shared_trainer.outcome(run), counts | {"pixels": sum(each.pixels for each in encoded)}


def reward_of_text(completions, **kwargs):
    return shared_trainer.reward([completion[0]["content"] for completion in completions])


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(shared_trainer.compare_all(SCENARIOS, functools.partial(shared_trainer.compare, train))))
