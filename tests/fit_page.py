"""Data of docs/fit.html for the tests, and pages in a browser."""

import json
import random
import shutil
from dataclasses import asdict

import pytest

from rloo_memory.plan.accuracy.measured import MeasuredErrors
from rloo_memory.plan.setups import Setup
from visualization.fit import make_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARMS = ("stock", "stock-accumulate", "shared")
TRAINED = {"all": Setup(1), "lora": Setup(1, lora_rank=16), "lora-4-bits": Setup(1, lora_rank=16, weight_bits=4)}
ONE_CARD = ("lora-4-bits",)


DATA = json.loads((make_page.DOCS / "fit.json").read_text())
MEASURED = MeasuredErrors(low=0.95, high=1.05, peaks=7, trainings=2, devices="CPU")
MODELS = {model["name"]: model for model in DATA["models"]}
MODEL = "Qwen/Qwen3-8B"
OTHER = next(name for name in MODELS if name != MODEL)
CHOICE = dict(model=MODEL, trained="lora", prompt=3000, completion=512, k=8, card=23.5, cards=1, reference=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "fit.html"
    path.write_text(make_page.page(DATA, asdict(MEASURED)))
    return path


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("no chromium here: apt install chromium")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, file):
    """Opens the page, with an address, or another; fails if it writes an error or asks for anything but itself."""
    contexts, said, asked = [], [], set()

    def open_page(hash="", width=1280, scheme="light", path=file, height=900):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)  # a busy machine takes its time
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.add((path.name, request.url.split("#")[0])))
        page.goto(path.as_uri() + hash)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith("data:") or url.startswith("file:") and url.endswith(f"/{name}") for name, url in asked)


def address(**changes) -> str:
    return "#" + "&".join(f"{name}={value}" for name, value in (CHOICE | changes).items())


def choices(number: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    found = []
    while len(found) < number:
        name, trained = rng.choice(list(MODELS)), rng.choice(list(TRAINED))
        lengths = {key: round(64 * 2 ** rng.uniform(0, 9)) for key in ("prompt", "completion")}
        if sum(lengths.values()) <= MODELS[name]["positions"]:
            cards = 1 if trained in ONE_CARD else rng.choice((1, 2, 8))
            others = dict(k=2 * rng.randint(2, 64), cards=cards, reference=rng.random() < 0.5)
            found.append({"model": name, "trained": trained, "card": rng.choice((8, 24, 80)), **lengths, **others})
    return found
