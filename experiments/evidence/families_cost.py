"""Generation, scoring and policy forward/backward of one group on models beyond text transformers, alternating.

    python -m experiments.evidence.families_cost [--families gated-deltanet,mamba-2,images] [--repeats 3]

Whole rows against prefix sharing with all or two completions together: the same narrow model in float32, gradient
checkpointing and compact LM head for each. `gated-deltanet` is Qwen3.5's text model and `mamba-2` Bamba's, both at a
prompt of 3,000 and completions of 100; `images` is Qwen2.5-VL's architecture at a prompt of 1,024 image tokens (4,096
patches) and 200 of text. The operators are PyTorch's own: there are no kernels for recurrent layers on a CPU.

Writes one row a repeat to results/<machine>/families/<family>.csv: seconds and peak resident bytes above the level
before of each phase, how many images went through the vision tower in all three, and the relative difference of all
parameters' gradients from those of whole rows.
"""

import os
import statistics
import sys
from contextlib import nullcontext

from experiments import config as cfg
from experiments.builds import use_fork
from experiments.config import ARMS
from experiments.device import keep_only_live_memory
from experiments.evidence.common import FACTS, Parser, Place, Table, place, whole, words
from experiments.evidence.rivals import measured
from experiments.phases import HighWater

PHASES = ("generate", "score", "train")
COLUMNS = (
    "way", "repeat", *(f"{phase}_seconds" for phase in PHASES), *(f"{phase}_peak_bytes" for phase in PHASES),
    "images_encoded", "gradient_difference", "family", "prompt_tokens", "completion_tokens", "k", *FACTS,
)  # fmt: skip
WAYS = {"whole": None, "shared": {}, "shared-2": {"completions_per_forward": 2}}
VOCAB, LAYERS, HIDDEN, K, COMPLETION = 32_000, 8, 256, 8, 100
IMAGE_SIDE, IMAGE_TOKEN, TEXT = 64, 3, 200  # patches; four of them are a token
PROMPT = {"gated-deltanet": 3000, "mamba-2": 3000, "images": IMAGE_SIDE**2 // 4 + TEXT}


def build_model(family: str):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    width = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    if family == "gated-deltanet":
        heads = dict(
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64, linear_value_head_dim=64
        )
        config = CONFIG_MAPPING["qwen3_5_text"](**width, **heads, head_dim=64)
        return AutoModelForCausalLM.from_config(config)
    if family == "mamba-2":
        heads = dict(mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64, mamba_n_groups=1)
        config = CONFIG_MAPPING["bamba"](**width, **heads, attn_layer_indices=[3, 7])
        return AutoModelForCausalLM.from_config(config)
    # As in Qwen2.5-VL 3B, the tower has about three quarters of the text model's multiplications on such a prompt
    vision = dict(
        depth=2, fullatt_block_indexes=[1], hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, out_hidden_size=HIDDEN,
        num_heads=4,
    )  # fmt: skip
    text = dict(width, rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]))
    special = dict(image_token_id=IMAGE_TOKEN, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision, **special)
    return AutoModelForImageTextToText.from_config(config)


class Group:
    """One prompt with k completions, and the phases of a training step on it."""

    def __init__(self, family: str):
        import torch
        from trl.models.prefix_sharing import enable_prefix_sharing
        from trl.trainer.utils import add_fused_lm_head

        torch.manual_seed(0)
        self.torch, self.prompt = torch, PROMPT[family]
        self.model = build_model(family).train()
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        enable_prefix_sharing(self.model)
        self.ids = torch.randint(10, VOCAB, (K, self.prompt + COMPLETION))
        self.ids[:, : self.prompt] = self.ids[0, : self.prompt]
        self.weights = torch.linspace(-1, 1, K * COMPLETION).view(K, COMPLETION)
        self.images, self.num_images, self.encoded = {}, None, 0
        if family == "images":
            self.ids[:, 20 : 20 + IMAGE_SIDE**2 // 4] = IMAGE_TOKEN
            self.images = {
                "pixel_values": torch.randn(IMAGE_SIDE**2, 3 * 2 * 14 * 14).repeat(K, 1),
                "image_grid_thw": torch.tensor([[1, IMAGE_SIDE, IMAGE_SIDE]] * K),
            }
            self.num_images = [1] * K
            self.model.base_model.visual.register_forward_pre_hook(self.count)

    def count(self, tower, args):
        self.encoded += len(args[0]) // IMAGE_SIDE**2

    def inputs(self, ids) -> dict:
        types = {"mm_token_type_ids": (ids == IMAGE_TOKEN).long()} if self.images else {}
        return {"input_ids": ids, "attention_mask": self.torch.ones_like(ids), **types, **self.images}

    def generate(self, way: str):
        from transformers import GenerationConfig
        from trl.generation.shared_prefix import generate_with_shared_prefix

        length = {"max_new_tokens": COMPLETION, "min_new_tokens": COMPLETION}
        config = GenerationConfig(**length, do_sample=True, pad_token_id=0, eos_token_id=1, disable_compile=True)
        inputs = self.inputs(self.ids[:, : self.prompt])
        self.model.eval()
        with self.torch.no_grad():
            if way == "whole":
                self.model.generate(**inputs, generation_config=config)
            else:
                sharing = {"group_size": K, "num_images": self.num_images}
                generate_with_shared_prefix(self.model, generation_config=config, **sharing, **inputs)
        self.model.train()

    def log_probs(self, way: str):
        from trl.models.prefix_sharing import SharedPrefixPasses

        labels = self.ids.clone()
        labels[:, : self.prompt] = -100
        shared = WAYS[way]
        passes = None
        if shared is not None:
            passes = SharedPrefixPasses(self.prompt, group_size=K, num_images=self.num_images, **shared)
        output = self.model(**self.inputs(self.ids), labels=labels, fused_lm_head=True, passes=passes)
        return output.log_probs[:, -COMPLETION:]

    def score(self, way: str):
        with self.torch.no_grad():
            self.log_probs(way)

    def train(self, way: str):
        self.model.gradient_checkpointing_enable()  # as the trainer does: off while completions are generated
        (self.log_probs(way) * self.weights).sum().backward()
        self.model.gradient_checkpointing_disable()

    def gradient(self):
        return self.torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def attention_of(model, way: str):
    """Whole rows go through the attention that stock has."""
    from trl.models.prefix_sharing import use_base_attention

    return use_base_attention(model) if way == "whole" else nullcontext()


def run(argv: list[str] | None) -> int:
    parser = Parser("families_cost", __doc__, cpu_only=True)
    parser.add_argument("--families", default=",".join(PROMPT), help=f"some of {', '.join(PROMPT)}")
    parser.add_argument("--repeats", type=whole(1, 100), default=3)
    args = parser.parse_args(argv)
    families = words("family", args.families, PROMPT)
    here = place(args)
    (here.folder / "families").mkdir(exist_ok=True)
    use_fork(ARMS["shared"])
    for number, family in enumerate(families, start=1):
        print(f"{family}, {number} of {len(families)}", flush=True)
        measure(family, here, args.repeats, args.fresh)
    return 0


def measure(family: str, here: Place, repeats: int, fresh: bool) -> None:
    """Brings results/<machine>/families/<family>.csv to `repeats` rows of each way, and prints their medians."""
    sizes = {"prompt_tokens": PROMPT[family], "completion_tokens": COMPLETION, "k": K}
    path = here.folder / "families" / f"{family}.csv"
    table = Table(path, COLUMNS, {"family": family, **sizes, **here.facts}, fresh)
    missing = [(repeat, way) for repeat in range(repeats) for way in WAYS if not table.has(way=way, repeat=repeat)]
    if missing:
        keep_only_live_memory()
        group, high_water = Group(family), HighWater("cpu")
        group.train("whole")
        truth = group.gradient()
        for repeat, way in missing:
            row = {"way": way, "repeat": repeat}
            group.encoded = 0
            group.model.zero_grad(set_to_none=False)
            with attention_of(group.model, way):
                for phase in PHASES:
                    _, seconds, peak = measured(high_water, lambda phase=phase, way=way: getattr(group, phase)(way))
                    row |= {f"{phase}_seconds": round(seconds, 4), f"{phase}_peak_bytes": peak}
            difference = (group.gradient() - truth).norm() / truth.norm()
            table.add({**row, "images_encoded": group.encoded, "gradient_difference": f"{difference.item():.2e}"})
            print(f"{way}: {repeat + 1} of {repeats}, {sum(row[f'{x}_seconds'] for x in PHASES):.1f} s", flush=True)
    table.finish()
    for way in WAYS:
        mine = [row for row in table.rows if row["way"] == way]
        medians = {name: statistics.median(float(row[name]) for row in mine) for name in COLUMNS[2:9]}
        phases = "   ".join(
            f"{x} {medians[f'{x}_seconds']:6.2f} s, {medians[f'{x}_peak_bytes'] / 2**20:6.0f} MiB" for x in PHASES
        )
        print(f"{way:9} {phases}   {medians['images_encoded']:.0f} images")
    print(os.path.relpath(path))


def main(argv: list[str] | None = None) -> int:
    return cfg.exit_code("families_cost", run, argv)


if __name__ == "__main__":
    sys.exit(main())
