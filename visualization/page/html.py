"""What the page is made of: sections, tables and pictures."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

# What a chart shows, for who cannot see it
CHARTS = {
    "peak_comparison": "Peak memory of each arm and k, as bars",
    "audit": "What the published change saves, and where it comes from",
    "phases": "Peak memory of each phase and arm, as bars",
    "peak_by_k": "Peak memory as the number of completions grows, one line an arm",
    "idea": "Whole rows beside prefix sharing: tokens, memory and seconds",
    "convergence": "Reward, loss and KL over the updates, with and without the change",
}


class Failed(str):
    """The text of a table's cell where a run failed: hatched, and no number."""


class Bold(str):
    """The text of a table's cell that stands out."""


def section(name: str, title: str, parts: Sequence[str]) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n' + "\n".join(parts) + "\n</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int]) -> str:
    """A table whose columns `texts` are text, the others numbers."""

    def kind(column: int, text: str) -> str:
        names = ["number"] * (column not in texts) + ["hatched"] * isinstance(text, Failed)
        names += ["bold"] * isinstance(text, Bold)
        return f' class="{" ".join(names)}"' if names else ""

    first = "".join(f'<th scope="col"{kind(i, name)}>{escape(name)}</th>' for i, name in enumerate(head))
    lines = ("".join(f"<td{kind(i, text)}>{escape(text)}</td>" for i, text in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def of_markdown(text: str) -> str:
    """Headings a level lower than there, and tables as above."""
    text = ("\n" + text).replace("\n## ", "\n### ")
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace('<th style="text-align:right">', '<th scope="col" class="number">')
    html = html.replace('<td style="text-align:right">', '<td class="number">').replace("<th>", '<th scope="col">')
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def quiet(lines: Sequence[str]) -> str:
    """Small print."""
    return "".join(f'<p class="quiet">{escape(line)}</p>' for line in lines if line)


def picture(path: Path) -> str:
    source = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{CHARTS[path.stem]}" src="data:image/svg+xml;base64,{source}"></figure>'
