"""docs/fit.html: that it needs nothing else, its address, wrong input, keys, screen readers, phones, copying."""

import json
import re
from dataclasses import asdict
from functools import partial

import fit_page
import pytest
from fit_page import DATA, MODEL, MODELS, OTHER, address

from experiments.config import ROOT
from rloo_memory.plan.accuracy.measured import measured_errors
from visualization.fit import make_page

browser, file, opened = fit_page.browser, fit_page.file, fit_page.opened  # fixtures


def shown(page) -> str:
    return page.inner_text("#answer")


# -- the file ---------------------------------------------------------------------------------------------------------


def test_it_is_one_file_that_loads_nothing_and_has_no_link_that_a_saved_copy_lacks(file):
    html = file.read_text()
    html = html[: html.index('id="data"')] + html[html.index("</script>", html.index('id="data"')) :]
    assert not re.search(r"\ssrc=|@import|url\(|fetch\(|XMLHttpRequest|sendBeacon|https?://", html)
    assert "default-src 'none'" in html
    links = re.findall(r'<(?:a|link)\b[^>]*href="([^"]+)"', html)
    assert links == ["data:,"], "only its icon: it is saved by itself, and nothing is beside it then"
    named = re.findall(r"<code>((?:docs/)?\w+\.md)</code>", html)
    assert len(named) > 5 and all((ROOT / name).exists() for name in named)


def test_the_committed_page_is_made_of_the_committed_data():
    made = make_page.page(DATA, asdict(measured_errors()))
    assert made == (ROOT / "docs" / "fit.html").read_text(), "run python -m visualization.fit.make_page"
    assert '"compared":{"choices":' in made


def test_data_that_are_lacking_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_page, "DOCS", tmp_path)
    assert make_page.run_cli(partial(make_page.main, [])) == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert "fit.json: the file is missing; make it with python -m experiments.fitting.fit_data" in error
    assert error.count("\n") == 1


def test_the_command_writes_the_page_and_no_name_in_the_data_ends_its_script(tmp_path, monkeypatch, capsys):
    data = DATA | {"versions": "</script><script>alert(1)</script>"}
    (tmp_path / "fit.json").write_text(json.dumps(data))
    monkeypatch.setattr(make_page, "DOCS", tmp_path)
    assert make_page.main([]) == 0
    assert f"{len(MODELS)} models" in capsys.readouterr().out
    assert "<script>alert" not in (tmp_path / "fit.html").read_text()


# -- what is asked of it ----------------------------------------------------------------------------------------------


def test_every_choice_changes_the_answer(opened):
    page = opened()
    seen = [shown(page)]
    assert "NaN" not in seen[0] and "undefined" not in page.inner_text("body")
    for name, value in (("model", OTHER), ("trained", "all"), ("named", "79.1"), ("cards", "4"), ("reference", "0")):
        page.select_option(f"#{name}", value)
        seen.append(page.inner_text("#answer"))
    for name, value in (("prompt", "1500"), ("completion", "700"), ("k", "16"), ("card", "44.4")):
        page.fill(f"#{name}", value)
        seen.append(page.inner_text("#answer"))
    assert len(set(seen)) == len(seen)
    assert page.input_value("#named") == "44.4" and "NaN" not in seen[-1]
    page.fill("#card", "45")
    assert page.input_value("#named") == "", "no card of that size has a name"


def test_the_address_carries_the_choice_and_back_takes_it_back(opened):
    page = opened()
    first = shown(page)
    page.select_option("#trained", "all")
    page.locator("#prompt").press_sequentially("0")  # 30000, from 3000
    page.locator("#prompt").press("Backspace")
    page.fill("#k", "16")
    here, answer, there = url_of(page), shown(page), opened()
    there.goto(here)
    wait_for(there, "k", "16")
    assert shown(there) == answer and there.input_value("#trained") == "all"
    assert "#model=" + MODEL + "&trained=all&prompt=3000&completion=512&k=16&" in here
    page.go_back()
    wait_for(page, "k", "8")
    assert page.input_value("#prompt") == "3000"
    page.go_back()
    page.go_back()
    wait_for(page, "trained", "lora")
    assert shown(page) == first
    for _ in range(3):
        page.go_forward()
    wait_for(page, "k", "16")
    assert url_of(page) == here and shown(page) == answer


def url_of(page) -> str:
    """As the page has it; the driver's `page.url` follows a moment later."""
    return page.evaluate("location.href")


def wait_for(page, name: str, value: str) -> None:
    """The browser tells a page of another address a moment after it has gone there."""
    page.wait_for_function("([name, value]) => document.getElementById(name).value === value", arg=[name, value])


WRONG_ADDRESSES = {
    address(prompt=12): ["Prompt is 12", "64", "from 64 to 65,536"],
    address(prompt="1e3"): ["Prompt is “1e3”", "whole number from 64"],
    address(prompt=""): ["Prompt is empty", "whole number from 64"],
    address(completion="9" * 400): ["Completion is “999"],
    address(k=7): ["k is 7", "odd", "6 or 8"],
    address(k=130): ["k is 130", "128"],
    address(card="24GB"): ["“24GB”", "8 to 192"],
    address(cards=3): ["cards is “3”", "1, 2, 4, 8"],
    address(cards=2, trained="lora-4-bits"): ["no formula", "Take 1 card, or LoRA on 16 bits"],
    address(model="<img src=x onerror=alert(1)>"): ["model is “<img src=x", "in the list"],
    address() + "&promt=3": ["“promt”", "Take it out"],
    address() + "&k=16": ["k more than once"],
    address(prompt=MODELS[MODEL]["positions"] - 100): ["positions", MODEL, "take less"],
    "#%ff%": ["no name of this page"],
}


def test_a_wrong_address_is_told_and_answers_nothing(opened):
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
        assert page.inner_text("#problem") == "" and not page.query_selector("[aria-invalid]")


def test_a_wrong_number_in_the_form_is_told_and_is_in_the_address_too(opened):
    page = opened()
    page.fill("#k", "9")
    assert "k is 9" in page.inner_text("#problem") and page.get_attribute("#k", "aria-invalid") == "true"
    assert not page.is_visible("#found") and "&k=9&" in url_of(page)
    page.fill("#prompt", "")
    assert page.inner_text("#problem").count("\n") == 1
    page.fill("#prompt", "3000")
    page.fill("#k", "10")
    assert page.is_visible("#answer table") and "k = 10" in page.inner_text("#asked")
    page.select_option("#trained", "lora-4-bits")
    disabled = page.eval_on_selector_all("#cards option", "options => options.map((option) => option.disabled)")
    assert disabled == [False, True, True, True] and page.is_visible("#cards-hint")
    for model in MODELS:  # weights that the numbers are not of
        page.select_option("#model", model)
        assert page.is_visible("#published-hint") == (model == "openai/gpt-oss-20b")


# -- who uses it ------------------------------------------------------------------------------------------------------


def test_keys_reach_everything_and_choose(opened):
    page = opened()
    page.click("summary")
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    all_of_it = page.evaluate(
        """[...document.querySelectorAll("a, button, input, select, summary, pre[tabindex]")].map((e, i) =>
          (e.dataset.i = i))"""
    )
    reached, unseen = set(), 0
    page.keyboard.press("Control+Home")
    for _ in range(len(all_of_it) + 5):
        page.keyboard.press("Tab")
        state = page.evaluate(
            "[document.activeElement.dataset.i, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(state[0])
        unseen += state[0] is not None and state[1] == "none"
    assert {str(i) for i in all_of_it} <= reached and not unseen, "each is reached, and seen to be"
    before = shown(page)
    page.focus("#model")
    page.keyboard.press("ArrowDown" if MODEL != DATA["models"][-1]["name"] else "ArrowUp")
    assert shown(page) != before and page.input_value("#model") != MODEL
    page.focus("#k")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#k") == "10" and "k = 10" in page.inner_text("#asked")
    page.keyboard.press("Enter")
    assert page.input_value("#k") == "10" and "k=10" in url_of(page), "nothing is sent"


def test_screen_readers_get_names_headings_and_the_answer(opened):
    page = opened(address(k=4))
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    role = lambda node: node.get("role", {}).get("value")  # noqa: E731
    named = [node for node in tree if role(node) in ("button", "combobox", "spinbutton", "link", "image", "form")]
    assert len(named) > 25 and all(node["name"]["value"].strip() for node in named)
    controls = [n["name"]["value"] for n in named if role(n) in ("button", "combobox", "spinbutton")]
    assert len(controls) == len(set(controls)), "no two are called the same"
    ids, levels = page.evaluate(
        """[[...document.querySelectorAll("[id]")].map((e) => e.id),
            [...document.querySelectorAll("h1, h2, h3")].map((e) => Number(e.tagName[1]))]"""
    )
    assert len(ids) == len(set(ids)) and levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    pointed = page.evaluate(
        """[...document.querySelectorAll("[for], [aria-labelledby], [aria-describedby]")].flatMap((e) =>
          ["for", "aria-labelledby", "aria-describedby"].map((name) => e.getAttribute(name))).filter(Boolean)
            .flatMap((ids) => ids.split(" "))"""
    )
    assert set(pointed) <= set(ids)
    page.fill("#k", "12")
    page.wait_for_function("document.querySelector('#said').textContent.includes('Prefix sharing')")
    assert page.get_attribute("#said", "aria-live") == "polite" and "fit" in page.text_content("#said")
    assert page.get_attribute("html", "lang") == "en"


CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => colour.slice(0, 3).map((x) => linear(x / 255))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || e.matches("script, option, .unseen") || !e.checkVisibility()) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), e.textContent.slice(0, 40)]);
  }
  return found;
}"""


# What holds more than its width, but for fields, which scroll, and what is cut on purpose
WIDER = """[...document.querySelectorAll("main *")].filter((e) =>
  e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1 &&
  !e.matches("select, input, .bar, .bar *, thead, thead *") && getComputedStyle(e).display !== "inline")
  .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width, scheme", [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")])
def test_it_is_readable_on_a_phone_and_in_the_dark(opened, width, scheme):
    for hash in (address(card=8, k=64, trained="all"), address(prompt="9" * 60)):
        page = opened(hash, width, scheme)
        if page.is_visible("summary"):
            page.click("summary")
            page.wait_for_selector("#numbers table")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(WIDER) == []
        found = page.evaluate(CONTRAST)
        assert len(found) > 20 and min(found)[0] >= 4.5, min(found)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width, height", [(1280, 800), (390, 844)])
def test_the_answer_is_seen_without_scrolling(opened, width, height):
    page = opened(width=width, height=height)
    for trained, cards in (("lora", "1"), ("all", "1"), ("all", "4")):
        page.select_option("#trained", trained)
        page.select_option("#cards", cards)
        bottom = page.evaluate("document.querySelector('#answer table').getBoundingClientRect().bottom + scrollY")
        assert bottom <= height, (trained, bottom)


def test_older_trl_is_told_with_the_formulas_numbers(opened):
    page = opened(address(k=16, completion=1000))
    said, vocabulary = page.inner_text("#older").replace("\xa0", " "), MODELS[MODEL]["vocabulary"]
    for copies in (4, 3):
        assert f"{copies * 16 * 1000 * vocabulary * 4 / 2**30:.2f} GiB in 1." in said
    assert "1.15 or newer" in said and "a formula, not a run" in said


def test_buttons_copy_and_say_so(opened):
    page = opened()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name in ("yaml", "command", "python"):
        page.click(f"button[data-copies={name}]")
        page.wait_for_function(
            "word => document.querySelector('#copied').textContent.toLowerCase().includes(word)", arg=name
        )
        assert page.evaluate("navigator.clipboard.readText()") == page.text_content(f"#{name}") != ""
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')) }")
    page.click("#copy-address")
    page.wait_for_function("document.querySelector('#copied').textContent.includes('link')")
    assert page.evaluate("navigator.clipboard.readText()").endswith(address())
    page.evaluate("() => { document.execCommand = () => false }")
    page.click("#copy-address")
    page.wait_for_function("document.querySelector('#copied').textContent.includes('by hand')")
