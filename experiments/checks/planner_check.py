"""The planner's predictions beside measurements: real trainings of small models, phase by phase.

    python -m experiments.checks.planner_check [--device cuda] [--cases shared-k8,...]

On CUDA the measure is torch's own peak of allocated bytes, on a CPU `LiveBytes`, which counts the same there. Two
updates are trained and the peaks of the second one compared, when the optimizer has its state. Each case
is a process of its own: what one leaves on the device would count in the next. Writes one row a case and phase to
results/<machine>/plan_check.csv, case by case; cases that this commit has measured there are not repeated. Beside
each stands what CUDA is predicted to take, where TRL's LM head has no logits of prompts, as it has on a CPU.
"""

import copy
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pandas

from experiments.checks.setup_trainer import build_trainer, text_dataset, train
from experiments.commit import is_same_code
from experiments.measuring import FACTS, need, place, words
from experiments.processes import in_its_own_process
from experiments.record import read_csv, write_csv
from experiments.run_options import Parser
from rloo_memory import data, models
from rloo_memory.errors import program
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.predict import predict
from rloo_memory.plan.setups import Setup
from rloo_memory.sizes import GIB

COLUMNS = (
    "case", "phase", "predicted_bytes", "measured_bytes", "error", "predicted_on_cuda_bytes", "shape", "vocab_size",
    "prompt_tokens", "completion_tokens", "k", "reserved_bytes", *FACTS,
)  # fmt: skip
PHASES = ("generate", "score", "train", "optimizer")
# (shape, vocabulary, prompt, completion): large enough that tensors, not bookkeeping, are what is counted
WORKLOADS = {"cpu": ("qwen3-8-layers", 8000, 256, 24), "cuda": ("qwen3-0.6b", 151_936, 3000, 256)}
# Shapes of other models, by the last word of a case: with a state in three of four layers, with a tower for images
OTHERS = {
    "deltanet": "qwen3.5-8-layers", "mamba2": "bamba-8-layers", "conv": "lfm2-8-layers",
    "qwen2vl": "qwen2.5-vl-8-layers", "qwen3vl": "qwen3-vl-8-layers", "gemma3": "gemma-3-8-layers",
}  # fmt: skip
IMAGE, SENTENCES = (280, 224), 12  # its pixels, and what stands behind it: some 200 tokens


def shape_of(case: str, device: str) -> str:
    """The built-in shape that a case trains."""
    return OTHERS.get(case.rpartition("-")[2], WORKLOADS[device][0])


def cases(device: str) -> dict[str, Setup]:
    _, _, prompt, completion = WORKLOADS[device]
    base = Setup(
        prompt_tokens=prompt,
        max_completion_length=completion,
        device=device,
        padded=False,
        dtype="float32",
        bf16=False,
        temperature=0.9,
    )
    half = replace(base, dtype="bfloat16", bf16=True)
    two_rows = 2 * (prompt + completion)  # tokens
    on_gpu = {  # what goes to the host leaves nothing on a CPU
        "shared-k8-offload-reference": replace(half, offload_reference=True).with_shared_groups(),
        "stock-k8-offload-activations": replace(half, activation_offloading=True),
        "shared-k8-offload-activations": replace(half, activation_offloading=True).with_shared_groups(),
    }
    image = replace(base, images=(IMAGE,))
    image_lora = replace(image, dtype="bfloat16", bf16=True, lora_rank=16)
    long_completions = replace(base, prompt_tokens=completion + 8, max_completion_length=prompt)
    few = replace(base, max_completion_length=8)  # in PyTorch, a state takes many small operations a token
    return (on_gpu if device == "cuda" else {}) | {
        "stock-k4": base.with_k(4),
        "stock-k8": base,
        "stock-k8-mixed": replace(base, bf16=True),
        "stock-k8-bf16": half,
        "stock-k8-plain": replace(base, gradient_checkpointing=False),
        "stock-k8-lora": replace(half, lora_rank=16),
        "stock-k8-lora32": replace(base, lora_rank=16),
        "stock-k8-lora-8bit": replace(base, lora_rank=16, weight_bits=8),
        "stock-k8-lora-4bit": replace(base, lora_rank=16, weight_bits=4),
        "stock-k8-adam8": replace(base, optim="adamw_bnb_8bit"),
        "stock-k8-beta0": replace(base, beta=0.0),
        "shared-k8-lora32": replace(base, lora_rank=16).with_shared_groups(),
        "accumulate-k8": base.arm("stock-accumulate"),
        "shared-k8": base.with_shared_groups(),
        "shared-k8-together": base.with_passes(8).with_shared_groups(),
        "shared-k8-bf16": half.with_shared_groups(),
        "shared-k8-plain": replace(base, gradient_checkpointing=False).with_shared_groups(),
        "shared-k8-lora": replace(half, lora_rank=16).with_shared_groups(),
        "shared-k8-long": long_completions.with_shared_groups(),
        "shared-k32": base.with_k(32).with_shared_groups(),
        "shared-k8-tied": base.with_shared_groups(),  # one matrix for embedding and head
        "shared-parts": replace(base.with_rows(2), prefix_sharing=True),
        "shared-parts-lora": replace(half.with_rows(1), prefix_sharing=True, lora_rank=16),
        "shared-two-prompts": replace(base, per_device_train_batch_size=16).with_shared_groups(),
        "tokens-k8": replace(base, tokens_per_forward=two_rows).arm("stock-tokens"),
        "tokens-k8-lora": replace(half, lora_rank=16, tokens_per_forward=two_rows).arm("stock-tokens"),
        "shared-k8-tokens": replace(base, tokens_per_forward=4 * completion).with_shared_groups(),
        "stock-k8-reward": replace(half, reward_model="policy"),
        "shared-k8-reward": replace(base, reward_model="policy").with_shared_groups(),
        "shared-generate-each": replace(base, gradient_accumulation_steps=2).with_shared_groups(),
        "stock-k8-deltanet": few,
        "shared-k8-deltanet": few.with_shared_groups(),
        "shared-parts-deltanet": replace(few.with_rows(2), prefix_sharing=True),
        "shared-k8-lora-deltanet": replace(few, dtype="bfloat16", bf16=True, lora_rank=16).with_shared_groups(),
        "stock-k8-mamba2": few,
        "shared-k8-mamba2": few.with_shared_groups(),
        "stock-k8-conv": few,
        "shared-k8-conv": few.with_shared_groups(),
        "stock-k8-qwen2vl": image,
        "stock-k8-plain-qwen2vl": replace(image, images=((560, 560),), gradient_checkpointing=False),
        "stock-k8-lora-qwen2vl": image_lora,
        "accumulate-k8-qwen2vl": image.arm("stock-accumulate"),
        "shared-k8-qwen2vl": image.with_shared_groups(),
        "shared-k8-lora-qwen2vl": image_lora.with_shared_groups(),
        "shared-parts-qwen2vl": replace(image.with_rows(2), prefix_sharing=True),
        "shared-k8-two-qwen2vl": replace(image, images=(IMAGE, (112, 168))).with_shared_groups(),
        "stock-k8-qwen3vl": image,
        "shared-k8-qwen3vl": image.with_shared_groups(),
        "stock-k8-gemma3": image,
        "shared-k8-gemma3": image.with_shared_groups(),
    }


def is_quantized(setup: Setup) -> bool:
    """Whether it needs bitsandbytes."""
    return setup.weight_bits < 16 or "bnb" in setup.optim


def measure(setup: Setup, folder: Path, processor, dataset) -> tuple[dict[str, int], int | None]:
    """Peak allocated bytes of each phase in the second update, from its last rollout on, and what torch has reserved
    at most by its end (CUDA)."""
    from rloo_memory.launch.offload import keep_on_host
    from rloo_memory.plan.simulation.live_bytes import LiveBytes

    trainer = build_trainer(setup, folder, processor, dataset)
    if setup.offload_reference:
        keep_on_host(trainer, trainer.ref_model)
    if setup.reward_model:
        trainer.reward_funcs[0].config.use_cache = not setup.uses_passes  # as untouched TRL leaves it
    phases = PhaseRecorder(folder / "phases.csv", setup.device)
    train(trainer, phases, None if setup.device == "cuda" else LiveBytes())
    found = pandas.DataFrame(phases.peaks)
    last = found[found.step == found.step.max()]  # rollouts, of which there may be several an update
    reserved = None if setup.device == "cpu" else int(found.peak_reserved_bytes.max())
    return last.groupby("phase").peak_allocated_bytes.max().to_dict(), reserved


@program("planner_check")
def main(argv: list[str] | None) -> int:
    parser = Parser("checks.planner_check", __doc__)
    parser.add_argument("--cases", help="some of the cases, by name; default: all")
    parser.add_fresh()
    args = parser.parse_args(argv)
    here = place(args)
    chosen = known = cases(here.device)
    if args.cases is not None:
        chosen = {name: known[name] for name in words("case", args.cases, known)}
    elif not find_spec("bitsandbytes"):
        chosen = {name: setup for name, setup in known.items() if not is_quantized(setup)}
        print("left out, as bitsandbytes is not installed: cases with 4 or 8 bits", file=sys.stderr)
    if any(map(is_quantized, chosen.values())):
        need("bitsandbytes")
    path, order = here.folder / "plan_check.csv", [*known]
    rows = read_csv(path)
    mine = [row for row in rows if row.items() >= here.facts.items() and not args.fresh]
    there = {row["case"] for row in mine if is_same_code(row["commit"], here.facts["commit"])}
    print(f"{'case, GiB predicted / measured':32}" + "".join(f"{phase:>22}" for phase in PHASES))
    for name in chosen:
        if name not in there:
            found = in_its_own_process(check_here, name, here.device)
            rows = [row for row in rows if row["case"] != name] + [row | here.facts for row in found]
            rows.sort(key=lambda row: order.index(row["case"]) if row["case"] in order else len(order))
            write_csv(path, COLUMNS, rows)
        sizes = [[float(row[key]) for key in COLUMNS[2:5]] for row in rows if row["case"] == name]
        cells = (f"{says / GIB:8.3f}/{got / GIB:.3f} {error:+5.0%}" for says, got, error in sizes)
        print(f"{name:32}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    worst = max(abs(float(row["error"])) for row in rows if row["case"] in chosen)
    print(f"largest error {worst:.1%}; {path}")
    return 0


def predicted_peaks(name: str, setup: Setup, hf_config) -> dict[str, int]:
    return {peak.phase: peak.total for peak in predict(name, setup, hf_config).phases}


def check_here(name: str, device: str) -> list[dict]:
    """One case on a small model with random weights: a row a phase, bytes."""
    from experiments.workload.run_models import save_models

    setup, vocab_size = cases(device)[name], WORKLOADS[device][1]
    documents = data.load_documents()
    tokenizer = models.build_tokenizer(documents, vocab_size)
    hf_config = models.shape_config(shape_of(name, device), None if setup.images else vocab_size)
    if setup.images:
        processor, dataset, setup = with_images(setup, hf_config, tokenizer)
    else:
        processor, dataset = tokenizer, text_dataset(data.build_prompts(documents, tokenizer, setup.prompt_tokens))
    hf_config.tie_word_embeddings |= name.endswith("tied")
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder), hf_config, tokenizer, reward=setup.reward_model is not None)
        predicted = predicted_peaks(name, setup, hf_config)
        on_cuda = predicted if device == "cuda" else predicted_peaks(name, replace(setup, device="cuda"), hf_config)
        measured, reserved = measure(setup, Path(folder), processor, dataset)
    about = {"case": name, "shape": shape_of(name, device), "vocab_size": vocab_size, "reserved_bytes": reserved}
    about |= {"prompt_tokens": setup.prompt_tokens, "completion_tokens": setup.max_completion_length}
    return [
        about
        | {
            "phase": phase,
            "predicted_bytes": predicted[phase],
            "measured_bytes": measured[phase],
            "error": round(predicted[phase] / measured[phase] - 1, 4),
            "predicted_on_cuda_bytes": on_cuda[phase],
            "k": setup.num_generations,
        }
        for phase in PHASES
    ]


def with_images(setup: Setup, hf_config, tokenizer):
    """(processor, training set, the setup with the tokens that its prompts then have). The config gets the ids of the
    tokens that stand for images."""
    from experiments.workload import pictures
    from rloo_memory.launch.prompt_images import encode

    tokenizer = pictures.with_image_tokens(copy.deepcopy(tokenizer))
    processor = pictures.processor_of(pictures.with_token_ids(hf_config, tokenizer), tokenizer)
    dataset = pictures.dataset_of(setup.images, SENTENCES)
    ids, _ = encode(dataset[0]["prompt"], dataset[0]["images"], processor, {})
    return processor, dataset, replace(setup, prompt_tokens=len(ids))


if __name__ == "__main__":
    sys.exit(main())
