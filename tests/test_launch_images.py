"""Launched trainings whose prompts have images: what is trained and predicted, and what is refused before the model
loads."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import tiny_gemma3
from PIL import Image
from small_profile import small_profile
from tiny_gemma3 import SIDE
from transformers import AutoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import prompt_images, vllm_server
from rloo_memory.plan import doctor
from rloo_memory.plan.options import asked as asked_by
from rloo_memory.plan.records import read_run

PROFILE = small_profile(
    4, 6, beta=0.05, per_device_train_batch_size=12, prefix_sharing=True, tokens_per_forward=14, max_steps=1,
    reward_funcs=["image_rewards:score"],
)  # fmt: skip
WORDS = ["profile.yaml", "--dataset_name", "rows.parquet"]
REWARD = """
def score(completions, images=None, image=None, **kwargs):
    assert len(images or image) == len(completions)
    return [float(len(completion[0]["content"])) for completion in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    tiny_gemma3.save(folder)
    return str(folder)


@pytest.fixture
def here(model, tmp_path, monkeypatch):
    """A folder with a profile and a reward, where the model is the one that takes images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", model)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "image_rewards.py").write_text(REWARD)
    return tmp_path


def chat(text):
    return [{"role": "user", "content": text}]


def png(width, height) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 64).save(file, "png")
    return file.getvalue()


def write(path, prompts, **columns):
    pandas.DataFrame({"prompt": prompts, **columns}).to_parquet(path)


@pytest.mark.slow
def test_prompts_with_images_train_and_the_gate_knows_them(here, planner, capsys):
    """With prefix sharing. The longest prompt has one image, another one has two; one has none."""
    prompts = [chat("What is in the picture? " * 8), chat("Say a word."), chat("Say a word.")]
    write("rows.parquet", prompts, images=[[png(40, 20)], [png(16, 16), png(20, 60)], []])
    code, (out, err) = launch.main(WORDS), capsys.readouterr()
    assert code == 0, err
    (asked,) = planner
    assert asked["where"]["images"] == ((SIDE, SIDE), (SIDE, SIDE))
    assert f"rows.parquet: 3 prompts with images, the longest {asked['prompt_tokens']} tokens, " in out
    record = json.loads(Path("trainer_output", "memory.json").read_text())
    assert record["prompt_tokens"] == asked["prompt_tokens"]  # as the trainer counts them
    assert record["images"] == [[SIDE, SIDE], [SIDE, SIDE]]
    setup = asked_by(doctor.parse_args(["trainer_output"]), None, read_run(Path("trainer_output"))).setup
    assert setup.images == ((SIDE, SIDE), (SIDE, SIDE)) and setup.prompt_tokens == record["prompt_tokens"]


def test_what_cannot_be_trained_on_is_one_line_before_the_model_loads(
    here, policy, no_model_loads, refused, monkeypatch
):
    places = [[{"role": "user", "content": [{"type": "image"}] * 2}]] * 2
    for prompts, columns, said in (
        ([chat("a")] * 2, {"image": [png(8, 8), None]}, "row 2 cannot be made tokens"),
        ([chat("a")] * 2, {"image": ["gone.png"] * 2}, "row 1 cannot be made tokens: [Errno 2] No such file"),
        ([chat("a")] * 2, {"images": ["a.png"] * 2}, "the column 'images' is Value('"),
        (["a", "b"], {"image": [png(8, 8)] * 2}, "row 1 cannot be made tokens"),
        (places, {"images": [[png(8, 8)]] * 2}, "row 1 cannot be made tokens: Number of images provided (1) does not"),
    ):
        write("rows.parquet", prompts, **columns)
        refused([*WORDS, "--per_device_train_batch_size", "4"], f"launch: dataset 'rows.parquet': {said}")
    write("rows.parquet", [chat("a")] * 2, image=[png(16, 16)] * 2)
    monkeypatch.setenv("MODEL_PATH", policy)
    refused(WORDS, "the prompts have images, and model ", "(of type qwen3) takes none")


def test_a_vllm_server_is_compared_with_the_tokenizer_of_a_processor(model, monkeypatch, capsys):
    processor = AutoProcessor.from_pretrained(model)
    config = SimpleNamespace(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://here", process_index=0,
                             vllm_server_timeout=0, model_init_kwargs=None)  # fmt: skip
    monkeypatch.setattr(vllm_server, "answers", lambda url: True)
    monkeypatch.setattr(
        vllm_server, "what_it_serves", lambda url: ("it", processor.tokenizer(vllm_server.PROBE)["input_ids"])
    )
    vllm_server.check(config, model, processor)
    assert "http://here serves it" in capsys.readouterr().out


def test_sizes_are_those_of_the_grid_where_a_processor_keeps_the_shape():
    images = Qwen2VLImageProcessorPil(patch_size=4, size=dict(shortest_edge=64, longest_edge=1024))
    given = [Image.open(io.BytesIO(png(*size))) for size in ((30, 20), (16, 64))]
    scaled = prompt_images.sizes(images(given), given, SimpleNamespace(image_processor=images))
    assert scaled == ((32, 16), (16, 64))
