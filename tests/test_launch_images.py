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
from rloo_memory.plan.options import Problems
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


def picture(width, height):
    from PIL import Image

    return Image.effect_noise((width, height), 64)


def png(width, height) -> bytes:
    file = io.BytesIO()
    picture(width, height).save(file, "png")
    return file.getvalue()


def write(path, prompts, **columns):
    """A parquet file with images, as `datasets` writes it."""
    import datasets

    datasets.disable_progress_bars()
    kinds = {"image": datasets.Image(), "images": datasets.List(datasets.Image())}
    rows = datasets.Dataset.from_dict({"prompt": prompts, **columns})
    for name in columns.keys() & kinds.keys():
        rows = rows.cast_column(name, kinds[name])
    rows.to_parquet(path)


def test_prompts_with_images_train_and_the_gate_and_the_doctor_know_them(here, planner, capsys):
    """With prefix sharing. The longest prompt has one image, another one has two; one has none."""
    prompts = [chat("What is in the picture? " * 8), chat("Say a word."), chat("Say a word.")]
    write("rows.parquet", prompts, images=[[picture(40, 20)], [picture(16, 16), picture(20, 60)], []])
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
    setup = asked_by(doctor.parse_args(["trainer_output"]), None, Problems(), run).setup
    assert setup.images == ((SIDE, SIDE), (SIDE, SIDE)) and setup.prompt_tokens == record["prompt_tokens"]
    Path("trainer_output", "memory.json").write_text(json.dumps(record | {"prompt_tokens": 5}))
    assert read_run(Path("trainer_output")).prompt_tokens == asked["prompt_tokens"]  # or they would have no room
    del record["images"]
    Path("trainer_output", "memory.json").write_text(json.dumps(record))
    assert "images" not in read_run(Path("trainer_output")).where  # an older one


def test_images_in_files_train_one_a_row(here, capsys):
    """Their names are those where the user stands."""
    for name in ("a.png", "b.png", "c.png"):
        Path(name).write_bytes(png(20, 20))
    rows = [{"prompt": chat("Say a word."), "image": name} for name in ("a.png", "b.png", "c.png")]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset_name", "rows.jsonl", "--predict_memory", "false", "--algorithm", "grpo"]
    code, (out, err) = launch.main(["profile.yaml", *words]), capsys.readouterr()
    assert code == 0, err
    assert "rows.jsonl: 3 prompts with images, the longest " in out
    assert json.loads(Path("trainer_output", "memory.json").read_text())["images"] == [[SIDE, SIDE]]


def test_text_trains_as_before_on_a_model_that_takes_images(here, model):
    from transformers import PreTrainedTokenizerBase

    config = SimpleNamespace(trust_remote_code=False, model_init_kwargs=None)
    assert isinstance(launch.policy.load(model, config).tokenizer, PreTrainedTokenizerBase)
    write("rows.parquet", ["Say a word.", "Say a word."], images=[[], []])
    assert prompt_images.column_of(dataset.load(LaunchArguments(dataset_name="rows.parquet"))) is None


def test_a_refusal_names_the_images_for_the_doctor(here, monkeypatch, refused):
    peak = PredictedPeak("train", 2**40, {"images": 2**40}, 0)
    monkeypatch.setattr(ask, "predict", lambda *args, **kwargs: ask.Expected((peak,)))
    monkeypatch.setattr(gate, "available_bytes", lambda device: 2**30)
    write("rows.parquet", [chat("Say a word.")] * 3, images=[[picture(16, 16)] * 2] * 3)
    said = f" --image {SIDE}x{SIDE} --image {SIDE}x{SIDE} --device-memory "
    refused(["profile.yaml", "--dataset_name", "rows.parquet"], said)


BROKEN = b"\x89PNG\r\n\x1a\nno more of it"
REFUSED = {  # what is in the columns besides two prompts -> what is said of it
    "both": (dict(image=[png(8, 8)] * 2, images=[[], []]), ["has the columns 'image' and 'images'", "remove one"]),
    "missing": (dict(image=[png(8, 8), None]), ["row 2: the column 'image' is empty", "'images' can say"]),
    "no_list": (dict(images=[[png(8, 8)], None]), ["row 2: the column 'images' is empty"]),
    "hole": (dict(images=[[png(8, 8)], [None]]), ["row 2: an image cannot be opened (there is none)"]),
    "junk": (dict(image=[png(8, 8), b"junk"]), ["row 2: an image cannot be opened (pillow does not know its format)"]),
    "broken": (dict(image=[png(8, 8), BROKEN]), ["row 2: an image cannot be opened"]),
    "cut": (dict(image=[png(8, 8), png(64, 64)[:-900]]), ["row 2 cannot be made tokens", "truncated"]),
    "no_file": (dict(image=["here.png", "gone.png"]), ["row 2: an image cannot be opened", "gone.png"]),
    "one": (dict(images=["a.png"] * 2), ["the column 'images' is Value('", "string'); it must be a list"]),
    "text": (dict(image=["here.png"] * 2, prompt=["a", "b"]), ["row 1: the prompt is text; images need chats"]),
    "places": (
        dict(images=[[png(8, 8)]] * 2, prompt=[[{"role": "user", "content": [{"type": "image"}] * 2}]] * 2),
        ["row 1: Number of images provided (1) does not match number of image placeholders (2)"],
    ),
    "role": (
        dict(images=[[png(8, 8)], []], prompt=[chat("a"), [{"role": "root", "content": "a"}]]),
        ["row 2: Invalid role in message: root."],
    ),
}  # fmt: skip


def words_for(rows: str, *words):
    return ["profile.yaml", "--dataset_name", rows, "--per_device_train_batch_size", "4", *words]


def test_what_cannot_be_trained_on_is_one_line_before_the_model_loads(here, no_model_loads, refused):
    import pandas

    Path("here.png").write_bytes(png(8, 8))
    for name, (columns, parts) in REFUSED.items():
        pandas.DataFrame({"prompt": [chat("a"), chat("b")], **columns}).to_parquet(f"{name}.parquet")
        refused(words_for(f"{name}.parquet"), f"launch: dataset '{name}.parquet'", *parts)


STAND_INS = (  # what AutoProcessor raises without torchvision, for Qwen2.5-VL and for Qwen3-VL
    ImportError("\nQwen2VLVideoProcessor requires the Torchvision library. Check out the page\nhttps://"),
    ValueError("model requires `torchvision` to be installed. Please install `torchvision` and try again."),
)


def test_a_model_or_machine_that_cannot_take_images_is_named_with_a_remedy(
    here, model, policy, no_model_loads, refused, monkeypatch
):
    import transformers

    words = words_for("rows.parquet")
    write("rows.parquet", [chat("a")] * 2, image=[picture(16, 16)] * 2)
    monkeypatch.setattr(prompt_images, "version", lambda name: "2.13.0+cpu")
    install = "; .venv/bin/python -m pip install pillow torchvision torch==2.13.0 --extra-index-url https://"
    for error in STAND_INS:
        with monkeypatch.context() as patch:
            patch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *a, error=error, **k: raised(error))
            refused(words, f"the processor of model {model!r} cannot be loaded: ", "orchvision", install)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_images, "find_spec", lambda name: None)
        refused(words, "'rows.parquet': row 1: it has images, and pillow is not installed", install)
    bare = here / "bare"
    bare.mkdir()
    for file in Path(model).iterdir():
        if file.name != "processor_config.json":
            (bare / file.name).symlink_to(file)
    monkeypatch.setenv("MODEL_PATH", "bare")
    refused(words, "Can't load image processor", "; put its preprocessor_config.json beside its weights")
    monkeypatch.setenv("MODEL_PATH", policy)
    refused(words, "the prompts have images, and model ", "(of type qwen3) takes none")


def raised(error):
    raise error


def test_the_first_200_rows_are_counted_or_all_where_there_is_a_limit(here, model, shared_fork):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    images = [[picture(8, 8)]] + [[]] * 209 + [[picture(8, 8)] * 3] + [[]] * 39
    write("rows.parquet", [chat("a")] * 249 + [chat("a word " * 40)], images=images)
    rows = dataset.load(LaunchArguments(dataset_name="rows.parquet"))
    assert prompt_images.column_of(rows) == "images"
    first = dataset.measure(rows, processor, {}, None, "images")
    assert (first.row, first.counted, first.images) == (1, 200, ((SIDE, SIDE),))
    every = dataset.measure(rows, processor, {}, 1000, "images")
    assert (every.row, every.counted, every.images) == (250, 250, ((SIDE, SIDE),) * 3)
    with pytest.raises(ConfigError, match="2 processes would wait .* --log_multimodal false"):
        prompt_images.check_gathered(rows, "images", SimpleNamespace(world_size=2, log_multimodal=True))


def test_sizes_are_those_of_the_grid_where_a_processor_keeps_the_shape():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, size=dict(shortest_edge=64, longest_edge=1024))
    given = [picture(30, 20), picture(16, 64)]
    scaled = prompt_images.sizes(images(given), given, SimpleNamespace(image_processor=images))
    assert scaled == ((32, 16), (16, 64))
    assert prompt_images.sizes({}, given, None) == ()
