"""Launched trainings whose prompts have images: what is trained and predicted, and what is refused before the model
loads."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_gemma3
from small_profile import small_profile
from tiny_gemma3 import SIDE

from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import dataset, gate, prompt_images
from rloo_memory.plan import ask, doctor
from rloo_memory.plan.options import asked as asked_by
from rloo_memory.plan.peaks import PredictedPeak
from rloo_memory.plan.records import read_run
from rloo_memory.settings.arguments import LaunchArguments

PROFILE = small_profile(
    4, 6, beta=0.05, per_device_train_batch_size=12, prefix_sharing=True, tokens_per_forward=14, max_steps=1,
    reward_funcs=["image_rewards:score"],
)  # fmt: skip
REWARD = """
def score(completions, images=None, image=None, **kwargs):
    assert len(images or image) == len(completions)
    return [float(len(completion[0]["content"])) for completion in completions]
"""
pytestmark = pytest.mark.torch


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
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "image_rewards.py").write_text(REWARD)
    return tmp_path


def chat(text):
    return [{"role": "user", "content": text}]


def png(width, height) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((width, height), 64).save(file, "png")
    return file.getvalue()


def write(path, prompts, **columns):
    import pandas

    pandas.DataFrame({"prompt": prompts, **columns}).to_parquet(path)


def test_prompts_with_images_train_and_the_gate_knows_them(here, planner, capsys):
    """With prefix sharing. The longest prompt has one image, another one has two; one has none."""
    prompts = [chat("What is in the picture? " * 8), chat("Say a word."), chat("Say a word.")]
    write("rows.parquet", prompts, images=[[png(40, 20)], [png(16, 16), png(20, 60)], []])
    code, (out, err) = launch.main(["profile.yaml", "--dataset_name", "rows.parquet"]), capsys.readouterr()
    assert code == 0, err
    (asked,) = planner
    assert asked["where"]["images"] == ((SIDE, SIDE), (SIDE, SIDE))
    assert f"rows.parquet: 3 prompts with images, the longest {asked['prompt_tokens']} tokens, " in out
    record = json.loads(Path("trainer_output", "memory.json").read_text())
    assert record["prompt_tokens"] == asked["prompt_tokens"]  # as the trainer counts them
    assert record["images"] == [[SIDE, SIDE], [SIDE, SIDE]]
    assert record["predicted_peaks"].keys() == {"load", "generate", "score", "train", "optimizer"}
    run = read_run(Path("trainer_output"))
    setup = asked_by(doctor.parse_args(["trainer_output"]), None, run).setup
    assert setup.images == ((SIDE, SIDE), (SIDE, SIDE)) and setup.prompt_tokens == record["prompt_tokens"]
    Path("trainer_output", "memory.json").write_text(json.dumps(record | {"prompt_tokens": 5}))
    assert read_run(Path("trainer_output")).prompt_tokens == asked["prompt_tokens"]  # or they would have no room
    del record["images"]
    Path("trainer_output", "memory.json").write_text(json.dumps(record))
    assert "images" not in read_run(Path("trainer_output")).where  # an older one


def test_images_in_files_train_one_a_row(here, capsys):
    """Their names are those where the user stands."""
    Path("a.png").write_bytes(png(20, 20))
    Path("rows.jsonl").write_text(3 * (json.dumps({"prompt": chat("Say a word."), "image": "a.png"}) + "\n"))
    words = ["--dataset_name", "rows.jsonl", "--predict_memory", "false", "--algorithm", "grpo"]
    assert launch.main(["profile.yaml", *words]) == 0, capsys.readouterr().err
    assert json.loads(Path("trainer_output", "memory.json").read_text())["images"] == [[SIDE, SIDE]]


def test_a_refusal_names_the_images_for_the_doctor(here, monkeypatch, refused):
    peak = PredictedPeak("train", 2**40, {"images": 2**40}, 0)
    monkeypatch.setattr(ask, "predict", lambda *args, **kwargs: ask.Expected((peak,)))
    monkeypatch.setattr(gate, "available_bytes", lambda device: 2**30)
    write("rows.parquet", [chat("Say a word.")] * 3, images=[[png(16, 16)] * 2] * 3)
    said = f" --image {SIDE}x{SIDE} --image {SIDE}x{SIDE} --device-memory "
    refused(["profile.yaml", "--dataset_name", "rows.parquet"], said)


REFUSED = {  # what is in the columns besides two prompts -> what is said of it
    "both": (dict(image=[png(8, 8)] * 2, images=[[], []]), ["has the columns 'image' and 'images'", "remove one"]),
    "missing": (dict(image=[png(8, 8), None]), ["some rows have no image in the column 'image'"]),
    "junk": (dict(image=[png(8, 8), b"junk"]), ["row 2 cannot be made tokens: cannot identify image file"]),
    "no_file": (dict(image=["here.png", "gone.png"]), ["row 2 cannot be made tokens", "gone.png"]),
    "one": (dict(images=["a.png"] * 2), ["the column 'images' is Value('", "string'); it must be a list"]),
    "text": (dict(image=["here.png"] * 2, prompt=["a", "b"]), ["row 1 cannot be made tokens"]),
    "places": (
        dict(images=[[png(8, 8)]] * 2, prompt=[[{"role": "user", "content": [{"type": "image"}] * 2}]] * 2),
        ["row 1 cannot be made tokens: Number of images provided (1) does not match"],
    ),
}  # fmt: skip


def test_what_cannot_be_trained_on_is_one_line_before_the_model_loads(
    here, policy, no_model_loads, refused, monkeypatch
):
    import transformers

    Path("here.png").write_bytes(png(8, 8))
    words = ["profile.yaml", "--per_device_train_batch_size", "4", "--dataset_name"]
    for name, (columns, parts) in REFUSED.items():
        write(f"{name}.parquet", [chat("a"), chat("b")], **columns)
        refused([*words, f"{name}.parquet"], f"launch: dataset '{name}.parquet'", *parts)
    write("rows.parquet", [chat("a")] * 2, image=[png(16, 16)] * 2)
    install = "; .venv/bin/python -m pip install pillow torchvision torch=="
    missing = ValueError("model requires `torchvision` to be installed. Please install `torchvision` and try again.")
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *a, **k: raised(missing))
        refused([*words, "rows.parquet"], "the processor of model ", "orchvision", install)
    monkeypatch.setenv("MODEL_PATH", policy)
    refused([*words, "rows.parquet"], "the prompts have images, and model ", "(of type qwen3) takes none")


def raised(error):
    raise error


def test_the_first_200_rows_are_counted_or_all_where_there_is_a_limit(here, model, shared_fork):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    images = [[png(8, 8)]] + [[]] * 209 + [[png(8, 8)] * 3] + [[]] * 39
    write("rows.parquet", [chat("a")] * 249 + [chat("a word " * 40)], images=images)
    rows = dataset.load(LaunchArguments(dataset_name="rows.parquet"))
    assert prompt_images.column_of(rows) == "images"
    first = dataset.measure(rows, processor, {}, None, "images")
    assert (first.row, first.counted, first.images) == (1, 200, ((SIDE, SIDE),))
    every = dataset.measure(rows, processor, {}, 1000, "images")
    assert (every.row, every.counted, every.images) == (250, 250, ((SIDE, SIDE),) * 3)
    with pytest.raises(ConfigError, match="some rows have no image .* --log_multimodal false"):
        several = SimpleNamespace(world_size=2, log_multimodal=True)
        prompt_images.check_each_row_has_some(rows, "images", several)


def test_sizes_are_those_of_the_grid_where_a_processor_keeps_the_shape():
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, size=dict(shortest_edge=64, longest_edge=1024))
    given = [Image.open(io.BytesIO(png(*size))) for size in ((30, 20), (16, 64))]
    scaled = prompt_images.sizes(images(given), given, SimpleNamespace(image_processor=images))
    assert scaled == ((32, 16), (16, 64))
