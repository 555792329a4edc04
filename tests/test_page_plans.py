"""README's predictions, predicted anew."""

import re

import pytest

from experiments.config import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_readme_says_what_its_command_says(planned):
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"TRL is short by (\S+) GiB, by (\S+) with one .*? fits with a peak of (\d+\.\d+)", text).groups()
    result = planned(*re.search(r"rloo-memory plan (--model \S+8B .*?--device-memory \S+)", text)[1].split())
    short = re.findall(r"^stock.* short by (\S+) GiB$", result.stdout, re.MULTILINE)
    (peak,) = re.findall(r"^shared .* (\S+)\* .* yes$", result.stdout, re.MULTILINE)
    assert said == (*short, peak)
