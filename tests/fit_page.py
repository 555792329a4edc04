"""Data of docs/fit.html for the tests: those in docs or made-up ones, and the page in a browser."""

import json
import random
import shutil

import pytest

from rloo_memory.plan.scale_up.sharding import SHARDED
from rloo_memory.plan.setups import Setup
from visualization.fit import make_page

PHASES = ("load", "generate", "score", "train", "optimizer")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt install chromium")
ARMS = ("stock", "stock-accumulate", "shared")
TRAINED = {"all": Setup(1), "lora": Setup(1, lora_rank=16), "lora-4-bits": Setup(1, lora_rank=16, weight_bits=4)}
ONE_CARD = ("lora-4-bits",)


def made_up() -> dict:
    """Data of two models that are none, with every kind of formula; a second tile of the LM head takes less."""
    one_tile, more = ({"logits": {"min(k*C,4096)": 6e5, "1": size}} for size in (0, -9e8))
    cache = {
        "stock": {"k*P": 1.5e5, "k*C": 1.5e5, "k*min(P,W)": 2e4, "(P>=W)*k*P": 10.0},
        "shared": {"P": 1.5e5, "k*room(P,C,0)": 1.5e5, "k*before(P,C,W)": 100.0, "prefix(P,C,W)": 200.0},
    }
    activations = {
        "stock": {"k*P": 4e5, "k*C": 4e5, "k*P*P": 2.0, "k*C*C": 2.0},
        "stock-accumulate": {"P": 4e5, "C": 4e5},
        "shared": {"P": 4e5, "C": 8e5, "k": 1e6, "k*C": 2e4},
    }

    def arm(name, weights, trained, window):
        states = weights if trained == "all" else 5e7
        alive = {"parameters": {"1": weights}, "optimizer state": {"1": 2 * states}, "host": {"1": 9e15}}
        if trained == "all":
            alive["reference"] = {"1": weights}
        kept = cache["shared" if name == "shared" else "stock"]
        kept = kept if window else {term: size for term, size in kept.items() if "W" not in term}
        attends = {"(8*C<=P)*C*C": 3.0} if name == "shared" and window else {}
        train = {**alive, "activations": activations[name] | attends, "gradients": {"1": 0.25 * states}}
        tiles = {"1": {}} if name == "stock-accumulate" else {"(k*C<=4096)": one_tile, "(k*C>4096)": more}
        ended = {"when": "1", "stretches": [{**alive, "gradients": {"1": states}}]}
        generated = [{**alive, "KV cache": kept, "activations": {"k": -2e5}}, {**alive, "activations": {"k*P": 9.0}}]
        return {
            "load": [{"when": "1", "stretches": [{"parameters": {"1": weights}}]}],
            "generate": [{"when": "1", "stretches": generated}],
            "score": [{"when": "1", "stretches": [{**alive, "activations": {"P": 3e5}}]}],
            "train": [*({"when": when, "stretches": [{**train, **tile}]} for when, tile in tiles.items()), ended],
            "optimizer": [ended],
        }

    def model(name, weights, positions, window=None):
        compute = ("generate", "score", "train")
        gathered = {phase: {"parameters": weights * 0.35} if phase in compute else {} for phase in PHASES}
        of_all = {**gathered, "train": {**gathered["train"], "gradients": weights * 0.3}}
        trained = {key: {each: arm(each, 2.0 * weights, key, window) for each in ARMS} for key in TRAINED}
        several = {
            "all": {each: arm(each, 1.5 * weights, "all", window) for each in ARMS},
            "lora": {"shared": arm("shared", 2.5 * weights, "lora", window)},
        }
        sizes = {"weights": weights, "gathered": {"all": of_all, "lora": gathered}, "vocabulary": 150_000}
        sums = {"trained": trained, "several": several}
        return {"name": name, **sizes, "positions": positions, "window": window, "experts": None, **sums}

    return {
        "versions": "trl 0",
        "reserve_bytes": 214_748_365,
        "fragments": 0.33,
        "stays": ["parameters", "reference", "gradients", "optimizer state"],
        "first_room": 64,
        "together": 2,
        "least": {"prompt": 64, "completion": 64, "k": 4},
        "most": {"prompt": 65_536, "completion": 32_768, "k": 128},
        "trained": {
            key: {
                "called": f"called {key}",
                "one_card": key in ONE_CARD,
                "widened": dict.fromkeys((*SHARDED, "activations"), 1 + (key == "all")) | {"reference": 1},
            }
            for key in TRAINED
        },
        "models": [
            model("Qwen/Qwen3-8B", 8_190_735_360, 40_960),
            model("google/gemma-3-4b-it", 4_300_079_472, 131_072, 1024),
        ],
    }


REAL = make_page.DOCS / "fit.json"
needs_data = pytest.mark.skipif(not REAL.exists(), reason="docs/fit.json is not made yet: make fit-data")
DATA = json.loads(REAL.read_text()) if REAL.exists() else made_up()
MEASURED = {"low": 0.95, "high": 1.05, "peaks": 7, "on": "CPU"}  # over predicted
MODELS = {model["name"]: model for model in DATA["models"]}
MODEL = "Qwen/Qwen3-8B" if "Qwen/Qwen3-8B" in MODELS else DATA["models"][0]["name"]
OTHER = next(name for name in MODELS if name != MODEL)
CHOICE = dict(model=MODEL, trained="lora", prompt=3000, completion=512, k=8, card=23.6, cards=1, reference=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "fit.html"
    path.write_text(make_page.page(DATA, MEASURED))
    return path


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, file):
    """Opens the page, with an address; fails if it writes an error or asks for anything but itself."""
    contexts, said, asked = [], [], set()

    def open_page(hash="", width=1280, scheme="light", path=file, height=900):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)  # a busy machine takes its time
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.add(request.url.split("#")[0]))
        page.goto(path.as_uri() + hash)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == [] and all(url.startswith(("file:", "data:")) and url.endswith(("fit.html", ",")) for url in asked)


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
