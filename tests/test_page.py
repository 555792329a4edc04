"""results/<machine>/report.html: what it says, that it needs nothing else, and what it does in a browser."""

import json
import re
from html.parser import HTMLParser

import fit_page
import pytest
from test_visualization import GIB, write_run

from visualization import create_charts
from visualization.load import load_machine
from visualization.page import answers, build

VOID = {"meta", "img", "input", "br", "hr", "link"}
browser, file, opened = fit_page.browser, fit_page.file, fit_page.opened  # fixtures


class Page(HTMLParser):
    """Fails at a tag that does not close; keeps text, and what would be loaded from elsewhere."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.loaded, self.ids, self.images = [], [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.images += [values.get("alt")] if tag == "img" else []
        for name in ("src", "href", "action"):
            if name in values and not values[name].startswith(("data:", "#")):
                self.loaded.append(values[name])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = tmp_path_factory.mktemp("results") / "a machine <b>"
    for k in (2, 8):
        write_run(machine, "classic-baseline", k, above=k * GIB, status="ok" if k == 2 else "oom")
        write_run(machine, "classic-string", k, above=GIB, fed=1024)
        write_run(machine, "shared", k, above=GIB // 2, step_seconds_median=10.0)
        for repeat, seconds in enumerate((65.0, 75.0)):
            write_run(machine, "stock", k, repeat, above=4 * GIB, step_seconds_median=seconds)
    write_run(machine, "stock-accumulate", 8, above=3 * GIB, step_seconds_median=80.0)
    for arm, reward in (("stock", 1.0), ("shared", 1.25)):
        trace = [{"step": step, "reward": reward, "loss": 0.5, "kl": None} for step in (1, 2)]
        write_run(machine, arm, 4, scale="learn", trace=trace)
    write_run(machine, "stock", 8, above=5 * GIB, scale="bench")
    folder = write_run(
        machine, "shared", 8, above=GIB, scale="bench", device_name="</script><script>alert(1)</script>"
    )
    (folder / "log.txt").write_text("first\n" * 40 + "the last line & <more>\n")
    (write_run(machine, "shared", 4) / "run.json").write_text("7")
    return machine


@pytest.fixture(scope="module")
def html(machine):
    runs = load_machine(machine)
    charts = create_charts.draw_all(runs, machine / "charts")
    text = build.report(machine, runs, charts)
    (machine / "report.html").write_text(text)
    return text


def section_of(html, name):
    part = re.search(f'<section id="{name}">.*?</section>', html, re.DOTALL)[0]
    return part, " ".join(" ".join(Page(part).text).split())


def test_the_page_answers_three_questions_first_and_holds_every_run(html, machine):
    page = Page(html)
    text = " ".join(" ".join(page.text).split())
    assert page.ids[:8] == ["memory", "time", "exact", "short", "timelines", "charts", "tables", "runs"]
    assert len(page.ids) == len(set(page.ids)) and page.images and all(page.images), "each picture in words"
    assert "a machine <b>" in text and "1 damaged, left out" in text
    for folder in machine.glob("*/memory.csv"):
        assert f"{folder.parent.name}: " in text
    assert "the last line & <more>" in text and text.count("first first") > 0 and "alert(1)" in text


def test_how_much_memory_beside_the_strongest_rival(html):
    """Not beside an arm that was fed other prompts; a failed run is hatched and no number."""
    part, text = section_of(html, "memory")
    assert (
        "At k = 8, shared (TRL 1.16 with prefix sharing, two completions a pass) peaks 0.50 GiB above the start "
        "level; the strongest rival, stock-accumulate (TRL 1.16, one completion at a time), 3.00 GiB." in text
    )
    assert text.index("Scale cpu") < text.index("Scale bench"), "what everybody runs comes first"
    assert "Out of memory: classic-baseline at k = 8." in text
    assert (
        '<td class="number hatched">out of memory</td>' in part and '<td class="number hatched">damaged</td>' in part
    )
    assert part.count('<td class="number bold">3.00</td>') == 1 and '<td class="number bold">4.00</td>' in part


def test_the_sentence_is_of_the_k_at_which_most_rivals_were_run(tmp_path):
    """At another k the strongest one may be missing."""
    for k, peaks in {8: {"shared": 1, "stock": 4, "stock-accumulate": 2}, 16: {"shared": 1, "stock": 9}}.items():
        for arm, peak in peaks.items():
            write_run(tmp_path, arm, k, above=peak * GIB)
    said = answers.memory(load_machine(tmp_path))
    assert "At k = 8, shared" in said and "strongest rival, stock-accumulate" in said


def test_how_much_time_with_the_range_of_repeats(html):
    _, text = section_of(html, "time")
    assert "At k = 8, a step takes 10.00 s with shared" in text and "with the strongest rival, stock (TRL" in text
    assert "70.00 (65.00 to 75.00)" in text and "out of memory" in text


def test_is_it_exact_tells_updates_side_by_side_and_tokens_fed(html):
    _, text = section_of(html, "exact")
    assert "Over 2 updates of shared beside stock, rewards differ by at most 0.25 and losses by at most 0." in text
    assert "Fed other prompts than asked for, and left out of this: classic-string (1,024 of 3,000)." in text
    assert "The others were fed 100 % or more of what was asked for." in text and "docs/exactness.md" in text


def test_the_page_is_one_file_that_loads_nothing(html):
    page = Page(html)
    assert page.loaded == [] and not re.search(r"@import|url\(\s*['\"]?http|fetch\(|XMLHttpRequest", html)
    assert len(html.encode()) < 6e6
    assert "</script><script>alert" not in html


def test_timelines_hold_each_runs_recorded_peak(html, machine):
    curves = [
        curve
        for data in re.findall(r'<script type="application/json">(.*?)</script>', html)
        for curve in json.loads(data)
    ]
    first = [run for run in load_machine(machine) if run.repeat == 0 and run.scale != "learn"]
    peaks = {run.run_id: run.peak_bytes / GIB for run in first if run.peak_bytes}
    drawn = {curve["name"]: max(curve["y"]) for curve in curves}
    assert {name: pytest.approx(peak, abs=1e-3) for name, peak in peaks.items()} == {
        name: peak for name, peak in drawn.items() if name in peaks
    }
    assert "classic-baseline_cpu_k8_r0 (oom)" in drawn
    assert all(curve["t"] == sorted(set(curve["t"])) and len(curve["t"]) == len(curve["y"]) for curve in curves)


USE = """() => {
const said = {};
const table = document.querySelector("#memory table");
const column = (i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
const sort = (i) => table.querySelectorAll("thead th button")[i].click();
sort(1); said.up = column(1);
sort(1); said.down = column(1);
said.order = table.querySelectorAll("thead th")[1].getAttribute("aria-sort");
sort(0); said.names = column(0);
const place = document.querySelector(".timeline");
const box = place.previousElementSibling.querySelector("input");
box.checked = false;
box.dispatchEvent(new Event("change", { bubbles: true }));
said.shown = place.plot.series.slice(1).map((series) => series.show);
said.drawn = document.querySelectorAll(".timeline canvas").length;
said.places = document.querySelectorAll(".timeline").length;
const find = document.querySelector("#find");
find.value = "K8 oom";
find.dispatchEvent(new Event("input"));
said.found = [...document.querySelectorAll("details.run")].filter((run) => !run.hidden).length;
said.wide = document.documentElement.scrollWidth - innerWidth;
return said;
}"""


def test_a_browser_draws_sorts_switches_and_finds(html, machine, opened):
    """And nothing is wider than a phone, nor does the page write an error."""
    said = opened(path=machine / "report.html", width=500).evaluate(USE)
    assert said["up"] == ["0.50", "1.00", "2.00", "4.00", "not run"] and said["order"] == "descending"
    assert said["down"] == ["4.00", "2.00", "1.00", "0.50", "not run"], "what is no number stays last"
    assert said["names"] == sorted(said["names"])
    assert said["shown"][0] is False and all(said["shown"][1:]) and said["drawn"] == said["places"] > 2
    assert said["found"] == 1 and said["wide"] <= 0
