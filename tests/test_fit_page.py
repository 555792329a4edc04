"""docs/fit.html: its numbers are the planner's, planner and launcher take its settings, wrong input is told."""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace

import pandas
import pytest

from experiments.config import ROOT
from experiments.fitting import fit_check, fit_data
from experiments.fitting.fit_data import PAGE_ARMS, TRAINED
from experiments.record import read_csv
from rloo_memory.plan import __main__ as plan
from rloo_memory.plan.options import setup_from
from rloo_memory.plan.smallest import on_cards
from rloo_memory.settings.profiles import load_profile
from rloo_memory.sizes import GIB
from visualization.fit import make_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FILE = ROOT / "docs" / "fit.html"
DATA = json.loads((ROOT / "docs" / "fit.json").read_text())
MEASURED = json.loads((make_page.ACCURACY / "measured.json").read_text())["errors"]
MODELS = {model["name"]: model for model in DATA["models"]}
MODEL = "Qwen/Qwen3-8B"
CHOICE = dict(model=MODEL, trained="lora", prompt=3000, completion=512, k=8, card=23.5, cards=1, reference=1)


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
def opened(browser):
    """Opens the page, with an address; fails if it writes an error or asks for anything but itself."""
    contexts, said, asked = [], [], set()

    def open_page(hash="", width=1280):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)  # a busy machine takes its time
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.add(request.url.split("#")[0]))
        page.goto(FILE.as_uri() + hash)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith("data:") or url == FILE.as_uri() for url in asked)


def address(**changes) -> str:
    return "#" + "&".join(f"{name}={value}" for name, value in (CHOICE | changes).items())


def test_it_is_one_file_that_loads_nothing_and_is_made_of_the_committed_data():
    html = FILE.read_text()
    assert html == make_page.page(DATA), "run python -m visualization.fit.make_page"
    html = html[: html.index('id="data"')] + html[html.index("</script>", html.index('id="data"')) :]
    assert not re.search(r"\ssrc=|@import|url\(|fetch\(|XMLHttpRequest|sendBeacon|https?://", html)
    assert re.findall(r'<(?:a|link)\b[^>]*href="([^"]+)"', html) == ["data:,"], "only its icon: nothing is beside it"


# -- its numbers ------------------------------------------------------------------------------------------------------

# By arm, of functions of sums.js: bytes of each phase, and what torch is expected to reserve
BY_ARM = "choice => Object.fromEntries(ARMS.map((arm) => [arm, %s(peaks(MODELS.get(choice.model), choice, arm))]))"
TOTALS = BY_ARM % "((found) => Object.fromEntries(Object.entries(found).map(([phase, { total }]) => [phase, total])))"
NEEDED = BY_ARM % "needed"


def test_at_the_recorded_choices_the_browser_says_what_was_compared_with_the_planner(opened):
    rows = read_csv(fit_check.TABLE)
    answers = opened().evaluate(f"asked => asked.map({TOTALS})", [choice_of(row) for row in rows])
    assert len(rows) == DATA["compared"]["choices"] + DATA["compared"]["whole_choices"]
    for row, answer in zip(rows, answers, strict=True):
        for phase, size in answer[row["arm"]].items():
            assert size == pytest.approx(int(row[f"{phase}_page_bytes"]), rel=1e-6), (row, phase)


def test_the_planner_of_this_tree_still_says_what_the_page_says():
    choices = fit_check.choices(DATA)
    on_several = [choice for choice in choices if choice["cards"] > 1 and choice["arm"] == "shared"]
    for choice in [*choices[:40:16], on_several[0]]:
        row = fit_check.row_of(choice, DATA)
        assert row["goes_whole"] or fit_check.apart(pandas.DataFrame([row])).item() < fit_check.MOST_APART, choice


def test_at_200_random_choices_the_page_is_within_3_percent_of_the_planner():
    rows = read_csv(fit_check.TABLE)
    drawn = [tuple(str(choice[name]) for name in fit_check.CHOICE) for choice in fit_check.choices(DATA)]
    assert [tuple(row[name] for name in fit_check.CHOICE) for row in rows] == drawn
    assert {row["model"] for row in rows} == MODELS.keys() == set(fit_data.MODELS)
    assert fit_check.compared(pandas.read_csv(fit_check.TABLE)) == DATA["compared"]
    assert DATA["compared"]["apart"] < fit_check.MOST_APART


def choice_of(row: dict) -> dict:
    columns = {"prompt": "prompt_tokens", "completion": "completion_tokens", "k": "k", "cards": "cards"}
    lengths = {name: int(row[column]) for name, column in columns.items()}
    return dict(model=row["model"], trained=row["trained"], **lengths, reference=row["reference"] == "1")


def test_the_largest_fits_and_one_step_more_does_not(opened):
    check = """([asked, arms, least]) => asked.map((choice) => [choice, Object.fromEntries(arms.flatMap((arm) =>
      ["k", "prompt", "completion"].map((name) => {
        const model = MODELS.get(choice.model);
        const of = (value) => needed(peaks(model, {...choice, [name]: value}, arm));
        const value = largest(model, choice, arm, name);
        const [fits, step] = [value || least[name], name === "k" ? 2 : 1];
        return [`${arm} ${name}`, [value, of(fits), of(fits + step)]];
      })))])"""
    ends = 0
    asked = [choice_of(row) | {"card": card} for row in read_csv(fit_check.TABLE)[::5] for card in (8, 24, 80)]
    for choice, found in opened().evaluate(check, [asked, PAGE_ARMS, DATA["least"]]):
        may = choice["card"] * GIB - DATA["reserve_bytes"]
        for what, (value, peak, more) in found.items():
            name = what.split()[1]
            least, most, step = DATA["least"][name], DATA["most"][name], 2 if name == "k" else 1
            if name != "k":
                other = choice["completion" if name == "prompt" else "prompt"]
                most = min(most, MODELS[choice["model"]]["positions"] - other)
            if not value:
                assert peak > may, (choice, what)
                continue
            assert least <= value <= most and peak <= may, (choice, what)
            assert value + step > most or more > may, (choice, what)
            ends += value + step <= most
    assert ends > 50, "most of the largest are where memory ends"


def test_what_is_shown_is_what_is_computed_with_its_error(opened):
    page = opened(address())
    peaks, needed = page.evaluate(TOTALS, CHOICE), page.evaluate(NEEDED, CHOICE)
    may = int(CHOICE["card"] * GIB) - DATA["reserve_bytes"]
    for row, arm in zip(page.query_selector_all("#answer tbody tr"), PAGE_ARMS, strict=True):
        phase, peak = max(peaks[arm].items(), key=lambda item: item[1])
        text = row.inner_text().replace("\xa0", " ")
        assert f"{peak / GIB:.2f} GiB in {phase}" in text
        assert f"stands for {peak * MEASURED['low'] / GIB:.2f} to {peak * MEASURED['high'] / GIB:.2f} GiB" in text
        assert (f"fits: {(may - peak) / GIB:.2f} GiB to spare" if peak <= may else "does not fit: short by") in text
        assert ("just fits" in text) == (peak <= may < max(needed[arm], peak * MEASURED["high"]))
    page.click("summary")
    page.wait_for_selector("#numbers table")
    cells = page.evaluate(
        """[...document.querySelectorAll("#numbers tbody tr")].map((row) =>
          [...row.cells].map((cell) => parseFloat(cell.textContent)))"""
    )
    assert len(cells) == 15 == page.locator(".bar").count()
    for _, *kinds, total in cells:
        assert sum(kinds) == pytest.approx(total, abs=0.05), "the kinds of a phase add up"


def test_its_settings_are_what_planner_and_launcher_take(opened, tmp_path, monkeypatch):
    page = opened()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rloo_memory").symlink_to(ROOT / "rloo_memory")
    asked = (("all", 1, 1, 8), ("lora", 1, 1, 8), ("lora", 1, 2, 4), ("lora", 0, 8, 16), ("lora-4-bits", 1, 1, 4))
    for trained, reference, cards, k in asked:
        hash = address(trained=trained, reference=reference, cards=cards, k=k)
        page.evaluate("hash => { location.hash = hash }", hash)
        shown = "k => document.querySelector('#yaml').textContent.includes(`num_generations: ${k}\\n`)"
        page.wait_for_function(shown, arg=k)
        yaml, commands = (page.text_content(f"#{name}") for name in ("yaml", "command"))
        (tmp_path / "fit.yaml").write_text(yaml)
        for line in commands.splitlines():
            if line.startswith("sed "):
                subprocess.run(line, shell=True, check=True)
        predict = next(line for line in commands.splitlines() if line.startswith("rloo-memory plan "))
        _, setup, _ = setup_from(plan.parse_args(shlex.split(predict)[2:]), load_profile("fit.yaml"))
        lengths = dict(prompt_tokens=3000, max_completion_length=512, num_generations=k, per_device_train_batch_size=k)
        mine = replace(on_cards(TRAINED[trained][1], cards), **lengths, beta=0.05 * reference)
        if trained == "all":  # then nothing reads how LoRA would be
            setup = replace(setup, lora_target_modules="all-linear", lora_dropout=0.0)
        if trained != "lora-4-bits":
            setup = replace(setup, nested_scales=True)
        for arm in PAGE_ARMS:
            assert setup.arm(arm) == mine.arm(arm)


# -- what is asked of it ----------------------------------------------------------------------------------------------


def test_the_address_carries_the_choice(opened):
    page = opened()
    page.select_option("#trained", "all")
    page.fill("#k", "16")
    here = page.evaluate("location.href")
    there = opened(here[here.index("#") :])
    assert there.inner_text("#answer") == page.inner_text("#answer")
    assert there.input_value("#trained") == "all"
    assert "#model=" + MODEL + "&trained=all&prompt=3000&completion=512&k=16&" in here


# What the browser says of a number is in its own words
WRONG_ADDRESSES = {
    address(prompt=12): ["Prompt: ", "64"],
    address(k=7): ["k: ", "6", "8"],
    address(card="24GB"): ["Its GiB: "],
    address(cards=2, trained="lora-4-bits"): ["no formula", "take 1 card, or LoRA on 16 bits"],
    address(model="<img src=x onerror=alert(1)>"): ["Model: "],
    address() + "&promt=3": ["“promt”", "Take it out"],
    address(prompt=MODELS[MODEL]["positions"] - 100): ["positions", MODEL, "take less"],
    "#%ff%": ["no name of this page"],
}


def test_a_wrong_choice_is_told_and_answers_nothing(opened):
    page = opened()
    for hash, words in WRONG_ADDRESSES.items():
        page.evaluate("hash => { location.hash = hash }", hash)
        page.wait_for_function("document.querySelector('#problem').textContent !== ''")
        told = page.inner_text("#problem")
        assert all(word in told for word in words), (hash, told)
        assert "\n" not in told and len(told) < 250, told
        assert not page.is_visible("#answer") and page.text_content("#answer") + page.text_content("#yaml") == ""
        page.evaluate("hash => { location.hash = hash }", address())
        page.wait_for_selector("#answer table")
        assert page.inner_text("#problem") == ""
    page.fill("#k", "9")
    assert "k: " in page.inner_text("#problem") and not page.is_visible("#found")
    page.fill("#k", "10")
    assert page.is_visible("#answer table") and "k = 10" in page.inner_text("#asked")
    page.select_option("#trained", "lora-4-bits")
    disabled = page.eval_on_selector_all("#cards option", "options => options.map((option) => option.disabled)")
    assert disabled == [False, True, True, True] and page.is_visible("#cards-hint")


def test_a_phone_shows_the_answer_without_scrolling_to_the_side(opened):
    page = opened(address(card=8, k=64, trained="all"), width=360)
    assert page.is_visible("#answer table") and page.evaluate("document.documentElement.scrollWidth") <= 360
